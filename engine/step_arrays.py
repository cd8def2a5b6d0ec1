"""A step's index tensors, still on the host: gathered from the requests' rows by numpy, no Python per token.

Also finds the decode rows whose block tables begin alike, so that attention may read their common prefix once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

MAX_SHARED_GROUPS = 64
# Tokens of keys not read again, by all groups together, that pay for a layer's second attention call and its merge.
MIN_TOKENS_SAVED = 32_000
MIN_GROUP_SHARE = 1 / 16  # of that, by each group: one more costs a few multiprocessors their time


@dataclass(frozen=True, slots=True)
class SharedArrays:
    """Groups of decode rows with a common prefix, padded to MAX_SHARED_GROUPS; see kernels.attention_plan."""

    block_tables: IntArray  # (MAX_SHARED_GROUPS, num_columns)
    lengths: IntArray  # (MAX_SHARED_GROUPS,)
    query_starts: IntArray  # (MAX_SHARED_GROUPS + 1,)
    num_rows: int
    private_block_tables: IntArray  # (num_decode_rows, num_columns)
    private_lengths: IntArray  # (num_decode_rows,)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Rows in the order of computation: decode rows first, those of a group together. `order[i]`: row i's run."""

    order: npt.NDArray[np.int64]
    rows: IntArray  # (num_rows,) the requests' rows
    token_ids: IntArray  # (num_tokens,); -1: the row's last sampled token, which only the device knows
    positions: IntArray  # (num_tokens,)
    slot_mapping: IntArray  # (num_tokens,)
    block_tables: IntArray  # (num_rows, num_columns), 0 past a row's length
    query_starts: IntArray  # (num_rows + 1,)
    sequence_lengths: IntArray  # (num_rows,)
    logits_indices: IntArray  # (num_sampling,) into tokens
    sampling_rows: IntArray  # (num_sampling,) the requests' rows of these
    sampling_runs: npt.NDArray[np.int64]  # (num_sampling,) their runs in the plan
    num_decode_rows: int
    max_query_length: int
    max_sequence_length: int
    shared: SharedArrays | None


def received_step(tree: Mapping[str, Any]) -> StepArrays:
    """From the fields of one that another process gathered."""
    shared = tree["shared"]
    return StepArrays(**{**tree, "shared": SharedArrays(**shared) if shared is not None else None})


