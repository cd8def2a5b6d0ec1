"""Cuts a step's attention on a CPU into batches of products: which queries over which keys. Index arithmetic only.

Keys are gathered in whole blocks, with whatever lies behind a sequence's end, and before a window's begin, masked. A
row with several new tokens has a batch of its own: its keys are gathered once, and tiles of its queries see them up to
their own last token. Decode rows are batched by similar length; those whose block tables begin alike are an entry,
whose shared keys are gathered and multiplied once:

    entry       [ shared keys  ][ own keys of row 0 ..]         scores of a row: [shared | own]
    of a group                  [ own keys of row 1      ]      what is padding, in either, is masked
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.attention_plan import AttentionPlan, AttentionRows

# A group's own batch must save this many (members - 1) x shared tokens, or it costs more than the keys it saves.
MIN_TOKENS_SAVED = 1024
# Small groups share their batches: each must save this many, and all of them together as above.
MIN_TOKENS_SAVED_IN_BATCH = 128
# Scores of a batch at most, over all heads: 2 MB in bf16, what two cores keep near them from product to product.
MAX_SCORES = 1 << 20
# Queries of a prefill row that are multiplied at a time: more would compute more behind the diagonal.
MIN_TILE, MAX_TILE = 16, 128
# Scores of a query are of a multiple of so many keys: softmax and product over 500 take 20% more time than over 512.
KEY_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of one row's queries over a run of its keys."""

    tokens: slice  # rows of the query
    keys: slice
    mask: torch.Tensor  # (num_queries, 1, n) of the last n keys, 0 or -inf, in the query's dtype


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """`block_index`: of each of the row's blocks, head after head, the last one repeated: block x num_kv_heads + head,
    which is where it lies in a CPU's cache."""

    block_index: torch.Tensor  # (num_kv_heads x num_blocks,) int64
    num_keys: int  # of the row, from the first block's begin
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Entries of `members` rows each, entry after entry; padding repeats the last block of what it pads.

    `block_index` as a prefill row's: the shared ones of (num_kv_heads, entries), then the own of (num_kv_heads, rows).
    """

    tokens: slice | torch.Tensor  # a run, or (num_rows,) int64
    num_rows: int
    members: int
    num_shared: int
    num_own: int
    fewest_own: int  # that any row has, padding aside
    block_index: torch.Tensor  # (num_kv_heads x (entries x num_shared + num_rows x num_own) / block_size,) int64
    mask: torch.Tensor | None  # (num_rows, 1, n) of the last n keys, 0 or -inf, in the query's dtype; None: no padding


@dataclass(frozen=True, slots=True)
class Batches:
    """Each query of the step is in exactly one of them."""

    prefills: list[PrefillRow]
    decodes: list[DecodeBatch]


@dataclass(frozen=True, slots=True)
class _Row:
    table_id: int  # which block table is its own
    start: int  # of its queries among the step's tokens
    num_queries: int
    length: int  # of its sequence


@dataclass(frozen=True, slots=True)
class _Entry:
    """Decode rows, in the step's order, whose first `num_shared` keys are the same; what a window hides lies before."""

    rows: list[_Row]
    num_shared: int
    first_own: int

    @property
    def num_own(self) -> int:
        return max(row.length for row in self.rows) - self.first_own


@dataclass(frozen=True, slots=True)
class _Kind:
    """Of a layer: what its batches depend on besides the step's rows."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan(AttentionPlan):
    """Batches are worked out for the first layer of each kind and kept for the step's others."""

    batches: dict[_Kind, Batches] = field(default_factory=dict)

    def batches_for(
        self, block_size: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, sliding_window: int | None
    ) -> Batches:
        if sliding_window is not None and sliding_window >= self.rows.max_sequence_length:
            sliding_window = None  # it hides nothing in this step
        kind = _Kind(block_size, num_heads, num_kv_heads, dtype, sliding_window)
        if kind not in self.batches:
            rows, tables = _rows_of(self.rows), self.rows.block_tables
            decodes = _entries([row for row in rows if row.num_queries == 1], tables, kind)
            self.batches[kind] = Batches(
                [_prefill(row, tables, kind) for row in rows if row.num_queries > 1],
                [_decode_batch(entries, tables, kind) for entries in _batched(decodes, num_heads)],
            )
        return self.batches[kind]


