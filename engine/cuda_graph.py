"""Decode steps as CUDA graphs: one launch instead of some hundreds, at sizes rounded up to a bucket.

A graph reads its inputs from one buffer whose layout its bucket fixes. Padding rows have length 0, write to no slot and
leave their token in a row that nobody reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.staging import Staging, layout, slices
from engine.step_arrays import MAX_SHARED_GROUPS, IntArray, SharedArrays, StepArrays
from kernels.attention_plan import SharedPrefixes

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024)

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class TakeGraph(Protocol):
    """Makes a graph of a step: `Capture`, or `Rehearsal` in its place."""

    def __call__(self, step: Step, /) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph of a step that ends in tokens."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # (bucket, vocab_size) float32, in the graphs' shared memory: good until the next replay
    chosen: torch.Tensor  # (2, bucket) int32: token ids, whether the row was finite


class DecodeGraphs:
    """Graphs of one decoder's decode steps, captured at start so that their memory is counted before the pool's."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        staging: Staging,
        last_token_ids: torch.Tensor,
        max_rows: int,
        num_columns: int,
        with_shared: bool,
        take_graph: TakeGraph,
        largest_only: bool = False,
    ) -> None:
        """`last_token_ids` (rows + 1,) int32: each request row's last sampled token; the last entry is padding's.

        `num_columns`: the longest block table. `with_shared`: also capture steps whose rows share prefixes.
        `largest_only`: to see what memory they take; `num_graphs` is that of all.
        """
        self._decoder = decoder
        self._cache = cache
        self._staging = staging
        self._last_token_ids = last_token_ids
        self._num_columns = num_columns
        self.buckets = row_buckets(max_rows)
        shapes = self._shapes(self.buckets[-1], True)
        num_ints = layout([*shapes, (0,)])[-1]
        self._buffer = torch.zeros(num_ints, dtype=torch.int32, device=decoder.device)
        # Like every tensor that graphs read, held as long as they are.
        self._query_starts = torch.arange(self.buckets[-1] + 1, dtype=torch.int32, device=decoder.device)
        self._take_graph = take_graph
        self._captured: dict[tuple[int, bool], Captured] = {}
        kinds = (False, True) if with_shared else (False,)
        self.num_graphs = len(self.buckets) * len(kinds)
        # The largest first: the others fit into its memory.
        for bucket in self.buckets[-1:] if largest_only else reversed(self.buckets):
            for is_shared in kinds:
                self._captured[bucket, is_shared] = self._capture(bucket, is_shared)

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def takes(self, arrays: StepArrays) -> bool:
        """Whether the step is decode rows alone, all of which sample, and not too many."""
        num_rows = len(arrays.rows)
        return arrays.num_decode_rows == num_rows == len(arrays.sampling_rows) and num_rows <= self.buckets[-1]

    def replay(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (num_rows, vocab_size) float32, chosen (2, num_rows) int32); good until the next replay."""
        num_rows = len(arrays.rows)
        bucket = next(b for b in self.buckets if b >= num_rows)
        is_shared = arrays.shared is not None and (bucket, True) in self._captured
        self._staging.upload(self._padded(arrays, bucket, arrays.shared if is_shared else None), self._buffer)
        captured = self._captured[bucket, is_shared]
        captured.graph.replay()
        return captured.logits[:num_rows], captured.chosen[:, :num_rows]

    def _shapes(self, bucket: int, is_shared: bool) -> list[tuple[int, ...]]:
        """rows, token ids, positions, slots, lengths, tables; then shared lengths, starts, count, tables, and private
        lengths, tables."""
        columns = self._num_columns
        shapes: list[tuple[int, ...]] = [(bucket,)] * 5 + [(bucket, columns)]
        if is_shared:
            groups = MAX_SHARED_GROUPS
            shapes += [(groups,), (groups + 1,), (1,), (groups, columns), (bucket,), (bucket, columns)]
        return shapes

    def _padded(self, arrays: StepArrays, bucket: int, shared: SharedArrays | None) -> list[IntArray]:
        padding_row = self._last_token_ids.shape[0] - 1
        padded = [
            pad(arrays.rows, bucket, padding_row),
            pad(arrays.token_ids, bucket, 0),
            pad(arrays.positions, bucket, 0),
            pad(arrays.slot_mapping, bucket, -1),
            pad(arrays.sequence_lengths, bucket, 0),
            pad_table(arrays.block_tables, bucket, self._num_columns),
        ]
        if shared is not None:
            padded += [
                shared.lengths,
                shared.query_starts,
                np.array([shared.num_rows], dtype=np.int32),
                pad_table(shared.block_tables, MAX_SHARED_GROUPS, self._num_columns),
                pad(shared.private_lengths, bucket, 0),
                pad_table(shared.private_block_tables, bucket, self._num_columns),
            ]
        return padded

    def _capture(self, bucket: int, is_shared: bool) -> Captured:
        inputs = slices(self._buffer, self._shapes(bucket, is_shared))
        self._buffer.zero_()
        inputs[0].fill_(self._last_token_ids.shape[0] - 1)
        inputs[3].fill_(-1)
        step = self._step_of(inputs, bucket)
        graph, (logits, chosen) = self._take_graph(step)
        return Captured(graph, logits, chosen)

    def _step_of(self, inputs: Sequence[torch.Tensor], bucket: int) -> Step:
        rows, token_ids, positions, slot_mapping, lengths, tables, *of_shared = inputs
        shared = None
        if of_shared:
            shared_lengths, shared_starts, num_rows, shared_tables, private_lengths, private_tables = of_shared
            shared = SharedPrefixes(
                shared_tables, shared_lengths, shared_starts, num_rows, private_tables, private_lengths
            )

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            known = torch.where(token_ids < 0, self._last_token_ids[rows], token_ids)
            batch = ForwardBatch(
                token_ids=known,
                positions=positions,
                slot_mapping=slot_mapping,
                block_tables=tables,
                query_starts=self._query_starts[: bucket + 1],
                sequence_lengths=lengths,
                logits_indices=None,
                max_query_length=1,
                max_sequence_length=self._num_columns * self._cache.block_size,
                num_decode_rows=bucket,
                shared=shared,
            )
            logits = self._decoder.logits(self._decoder.forward(batch, self._cache))
            return logits, choose(self._decoder, logits, self._last_token_ids, rows)

        return step


def row_buckets(max_rows: int) -> list[int]:
    """The numbers of rows that graphs are captured for, ascending; the last is `max_rows` where one is so large."""
    return [bucket for bucket in BUCKETS if bucket < max_rows] + [max_rows] * (max_rows <= BUCKETS[-1])


class Capture:
    """Graphs of one device whose memory is one pool: a step's is free again for the next, whichever that is."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for every stream that they have seen.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
        """A graph of `step`, and the tensors that each replay writes: good until the next replay of any graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()  # compiles kernels and lets libraries take their workspaces outside of the capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of others, NCCL's among them, may ask after their events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            first, second = step()
        return graph, (_borrowed(first), _borrowed(second))


class Rehearsal:
    """In Capture's place: a step runs once, so that its kernels are compiled, and nothing is captured."""

    def __call__(self, step: Step) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
        return torch.cuda.CUDAGraph(), step()


