"""A step's index arrays: exact on tiny cases, and equal to a loop over tokens on random ones."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_arrays import MAX_SHARED_GROUPS, StepArrays, find_groups, gather_step

BLOCK = 4


def gather(
    tables: list[list[int]],
    runs: list[tuple[int, int, int, bool]],  # (row, start, count, samples)
    num_known: list[int],
    min_tokens_saved: int | None = None,
) -> StepArrays:
    """Row r's token at position p is 100 * r + p."""
    width = max(len(table) for table in tables)
    request_tables = np.full((len(tables), width), 999, dtype=np.int32)
    for row, table in enumerate(tables):
        request_tables[row, : len(table)] = table
    tokens = 100 * np.arange(len(tables))[:, None] + np.arange(width * BLOCK)[None, :]
    rows, starts, counts, samples = (np.array(column) for column in zip(*runs, strict=True))
    return gather_step(
        tokens, request_tables, num_known, rows, starts, counts, samples.astype(np.bool_), BLOCK, min_tokens_saved
    )


def test_decode_rows_come_first_and_a_token_on_its_way_is_minus_one() -> None:
    arrays = gather(
        [[3, 5], [7, 1], [2, 0]],
        [(0, 2, 4, False), (1, 5, 1, True), (2, 4, 1, True)],
        num_known=[8, 6, 4],  # row 2's token at position 4 is being sampled
    )
    assert arrays.order.tolist() == [1, 2, 0]
    assert arrays.rows.tolist() == [1, 2, 0]
    assert arrays.num_decode_rows == 2
    assert arrays.token_ids.tolist() == [105, -1, 2, 3, 4, 5]
    assert arrays.positions.tolist() == [5, 4, 2, 3, 4, 5]
    assert arrays.slot_mapping.tolist() == [1 * 4 + 1, 0 * 4 + 0, 3 * 4 + 2, 3 * 4 + 3, 5 * 4 + 0, 5 * 4 + 1]
    assert arrays.query_starts.tolist() == [0, 1, 2, 6]
    assert arrays.sequence_lengths.tolist() == [6, 5, 6]
    assert arrays.block_tables.tolist() == [[7, 1], [2, 0], [3, 5]]
    assert arrays.logits_indices.tolist() == [0, 1]
    assert arrays.sampling_rows.tolist() == [1, 2]
    assert arrays.sampling_runs.tolist() == [1, 2]
    assert (arrays.max_query_length, arrays.max_sequence_length) == (4, 6)


def test_rows_that_begin_alike_are_brought_together_and_keep_their_private_rest() -> None:
    arrays = gather(
        [[9, 8, 1], [4, 5, 6], [9, 8, 2], [9, 8, 3]],
        [(0, 9, 1, True), (1, 8, 1, True), (2, 8, 1, True), (3, 10, 1, True)],
        num_known=[10, 9, 9, 11],
        min_tokens_saved=16,
    )
    shared = arrays.shared
    assert shared is not None
    assert arrays.rows.tolist() == [0, 2, 3, 1]
    assert arrays.sampling_runs.tolist() == [0, 2, 3, 1]
    assert shared.num_rows == 3
    assert shared.lengths.tolist() == [8] + [0] * (MAX_SHARED_GROUPS - 1)
    assert shared.query_starts.tolist() == [0] + [3] * MAX_SHARED_GROUPS
    assert shared.block_tables[0].tolist() == [9, 8, 0]
    assert shared.private_lengths.tolist() == [2, 1, 3, 9]
    assert shared.private_block_tables[:, 0].tolist() == [1, 2, 3, 4]
    assert shared.private_block_tables[3].tolist() == [4, 5, 6]
    assert arrays.sequence_lengths.tolist() == [10, 9, 11, 9], "the whole lengths stay for others"


def test_the_last_tokens_block_is_never_shared_and_little_is_not_worth_it() -> None:
    tables = np.array([[1, 2], [1, 2]], dtype=np.int32)
    lengths = np.array([8, 8], dtype=np.int64)
    ((members, num_common),) = find_groups(tables, lengths, BLOCK, 4)
    assert (members.tolist(), num_common) == ([0, 1], 1)
    assert find_groups(tables, lengths, BLOCK, 5) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_lies_where_its_rows_table_says(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 6))
    stems = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=2))
    tables, runs, known = [], [], []
    for row in range(num_rows):
        stem = data.draw(st.sampled_from(stems))
        tables.append([*stem, *(10 * (row + 1) + i for i in range(data.draw(st.integers(1, 4))))])
        end = data.draw(st.integers(1, len(tables[row]) * BLOCK))
        count = data.draw(st.integers(1, end)) if data.draw(st.booleans()) else 1
        runs.append((row, end - count, count, data.draw(st.booleans())))
        known.append(end if count > 1 else data.draw(st.sampled_from([end, end - 1])))
    arrays = gather(tables, runs, known, min_tokens_saved=data.draw(st.sampled_from([None, 1, 8])))
    assert sorted(arrays.order.tolist()) == list(range(num_rows))
    token = 0
    for place, run in enumerate(arrays.order):
        row, start, count, samples = runs[run]
        assert arrays.rows[place] == row
        assert (place < arrays.num_decode_rows) == (count == 1)
        assert arrays.query_starts[place] == token
        assert arrays.sequence_lengths[place] == start + count
        for position in range(start, start + count):
            assert arrays.positions[token] == position
            assert arrays.slot_mapping[token] == tables[row][position // BLOCK] * BLOCK + position % BLOCK
            assert arrays.token_ids[token] == (100 * row + position if position < known[row] else -1)
            token += 1
        num_blocks = -(-(start + count) // BLOCK)
        assert arrays.block_tables[place, :num_blocks].tolist() == tables[row][:num_blocks]
        assert not arrays.block_tables[place, num_blocks:].any()
        sampled_at = [i for i, at in enumerate(arrays.logits_indices) if at == token - 1]
        assert [arrays.sampling_runs[i] for i in sampled_at] == ([run] if samples else [])
        if arrays.shared is not None and place < arrays.num_decode_rows:
            prefix = start + count - int(arrays.shared.private_lengths[place])
            private = arrays.shared.private_block_tables[place, : num_blocks - prefix // BLOCK].tolist()
            assert tables[row][prefix // BLOCK : num_blocks] == private
            groups = [g for g in range(MAX_SHARED_GROUPS) if place < arrays.shared.query_starts[g + 1]]
            assert (place < arrays.shared.num_rows) == bool(groups)
            if groups:
                assert arrays.shared.lengths[groups[0]] == prefix
                assert (
                    arrays.shared.block_tables[groups[0], : prefix // BLOCK].tolist() == tables[row][: prefix // BLOCK]
                )
            else:
                assert prefix == 0
    assert arrays.query_starts[-1] == token == len(arrays.token_ids)
