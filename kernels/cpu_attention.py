"""Paged attention on a CPU: a step becomes a few dense attention calls, and a shared prefix is attended once.

The rows' keys are cut into segments, each one call of torch's CPU flash attention, which keeps scores and softmax in
float32 and returns the log-sum-exp; a query that takes part in several segments has their results merged by it
(cascade attention; the merge is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

    [shared prefix | private context | new tokens]      keys of one row
     dense, once    dense              causal tiles     a prefill row; a short context joins the tiles
     per group      `------- padded --------'           decode rows, batched by similar length

Query heads that share a key head are folded into the query dimension: keys are never repeated, products are larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from kernels.attention_plan import AttentionPlan, SharedPrefixes

# Below this many (members - 1) x shared tokens a group's extra call costs more than the keys it saves.
MIN_TOKENS_SAVED = 1024
# Slots a padded batch gathers at most, so that its keys are still in the cache when they are multiplied.
MAX_PADDED_SLOTS = 16384
# Queries per causal tile, for rows of up to 256 new tokens and above: small tiles waste fewer keys behind the diagonal.
SMALL_TILE, LARGE_TILE = 64, 128


@dataclass(frozen=True, slots=True)
class _Folded:
    """Queries over one list of keys; a causal tile has a mask."""

    tokens: slice | torch.Tensor  # which rows of the query: a run, or (n,) int64
    key_slots: torch.Tensor  # (num_keys,) int64
    mask: torch.Tensor | None = None  # (n * group, num_keys) float32, 0 or -inf; None: every query sees every key


@dataclass(frozen=True, slots=True)
class _Padded:
    """One query per row, each over its own keys, padded to one length."""

    tokens: slice | torch.Tensor
    key_slots: torch.Tensor  # (num_rows, num_keys) int64; padding repeats the row's first key, so it is finite
    mask: torch.Tensor | None  # (num_rows, 1, 1, num_keys) float32, 0 or -inf; None: nothing is padded


@dataclass(frozen=True, slots=True)
class _Segments:
    """Each query is in exactly one causal or padded segment, and in any number of dense ones, which have no mask."""

    causal: list[_Folded]
    padded: list[_Padded]
    dense: list[_Folded]


@dataclass(frozen=True, slots=True)
class _Row:
    start: int  # of its queries among the step's tokens
    num_queries: int
    length: int  # of its sequence
    slots: torch.Tensor  # (length,) int64: where its keys lie


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan(AttentionPlan):
    """Segments are worked out for the first layer of each kind and kept for the step's others."""

    segments: dict[tuple[int, int, int | None], _Segments] = field(default_factory=dict)

    def segments_for(self, block_size: int, group: int, sliding_window: int | None) -> _Segments:
        """group: query heads per key head."""
        if sliding_window is not None and sliding_window >= self.max_sequence_length:
            sliding_window = None  # it hides nothing in this step
        found = self.segments.get((block_size, group, sliding_window))
        if found is None:
            found = _plan_segments(self, block_size, group, sliding_window)
            self.segments[block_size, group, sliding_window] = found
        return found


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

        each_query_once: list[_Folded | _Padded] = [*segments.causal, *segments.padded]
        for segment in each_query_once:
            key, value = self._gathered.gather(key_cache, value_cache, segment.key_slots.view(-1))
            part, part_lse = _attend(query, key, value, segment, scale)
            _put(out, segment.tokens, part)
            if lse is not None:
                _put(lse, segment.tokens, part_lse)
        if lse is None:
            return out
        for dense in segments.dense:
            key, value = self._gathered.gather(key_cache, value_cache, dense.key_slots)
            part, part_lse = _attend(query, key, value, dense, scale)
            _merge(out, lse, dense.tokens, part, part_lse)
        return out.to(query.dtype)


# Planning: plain data from index tensors, once a step.


def _plan_segments(plan: AttentionPlan, block_size: int, group: int, sliding_window: int | None) -> _Segments:
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

    prefills = [(row_id, row) for row_id, row in enumerate(rows) if row.num_queries > 1]
    decodes = [(row_id, row) for row_id, row in enumerate(rows) if row.num_queries == 1]
    if sliding_window is not None:  # it slides off a prefix query by query: no sharing
        causal = [tile for _, row in prefills for tile in _causal_tiles(row, 0, group, sliding_window)]
        return _Segments(
            causal, _padded_segments([(row, max(0, row.length - sliding_window)) for _, row in decodes]), []
        )

    num_shared = [0] * len(rows)  # tokens
    dense: list[_Folded] = []
    for member_ids, num_blocks in group_by_prefix(sharable, block_size):
        members = [rows[member_id] for member_id in sorted(member_ids)]
        for member_id in member_ids:
            num_shared[member_id] = num_blocks * block_size
        tokens = [torch.arange(row.start, row.start + row.num_queries) for row in members]
        dense.append(_Folded(_run_or_index(torch.cat(tokens)), members[0].slots[: num_blocks * block_size]))

    causal = []
    for row_id, row in prefills:
        first_key, own = num_shared[row_id], row.length - row.num_queries
        if own - first_key > row.num_queries:  # a context that is worth a call without a mask
            dense.append(_Folded(slice(row.start, row.start + row.num_queries), row.slots[first_key:own]))
            first_key = own
        causal += _causal_tiles(row, first_key, group, None)
    return _Segments(causal, _padded_segments([(row, num_shared[row_id]) for row_id, row in decodes]), dense)


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


def _causal_tiles(row: _Row, first_key: int, group: int, sliding_window: int | None) -> list[_Folded]:
    """The row's queries in runs, each over the keys from first_key (or its window's begin) to its own last token."""
    size = SMALL_TILE if row.num_queries <= 256 else LARGE_TILE
    num_past = row.length - row.num_queries
    tiles = []
    for first in range(0, row.num_queries, size):
        last = min(first + size, row.num_queries)
        begin = first_key if sliding_window is None else max(first_key, num_past + first + 1 - sliding_window)
        key_positions = torch.arange(begin, num_past + last)
        positions = torch.arange(num_past + first, num_past + last)[:, None]
        seen = key_positions <= positions
        if sliding_window is not None:
            seen &= key_positions > positions - sliding_window
        mask = _additive(seen).repeat_interleave(group, dim=0)
        tiles.append(_Folded(slice(row.start + first, row.start + last), row.slots[begin : num_past + last], mask))
    return tiles


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


# Acting, on gathered keys and values (num_keys, num_kv_heads, head_size): each returns, for its n queries, the output
# (n, num_heads, head_size) and the log-sum-exp (n, num_heads) float32.


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: _Folded | _Padded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(segment, _Padded):
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: _Folded, scale: float
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: _Padded, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, head_size = key.shape[1:]
    queries = _take(query, segment.tokens)
    num_rows, num_heads, _ = queries.shape
    group = num_heads // num_kv_heads
    num_keys = segment.key_slots.shape[1]
    paged = (num_rows, num_keys, num_kv_heads, head_size)
    key, value = key.view(paged).transpose(1, 2), value.view(paged).transpose(1, 2)
    mask = None if segment.mask is None else segment.mask.expand(num_rows, 1, group, num_keys)
    out, lse = _flash(queries.view(num_rows, num_kv_heads, group, head_size), key, value, scale, mask)
    return out.reshape(queries.shape), lse.reshape(num_rows, num_heads)


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