def gather_step(
    request_tokens: npt.NDArray[np.int64],
    request_tables: IntArray,
    num_known: Sequence[int],
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    samples: npt.NDArray[np.bool_],
    block_size: int,
    min_tokens_saved: int | None = MIN_TOKENS_SAVED,
) -> StepArrays:
    """rows, starts, counts, samples: one entry per run in the plan's order, of counts 1 or more.

    request_tokens (max_running, max_model_len) and request_tables (max_running, max_blocks) are read at `rows`;
    num_known[row] tokens of a row are known. `min_tokens_saved` None: prefixes are not looked for.
    """
    is_decode = counts == 1
    order = np.argsort(~is_decode, kind="stable")
    num_decode = int(is_decode.sum())
    rows, starts, counts, samples = rows[order], starts[order], counts[order], samples[order]
    ends = starts + counts
    max_sequence_length = int(ends.max())
    num_columns = -(-max_sequence_length // block_size)

    shared = None
    if min_tokens_saved is not None and num_decode > 1:
        tables = request_tables[rows[:num_decode], :num_columns]
        groups = find_groups(tables, ends[:num_decode], block_size, min_tokens_saved)
        if groups:
            regrouped = _grouped_first(groups, num_decode)
            order[:num_decode] = order[regrouped]
            rows[:num_decode], starts[:num_decode] = rows[regrouped], starts[regrouped]
            ends[:num_decode], samples[:num_decode] = ends[regrouped], samples[regrouped]
            shared = _share(groups, tables[regrouped], ends[:num_decode], block_size)

    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    row_of_token = np.repeat(rows, counts)
    # Token t of run r is at starts[r] + (t - query_starts[r]).
    positions = np.arange(query_starts[-1], dtype=np.int64) + np.repeat(starts - query_starts[:-1], counts)
    token_ids = request_tokens[row_of_token, positions].astype(np.int32)
    known = np.fromiter((num_known[row] for row in rows[:num_decode]), dtype=np.int64, count=num_decode)
    token_ids[:num_decode][starts[:num_decode] >= known] = -1
    blocks = request_tables[row_of_token, positions // block_size].astype(np.int64)
    block_tables = request_tables[rows, :num_columns]
    # What lies past a row's length is another request's, or nobody's.
    block_tables[np.arange(num_columns)[None, :] >= (-(-ends // block_size))[:, None]] = 0
    sampling = np.flatnonzero(samples)
    return StepArrays(
        order=order,
        rows=rows.astype(np.int32),
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        slot_mapping=(blocks * block_size + positions % block_size).astype(np.int32),
        block_tables=block_tables,
        query_starts=query_starts,
        sequence_lengths=ends.astype(np.int32),
        logits_indices=query_starts[1:][sampling] - 1,
        sampling_rows=rows[sampling].astype(np.int32),
        sampling_runs=order[sampling],
        num_decode_rows=num_decode,
        max_query_length=int(counts.max()),
        max_sequence_length=max_sequence_length,
        shared=shared,
    )


def find_groups(
    tables: IntArray, lengths: npt.NDArray[np.int64], block_size: int, min_tokens_saved: int
) -> list[tuple[npt.NDArray[np.int64], int]]:
    """(members, common blocks) of groups whose sharing saves enough together, most first, MAX_SHARED_GROUPS at most.

    Rows with the same first block form a group; its prefix is the blocks that all of them have in common, each row's
    last token's block left out. One level: prefixes within prefixes are not looked for.
    """
    _, group_of_row, sizes = np.unique(tables[:, 0], return_inverse=True, return_counts=True)
    found = []
    for group in np.flatnonzero(sizes > 1):
        members = np.flatnonzero(group_of_row == group)
        most = int((lengths[members].min() - 1) // block_size)
        equal = (tables[members, :most] == tables[members[0], :most]).all(axis=0)
        num_common = most if equal.all() else int(equal.argmin())
        saved = (len(members) - 1) * num_common * block_size
        if saved >= min_tokens_saved * MIN_GROUP_SHARE:
            found.append((saved, members, num_common))
    found = sorted(found, key=lambda entry: -entry[0])[:MAX_SHARED_GROUPS]
    if sum(saved for saved, _, _ in found) < min_tokens_saved:
        return []
    return [(members, num_common) for _, members, num_common in found]


def _grouped_first(groups: list[tuple[npt.NDArray[np.int64], int]], num_rows: int) -> npt.NDArray[np.int64]:
    grouped = np.concatenate([members for members, _ in groups])
    rest = np.ones(num_rows, dtype=np.bool_)
    rest[grouped] = False
    return np.concatenate((grouped, np.flatnonzero(rest)))


def _share(
    groups: list[tuple[npt.NDArray[np.int64], int]], tables: IntArray, ends: npt.NDArray[np.int64], block_size: int
) -> SharedArrays:
    """`tables` and `ends` are in the groups' order already."""
    num_columns = tables.shape[1]
    block_tables = np.zeros((MAX_SHARED_GROUPS, num_columns), dtype=np.int32)
    lengths = np.zeros(MAX_SHARED_GROUPS, dtype=np.int32)
    query_starts = np.zeros(MAX_SHARED_GROUPS + 1, dtype=np.int32)
    private_tables = np.zeros_like(tables)
    private_lengths = ends.astype(np.int32)
    first = 0
    for group, (members, num_common) in enumerate(groups):
        last = first + len(members)
        block_tables[group, :num_common] = tables[first, :num_common]
        lengths[group] = num_common * block_size
        query_starts[group + 1] = last
        private_tables[first:last, : num_columns - num_common] = tables[first:last, num_common:]
        private_lengths[first:last] -= num_common * block_size
        first = last
    query_starts[len(groups) + 1 :] = first
    private_tables[first:] = tables[first:]
    # Columns past a row's private length may name any block: they are never read.
    return SharedArrays(block_tables, lengths, query_starts, first, private_tables, private_lengths)
