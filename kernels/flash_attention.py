"""flash-attn 4 as the prefill of Hopper and later: bf16 and fp16, pages of 16, 64, 128 or 256 tokens.

It is an extra and imports CUDA libraries, so it is imported when a FlashPrefill is made.
"""

from collections.abc import Callable

import torch

from kernels.attention_plan import AttentionRows

LARGEST_HEAD_SIZE = 256  # and a multiple of 8


class FlashPrefill:
    """As kernels.gpu_attention.Prefill."""

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_varlen_func
        from flash_attn.cute.interface import _flash_attn_fwd

        self._attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_attn_varlen_func
        self._attend_into: Callable[..., object] = _flash_attn_fwd  # the same, with `out` given

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
        is_whole = sliding_window is None
        self._attend_into(
            query, key_cache, value_cache, out=out,
            cu_seqlens_q=rows.query_starts, seqused_k=rows.sequence_lengths, page_table=rows.block_tables,
            max_seqlen_q=rows.max_query_length, max_seqlen_k=rows.max_sequence_length, softmax_scale=scale,
            causal=is_whole, window_size_left=None if sliding_window is None else sliding_window - 1,
            window_size_right=None if is_whole else 0,
        )  # fmt: skip

    def attend_to_all(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._attend(
            query, key_cache, value_cache,
            cu_seqlens_q=rows.query_starts, seqused_k=rows.sequence_lengths, page_table=rows.block_tables,
            max_seqlen_q=rows.max_query_length, max_seqlen_k=rows.max_sequence_length,
            softmax_scale=scale, causal=False, return_lse=True,
        )  # fmt: skip
        return out, lse.t()
