"""A replay is the message of a dead letter sent again, with headers that say where and when it was delivered first.

A row's version and source follow from that first delivery, and from the attempt: a replay beats the failed row that it
is for, and nothing that is newer than that.
"""

import re
from collections.abc import Mapping

from schemas.document import RawMessage, SourcePosition

HEADER_PREFIX = "pagemill-"
JOB_HEADER = f"{HEADER_PREFIX}job"
ATTEMPT_HEADER = f"{HEADER_PREFIX}attempt"
CODE_HEADER = f"{HEADER_PREFIX}code"  # a dead letter's own
_TOPIC_HEADER, _PARTITION_HEADER = f"{HEADER_PREFIX}topic", f"{HEADER_PREFIX}partition"
_OFFSET_HEADER, _TIMESTAMP_HEADER = f"{HEADER_PREFIX}offset", f"{HEADER_PREFIX}timestamp"
MAX_ATTEMPT = 15  # a row's version has four bits for it
TIMESTAMP_LIMIT = 2**42  # and as many for this: milliseconds, in the year 2109

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def first_delivery(raw: RawMessage) -> tuple[SourcePosition, int, int]:
    """(position, timestamp in ms, attempt) that the row's version is made from: of the first delivery where this is a
    replay, else the message's own.

    Headers are strangers' bytes. Those of a first delivery count all together or not at all, and not in a dead letter
    that somebody has copied back as it is: that is a new message, or its row's version would be the failed one's.
    """
    headers = our_headers(raw)
    if not headers:
        return raw.position, raw.timestamp_ms, 0
    attempt = told_attempt(headers)
    if attempt and CODE_HEADER not in headers and (first := told_first(headers)) is not None:
        (topic, partition, offset), timestamp_ms = first
        return SourcePosition(topic, partition, offset, raw.position.epoch), timestamp_ms, attempt
    return raw.position, raw.timestamp_ms, attempt


def our_headers(raw: RawMessage) -> dict[str, bytes]:
    """Those with our prefix; of two with one name the first."""
    headers: dict[str, bytes] = {}
    for name, value in raw.headers:
        if name.startswith(HEADER_PREFIX):
            headers.setdefault(name, value)
    return headers


def told_attempt(headers: Mapping[str, bytes]) -> int:
    """The attempt in them, at most 15; 0 where there is none, or none that can be read."""
    return min(_number(headers, ATTEMPT_HEADER, 100) or 0, MAX_ATTEMPT)


def told_first(headers: Mapping[str, bytes]) -> tuple[tuple[str, int, int], int] | None:
    """(topic, partition, offset) and timestamp in ms of a first delivery; None where any of them cannot be read."""
    topic = headers.get(_TOPIC_HEADER, b"").decode("ascii", "replace")
    partition, offset = _number(headers, _PARTITION_HEADER, 2**31), _number(headers, _OFFSET_HEADER, 2**63)
    has_none = headers.get(_TIMESTAMP_HEADER) == b"-1"
    timestamp_ms = -1 if has_none else _number(headers, _TIMESTAMP_HEADER, TIMESTAMP_LIMIT)
    if not _TOPIC_NAME.fullmatch(topic) or partition is None or offset is None or timestamp_ms is None:
        return None
    return (topic, partition, offset), timestamp_ms


def replay_headers(position: SourcePosition, timestamp_ms: int, attempt: int, job: str) -> list[tuple[str, bytes]]:
    """What `first_delivery` reads, and the job, which a message that is unreadable has nowhere else."""
    told = {
        _TOPIC_HEADER: position.topic,
        _PARTITION_HEADER: str(position.partition),
        _OFFSET_HEADER: str(position.offset),
        _TIMESTAMP_HEADER: str(timestamp_ms if 0 <= timestamp_ms < TIMESTAMP_LIMIT else -1),  # one version either way
        ATTEMPT_HEADER: str(attempt),
        JOB_HEADER: job,
    }
    return [(name, value.encode()) for name, value in told.items()]


def _number(headers: Mapping[str, bytes], name: str, limit: int) -> int | None:
    """A header's decimal number in [0, limit); None where it is none."""
    value = headers.get(name)
    if value is None or not value.isdigit() or len(value) > 19:
        return None
    number = int(value)
    return number if number < limit else None
