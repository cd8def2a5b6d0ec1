"""What a replay's headers do to a document, and what headers that are none do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.dead_letter import DeadLetter, build_record
from consumers.decode import decode_document
from consumers.replay import first_delivery, replay_headers
from schemas.document import Document, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import Failure, FailureCode, Stage

HERE = SourcePosition("documents", 3, 17, epoch=4)
FIRST = SourcePosition("documents", 1, 5, epoch=4)
REPLAY = tuple(replay_headers(FIRST, 1000, 2, "monday"))
FAILURE = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "why")


def message(headers: tuple[tuple[str, bytes], ...], value: bytes | None = b'{"prompt": "x"}') -> RawMessage:
    return RawMessage(HERE, 9000, b"key", value, headers)


def told(document: Document | RejectedDocument) -> tuple[SourcePosition, SourcePosition, int, int, str]:
    return document.position, document.source, document.timestamp_ms, document.attempt, document.identity.document_id


def changed(name: str, value: bytes | None) -> tuple[tuple[str, bytes], ...]:
    kept = tuple((key, found) for key, found in REPLAY if key != f"pagemill-{name}")
    return kept if value is None else (*kept, (f"pagemill-{name}", value))


def test_a_replay_has_the_source_timestamp_and_name_of_its_first_delivery() -> None:
    assert told(decode_document(message(REPLAY), 100)) == (HERE, FIRST, 1000, 2, "documents/1/5")


def test_so_has_the_replay_of_a_message_that_is_no_document() -> None:
    rejected = decode_document(message(REPLAY, b"not JSON"), 100)
    assert told(rejected) == (HERE, FIRST, 1000, 2, "documents/1/5")
    assert rejected.identity.job == "monday"


@pytest.mark.parametrize("headers", [(), (("trace", b"t"),)])
def test_a_message_without_a_replays_headers_is_its_own_source(headers: tuple[tuple[str, bytes], ...]) -> None:
    assert told(decode_document(message(headers), 100)) == (HERE, HERE, 9000, 0, "documents/3/17")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topic", None),
        ("topic", b""),
        ("topic", b"a/b"),
        ("topic", b"\xff\xfe"),
        ("topic", b"t" * 250),
        ("partition", None),
        ("partition", b"-1"),
        ("partition", b"%d" % 2**31),
        ("offset", None),
        ("offset", b"-5"),
        ("offset", b"%d" % 2**63),
        ("offset", b"9" * 5000),
        ("offset", "٣".encode()),
        ("timestamp", None),
        ("timestamp", b"-2"),
        ("timestamp", b"1e3"),
        ("timestamp", b"%d" % 2**42),
    ],
)
def test_headers_of_a_first_delivery_count_all_together_or_not_at_all(name: str, value: bytes | None) -> None:
    assert told(decode_document(message(changed(name, value)), 100)) == (HERE, HERE, 9000, 2, "documents/3/17")


@pytest.mark.parametrize("value", [None, b"0", b"", b"-1", b"two", b"100"])
def test_without_an_attempt_there_is_no_replay(value: bytes | None) -> None:
    assert told(decode_document(message(changed("attempt", value)), 100)) == (HERE, HERE, 9000, 0, "documents/3/17")


def test_an_attempt_beyond_a_versions_four_bits_counts_as_the_last_one() -> None:
    assert decode_document(message(changed("attempt", b"99")), 100).attempt == 15


def test_a_dead_letter_that_was_copied_back_as_it_is_is_a_new_message() -> None:
    letter = build_record(DeadLetter(message(REPLAY), "monday", FAILURE, lambda: None), "worker", 10_000)
    copied = RawMessage(HERE, 9000, letter.key, letter.value, tuple(letter.headers))
    assert told(decode_document(copied, 100)) == (HERE, HERE, 9000, 2, "documents/3/17")


def test_a_record_without_a_timestamp_is_replayed_without_one() -> None:
    headers = tuple(replay_headers(FIRST, -1, 1, "monday"))
    assert first_delivery(message(headers)) == (FIRST, -1, 1)
    assert dict(replay_headers(FIRST, 2**60, 1, "monday"))["pagemill-timestamp"] == b"-1"


def test_the_letter_of_a_failed_replay_tells_of_the_first_delivery_and_its_own_attempt() -> None:
    letter = build_record(DeadLetter(message(REPLAY), "monday", FAILURE, lambda: None), "worker", 10_000)
    headers = dict(letter.headers)
    assert letter.key == b"documents/1/5"
    assert (headers["pagemill-offset"], headers["pagemill-timestamp"], headers["pagemill-attempt"]) == (
        b"5", b"1000", b"2",
    )  # fmt: skip


@given(
    st.text(st.sampled_from("abcXYZ019._-"), min_size=1, max_size=249),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-1, 2**42 - 1),
    st.integers(1, 15),
)
def test_what_is_written_is_what_is_read(topic: str, partition: int, offset: int, timestamp: int, attempt: int) -> None:
    first = SourcePosition(topic, partition, offset, HERE.epoch)
    assert first_delivery(message(tuple(replay_headers(first, timestamp, attempt, "j")))) == (first, timestamp, attempt)
