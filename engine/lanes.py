"""A CPU's cores as lanes: each takes a part of a large step's tokens through all layers by itself.

Threads that share every product wait for each other thousands of times a step; lanes wait once a layer, until all keys
and values are written, since a part may read what another one writes. Small steps stay whole: what lanes save there,
each one's way through all the weights costs (tests/bench/cpu_lanes.py). So does every step on a core that multiplies
in tiles, whose products are the faster the larger they are.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise

import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder

MIN_TOKENS = 1024  # of a lane: with half as many lanes gain nothing


def usable_lanes(dtype: torch.dtype) -> int:
    """Lanes at most, for a model of that dtype: torch's threads, or 1 where products are done in tiles (AMX).

    On 16 such cores the run of tests/bench/cpu_engine.py took 5.8 s whole and 7.5 s in lanes.
    """
    in_tiles = dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False)
    return 1 if in_tiles else torch.get_num_threads()


class Lanes:
    """Threads that carry one decoder's steps, each with its share of the cores."""

    def __init__(self, num_threads: int, min_tokens: int = MIN_TOKENS) -> None:
        """`num_threads`: torch's, of a whole step; 1: no lanes. `min_tokens`: of a lane."""
        self._num_threads = num_threads
        self._min_tokens = min_tokens
        self._pool = ThreadPoolExecutor(num_threads, "lane")

    def forward(self, decoder: Decoder, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """`decoder.forward(batch, cache)`. Raises what a lane raised."""
        num_lanes = self.num_lanes(len(batch.token_ids))
        if num_lanes == 1:
            return decoder.forward(batch, cache)
        parts = cut(batch, num_lanes, decoder.config)
        all_there = threading.Barrier(len(parts))

        @torch.inference_mode()
        def forward(part: ForwardBatch) -> torch.Tensor:
            torch.set_num_threads(self._num_threads // num_lanes)  # the calling thread's
            try:
                return decoder.forward(part, cache, all_written=all_there.wait)
            except BaseException:
                all_there.abort()
                raise

        try:
            return torch.cat(_results([self._pool.submit(forward, part) for part in parts]))
        finally:
            torch.set_num_threads(self._num_threads)  # threads yet to come begin with the last number that any has set

    def num_lanes(self, num_tokens: int) -> int:
        """Of a step: as many as divide the threads and have enough to do."""
        most = max(1, min(self._num_threads, num_tokens // self._min_tokens))
        return next(number for number in range(most, 0, -1) if self._num_threads % number == 0)


def cut(batch: ForwardBatch, num_parts: int, config: ModelConfig) -> list[ForwardBatch]:
    """Runs of the batch's tokens, of equal work about. A row in several parts is a row of each, as chunks would be."""
    done = torch.cumsum(_work_of_layer(batch.positions, config), 0)
    shares = done[-1] * torch.arange(1, num_parts) / num_parts
    cuts = [0, *torch.searchsorted(done, shares).tolist(), len(done)]
    return [_part(batch, first, last) for first, last in pairwise(cuts) if last > first]


def _work_of_layer(positions: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """(num_tokens,) float64: the multiplications of a layer's products, and of a token's attention to all before it."""
    per_size = 2 * config.query_size + 2 * config.kv_size + 3 * config.intermediate_size
    return config.hidden_size * per_size + 2.0 * config.query_size * (positions.double() + 1)


def _part(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """Tokens [first, last)."""
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    rows = torch.nonzero((starts < last) & (ends > first)).flatten()
    starts, ends = starts[rows].clamp(min=first), ends[rows]
    lengths = batch.sequence_lengths[rows] - (ends - last).clamp(min=0)
    ends = ends.clamp(max=last)
    indices = batch.logits_indices
    assert indices is not None, "a step on a CPU names the rows that sample"
    return replace(
        batch,
        token_ids=batch.token_ids[first:last],
        positions=batch.positions[first:last],
        slot_mapping=batch.slot_mapping[first:last],
        block_tables=batch.block_tables[rows],
        query_starts=torch.cat((starts[:1], ends)) - first,
        sequence_lengths=lengths,
        logits_indices=indices[(indices >= first) & (indices < last)] - first,
        max_query_length=int((ends - starts).max()),
        max_sequence_length=int(lengths.max()),
    )


def _results(futures: Sequence[Future[torch.Tensor]]) -> list[torch.Tensor]:
    """All of them, or the error that the first of them failed with: others fail since they wait for it in vain."""
    wait(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]