class _Memory:
    """Bytes on a GPU that somebody else owns, by the interface that torch takes them from (numba's, version 2)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "strides": None, "version": 2,
        }  # fmt: skip


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, their memory free to the pool. It stays mapped as long as a graph of the pool lives.

    Held by every graph, the logits of all buckets up to 1,024 rows of a vocabulary of 152,064 would take 5 GB. One with
    gaps cannot be lent, and is held.
    """
    if not tensor.is_contiguous():
        return tensor
    memory = _Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    alias = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).view(tensor.shape)
    assert alias.data_ptr() == tensor.data_ptr(), "a copy where the memory itself was asked for"
    return alias


def choose(decoder: Decoder, logits: torch.Tensor, last_token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Greedy tokens, into their rows of last_token_ids too: (2, num_rows) int32, ids and whether a row was finite."""
    token_ids, finite = decoder.greedy(logits)
    chosen = torch.stack((token_ids.to(torch.int32), finite.to(torch.int32)))
    last_token_ids.index_copy_(0, rows.long(), chosen[0])
    return chosen


def pad(array: IntArray, length: int, value: int) -> IntArray:
    padded = np.full(length, value, dtype=np.int32)
    padded[: len(array)] = array
    return padded


def pad_table(table: IntArray, num_rows: int, num_columns: int) -> IntArray:
    padded = np.zeros((num_rows, num_columns), dtype=np.int32)
    padded[: table.shape[0], : table.shape[1]] = table
    return padded
