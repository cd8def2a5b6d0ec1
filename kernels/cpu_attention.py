"""Paged attention on a CPU: a step becomes a few dense attention calls, and a shared prefix is attended once.

The rows' keys are cut into segments, each one call of torch's CPU flash attention, which keeps scores and softmax in
float32 and returns the log-sum-exp; a query that takes part in several segments has their results merged by it
(cascade attention; the merge is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

    [shared prefix | private context | new tokens]      keys of one row
     dense, once    dense              causal           a prefill row; a short context joins the causal call, masked
     per group      `------- padded --------'           decode rows, batched by similar length

Query heads that share a key head are folded into the query dimension or broadcast, so keys are never repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from kernels.attention_plan import AttentionPlan

# Below this many (members - 1) x shared tokens a group's extra call costs more than the keys it saves.
MIN_TOKENS_SAVED = 1024
# A padded batch's keys stay within a core's cache: slots per call.
MAX_PADDED_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class _Dense:
    """Every query sees every key."""

    tokens: slice | torch.Tensor  # which rows of the query: a run, or (n,) int64
    key_slots: torch.Tensor  # (num_keys,) int64


@dataclass(frozen=True, slots=True)
class _Causal:
    """One row's run of queries over keys that end with its own; mask None: the keys are just its own."""

    tokens: slice
    key_slots: torch.Tensor  # (num_keys,) int64
    mask: torch.Tensor | None  # (num_queries, num_keys) float32, 0 or -inf


@dataclass(frozen=True, slots=True)
class _Padded:
    """One query per row, each over its own keys, padded to one length."""

    tokens: slice | torch.Tensor
    key_slots: torch.Tensor  # (num_rows, num_keys) int64; padding repeats the row's first key, so it is finite
    mask: torch.Tensor | None  # (num_rows, 1, 1, num_keys) float32, 0 or -inf; None: nothing is padded


@dataclass(frozen=True, slots=True)
class _Segments:
    """Each query is in exactly one causal or padded segment, and in any number of dense ones."""

    causal: list[_Causal]
    padded: list[_Padded]
    dense: list[_Dense]


@dataclass(frozen=True, slots=True)
class _Row:
    start: int  # of its queries among the step's tokens
    num_queries: int
    length: int  # of its sequence
    slots: torch.Tensor  # (length,) int64: where its keys lie


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan(AttentionPlan):
    """Segments are worked out for the first layer of each (block size, window) and kept for the step's others."""

    segments: dict[tuple[int, int | None], _Segments] = field(default_factory=dict)

    def segments_for(self, block_size: int, sliding_window: int | None) -> _Segments:
        if sliding_window is not None and sliding_window >= self.max_sequence_length:
            sliding_window = None  # it hides nothing in this step
        found = self.segments.get((block_size, sliding_window))
        if found is None:
            found = _plan_segments(self, block_size, sliding_window)
            self.segments[block_size, sliding_window] = found
        return found


