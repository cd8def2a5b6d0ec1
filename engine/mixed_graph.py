"""Steps of decode rows and some prompt tokens as CUDA graphs, up to the last layer's attention; FinishGraphs go on.

A graph is of a number of tokens: first the decode rows, then the prompts, then padding. Its decode attention runs over
all places that could be decode rows, those of prompts having length 0, and its prefill attention over a fixed number of
rows, of which some are empty; so one graph serves every division of its tokens.
"""

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.cuda_graph import TakeGraph, pad
from engine.finish_graph import FinishGraphs
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.staging import Staging, layout, slices
from engine.step_arrays import IntArray, StepArrays

BUCKETS = (128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048)
MAX_PREFILL_ROWS = 32


class MixedGraphs:
    """Graphs of one decoder's mixed steps, captured at start."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        staging: Staging,
        last_token_ids: torch.Tensor,
        max_rows: int,
        num_columns: int,
        max_tokens: int,
        take_graph: TakeGraph,
        largest_only: bool = False,
    ) -> None:
        """`max_rows`: decode rows at most; `max_tokens`: of a step; otherwise as DecodeGraphs."""
        self._decoder = decoder
        self._cache = cache
        self._staging = staging
        self._last_token_ids = last_token_ids
        self._padding_row = last_token_ids.shape[0] - 1
        self._max_rows = max_rows
        self._num_columns = num_columns
        self.buckets = [bucket for bucket in BUCKETS if bucket <= max_tokens]
        shapes = self._shapes(self.buckets[-1]) if self.buckets else []
        self._buffer = torch.zeros(layout([*shapes, (0,)])[-1], dtype=torch.int32, device=decoder.device)
        self._take_graph = take_graph
        self._finish = FinishGraphs(decoder, last_token_ids, max_rows, take_graph, largest_only)
        self.num_graphs = len(self.buckets) + self._finish.num_graphs
        buckets = self.buckets[-1:] if largest_only else reversed(self.buckets)
        self._captured = {bucket: self._capture(bucket) for bucket in buckets}

    @property
    def num_captured(self) -> int:
        return len(self._captured) + self._finish.num_captured

    def takes(self, arrays: StepArrays) -> bool:
        """Whether some graph has room, and nothing speaks for a shared prefix."""
        return (
            bool(self.buckets)
            and arrays.shared is None
            and len(arrays.token_ids) <= self.buckets[-1]
            and 0 < len(arrays.rows) - arrays.num_decode_rows <= MAX_PREFILL_ROWS
            and arrays.num_decode_rows <= self._max_rows
            and len(arrays.sampling_rows) <= self._finish.buckets[-1]
        )

    def replay(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (num_sampling, vocab_size), chosen (2, num_sampling) int32); good until the next replay."""
        bucket = next(b for b in self.buckets if b >= len(arrays.token_ids))
        num_sampling = len(arrays.sampling_rows)
        assert self._finish.bucket_of(num_sampling) <= self._num_places(bucket), f"{num_sampling} rows of {bucket}"
        self._staging.upload(self._padded(arrays, bucket), self._buffer)
        self._captured[bucket].replay()
        return self._finish.replay(num_sampling)

    def _num_places(self, bucket: int) -> int:
        return min(bucket, self._max_rows)

    def _shapes(self, bucket: int) -> list[tuple[int, ...]]:
        """Token ids, positions, slots, decode rows, lengths, query starts, tables; what samples, and its row."""
        places = self._num_places(bucket)
        rows = places + MAX_PREFILL_ROWS
        tables = (rows, self._num_columns)
        return [(bucket,), (bucket,), (bucket,), (places,), (rows,), (rows + 1,), tables, (places,), (places,)]

    def _padded(self, arrays: StepArrays, bucket: int) -> list[IntArray]:
        places, num_decode = self._num_places(bucket), arrays.num_decode_rows
        num_tokens, num_rows = len(arrays.token_ids), len(arrays.rows)
        rows = places + MAX_PREFILL_ROWS
        lengths = np.zeros(rows, dtype=np.int32)
        lengths[:num_decode] = arrays.sequence_lengths[:num_decode]
        lengths[places : places + num_rows - num_decode] = arrays.sequence_lengths[num_decode:]
        # The first `places` entries are not read: a decode row's place is its number.
        starts = np.full(rows + 1, num_tokens, dtype=np.int32)
        starts[places : places + num_rows - num_decode] = arrays.query_starts[num_decode:-1]
        tables = np.zeros((rows, self._num_columns), dtype=np.int32)
        width = arrays.block_tables.shape[1]
        tables[:num_decode, :width] = arrays.block_tables[:num_decode]
        tables[places : places + num_rows - num_decode, :width] = arrays.block_tables[num_decode:]
        return [
            pad(arrays.token_ids, bucket, 0),
            pad(arrays.positions, bucket, 0),
            pad(arrays.slot_mapping, bucket, -1),
            pad(arrays.rows[:num_decode], places, self._padding_row),
            lengths,
            starts,
            tables,
            pad(arrays.logits_indices, places, 0),
            pad(arrays.sampling_rows, places, self._padding_row),
        ]

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        self._buffer.zero_()
        token_ids, positions, slot_mapping, rows, lengths, query_starts, tables, indices, sampling_rows = slices(
            self._buffer, self._shapes(bucket)
        )
        slot_mapping.fill_(-1)
        places = self._num_places(bucket)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            known = token_ids.clone()
            known[:places] = torch.where(known[:places] < 0, self._last_token_ids[rows], known[:places])
            batch = ForwardBatch(
                token_ids=known,
                positions=positions,
                slot_mapping=slot_mapping,
                block_tables=tables,
                query_starts=query_starts,
                sequence_lengths=lengths,
                logits_indices=None,
                max_query_length=bucket,
                max_sequence_length=self._num_columns * self._cache.block_size,
                num_decode_rows=places,
            )
            return self._finish.take(*self._decoder.attend_all(batch, self._cache), indices, sampling_rows)

        graph, _ = self._take_graph(step)
        return graph
