"""Cuts a step's attention on a CPU into a few dense calls: which queries over which keys. Index arithmetic only.

    [shared prefix | private context | new tokens]      keys of one row
     dense, once    dense              causal tiles     a prefill row; a short context joins the tiles
     per group      `------- padded --------'           decode rows, batched by similar length

A group is rows whose block tables begin alike. A large one has a call of its own; small ones, of decode rows only, are
batched like rows are, so that pairs of questions on one document pay too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from kernels.attention_plan import AttentionPlan

# A group's extra call must save this many (members - 1) x shared tokens, or it costs more than the keys it saves.
MIN_TOKENS_SAVED = 1024
# Small groups of decode rows share their calls: each must save this many, and all of them together as above.
MIN_TOKENS_SAVED_IN_BATCH = 128
# Slots a padded batch gathers at most: its keys are still in a core's cache when they are multiplied (measured).
MAX_PADDED_SLOTS = 4096
# Queries per causal tile, for rows of up to 256 new tokens and above: small tiles waste fewer keys behind the diagonal.
SMALL_TILE, LARGE_TILE = 64, 128


@dataclass(frozen=True, slots=True)
class Folded:
    """Queries over one list of keys; a causal tile has a mask."""

    tokens: slice | torch.Tensor  # which rows of the query: a run, or (n,) int64
    key_slots: torch.Tensor  # (num_keys,) int64
    mask: torch.Tensor | None = None  # (n * group, num_keys) float32, 0 or -inf; None: every query sees every key


@dataclass(frozen=True, slots=True)
class Padded:
    """The same number of queries per entry (a decode row, or a small group of them), each over the entry's own keys."""

    tokens: slice | torch.Tensor  # num_entries x members
    members: int
    key_slots: torch.Tensor  # (num_entries, num_keys) int64; padding repeats the entry's first
    mask: torch.Tensor | None  # (num_entries, 1, 1, num_keys) float32, 0 or -inf; None: nothing is padded


@dataclass(frozen=True, slots=True)
class Segments:
    """Each query is in exactly one causal or padded segment, and in any number of dense ones, which have no mask."""

    causal: list[Folded]
    padded: list[Padded]
    dense: list[Folded | Padded]


@dataclass(frozen=True, slots=True)
class _Row:
    start: int  # of its queries among the step's tokens
    num_queries: int
    length: int  # of its sequence
    slots: torch.Tensor  # (length,) int64: where its keys lie


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan(AttentionPlan):
    """Segments are worked out for the first layer of each kind and kept for the step's others."""

    segments: dict[tuple[int, int, int | None], Segments] = field(default_factory=dict)

    def segments_for(self, block_size: int, group: int, sliding_window: int | None) -> Segments:
        """group: query heads per key head."""
        if sliding_window is not None and sliding_window >= self.max_sequence_length:
            sliding_window = None  # it hides nothing in this step
        found = self.segments.get((block_size, group, sliding_window))
        if found is None:
            found = _plan_segments(self, block_size, group, sliding_window)
            self.segments[block_size, group, sliding_window] = found
        return found


# Queries and the slots of the keys that all of them see.
_Entry = tuple[list[int], torch.Tensor]


