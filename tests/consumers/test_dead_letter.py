"""The record of a dead letter, without a broker."""

import pytest

from consumers.dead_letter import DeadLetter, build_record
from schemas.document import RawMessage, SourcePosition
from schemas.errors import Failure, FailureCode, Stage


def make_letter(
    value: bytes | None, key: bytes | None = None, headers: tuple[tuple[str, bytes], ...] = ()
) -> DeadLetter:
    raw = RawMessage(SourcePosition("documents", 3, 14), 1000, key, value, headers)
    return DeadLetter(raw, "monday", Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "why"), lambda: None)


@pytest.mark.parametrize("value", [None, b"", b"v" * 5000])
@pytest.mark.parametrize("key", [None, b"k" * 5000])
@pytest.mark.parametrize("headers", [(), (("trace", b"h" * 5000),)])
def test_a_record_fits_its_topic_however_its_message_is_made_up(
    value: bytes | None, key: bytes | None, headers: tuple[tuple[str, bytes], ...]
) -> None:
    record = build_record(make_letter(value, key, headers), "worker", max_bytes=2000)
    assert record.num_bytes <= 2000
    assert record.key == b"documents/3/14"
    assert (record.value is None) == (value is None)
    assert dict(record.headers)["pagemill-code"] == b"BAD_MESSAGE"


def test_what_fits_is_sent_whole_with_its_headers_first() -> None:
    record = build_record(make_letter(None, b"k", (("trace", b"h"),)), "worker", max_bytes=2000)
    assert record.value is None
    assert record.headers[0] == ("trace", b"h")
    assert dict(record.headers)["pagemill-key"] == b"k"