def _rows_of(step: AttentionRows) -> list[_Row]:
    starts = step.query_starts.tolist()
    rows = []
    for table_id, length in enumerate(step.sequence_lengths.tolist()):
        num_queries = starts[table_id + 1] - starts[table_id]
        assert length >= num_queries, f"row {table_id}: {num_queries} queries in a sequence of {length}"
        if num_queries:
            rows.append(_Row(table_id, starts[table_id], num_queries, length))
    return rows


def _prefill(row: _Row, block_tables: torch.Tensor, kind: _Kind) -> PrefillRow:
    """Tiles of one size about, each over the keys from its window's begin, or the first, to its own last token."""
    most = min(MAX_TILE, max(MIN_TILE, MAX_SCORES // (kind.num_heads * row.length)))
    size = -(-row.num_queries // -(-row.num_queries // most))
    num_past = row.length - row.num_queries
    begin_of_row = _down(_first_seen(num_past, kind.window), kind.block_size)
    tiles = []
    for first in range(0, row.num_queries, size):
        last = min(first + size, row.num_queries)
        begin = _first_seen(num_past + first, kind.window)
        end = begin + _up(num_past + last - begin, KEY_MULTIPLE)
        positions = torch.arange(num_past + first, num_past + last)[:, None]
        # Without a window every query sees what lies before the tile.
        key_positions = torch.arange(num_past + first if kind.window is None else begin, end)
        seen = key_positions <= positions
        if kind.window is not None:
            seen &= key_positions > positions - kind.window
        keys = slice(begin - begin_of_row, end - begin_of_row)
        tiles.append(Tile(slice(row.start + first, row.start + last), keys, _additive(seen, kind.dtype)))
    num_blocks = -(-max(tile.keys.stop for tile in tiles) // kind.block_size)
    blocks = begin_of_row // kind.block_size + torch.arange(num_blocks)
    blocks.clamp_(max=(row.length - 1) // kind.block_size)
    index = _block_index(block_tables, torch.tensor([row.table_id]), blocks[None], kind)
    return PrefillRow(index, row.length - begin_of_row, tiles)


def _entries(rows: list[_Row], block_tables: torch.Tensor, kind: _Kind) -> list[_Entry]:
    """Each row is in one; a group too large for one batch, or of too different lengths, is several."""
    if kind.window is not None:  # it slides off a prefix query by query: no sharing
        first_seen = (_first_seen(row.length - 1, kind.window) for row in rows)
        return [_Entry([row], 0, _down(seen, kind.block_size)) for row, seen in zip(rows, first_seen, strict=True)]
    tables = block_tables.tolist()
    # Whole blocks before the row's query.
    sharable = [tuple(tables[row.table_id][: (row.length - 1) // kind.block_size]) for row in rows]
    entries = []
    alone = set(rows)
    for member_ids, num_blocks in group_by_prefix(sharable, kind.block_size):
        num_shared = num_blocks * kind.block_size
        members = sorted((rows[row_id] for row_id in member_ids), key=lambda row: row.length, reverse=True)
        for part in _runs([_Entry([row], num_shared, num_shared) for row in members], kind.num_heads):
            if len(part) > 1:
                in_order = sorted((row for entry in part for row in entry.rows), key=lambda row: row.start)
                entries.append(_Entry(in_order, num_shared, num_shared))
                alone.difference_update(in_order)
    return entries + [_Entry([row], 0, 0) for row in alone]


def _batched(entries: list[_Entry], num_heads: int) -> list[list[_Entry]]:
    """Batches of entries with as many rows and of similar lengths, each in the step's order."""
    entries = sorted(entries, key=lambda entry: (len(entry.rows), entry.num_shared, entry.num_own), reverse=True)
    return [sorted(batch, key=lambda entry: entry.rows[0].start) for batch in _runs(entries, num_heads)]


def _runs(entries: list[_Entry], num_heads: int) -> list[list[_Entry]]:
    """Cuts where members differ, more than half would be padding, or scores would be too many for one batch."""
    runs: list[list[_Entry]] = []
    num_keys = longest_shared = longest_own = 0  # of the run: without padding, and what an entry is padded to
    for entry in entries:
        num_keys += entry.num_shared + entry.num_own
        longest_shared, longest_own = max(longest_shared, entry.num_shared), max(longest_own, entry.num_own)
        num_padded = (len(runs[-1]) + 1 if runs else 1) * (longest_shared + longest_own)
        fits = num_padded <= 2 * num_keys and num_padded * len(entry.rows) * num_heads <= MAX_SCORES
        if runs and fits and len(runs[-1][0].rows) == len(entry.rows):
            runs[-1].append(entry)
        else:
            runs.append([entry])
            longest_shared, longest_own = entry.num_shared, entry.num_own
            num_keys = longest_shared + longest_own
    return runs


def _decode_batch(entries: list[_Entry], block_tables: torch.Tensor, kind: _Kind) -> DecodeBatch:
    size = kind.block_size
    num_shared, num_own = max(entry.num_shared for entry in entries), max(entry.num_own for entry in entries)
    num_own = _up(num_shared + num_own, math.lcm(KEY_MULTIPLE, size)) - num_shared
    rows = [row for entry in entries for row in entry.rows]
    table_ids = torch.tensor([row.table_id for row in rows])
    first_own = torch.tensor([entry.first_own for entry in entries for _ in entry.rows])[:, None]
    lengths = torch.tensor([row.length for row in rows])[:, None]
    own = first_own + torch.arange(num_own)
    seen = own < lengths
    if kind.window is not None:
        seen &= own >= lengths - kind.window
    own_blocks = torch.minimum(first_own // size + torch.arange(num_own // size), (lengths - 1) // size)
    shared_blocks = torch.arange(num_shared // size).expand(len(entries), -1)
    if any(entry.num_shared < num_shared for entry in entries):
        seen = torch.cat((torch.arange(num_shared) < first_own, seen), 1)
        last_shared = torch.tensor([entry.num_shared for entry in entries])[:, None] // size - 1
        shared_blocks = torch.minimum(shared_blocks, last_shared)
    of_shared = _block_index(block_tables, table_ids[:: len(entries[0].rows)], shared_blocks, kind)
    of_own = _block_index(block_tables, table_ids, own_blocks, kind)
    return DecodeBatch(
        _run_or_index([row.start for row in rows]),
        len(rows),
        len(entries[0].rows),
        num_shared,
        num_own,
        int((lengths - first_own).min()),
        torch.cat((of_shared, of_own)),
        _mask(seen, kind.dtype),
    )


def group_by_prefix(block_ids: Sequence[tuple[int, ...]], block_size: int) -> list[tuple[list[int], int]]:
    """(member rows, shared blocks) of disjoint groups whose block ids begin alike, saving the most keys.

    Groups that save less than MIN_TOKENS_SAVED save that much together.

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
            if saved_as_one >= max(saved, MIN_TOKENS_SAVED_IN_BATCH):
                saved, groups = saved_as_one, [(first, end, depth)]
            if stack[-1][0] >= common:  # the run around it is open already
                outer = stack[-1]
                stack[-1] = (outer[0], outer[1], outer[2] + saved, outer[3] + groups)
                saved, groups = 0, []
        if stack[-1][0] < common:
            stack.append((common, first, saved, groups))
    found = stack[0][3]
    small = {run for run in found if (run[1] - run[0] - 1) * run[2] * block_size < MIN_TOKENS_SAVED}
    if sum((end - first - 1) * depth * block_size for first, end, depth in small) < MIN_TOKENS_SAVED:
        found = [run for run in found if run not in small]
    return [(order[first:end], depth) for first, end, depth in found]


def _num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _block_index(
    block_tables: torch.Tensor, table_ids: torch.Tensor, blocks: torch.Tensor, kind: _Kind
) -> torch.Tensor:
    """(num_kv_heads x n x m,) from blocks (n, m), by their places in n tables."""
    of_first_head = block_tables[table_ids[:, None], blocks].long() * kind.num_kv_heads
    return (of_first_head.flatten() + torch.arange(kind.num_kv_heads)[:, None]).flatten()


def _down(number: int, multiple: int) -> int:
    return number // multiple * multiple


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n, m) -> (n, 1, m)."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


def _mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`_additive` of the columns from the first on that some row does not see; None: all see all."""
    hidden = torch.nonzero(~seen.all(0))
    return _additive(seen[:, int(hidden[0]) :], dtype) if len(hidden) else None


def _run_or_index(tokens: list[int]) -> slice | torch.Tensor:
    """A slice, which is a view, where the token ids follow each other."""
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return slice(tokens[0], tokens[0] + len(tokens))
    return torch.tensor(tokens)
