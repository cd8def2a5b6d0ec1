"""Captured steps compute what unpadded ones do: buckets, places shared by padding and prompts, shared prefixes, finish.

A graph's stand-in runs its step again at every replay, over the buffers that it was made with, as a graph would; the
kernels run under Triton's interpreter. The truth is the CPU's own attention over the step as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.cuda_graph import DecodeGraphs, row_buckets
from engine.kv_cache import KVCache
from engine.loading import allocate_cache, load_decoder, open_model
from engine.mixed_graph import MixedGraphs
from engine.models.decoder import Decoder
from engine.staging import slices
from engine.step_arrays import IntArray, StepArrays, gather_step
from kernels.attention import TritonPrefill
from kernels.gpu_attention import GpuAttention
from tests.tiny_models import write_tiny_model

BLOCK, MAX_ROWS, NUM_BLOCKS, MAX_LENGTH = 4, 5, 40, 28
CPU = torch.device("cpu")


class Staging:
    """Copies at once."""

    def upload(self, arrays: Sequence[IntArray], target: torch.Tensor) -> list[torch.Tensor]:
        tensors = slices(target, [array.shape for array in arrays])
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        return tensors


STAGING: Any = Staging()


class Replayed:
    def __init__(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._step = step
        self.outputs = step()

    def replay(self) -> None:
        for held, fresh in zip(self.outputs, self._step(), strict=True):
            held.copy_(fresh)


def take_graph(step: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    made = Replayed(step)
    return made, made.outputs


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """One model twice: with a GPU's attention, and with the CPU's."""
    files = open_model(write_tiny_model(Path(tmp_path_factory.mktemp("tiny"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.models.decoder.select_attention", lambda *_: GpuAttention(TritonPrefill(), 4, CPU))
        of_gpu = load_decoder(files, torch.float32, CPU, num_positions=64)
    return of_gpu, load_decoder(files, torch.float32, CPU, num_positions=64)


class Requests:
    """Rows of known tokens over shuffled pages, of which rows 0 to 2 begin alike, and a cache full of numbers."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.token_ids = generator.integers(0, decoder.num_tokens, (MAX_ROWS, MAX_LENGTH))
        pages = generator.permutation(NUM_BLOCKS)[: MAX_ROWS * MAX_LENGTH // BLOCK]
        self.tables = pages.astype(np.int32).reshape(MAX_ROWS, MAX_LENGTH // BLOCK)
        self.tables[1:3, :2] = self.tables[0, :2]
        self.last = torch.from_numpy(generator.integers(0, decoder.num_tokens, MAX_ROWS + 1)).int()
        self.cache = allocate_cache(decoder, NUM_BLOCKS, BLOCK)
        for each in (self.cache.keys, self.cache.values):
            each.copy_(torch.from_numpy(generator.standard_normal(tuple(each.shape))))

    def arrays(self, runs: Sequence[tuple[int, int, int, bool]], min_tokens_saved: int | None) -> StepArrays:
        """Runs of (row, start, count, samples); a decode row's last token is known to the device alone."""
        rows, starts, counts, samples = (np.array(column) for column in zip(*runs, strict=True))
        num_known = np.zeros(MAX_ROWS, dtype=np.int64)
        num_known[rows] = np.where(counts == 1, starts, starts + counts)
        return gather_step(
            self.token_ids, self.tables, num_known.tolist(), rows, starts, counts, samples, BLOCK, min_tokens_saved
        )


def truth(decoder: Decoder, requests: Requests, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
    """(logits, chosen token ids, the cache afterwards) of the step as it is."""
    cache = KVCache(requests.cache.keys.clone(), requests.cache.values.clone())
    token_ids = torch.from_numpy(arrays.token_ids).clone()
    num_decode = arrays.num_decode_rows
    last = requests.last[torch.from_numpy(arrays.rows[:num_decode]).long()]
    token_ids[:num_decode] = torch.where(token_ids[:num_decode] < 0, last, token_ids[:num_decode])
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=torch.from_numpy(arrays.positions),
        slot_mapping=torch.from_numpy(arrays.slot_mapping),
        block_tables=torch.from_numpy(arrays.block_tables),
        query_starts=torch.from_numpy(arrays.query_starts),
        sequence_lengths=torch.from_numpy(arrays.sequence_lengths),
        logits_indices=torch.from_numpy(arrays.logits_indices),
        max_query_length=arrays.max_query_length,
        max_sequence_length=arrays.max_sequence_length,
        num_decode_rows=num_decode,
    )
    logits = decoder.logits(decoder.forward(batch, cache))
    return logits, decoder.greedy(logits)[0], cache


def assert_replays_the_truth(
    graphs: MixedGraphs | DecodeGraphs, decoder: Decoder, requests: Requests, arrays: StepArrays
) -> None:
    assert graphs.takes(arrays)
    expected, token_ids, cache = truth(decoder, requests, arrays)
    others = np.setdiff1d(np.arange(MAX_ROWS), arrays.sampling_rows)
    untouched = requests.last[others].clone()
    logits, chosen = graphs.replay(arrays)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert chosen[0].tolist() == token_ids.tolist()
    assert chosen[1].tolist() == [1] * len(token_ids)
    assert requests.last[torch.from_numpy(arrays.sampling_rows).long()].tolist() == token_ids.tolist()
    assert torch.equal(requests.last[others], untouched)
    torch.testing.assert_close(requests.cache.keys, cache.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(requests.cache.values, cache.values, rtol=1e-4, atol=1e-5)


MIXED: list[list[tuple[int, int, int, bool]]] = [
    [(0, 20, 1, True), (3, 9, 1, True), (4, 0, 20, True)],
    [(4, 20, 6, False), (3, 0, 7, False)],  # nobody samples
    [(1, 12, 1, True), (2, 27, 1, True), (0, 0, 28, False), (4, 7, 2, True), (3, 10, 1, True)],
]


@torch.inference_mode()
def test_mixed_steps_of_all_divisions_replay_one_graph_each_after_the_other(decoders: tuple[Decoder, Decoder]) -> None:
    of_gpu, of_cpu = decoders
    requests = Requests(of_gpu, seed=1)
    graphs = MixedGraphs(of_gpu, requests.cache, STAGING, requests.last, MAX_ROWS, MAX_LENGTH // BLOCK, 128, take_graph)
    assert graphs.num_captured == graphs.num_graphs == 1 + len(row_buckets(MAX_ROWS))
    steps = [requests.arrays(runs, None) for runs in MIXED]
    for arrays in steps:
        assert_replays_the_truth(graphs, of_cpu, requests, arrays)
    assert not graphs.takes(requests.arrays([(0, 5, 1, True)], None)), "nothing of a prompt"
    assert not graphs.takes(replace(steps[0], token_ids=np.zeros(129, dtype=np.int32))), "more than any graph"


@torch.inference_mode()
def test_decode_steps_replay_at_numbers_of_rows_below_and_at_a_bucket_with_and_without_shared_prefixes(
    decoders: tuple[Decoder, Decoder],
) -> None:
    of_gpu, of_cpu = decoders
    requests = Requests(of_gpu, seed=2)
    graphs = DecodeGraphs(
        of_gpu, requests.cache, STAGING, requests.last, MAX_ROWS, MAX_LENGTH // BLOCK, True, take_graph
    )
    assert graphs.buckets == [1, 2, 4, 5]
    num_shared = 0
    for num_rows in (1, 3, 5):
        for min_tokens_saved in (None, 1):
            runs = [(row, 9 + 3 * row + num_rows, 1, True) for row in range(num_rows)]
            arrays = requests.arrays(runs, min_tokens_saved)
            num_shared += arrays.shared is not None
            assert_replays_the_truth(graphs, of_cpu, requests, arrays)
    assert num_shared == 2
    assert not graphs.takes(requests.arrays([(0, 5, 1, True), (4, 0, 9, True)], None)), "a prompt"


def test_buckets_end_at_the_most_rows_that_can_come() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(100) == [1, 2, 4, 8, 16, 32, 64, 96, 100]
    assert row_buckets(128)[-2:] == [96, 128]
    assert row_buckets(5000)[-1] == 1024
