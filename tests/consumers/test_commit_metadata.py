"""What a commit says beside its offset comes back as it was written, and anything else is ignored."""

import base64
import random
import zlib
from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from consumers.commit_metadata import MAX_OFFSETS, MAX_UNITS, OffsetBitmap, Progress, decode, encode

TOPIC = UUID("6f0c2b5e-7a51-4bd4-9a0e-0123456789ab")

offsets = st.integers(0, 2**62)
forms = st.sampled_from(["pagemill:1:", "pagemill:2:"])
nothing = st.just(range(0))
stretches = nothing | st.builds(lambda start, length: range(start, start + length), offsets, st.integers(0, 2**32 - 1))


def progress(base: int = 100, completed: OffsetBitmap | None = None, started: int = 700) -> Progress:
    return Progress(base, started, 0, 0, False, completed or OffsetBitmap(base))


@st.composite
def any_progress(draw: st.DrawFn) -> Progress:
    base = draw(offsets)
    steps = draw(st.lists(st.integers(0, MAX_OFFSETS - 1), max_size=50))
    return Progress(
        base,
        base + draw(st.integers(0, 10**9)),
        draw(offsets),
        draw(st.integers(0, 2**16 - 1)),
        draw(st.booleans()),
        OffsetBitmap.of(base, [base + step for step in steps]),
        lost := draw(stretches),
        draw(st.integers(0, 255)) if lost else 0,
        draw(stretches),
    )


@given(any_progress(), st.uuids())
def test_what_was_written_is_read(written: Progress, topic_id: UUID) -> None:
    text = encode(written, topic_id)
    assert len(text.encode("utf-16-le")) // 2 <= MAX_UNITS
    assert decode(text) == (topic_id, written)


def test_a_search_beside_a_bitmap_that_cannot_be_compressed_is_told_whole() -> None:
    bits = random.Random(1).randbytes(MAX_OFFSETS // 8)
    written = replace(progress(completed=OffsetBitmap(100, bits)), lost=range(100, 9000), isolated=range(200, 300))
    text = encode(written, TOPIC)
    read = decode(text)
    assert len(text) <= MAX_UNITS
    assert read is not None
    assert (read[1].lost, read[1].isolated) == (written.lost, written.isolated)
    assert bits.startswith(read[1].completed.bits)


def test_five_thousand_done_above_one_that_is_not_take_a_line() -> None:
    done = OffsetBitmap.of(100, range(101, 5101))
    text = encode(progress(completed=done, started=5101), TOPIC)
    assert len(text) < 130
    read = decode(text)
    assert read is not None
    assert list(read[1].completed) == list(range(101, 5101))


@given(st.binary(min_size=MAX_OFFSETS // 8, max_size=MAX_OFFSETS // 8))
def test_a_bitmap_that_cannot_be_compressed_fits_whole(bits: bytes) -> None:
    text = encode(progress(completed=OffsetBitmap(100, bits[:-1] + b"\1")), TOPIC)
    assert len(text) <= MAX_UNITS
    read = decode(text)
    assert read is not None
    assert read[1].completed.bits == bits[:-1] + b"\1"


@given(any_progress(), st.integers(0, MAX_UNITS))
def test_for_a_smaller_broker_the_bitmap_is_cut_at_its_end_and_nothing_is_made_up(
    written: Progress, max_units: int
) -> None:
    text = encode(written, TOPIC, max_units)
    assert len(text) <= max_units
    if text:
        read = decode(text)
        assert read is not None
        assert written.completed.bits.startswith(read[1].completed.bits)
        assert (read[1].started, read[1].crash_count) == (written.started, written.crash_count)
        assert (read[1].lost, read[1].isolated) == (written.lost, written.isolated)
    else:
        assert max_units < (108 if written.lost or written.isolated else 76)  # what all the rest takes


def test_the_second_form_is_written_only_while_something_is_searched_and_the_first_is_still_read() -> None:
    plain = progress(completed=OffsetBitmap.of(100, [101]))
    # As every worker has written it since the first.
    text = "pagemill:1:bwwrXnpRS9SaDgEjRWeJqwAAAAAAAABkAAAAAAAAArwAAAAAAAAAAAAAAJz4LZwC"
    assert (encode(plain, TOPIC), decode(text)) == (text, (TOPIC, plain))
    assert encode(replace(plain, lost=range(105, 107)), TOPIC).startswith("pagemill:2:")
    assert encode(replace(plain, isolated=range(105, 106)), TOPIC).startswith("pagemill:2:")


def test_offsets_outside_the_window_are_left_out_and_are_not_in_it() -> None:
    bitmap = OffsetBitmap.of(100, [99, 100, 107, 108, 100 + MAX_OFFSETS - 1, 100 + MAX_OFFSETS])
    assert list(bitmap) == [100, 107, 108, 100 + MAX_OFFSETS - 1]
    assert [offset in bitmap for offset in (99, 100, 101, 100 + MAX_OFFSETS)] == [False, True, False, False]


def test_text_of_others_is_none_of_ours() -> None:
    for text in (None, "", "pagemill:", "pagemill:1:", "pagemill:2:AAAA", "NO_TIMESTAMP", "pagemill:1:ü", "x" * 9000):
        assert decode(text) is None


@given(any_progress(), st.data())
def test_damaged_text_is_ignored(written: Progress, data: st.DataObject) -> None:
    text = encode(written, TOPIC)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda character: character != text[place]))
    damaged = text[:place] + other + text[place + 1 :]
    assert decode(damaged) is None or base64.b64decode(damaged[11:]) == base64.b64decode(text[11:])  # unused bits
    cut = data.draw(st.integers(0, len(text) - 1))
    assert decode(text[:cut]) is None


@given(st.text() | st.builds(lambda form, content: form + base64.b64encode(content).decode(), forms, st.binary()))
def test_any_text_is_read_or_ignored(text: str) -> None:
    decode(text)


def test_a_bitmap_that_would_fill_the_memory_is_not_unpacked() -> None:
    honest = encode(progress(completed=OffsetBitmap.of(100, range(100, 5000))), TOPIC)
    header = base64.b64decode(honest[11:])[:43]
    packed = zlib.compress(b"\xff" * 100_000)
    content = header + zlib.crc32(header + packed).to_bytes(4, "big") + packed
    assert decode("pagemill:1:" + base64.b64encode(content).decode()) is None
