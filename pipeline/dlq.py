"""Dead letters as a work list: those that fit a filter, and one in full.

What was replayed (pipeline/replay.py) or purged (pipeline/purge.py) is marked in the dead-letter topic itself, so that
no other state has to be kept.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from consumers.decode import decode_document
from consumers.letter_log import LetterKey, Mark, MarkKind, StoredLetter, read_letter
from consumers.log_reader import LogRange, LogReader, open_log_reader
from consumers.replay import HEADER_PREFIX
from schemas.document import Identity
from schemas.errors import SettingsError
from schemas.settings import Settings

_AGO = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class LetterState(StrEnum):
    """Whether a letter is still to be dealt with."""

    OPEN = "open"
    REPLAYED = "replayed"
    CUT = "cut"  # the topic had no room for all of its message: it must be sent anew by who has it
    PURGED = "purged"  # somebody wants to see it no more


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which letters; what is None or empty wants any. Times are when a document failed, ms since the epoch."""

    codes: frozenset[str] = frozenset()
    job: str | None = None
    task: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None  # before then

    def wants(self, letter: StoredLetter, identity: Identity) -> bool:
        return (
            (not self.codes or letter.code in self.codes)
            and (self.job is None or letter.job == self.job)
            and (self.task is None or identity.task == self.task)
            and (self.since_ms is None or letter.failed_at_ms >= self.since_ms)
            and (self.until_ms is None or letter.failed_at_ms < self.until_ms)
        )


@dataclass(frozen=True, slots=True)
class ListedLetter:
    """A letter, the identity of its document as far as it can be read, and what is left to do about it."""

    letter: StoredLetter
    identity: Identity
    state: LetterState

    def as_json(self, *, with_value: bool = False) -> dict[str, Any]:
        """Plain JSON types; a value that is not UTF-8 as base64 under another key."""
        letter, raw = self.letter, self.letter.raw
        told: dict[str, Any] = {
            "letter": letter.name,
            "state": self.state.value,
            "failed_at": datetime.fromtimestamp(letter.failed_at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "code": letter.code,
            "stage": letter.stage,
            "message": letter.message,
            "job": letter.job,
            "task": self.identity.task,
            "id": self.identity.document_id,
            "source": {
                "topic": raw.position.topic,
                "partition": raw.position.partition,
                "offset": raw.position.offset,
                "timestamp": raw.timestamp_ms if raw.timestamp_ms >= 0 else None,
            },
            "attempt": letter.attempt,
            "worker": letter.worker,
            "num_bytes_cut": letter.num_bytes_cut,
        }
        if with_value:
            told |= _bytes_as_json("key", raw.key) | _bytes_as_json("value", raw.value)
            told["headers"] = [
                {"name": name, **_bytes_as_json("value", value)}
                for name, value in raw.headers
                if not name.startswith(HEADER_PREFIX)
            ]
        return told


def _bytes_as_json(name: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode("ascii")}


def parse_time(text: str, now: datetime) -> int:
    """`2026-01-31T12:00:00Z` (UTC where it names no zone), or how long ago: `90s`, `15m`, `2h`, `3d`; in ms.

    Raises SettingsError for anything else.
    """
    if ago := _AGO.fullmatch(text.strip()):
        moment = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    else:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise SettingsError(
                f"{text!r} is no time: write 2026-01-31T12:00:00Z, or how long ago as 90s, 15m, 2h, 3d"
            ) from None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0, round(moment.timestamp() * 1000))


class LetterBox:
    """The dead-letter topic of one command. `open_letters` gives it."""

    def __init__(self, settings: Settings, reader: LogReader) -> None:
        self._settings = settings
        self._reader = reader
        self._whole = reader.whole([settings.kafka.dead_letter_topic])
        self.num_foreign = 0  # records that are neither letters nor marks of ours

    @property
    def ranges(self) -> list[LogRange]:
        """What the topic holds, as of the start."""
        return self._whole

    def find(self, wanted: LetterFilter) -> Iterator[ListedLetter]:
        """The letters that fit, each once: after a worker's crash one may be there twice.

        Reads the topic twice, since a mark comes after its letter. Holds the marks and the keys of what was
        found, about 200 bytes each.
        """
        ranges = self._whole
        if wanted.since_ms is not None:
            ranges = self._reader.first_offsets_since(ranges, wanted.since_ms)
        marks = {one for one in self._read(ranges) if isinstance(one, Mark)}
        self.num_foreign = 0
        found: set[LetterKey] = set()
        for letter in self._read(ranges):
            if isinstance(letter, Mark) or letter.key in found:
                continue
            identity = self.identity_of(letter)
            if wanted.wants(letter, identity):
                found.add(letter.key)
                yield ListedLetter(letter, identity, _state(letter, marks))

    def one(self, name: str) -> ListedLetter:
        """The letter called PARTITION/OFFSET. Raises SettingsError where there is none."""
        partition, offset = self.place(name)
        whole = next(one for one in self._whole if one.partition == partition)
        if not whole.start <= offset < whole.stop:
            raise SettingsError(
                f"there is no letter {name}: the partition holds offsets {whole.start} to {whole.stop} of {whole.topic}"
            )
        letters = self._read([LogRange(whole.topic, partition, offset, whole.stop)])
        letter = next(letters, None)
        if letter is None or isinstance(letter, Mark) or letter.place.offset != offset:
            raise SettingsError(f"the record {name} of {whole.topic} is no dead letter")
        marks = {one for one in letters if isinstance(one, Mark)}
        return ListedLetter(letter, self.identity_of(letter), _state(letter, marks))

    def place(self, name: str) -> tuple[int, int]:
        """PARTITION/OFFSET as numbers. Raises SettingsError where it is none, or there is no such partition."""
        partition, _, offset = name.partition("/")
        if not (_is_number(partition) and _is_number(offset)):
            raise SettingsError(f"{name!r} is no letter: write PARTITION/OFFSET, as `pagemill dlq list` shows it")
        if int(partition) not in {one.partition for one in self._whole}:
            raise SettingsError(f"{name!r}: {self._whole[0].topic} has partitions 0 to {len(self._whole) - 1}")
        return int(partition), int(offset)

    def offsets_at(self, timestamp_ms: int) -> dict[int, int]:
        """Partition -> the first offset of that time or later."""
        return {one.partition: one.start for one in self._reader.first_offsets_since(self._whole, timestamp_ms)}

    def identity_of(self, letter: StoredLetter) -> Identity:
        """As the worker read it."""
        return decode_document(letter.raw, self._settings.kafka.max_document_bytes).identity

    def _read(self, ranges: Sequence[LogRange]) -> Iterator[StoredLetter | Mark]:
        for raws in self._reader.read(ranges):
            for raw in raws:
                one = read_letter(raw)
                if one is None:
                    self.num_foreign += 1
                else:
                    yield one


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _state(letter: StoredLetter, marks: set[Mark]) -> LetterState:
    if Mark(letter.key, MarkKind.PURGED) in marks:
        return LetterState.PURGED
    if Mark(letter.key, MarkKind.REPLAYED) in marks:
        return LetterState.REPLAYED
    return LetterState.CUT if letter.num_bytes_cut else LetterState.OPEN


@contextmanager
def open_letters(settings: Settings) -> Iterator[LetterBox]:
    """The dead-letter topic. Raises SettingsError without an address, SourceError where it cannot be read."""
    if not settings.kafka.bootstrap_servers:
        raise SettingsError("kafka.bootstrap_servers is not set; give --kafka host:9092, or set it in pagemill.toml")
    with open_log_reader(settings.kafka) as reader:
        yield LetterBox(settings, reader)