class CpuAttention:
    """The `Attention` of a CPU."""

    def prepare(
        self,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_lengths: torch.Tensor,
        max_query_length: int,
        max_sequence_length: int,
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
        segments = plan.segments_for(key_cache.shape[1], sliding_window)
        query = query.contiguous()
        num_tokens, num_heads, _ = query.shape
        # Parts are merged in float32; without dense segments there is nothing to merge.
        merging = bool(segments.dense)
        out = torch.zeros(query.shape, dtype=torch.float32 if merging else query.dtype)
        lse = torch.zeros(num_tokens, num_heads) if merging else None

        for causal in segments.causal:
            part, part_lse = _attend_causal(query, key_cache, value_cache, causal, scale)
            out[causal.tokens] = part
            if lse is not None:
                lse[causal.tokens] = part_lse
        for padded in segments.padded:
            part, part_lse = _attend_padded(query, key_cache, value_cache, padded, scale)
            _put(out, padded.tokens, part)
            if lse is not None:
                _put(lse, padded.tokens, part_lse)
        if lse is None:
            return out
        for dense in segments.dense:
            part, part_lse = _attend_dense(query, key_cache, value_cache, dense, scale)
            _merge(out, lse, dense.tokens, part, part_lse)
        return out.to(query.dtype)


# Planning: plain data from index tensors, once a step.


def _plan_segments(plan: AttentionPlan, block_size: int, sliding_window: int | None) -> _Segments:
    starts = plan.query_starts.tolist()
    lengths = plan.sequence_lengths.tolist()
    offsets = torch.arange(block_size)
    rows: list[_Row] = []
    sharable: list[tuple[int, ...]] = []  # whole blocks before the row's first query: all its queries see them
    for row_id, length in enumerate(lengths):
        num_queries = starts[row_id + 1] - starts[row_id]
        if num_queries == 0:
            continue
        assert length >= num_queries, f"row {row_id}: {num_queries} queries in a sequence of {length}"
        block_ids = plan.block_tables[row_id, : -(-length // block_size)].long()
        slots = (block_ids[:, None] * block_size + offsets).flatten()[:length]
        rows.append(_Row(starts[row_id], num_queries, length, slots))
        sharable.append(tuple(block_ids[: (length - num_queries) // block_size].tolist()))

    if sliding_window is not None:  # a window slides off a prefix query by query: no sharing
        first_keys = [max(0, row.length - row.num_queries + 1 - sliding_window) for row in rows]
        causal = [
            _causal_segment(row, first, sliding_window)
            for row, first in zip(rows, first_keys, strict=True)
            if row.num_queries > 1
        ]
        decodes = [(row, first) for row, first in zip(rows, first_keys, strict=True) if row.num_queries == 1]
        return _Segments(causal, _padded_segments(decodes), [])

    num_shared = [0] * len(rows)  # tokens
    dense: list[_Dense] = []
    for member_ids, num_blocks in group_by_prefix(sharable, block_size):
        members = [rows[member_id] for member_id in sorted(member_ids)]
        for member_id in member_ids:
            num_shared[member_id] = num_blocks * block_size
        tokens = [torch.arange(row.start, row.start + row.num_queries) for row in members]
        dense.append(_Dense(_run_or_index(torch.cat(tokens)), members[0].slots[: num_blocks * block_size]))

    causal = []
    decodes = []
    for row, shared in zip(rows, num_shared, strict=True):
        num_private = row.length - row.num_queries - shared
        if row.num_queries == 1:
            decodes.append((row, shared))
        elif num_private <= row.num_queries // 2:
            causal.append(_causal_segment(row, shared, None))
        else:
            own = row.length - row.num_queries
            tokens_of_row = slice(row.start, row.start + row.num_queries)
            dense.append(_Dense(tokens_of_row, row.slots[shared:own]))
            causal.append(_causal_segment(row, own, None))
    return _Segments(causal, _padded_segments(decodes), dense)


def group_by_prefix(block_ids: Sequence[tuple[int, ...]], block_size: int) -> list[tuple[list[int], int]]:
    """(member rows, shared blocks) of disjoint groups whose block ids begin alike, saving the most keys.

    Sorting the rows makes each group a run of them; the runs with a common prefix form a tree, walked bottom up with
    the stack of LCP intervals (Abouelhoda, Kurtz and Ohlebusch, 2004): a run is one group if that saves more than
    the best groups inside it. One level only: a row is in at most one group.
    """
    order = sorted(range(len(block_ids)), key=block_ids.__getitem__)
    # Open runs: [shared blocks, first index, tokens saved by the best groups inside, those groups]
    Run = tuple[int, int, int, list[tuple[int, int, int]]]
    stack: list[Run] = [(0, 0, 0, [])]
    for end in range(1, len(order) + 1):
        common = _num_common(block_ids[order[end - 1]], block_ids[order[end]]) if end < len(order) else 0
        first = end - 1
        saved, groups = 0, list[tuple[int, int, int]]()
        while stack[-1][0] > common:
            depth, first, saved, groups = stack.pop()
            saved_as_one = (end - first - 1) * depth * block_size
            if saved_as_one >= max(saved, MIN_TOKENS_SAVED):
                saved, groups = saved_as_one, [(first, end, depth)]
            if stack[-1][0] >= common:  # the run around it is open already
                outer = stack[-1]
                stack[-1] = (outer[0], outer[1], outer[2] + saved, outer[3] + groups)
                saved, groups = 0, []
        if stack[-1][0] < common:
            stack.append((common, first, saved, groups))
    return [(order[first:end], depth) for first, end, depth in stack[0][3]]


def _num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


def _causal_segment(row: _Row, first_key: int, sliding_window: int | None) -> _Causal:
    tokens = slice(row.start, row.start + row.num_queries)
    key_slots = row.slots[first_key:]
    if len(key_slots) == row.num_queries and sliding_window is None:
        return _Causal(tokens, key_slots, None)
    key_positions = torch.arange(first_key, row.length)
    positions = torch.arange(row.length - row.num_queries, row.length)[:, None]
    seen = key_positions <= positions
    if sliding_window is not None:
        seen &= key_positions > positions - sliding_window
    return _Causal(tokens, key_slots, _additive(seen))


def _padded_segments(decodes: list[tuple[_Row, int]]) -> list[_Padded]:
    """Batches of rows, longest first; one ends where a row would be more than half padding, or at a size limit."""
    decodes = sorted(decodes, key=lambda decode: decode[0].length - decode[1], reverse=True)
    batches: list[list[tuple[_Row, int]]] = []
    longest = 0
    for row, first_key in decodes:
        num_keys = row.length - first_key
        if not batches or num_keys * 2 < longest or (len(batches[-1]) + 1) * longest > MAX_PADDED_SLOTS:
            batches.append([])
            longest = num_keys
        batches[-1].append((row, first_key))
    segments = []
    for batch in batches:
        batch.sort(key=lambda decode: decode[0].start)
        lengths = torch.tensor([row.length - first_key for row, first_key in batch])
        width = int(lengths.max())
        key_slots = torch.empty(len(batch), width, dtype=torch.int64)
        for i, (row, first_key) in enumerate(batch):
            num_keys = row.length - first_key
            key_slots[i, :num_keys] = row.slots[first_key:]
            key_slots[i, num_keys:] = row.slots[first_key]
        seen = torch.arange(width) < lengths[:, None]
        mask = None if bool(seen.all()) else _additive(seen)[:, None, None, :]
        segments.append(_Padded(_run_or_index(torch.tensor([row.start for row, _ in batch])), key_slots, mask))
    return segments


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def _run_or_index(tokens: torch.Tensor) -> slice | torch.Tensor:
    """A slice, which is a view, where the token ids follow each other."""
    first, last = int(tokens[0]), int(tokens[-1])
    if last - first + 1 == len(tokens) and bool((tokens[1:] > tokens[:-1]).all()):
        return slice(first, last + 1)
    return tokens


# Acting: each returns (out (n, num_heads, head_size), log-sum-exp (n, num_heads) float32) for its n queries.


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, heads, n, head_size) each -> out, log-sum-exp (batch, heads, n). Strides are free but the last one's."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p=0.0, is_causal=is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _attend_dense(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segment: _Dense, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key_cache.shape[2:]
    queries = _take(query, segment.tokens)
    num_queries, num_heads, _ = queries.shape
    group = num_heads // num_kv_heads
    key = _gather(key_cache, segment.key_slots).transpose(0, 1)[None]
    value = _gather(value_cache, segment.key_slots).transpose(0, 1)[None]
    folded = queries.view(num_queries, num_kv_heads, group, head_size).transpose(0, 1)
    folded = folded.reshape(1, num_kv_heads, num_queries * group, head_size)
    out, lse = _flash(folded, key, value, scale, None, False)
    out = out.view(num_kv_heads, num_queries, group, head_size).transpose(0, 1)
    lse = lse.view(num_kv_heads, num_queries, group).transpose(0, 1)
    return out.reshape(queries.shape), lse.reshape(num_queries, num_heads)


def _attend_causal(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segment: _Causal, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key_cache.shape[2:]
    queries = query[segment.tokens]
    num_queries, num_heads, _ = queries.shape
    group = num_heads // num_kv_heads
    # The key head is the batch, and its query heads are heads that share it by a stride of 0.
    grouped = queries.view(num_queries, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group, len(segment.key_slots), head_size)
    key = _gather(key_cache, segment.key_slots).transpose(0, 1)[:, None].expand(shared)
    value = _gather(value_cache, segment.key_slots).transpose(0, 1)[:, None].expand(shared)
    mask = None if segment.mask is None else segment.mask[None, None]
    out, lse = _flash(grouped, key, value, scale, mask, segment.mask is None)
    return out.permute(2, 0, 1, 3).reshape(queries.shape), lse.permute(2, 0, 1).reshape(num_queries, num_heads)


def _attend_padded(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, segment: _Padded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key_cache.shape[2:]
    queries = _take(query, segment.tokens)
    num_rows, num_heads, _ = queries.shape
    group = num_heads // num_kv_heads
    num_keys = segment.key_slots.shape[1]
    paged = (num_rows, num_keys, num_kv_heads, head_size)
    key = _gather(key_cache, segment.key_slots.view(-1)).view(paged).transpose(1, 2)
    value = _gather(value_cache, segment.key_slots.view(-1)).view(paged).transpose(1, 2)
    mask = None if segment.mask is None else segment.mask.expand(num_rows, 1, group, num_keys)
    out, lse = _flash(queries.view(num_rows, num_kv_heads, group, head_size), key, value, scale, mask, False)
    return out.reshape(queries.shape), lse.reshape(num_rows, num_heads)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(num_slots, num_kv_heads, head_size) of the tokens at these slots."""
    num_kv_heads, head_size = cache.shape[2:]
    if cache.is_contiguous():
        # An embedding look-up copies bf16 rows 50 times faster than index_select or [] do (measured, torch 2.11).
        rows = functional.embedding(slots, cache.view(-1, num_kv_heads * head_size))
        return rows.view(-1, num_kv_heads, head_size)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


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