def _plan_segments(plan: AttentionPlan, block_size: int, group: int, sliding_window: int | None) -> Segments:
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

    num_shared = [0] * len(rows)  # tokens that a group's segment covers
    causal: list[Folded] = []
    dense: list[Folded | Padded] = []
    if sliding_window is not None:  # it slides off a prefix query by query: no sharing
        num_shared = [max(0, row.length - sliding_window) if row.num_queries == 1 else 0 for row in rows]
    else:
        is_decode = [row.num_queries == 1 for row in rows]
        entries: list[_Entry] = []
        for member_ids, num_blocks in group_by_prefix(sharable, is_decode, block_size):
            members = [rows[member_id] for member_id in sorted(member_ids)]
            key_slots = members[0].slots[: num_blocks * block_size]
            for member_id in member_ids:
                num_shared[member_id] = len(key_slots)
            tokens = [token for row in members for token in range(row.start, row.start + row.num_queries)]
            if (len(members) - 1) * len(key_slots) >= MIN_TOKENS_SAVED:
                dense.append(Folded(_run_or_index(tokens), key_slots))
            else:
                entries.append((tokens, key_slots))
        dense += _padded_segments(entries)

    decodes: list[_Entry] = []
    for row, first_key in zip(rows, num_shared, strict=True):
        if row.num_queries == 1:
            decodes.append(([row.start], row.slots[first_key:]))
            continue
        own = row.length - row.num_queries
        if sliding_window is None and own - first_key > row.num_queries:  # a context worth a call without a mask
            dense.append(Folded(slice(row.start, row.start + row.num_queries), row.slots[first_key:own]))
            first_key = own
        causal += _causal_tiles(row, first_key, group, sliding_window)
    return Segments(causal, _padded_segments(decodes), dense)


def group_by_prefix(
    block_ids: Sequence[tuple[int, ...]], is_decode: Sequence[bool], block_size: int
) -> list[tuple[list[int], int]]:
    """(member rows, shared blocks) of disjoint groups whose block ids begin alike, saving the most keys.

    Groups that save less than MIN_TOKENS_SAVED are of decode rows only, and save that much together.

    Sorting the rows makes each group a run of them; the runs with a common prefix form a tree, walked bottom up with
    the stack of LCP intervals (Abouelhoda, Kurtz and Ohlebusch, 2004): a run is one group if that saves more than
    the best groups inside it. One level only: a row is in at most one group.
    """
    order = sorted(range(len(block_ids)), key=block_ids.__getitem__)
    num_prefills = [0, *accumulate(not is_decode[row_id] for row_id in order)]  # before each place in the order
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
            only_decodes = num_prefills[first] == num_prefills[end]
            if saved_as_one >= max(saved, MIN_TOKENS_SAVED_IN_BATCH if only_decodes else MIN_TOKENS_SAVED):
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


def _causal_tiles(row: _Row, first_key: int, group: int, sliding_window: int | None) -> list[Folded]:
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
        tiles.append(Folded(slice(row.start + first, row.start + last), row.slots[begin : num_past + last], mask))
    return tiles


def _padded_segments(entries: list[_Entry]) -> list[Padded]:
    """Batches of entries with as many queries, longest first.

    A batch ends where an entry would be more than half padding, or at the size limit.
    """
    entries = sorted(entries, key=lambda entry: (len(entry[0]), len(entry[1])), reverse=True)
    batches: list[list[_Entry]] = []
    members, longest = 0, 0
    for tokens, key_slots in entries:
        fits = batches and len(tokens) == members and len(key_slots) * 2 >= longest
        if not fits or (len(batches[-1]) + 1) * longest > MAX_PADDED_SLOTS:
            batches.append([])
            members, longest = len(tokens), len(key_slots)
        batches[-1].append((tokens, key_slots))
    return [_padded(batch) for batch in batches]


def _padded(batch: list[_Entry]) -> Padded:
    batch.sort(key=lambda entry: entry[0])
    lengths = [len(key_slots) for _, key_slots in batch]
    width = max(lengths)
    slots = torch.empty(len(batch), width, dtype=torch.int64)
    for row, (_, key_slots) in zip(slots, batch, strict=True):
        row[: len(key_slots)] = key_slots
        row[len(key_slots) :] = key_slots[0]
    tokens = [token for entry_tokens, _ in batch for token in entry_tokens]
    mask = None
    if min(lengths) < width:
        mask = _additive(torch.arange(width) < torch.tensor(lengths)[:, None])[:, None, None, :]
    return Padded(_run_or_index(tokens), len(batch[0][0]), slots, mask)


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def _run_or_index(tokens: list[int]) -> slice | torch.Tensor:
    """A slice, which is a view, where the token ids follow each other."""
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return slice(tokens[0], tokens[0] + len(tokens))
    return torch.tensor(tokens)
