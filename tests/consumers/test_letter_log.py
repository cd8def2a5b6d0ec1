"""What is read back of the records of the dead-letter topic, and what is sent because of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.dead_letter import DeadLetter, build_record
from consumers.decode import decode_document
from consumers.letter_log import Mark, MarkKind, OutboundRecord, StoredLetter, build_mark, build_replay, read_letter
from schemas.document import RawMessage, SourcePosition
from schemas.errors import Failure, FailureCode, Stage

PLACE = SourcePosition("dead-letters", 0, 40)
FAILURE = Failure(FailureCode.UNKNOWN_TASK, Stage.PROMPT, "no such task")


def message(**changes: Any) -> RawMessage:
    raw = RawMessage(SourcePosition("documents", 3, 17, epoch=2), 9000, b"key", b'{"prompt": 1}', (("trace", b"t"),))
    return raw._replace(**changes)


def failed(raw: RawMessage, max_bytes: int = 10_000, place: SourcePosition = PLACE) -> RawMessage:
    """The record in the dead-letter topic after this delivery has failed."""
    record = build_record(DeadLetter(raw, "monday", FAILURE, lambda: None), "worker-1", max_bytes)
    return RawMessage(place, 12_000, record.key, record.value, tuple(record.headers))


def delivered(record: OutboundRecord, offset: int) -> RawMessage:
    position = SourcePosition(record.topic, record.partition or 0, offset)
    return RawMessage(position, 20_000, record.key, record.value, tuple(record.headers))


def letter_of(record: RawMessage) -> StoredLetter:
    letter = read_letter(record)
    assert isinstance(letter, StoredLetter)
    return letter


def test_a_letter_tells_of_the_message_as_it_was_delivered_and_of_its_failure() -> None:
    letter = letter_of(failed(message()))
    assert letter.name == "0/40"
    assert letter.key == (b"documents/3/17", 0)
    assert (letter.code, letter.stage, letter.message) == ("UNKNOWN_TASK", "prompt", "no such task")
    assert (letter.job, letter.worker, letter.failed_at_ms, letter.num_bytes_cut) == ("monday", "worker-1", 12_000, 0)
    assert letter.raw == message(
        position=SourcePosition("documents", 3, 17), headers=(("trace", b"t"), ("pagemill-job", b"monday"))
    )


def test_a_replay_goes_to_its_own_topic_with_key_value_and_headers_and_is_the_next_attempt() -> None:
    record = build_replay(letter_of(failed(message(value=b"not JSON"))))  # so its job is the header's
    assert (record.topic, record.key, record.value) == ("documents", b"key", b"not JSON")
    assert record.headers[0] == ("trace", b"t")
    document = decode_document(delivered(record, 90), 1000)
    assert (document.position.offset, document.source.offset, document.timestamp_ms, document.attempt) == (
        90, 17, 9000, 1,
    )  # fmt: skip
    assert document.identity.document_id == "documents/3/17"
    assert document.identity.job == "monday"


def test_a_replay_that_fails_is_a_letter_of_the_same_message_at_its_next_attempt() -> None:
    raw = message()
    for attempt in range(15):
        letter = letter_of(failed(raw))
        assert letter.key == (b"documents/3/17", attempt)
        raw = delivered(build_replay(letter), 100 + attempt)
    assert letter_of(failed(raw)).attempt == 15


@pytest.mark.parametrize("kind", MarkKind)
def test_a_mark_names_its_letter_and_what_became_of_it_and_stands_in_the_same_partition(kind: MarkKind) -> None:
    letter = letter_of(failed(delivered(build_replay(letter_of(failed(message()))), 5)))
    record = build_mark(letter, kind)
    assert (record.topic, record.partition, record.value) == ("dead-letters", 0, None)
    assert record.headers == [(f"pagemill-{kind.value}", b"1")]
    assert read_letter(delivered(record, 41)) == Mark((b"documents/3/17", 1), kind)


def test_a_letter_that_lacks_a_part_of_its_message_says_how_much() -> None:
    letter = letter_of(failed(message(value=b"v" * 5000), max_bytes=2000))
    assert letter.num_bytes_cut == 5000 - len(letter.raw.value or b"") > 3000
    letter = letter_of(failed(message(value=b"v" * 100, headers=(("trace", b"h" * 5000),)), max_bytes=2000))
    assert (letter.num_bytes_cut, letter.raw.value) == (0, b"v" * 100)


@pytest.mark.parametrize("value", [None, b""])
def test_a_message_without_a_value_is_replayed_without_one(value: bytes | None) -> None:
    record = build_replay(letter_of(failed(message(value=value, key=None))))
    assert (record.key, record.value) == (None, value)


def test_a_record_of_somebody_else_is_no_letter() -> None:
    assert read_letter(message()) is None
    record = failed(message())
    lacking = tuple((name, value) for name, value in record.headers if name != "pagemill-offset")
    assert read_letter(record._replace(headers=lacking)) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["pagemill-" + name for name in ("code", "topic", "partition", "offset", "timestamp", "attempt",
                                                 "replayed", "purged", "value-length", "job", "key", "message")]
            ),
            st.binary(max_size=30) | st.integers(-5, 2**65).map(lambda number: str(number).encode()),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_any_headers_are_read_without_an_error(headers: list[tuple[str, bytes]]) -> None:
    letter = read_letter(RawMessage(PLACE, -1, None, b"x", tuple(headers)))
    if isinstance(letter, StoredLetter):
        assert 0 <= letter.attempt <= 15
        if not letter.num_bytes_cut and letter.attempt < 15:
            assert decode_document(delivered(build_replay(letter), 1), 1000).source == letter.raw.position
