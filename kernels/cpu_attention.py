"""Paged attention on a CPU: a step becomes a few dense attention calls, and a shared prefix is attended once.

Each segment of the plan is one call of torch's CPU flash attention, which keeps scores and softmax in float32 and
returns the log-sum-exp; a query that takes part in several segments has their results merged by it (cascade attention;
the merge is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Query heads that share
a key head are folded into the query dimension: keys are never repeated, and products are larger.
"""

import torch
from torch.nn import functional

from kernels.attention_plan import AttentionPlan, SharedPrefixes
from kernels.cpu_attention_plan import CpuAttentionPlan, Folded, Padded


class _Gathered:
    """Where a segment's keys and values are gathered, until the next segment's.

    The memory stays: fresh pages from the system for each layer cost twice the copying (measured).
    """

    def __init__(self) -> None:
        self._key = torch.empty(0, dtype=torch.int64)
        self._value = torch.empty(0, dtype=torch.int64)

    def gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (num_slots, num_kv_heads, head_size) of the tokens at these slots (num_slots,)."""
        block_size, num_kv_heads, head_size = key_cache.shape[1:]
        token_bytes = num_kv_heads * head_size * key_cache.itemsize
        if not (key_cache.is_contiguous() and value_cache.is_contiguous() and token_bytes % 8 == 0):
            block_ids, offsets = slots // block_size, slots % block_size
            return key_cache[block_ids, offsets], value_cache[block_ids, offsets]
        words = token_bytes // 8  # as int64, whatever the dtype: torch copies rows of bf16 one by one
        if self._key.numel() < slots.numel() * words:
            with torch.inference_mode(False):  # or no call outside that mode could write to it later
                self._key, self._value = (torch.empty(slots.numel() * words, dtype=torch.int64) for _ in range(2))
        gathered = []
        for cache, memory in ((key_cache, self._key), (value_cache, self._value)):
            rows = memory[: slots.numel() * words].view(-1, words)
            torch.index_select(cache.view(-1, num_kv_heads * head_size).view(torch.int64), 0, slots, out=rows)
            gathered.append(rows.view(cache.dtype).view(-1, num_kv_heads, head_size))
        return gathered[0], gathered[1]


class CpuAttention:
    """The `Attention` of a CPU; one thread's, as its gathering memory is."""

    def __init__(self) -> None:
        self._gathered = _Gathered()

    def prepare(
        self,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_lengths: torch.Tensor,
        max_query_length: int,
        max_sequence_length: int,
        num_decode_rows: int = 0,
        shared: SharedPrefixes | None = None,
    ) -> CpuAttentionPlan:
        return CpuAttentionPlan(block_tables, query_starts, sequence_lengths, max_query_length, max_sequence_length)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, CpuAttentionPlan), f"a {type(plan).__name__} was not prepared for a CPU"
        query = query.contiguous()
        num_tokens, num_heads, _ = query.shape
        segments = plan.segments_for(key_cache.shape[1], num_heads // key_cache.shape[2], sliding_window)
        # Parts are merged in float32; without dense segments there is nothing to merge.
        merging = bool(segments.dense)
        out = torch.zeros(query.shape, dtype=torch.float32 if merging else query.dtype)
        lse = torch.zeros(num_tokens, num_heads) if merging else None

        each_query_once: list[Folded | Padded] = [*segments.causal, *segments.padded]
        for segment in each_query_once:
            key, value = self._gathered.gather(key_cache, value_cache, segment.key_slots.view(-1))
            part, part_lse = _attend(query, key, value, segment, scale)
            _put(out, segment.tokens, part)
            if lse is not None:
                _put(lse, segment.tokens, part_lse)
        if lse is None:
            return out
        for dense in segments.dense:
            key, value = self._gathered.gather(key_cache, value_cache, dense.key_slots.view(-1))
            part, part_lse = _attend(query, key, value, dense, scale)
            _merge(out, lse, dense.tokens, part, part_lse)
        return out.to(query.dtype)


# Acting, on gathered keys and values (num_keys, num_kv_heads, head_size): each returns, for its n queries, the output
# (n, num_heads, head_size) and the log-sum-exp (n, num_heads) float32.


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Folded | Padded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(segment, Padded):
        return _attend_padded(query, key, value, segment, scale)
    return _attend_folded(query, key, value, segment, scale)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, heads, n, head_size) each -> out, log-sum-exp (batch, heads, n). Strides are free but the last one's."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p=0.0, is_causal=False, attn_mask=mask, scale=scale
    )
    return out, lse


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Folded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key.shape[1:]
    queries = _take(query, segment.tokens)
    num_queries, num_heads, _ = queries.shape
    group = num_heads // num_kv_heads
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    folded = queries.view(num_queries, num_kv_heads, group, head_size).transpose(0, 1)
    folded = folded.reshape(1, num_kv_heads, num_queries * group, head_size)
    mask = None if segment.mask is None else segment.mask[None, None]
    out, lse = _flash(folded, key, value, scale, mask)
    out = out.view(num_kv_heads, num_queries, group, head_size).transpose(0, 1)
    lse = lse.view(num_kv_heads, num_queries, group).transpose(0, 1)
    return out.reshape(queries.shape), lse.reshape(num_queries, num_heads)


def _attend_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Padded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key.shape[1:]
    queries = _take(query, segment.tokens)
    num_queries, num_heads, _ = queries.shape
    members, group = segment.members, num_heads // num_kv_heads
    num_entries, num_keys = segment.key_slots.shape
    paged = (num_entries, num_keys, num_kv_heads, head_size)
    key, value = key.view(paged).transpose(1, 2), value.view(paged).transpose(1, 2)
    folded = queries.view(num_entries, members, num_kv_heads, group, head_size).transpose(1, 2)
    folded = folded.reshape(num_entries, num_kv_heads, members * group, head_size)
    mask = None if segment.mask is None else segment.mask.expand(num_entries, 1, members * group, num_keys)
    out, lse = _flash(folded, key, value, scale, mask)
    out = out.view(num_entries, num_kv_heads, members, group, head_size).transpose(1, 2)
    lse = lse.view(num_entries, num_kv_heads, members, group).transpose(1, 2)
    return out.reshape(queries.shape), lse.reshape(num_queries, num_heads)


def _take(x: torch.Tensor, tokens: slice | torch.Tensor) -> torch.Tensor:
    """Rows of a contiguous (num_tokens, ...)."""
    if isinstance(tokens, slice):
        return x[tokens]
    return functional.embedding(tokens, x.view(x.shape[0], -1)).view(-1, *x.shape[1:])


def _put(x: torch.Tensor, tokens: slice | torch.Tensor, rows: torch.Tensor) -> None:
    if isinstance(tokens, slice):
        x[tokens] = rows
    else:
        x.index_copy_(0, tokens, rows.to(x.dtype))


def _merge(
    out: torch.Tensor, lse: torch.Tensor, tokens: slice | torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Fold a part over other keys into the running result: weights exp(lse) add up, outputs average by them."""
    running, running_lse = _take(out, tokens), _take(lse, tokens)
    weight = torch.sigmoid(part_lse - running_lse)[..., None]  # exp(b) / (exp(a) + exp(b)), without overflow
    merged = torch.lerp(running, part.to(out.dtype), weight)
    _put(out, tokens, merged)
    _put(lse, tokens, torch.logaddexp(running_lse, part_lse))
