"""Dead letters as their topic holds them: read back, made into replays, and marked as replayed or purged.

The topic is a log, so a letter can be neither changed nor taken out: what became of it is said by a mark, a record
without a value under the same key. Both are told apart by their headers.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from consumers.replay import (
    ATTEMPT_HEADER,
    CODE_HEADER,
    HEADER_PREFIX,
    JOB_HEADER,
    MAX_ATTEMPT,
    our_headers,
    replay_headers,
    told_attempt,
    told_first,
)
from schemas.document import DEFAULT_JOB, RawMessage, SourcePosition

# Which failure of which message: a letter may be there twice after a crash, and a mark names the letter that it is for.
LetterKey: TypeAlias = tuple[bytes, int]


class MarkKind(StrEnum):
    """What became of a letter; its header has the name, and the letter's attempt for its value."""

    REPLAYED = "replayed"
    PURGED = "purged"

    @property
    def header(self) -> str:
        return f"{HEADER_PREFIX}{self.value}"


@dataclass(frozen=True, slots=True)
class Mark:
    """Says what became of a letter that stands before it."""

    letter: LetterKey
    kind: MarkKind


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """One dead letter. `raw` is the message as it was delivered first, without our headers but for the job's."""

    place: SourcePosition  # in the dead-letter topic
    failed_at_ms: int
    raw: RawMessage
    job: str
    attempt: int
    code: str
    stage: str
    message: str
    worker: str
    num_bytes_cut: int  # of its value, where the topic had no room for all of it

    @property
    def key(self) -> LetterKey:
        return str(self.raw.position).encode(), self.attempt

    @property
    def name(self) -> str:
        """By which a person finds it."""
        return f"{self.place.partition}/{self.place.offset}"


@dataclass(frozen=True, slots=True)
class OutboundRecord:
    """A record to be sent: `partition` None lets the key decide."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


def read_letter(record: RawMessage) -> StoredLetter | Mark | None:
    """A letter or a mark; None where a record is neither."""
    headers = our_headers(record)
    for kind in MarkKind:
        if (attempt := headers.get(kind.header)) is not None:
            return Mark((record.key or b"", told_attempt({ATTEMPT_HEADER: attempt})), kind)
    first = told_first(headers)
    if CODE_HEADER not in headers or first is None:
        return None

    def told(name: str, default: str = "") -> str:
        return headers.get(HEADER_PREFIX + name, default.encode()).decode("utf-8", "replace")

    (topic, partition, offset), timestamp_ms = first
    job = told("job", DEFAULT_JOB)
    others = tuple((name, value) for name, value in record.headers if not name.startswith(HEADER_PREFIX))
    length = headers.get(f"{HEADER_PREFIX}value-length", b"")
    num_bytes = int(length) if length.isdigit() and len(length) <= 19 else 0
    return StoredLetter(
        place=record.position,
        failed_at_ms=record.timestamp_ms,
        raw=RawMessage(
            SourcePosition(topic, partition, offset),
            timestamp_ms,
            headers.get(f"{HEADER_PREFIX}key"),
            record.value,
            (*others, (JOB_HEADER, job.encode())),
        ),
        job=job,
        attempt=told_attempt(headers),
        code=told("code"),
        stage=told("stage"),
        message=told("message"),
        worker=told("worker"),
        num_bytes_cut=max(0, num_bytes - len(record.value or b"")),
    )


def build_replay(letter: StoredLetter) -> OutboundRecord:
    """The letter's message for its own topic once more, as the next attempt. What is cut must not be replayed."""
    assert not letter.num_bytes_cut, f"letter {letter.name} lacks {letter.num_bytes_cut} bytes of its message"
    assert letter.attempt < MAX_ATTEMPT, f"letter {letter.name} has had its last attempt"
    raw = letter.raw
    others = [(name, value) for name, value in raw.headers if not name.startswith(HEADER_PREFIX)]
    ours = replay_headers(raw.position, raw.timestamp_ms, letter.attempt + 1, letter.job)
    return OutboundRecord(raw.position.topic, None, raw.key, raw.value, others + ours)


def build_mark(letter: StoredLetter, kind: MarkKind) -> OutboundRecord:
    """Says in the dead-letter topic what became of the letter; behind it in its partition."""
    key, attempt = letter.key
    headers = [(kind.header, str(attempt).encode())]
    return OutboundRecord(letter.place.topic, letter.place.partition, key, None, headers)


def as_options(record: OutboundRecord) -> dict[str, Any]:
    """The keyword arguments of a producer's `send`."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "key": record.key,
        "value": record.value,
        "headers": record.headers,
    }
