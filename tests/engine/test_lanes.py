"""A step in lanes computes what it computes whole: every token in one part, every key where others look for it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.lanes import Lanes, cut, usable_lanes
from engine.loading import allocate_cache, load_decoder, open_model
from engine.models.decoder import Decoder
from tests.tiny_models import write_tiny_model

BLOCK = 4
NUM_POSITIONS = 64


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    files = open_model(write_tiny_model(Path(tmp_path_factory.mktemp("tiny"))))
    return load_decoder(files, torch.float32, torch.device("cpu"), NUM_POSITIONS)


def make_batch(rows: list[tuple[int, int]], tables: list[list[int]], samples: list[int]) -> ForwardBatch:
    """rows: (queries, length of the sequence); samples: the rows that do."""
    positions = torch.cat([torch.arange(length - queries, length) for queries, length in rows])
    block_of_token = [
        tables[row][position // BLOCK]
        for row, (queries, length) in enumerate(rows)
        for position in range(length - queries, length)
    ]
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0)
    width = max(map(len, tables))
    return ForwardBatch(
        token_ids=positions * 7 % 31 + torch.repeat_interleave(torch.arange(len(rows)), starts.diff()) % 5,
        positions=positions,
        slot_mapping=torch.tensor(block_of_token) * BLOCK + positions % BLOCK,
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        query_starts=starts.int(),
        sequence_lengths=torch.tensor([length for _, length in rows], dtype=torch.int32),
        logits_indices=starts[1:][samples] - 1,
        max_query_length=max(queries for queries, _ in rows),
        max_sequence_length=max(length for _, length in rows),
    )


def test_a_row_is_cut_as_two_chunks_of_it_would_be(decoder: Decoder) -> None:
    batch = make_batch([(1, 6), (7, 9)], [[1, 2], [3, 4, 5]], samples=[0, 1])
    first, second = cut(batch, 2, decoder.config)
    # The second row's tokens cost alike here, but for attention: 8 tokens, 4 in each part.
    assert first.token_ids.tolist() + second.token_ids.tolist() == batch.token_ids.tolist()
    assert first.positions.tolist() == [5, 2, 3, 4]
    assert second.positions.tolist() == [5, 6, 7, 8]
    assert first.slot_mapping.tolist() == [2 * BLOCK + 1, 3 * BLOCK + 2, 3 * BLOCK + 3, 4 * BLOCK]
    assert first.query_starts.tolist() == [0, 1, 4]
    assert second.query_starts.tolist() == [0, 4]
    assert first.sequence_lengths.tolist() == [6, 5]
    assert second.sequence_lengths.tolist() == [9]
    assert first.block_tables.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert second.block_tables.tolist() == [[3, 4, 5]]
    assert first.logits_indices is not None
    assert second.logits_indices is not None
    assert (first.logits_indices.tolist(), second.logits_indices.tolist()) == ([0], [3])
    assert (first.max_query_length, first.max_sequence_length) == (3, 6)
    assert (second.max_query_length, second.max_sequence_length) == (4, 9)


def test_later_tokens_attend_to_more_so_their_part_has_fewer(decoder: Decoder) -> None:
    length = NUM_POSITIONS * 1000  # nothing is computed here
    tokens = torch.arange(length)
    batch = ForwardBatch(
        tokens, tokens, tokens, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32), torch.tensor([length - 1]), length, length,
    )  # fmt: skip
    first, second = cut(batch, 2, decoder.config)
    # Almost all of it is attention: half of the triangle's area lies left of 1 / sqrt 2.
    assert len(first.token_ids) / length == pytest.approx(0.5**0.5, abs=0.01)
    assert len(first.token_ids) + len(second.token_ids) == length


def test_as_many_lanes_as_divide_the_threads_and_have_enough_to_do() -> None:
    lanes = Lanes(num_threads=6, min_tokens=100)
    assert [lanes.num_lanes(tokens) for tokens in (1, 199, 200, 399, 400, 599, 600, 10_000)] == [
        1, 1, 2, 3, 3, 3, 6, 6,
    ]  # fmt: skip
    assert Lanes(num_threads=1, min_tokens=1).num_lanes(1000) == 1


def test_products_in_tiles_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for in_tiles, dtype, is_whole in (
        (True, torch.bfloat16, True), (True, torch.float32, False), (False, torch.bfloat16, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=in_tiles: {"amx_bf16": has})
        assert usable_lanes(dtype) == (1 if is_whole else torch.get_num_threads())
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # another architecture's
    assert usable_lanes(torch.bfloat16) == torch.get_num_threads()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_threads=st.integers(2, 4), num_rows=st.integers(1, 6))
def test_lanes_compute_what_the_whole_step_does(
    decoder: Decoder, data: st.DataObject, num_threads: int, num_rows: int
) -> None:
    """Rows that continue, rows that begin within the step behind another row's first blocks, decode rows."""
    rows: list[tuple[int, int]] = []
    tables: list[list[int]] = []
    shared = data.draw(st.integers(0, 3))  # blocks of row 0 that others read, written in this very step
    for row in range(num_rows):
        past = shared * BLOCK if row else 0
        queries = data.draw(st.integers(1 if row else max(1, shared * BLOCK), 20))
        own = list(range(1 + 10 * row, 11 + 10 * row))
        rows.append((queries, past + queries))
        tables.append((tables[0][:shared] + own if row else own)[: -(-(past + queries) // BLOCK)])
    samples = [row for row in range(num_rows) if data.draw(st.booleans())]
    batch = make_batch(rows, tables, samples)
    whole, in_lanes = (allocate_cache(decoder, 64, BLOCK) for _ in range(2))
    with torch.inference_mode():
        expected = decoder.forward(batch, whole)
        got = Lanes(num_threads, min_tokens=1).forward(decoder, batch, in_lanes)
    assert got.shape == expected.shape == (len(samples), decoder.config.hidden_size)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(in_lanes.keys, whole.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(in_lanes.values, whole.values, rtol=1e-5, atol=1e-5)


class Counting:
    """A decoder that notes who computes, and fails where it is told to."""

    def __init__(self, decoder: Decoder, fails_at: int | None = None) -> None:
        self.config = decoder.config
        self.calls: list[tuple[int, int]] = []  # (tokens, torch's threads)
        self._fails_at = fails_at

    def forward(
        self, batch: ForwardBatch, cache: KVCache, all_written: Callable[[], object] = lambda: None
    ) -> torch.Tensor:
        self.calls.append((len(batch.token_ids), torch.get_num_threads()))
        if int(batch.positions[0]) == self._fails_at:
            raise MemoryError("no room for the scores")
        all_written()
        return batch.positions[:, None]


def test_a_lane_has_its_share_of_the_threads_and_the_process_keeps_its_own(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        counting, cache = Counting(decoder), allocate_cache(decoder, 8, BLOCK)
        lanes = Lanes(num_threads=4, min_tokens=8)
        batch = make_batch([(16, 16)], [[1, 2, 3, 4]], [0])
        assert lanes.forward(counting, batch, cache)[:, 0].tolist() == list(range(16))  # type: ignore[arg-type]
        assert counting.calls == [(8, 2), (8, 2)]
        assert torch.get_num_threads() == 4
        of_new_thread: list[int] = []
        thread = threading.Thread(target=lambda: of_new_thread.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert of_new_thread == [4]
        small = make_batch([(15, 15)], [[1, 2, 3, 4]], [0])
        lanes.forward(counting, small, cache)  # type: ignore[arg-type]
        assert counting.calls[2:] == [(15, 4)]  # whole
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fails_at", [0, 8])
def test_what_a_lane_raises_is_raised_and_the_next_step_computes(decoder: Decoder, fails_at: int) -> None:
    cache, batch = allocate_cache(decoder, 8, BLOCK), make_batch([(16, 16)], [[1, 2, 3, 4]], [0])
    lanes = Lanes(num_threads=2, min_tokens=8)
    with pytest.raises(MemoryError, match="no room for the scores"):
        lanes.forward(Counting(decoder, fails_at), batch, cache)  # type: ignore[arg-type]
    assert len(lanes.forward(Counting(decoder), batch, cache)) == 16  # type: ignore[arg-type]
