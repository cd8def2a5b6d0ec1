"""Paged attention on Hopper and later: prefill rows by flash-attn 4, decode rows by our own kernel, and a prefix that
several decode rows begin with read once for all of them, by flash-attn.

Decode rows are ours at every shape. On an H200, 7B shape, pages of 16, ours takes flash-attn's time divided by 1.8 at
1,024 rows of 180 keys, 1.3 at 1,024 of 384, 1.2 at 100 of 4,600, 2.6 at 8 of 8,192 and 1.0 at 32 of 4,096; it is the
slower only below some hundred keys in a few rows, by 5 microseconds.

flash-attn is an extra and imports CUDA libraries, so it is imported when a FlashAttention is made. bf16 and fp16 only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention_merge import merge_attention_
from kernels.attention_plan import AttentionPlan, SharedPrefixes
from kernels.decode_attention import decode_attention, plan_decode


@dataclass(frozen=True, slots=True)
class FlashPlan(AttentionPlan):
    """A step's rows: first `num_decode_rows` with a single query each, then the others."""

    num_decode_rows: int
    prefill_query_starts: torch.Tensor | None  # the other rows' first tokens, and the end; None: there are none
    shared: SharedPrefixes | None


class FlashAttention:
    """The `Attention` of Hopper and later: pages of 16, 64, 128 or 256 tokens, the head sizes of flash-attn 4."""

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_varlen_func
        from flash_attn.cute.interface import _flash_attn_fwd

        self._attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_attn_varlen_func
        self._num_multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._attend_into: Callable[..., object] = _flash_attn_fwd  # the same, with `out` given

    def prepare(
        self,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_lengths: torch.Tensor,
        max_query_length: int,
        max_sequence_length: int,
        num_decode_rows: int = 0,
        shared: SharedPrefixes | None = None,
    ) -> FlashPlan:
        prefill = query_starts[num_decode_rows:] if num_decode_rows < sequence_lengths.shape[0] else None
        return FlashPlan(
            block_tables, query_starts, sequence_lengths, max_query_length, max_sequence_length,
            num_decode_rows, prefill, shared,
        )  # fmt: skip

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, FlashPlan), f"a {type(plan).__name__} was not prepared for flash-attn"
        num_decode = plan.num_decode_rows
        if plan.prefill_query_starts is None:
            return self._decode(query, key_cache, value_cache, plan, scale, sliding_window)
        out = torch.empty_like(query)
        if num_decode:
            # First: in a captured step, decode rows that are padding share their places with prefill tokens.
            out[:num_decode] = self._decode(query[:num_decode], key_cache, value_cache, plan, scale, sliding_window)
        left, right = _window(sliding_window)
        self._attend_into(
            query, key_cache, value_cache, out=out,
            cu_seqlens_q=plan.prefill_query_starts, seqused_k=plan.sequence_lengths[num_decode:],
            page_table=plan.block_tables[num_decode:],
            max_seqlen_q=plan.max_query_length, max_seqlen_k=plan.max_sequence_length,
            softmax_scale=scale, causal=sliding_window is None, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out

    def _decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: FlashPlan,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        shared = plan.shared if sliding_window is None else None  # a window slides off a prefix row by row
        num_rows = query.shape[0]
        private, private_lse = decode_attention(
            query, key_cache, value_cache,
            plan.block_tables[:num_rows] if shared is None else shared.private_block_tables,
            plan.sequence_lengths[:num_rows] if shared is None else shared.private_lengths,
            scale, plan_decode(num_rows, query.shape[1], key_cache.shape[2], self._num_multiprocessors), sliding_window,
        )  # fmt: skip
        if shared is None:
            return private
        prefix, prefix_lse = self._attend(
            query, key_cache, value_cache,
            cu_seqlens_q=shared.query_starts, seqused_k=shared.lengths, page_table=shared.block_tables,
            max_seqlen_q=num_rows, max_seqlen_k=plan.max_sequence_length,
            softmax_scale=scale, causal=False, return_lse=True,
        )  # fmt: skip
        merge_attention_(prefix, prefix_lse.t(), private, private_lse, shared.num_rows)
        return private


def _window(sliding_window: int | None) -> tuple[int | None, int | None]:
    return (None, None) if sliding_window is None else (sliding_window - 1, 0)
