"""Paged attention by flash-attn 4 (Hopper and later), decode rows and prefill rows in a call each, and a prefix that
several decode rows begin with read once for all of them.

flash-attn is an extra and imports CUDA libraries, so it is imported when a FlashAttention is made. bf16 and fp16 only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention_merge import merge_attention_


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode rows whose block tables begin alike; group g is rows [query_starts[g], query_starts[g + 1]).

    Unused entries are empty: no rows, length 0. Rows from num_rows[0] on belong to no group.
    """

    block_tables: torch.Tensor  # (num_groups, max_blocks) int32
    lengths: torch.Tensor  # (num_groups,) int32, in tokens, whole blocks
    query_starts: torch.Tensor  # (num_groups + 1,) int32
    num_rows: torch.Tensor  # (1,) int32, on the device, so that a captured graph can change it


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """One step's rows: first those with a single query, then the others.

    With shared prefixes, the decode rows' tables and lengths are of what lies behind the prefix.
    """

    num_decode_rows: int
    decode_block_tables: torch.Tensor  # (num_decode_rows, max_blocks) int32
    decode_lengths: torch.Tensor  # (num_decode_rows,) int32; 0 is a padding row
    prefill_block_tables: torch.Tensor | None = None  # (num_prefill_rows, max_blocks) int32
    prefill_lengths: torch.Tensor | None = None  # (num_prefill_rows,) int32, the step's tokens included
    prefill_query_starts: torch.Tensor | None = None  # (num_prefill_rows + 1,) int32, from the first prefill token
    max_prefill_queries: int = 0  # host integer: the longest run of queries
    shared: SharedPrefixes | None = None


class FlashAttention:
    """Causal attention over pages of 16, 64, 128 or 256 tokens; head sizes that flash-attn 4 has for the device."""

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_attn_varlen_func

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: FlashPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """query (num_tokens, num_heads, head_size) -> the same shape; caches as in `Attention`, one layer's pages."""
        window = (None, None) if sliding_window is None else (sliding_window - 1, 0)
        num_decode = plan.num_decode_rows
        if plan.prefill_lengths is None:
            return self._decode(query, key_cache, value_cache, plan, scale, window)
        prefill, _ = self._attend(
            query[num_decode:], key_cache, value_cache,
            cu_seqlens_q=plan.prefill_query_starts, seqused_k=plan.prefill_lengths,
            page_table=plan.prefill_block_tables, max_seqlen_q=plan.max_prefill_queries,
            softmax_scale=scale, causal=True, window_size=window, return_lse=True,
        )  # fmt: skip
        if num_decode == 0:
            return prefill
        return torch.cat((self._decode(query[:num_decode], key_cache, value_cache, plan, scale, window), prefill))

    def _decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: FlashPlan,
        scale: float,
        window: tuple[int | None, int | None],
    ) -> torch.Tensor:
        # (rows, 1, heads, size) without cu_seqlens_q and causal=False: the varlen form adds two kernels a call, and
        # pack_gqa is left to flash-attn (switched off, decode is six times slower).
        private, private_lse = self._attend(
            query[:, None], key_cache, value_cache,
            seqused_k=plan.decode_lengths, page_table=plan.decode_block_tables, max_seqlen_q=1,
            softmax_scale=scale, causal=False, window_size=window, return_lse=True,
        )  # fmt: skip
        private = private[:, 0]
        if plan.shared is None:
            return private
        shared = plan.shared
        assert window == (None, None), "a shared prefix goes with full attention only"
        prefix, prefix_lse = self._attend(
            query, key_cache, value_cache,
            cu_seqlens_q=shared.query_starts, seqused_k=shared.lengths, page_table=shared.block_tables,
            max_seqlen_q=query.shape[0], softmax_scale=scale, causal=False, return_lse=True,
        )  # fmt: skip
        merge_attention_(prefix, prefix_lse.t(), private, private_lse[:, :, 0], shared.num_rows)
        return private
