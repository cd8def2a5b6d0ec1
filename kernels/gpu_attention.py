"""Paged attention on a GPU: decode rows by a kernel of their own, a prefix that several of them begin with read once
for all, and prefill rows by whatever is fastest there.

Decode rows are ours at every shape. On an H200, 7B shape, pages of 16, ours takes flash-attn's time divided by 1.8 at
1,024 rows of 180 keys, 1.3 at 1,024 of 384, 1.2 at 100 of 4,600, 2.6 at 8 of 8,192 and 1.0 at 32 of 4,096; it is the
slower only below some hundred keys in a few rows, by 5 microseconds.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention_merge import merge_attention_
from kernels.attention_plan import AttentionPlan, AttentionRows
from kernels.decode_attention import decode_attention, plan_decode

NUM_ARRIVALS = 2**18  # 8,192 rows of 32 key heads


class Prefill(Protocol):
    """Attention of rows with any number of queries over their keys in pages; tensors as in `Attention.__call__`."""

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """Causal, into `out` at the rows' tokens; the other tokens' places are left as they are."""
        ...

    def attend_to_all(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every query sees all keys of its row: (as query, log-sum-exp (num_tokens, num_heads) float32, natural)."""
        ...


@dataclass(frozen=True, slots=True)
class GpuPlan(AttentionPlan):
    """A step's rows: first `num_decode_rows` with a single query each, then `prefill`'s."""

    prefill: AttentionRows | None


class GpuAttention:
    """The `Attention` of GPUs."""

    def __init__(self, prefill: Prefill, num_multiprocessors: int, device: torch.device) -> None:
        self._prefill = prefill
        self._num_multiprocessors = num_multiprocessors
        self._arrivals = torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)  # decode attention's

    def prepare(self, rows: AttentionRows) -> GpuPlan:
        first = rows.num_decode_rows
        if first == rows.sequence_lengths.shape[0]:
            return GpuPlan(rows, None)
        prefill = AttentionRows(
            rows.block_tables[first:], rows.query_starts[first:], rows.sequence_lengths[first:],
            rows.max_query_length, rows.max_sequence_length,
        )  # fmt: skip
        return GpuPlan(rows, prefill)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, GpuPlan), f"a {type(plan).__name__} was not prepared for a GPU"
        num_decode = plan.rows.num_decode_rows
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if num_decode:
            # First: in a captured step, decode rows that are padding share their places with prefill tokens.
            self._decode(
                query[:num_decode], key_cache, value_cache, plan.rows, out[:num_decode], scale, sliding_window
            )  # fmt: skip
        if plan.prefill is not None:
            self._prefill.attend(query, key_cache, value_cache, plan.prefill, out, scale, sliding_window)
        return out

    def _decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        shared = rows.shared if sliding_window is None else None  # a window slides off a prefix row by row
        num_rows = query.shape[0]
        lse = decode_attention(
            query, key_cache, value_cache,
            rows.block_tables[:num_rows] if shared is None else shared.private_block_tables,
            rows.sequence_lengths[:num_rows] if shared is None else shared.private_lengths,
            scale, plan_decode(num_rows, query.shape[1], key_cache.shape[2], self._num_multiprocessors), out,
            self._arrivals, sliding_window,
        )  # fmt: skip
        if shared is None:
            return
        groups = AttentionRows(
            shared.block_tables, shared.query_starts, shared.lengths, num_rows, rows.max_sequence_length
        )
        prefix, prefix_lse = self._prefill.attend_to_all(query, key_cache, value_cache, groups, scale)
        merge_attention_(prefix, prefix_lse, out, lse, shared.num_rows)
