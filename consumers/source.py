"""Where documents come from: the face that the flow sees, and a source from memory for files and tests."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from consumers.decode import decode_document
from consumers.offsets import OffsetTracker
from schemas.document import Assignment, Document, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import Failure, SourceError


class Source(Protocol):
    """Documents in, completions back. Every method may be called from any thread; `poll` from one only.

    What `drain` finds in the inbox is handed back: it is not in flight any more, and nothing commits past it.

    A document is in flight from `poll`'s inbox until `complete`; the source bounds what is in flight by itself,
    in documents and bytes, and goes on polling its broker meanwhile.
    """

    def start(self) -> None:
        """Connects and subscribes. Raises SourceError where the broker is unreachable or refuses us."""

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        """What has arrived, at most that many; empty after the timeout. Raises SourceError when the source died."""

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        """Sends the raw message to the dead-letter topic; once it is acknowledged, another thread calls `then`.

        A position whose assignment is gone is dropped, and `then` is not called: its next owner does all of it again.
        """

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        """These documents' rows are stored (or superseded): their offsets may be committed, in order."""

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        """These will not be worked on here: they are not in flight any more, and nothing commits past them."""

    def take_skipped(self) -> Counter[Assignment]:
        """Documents that were delivered, complete before this assignment, and not handed out; since the last call."""

    def started_before(self, position: SourcePosition) -> int:
        """One past the highest offset of its partition that earlier owners are known to have had in work; 0: none.

        They may have had later ones, of their last moments.
        """

    def isolate(self, positions: Sequence[SourcePosition]) -> None:
        """The engine is about to have these, of one partition, and nothing else; none: about to have anything again.

        Returns once the next owners of our partitions would find that noted, should we die. Where that cannot be had
        within seconds it is logged, and our death would only say less.
        """

    def expect_no_clean_end(self) -> None:
        """We are about to die of our work: the next owners of it count that as a crash, `close` or not."""

    def is_current(self, position: SourcePosition) -> bool:
        """Whether the position's assignment is still ours; work for others may be skipped."""

    @property
    def has_assignment(self) -> bool:
        """Whether the group has given us our partitions (possibly none of them)."""

    @property
    def num_in_flight(self) -> int: ...

    @property
    def num_handed_out(self) -> int:
        """Of these, what `poll` has given away and nobody has completed or handed back, by the source's own books.

        May be out of step with other threads for a moment.
        """

    @property
    def is_paused(self) -> bool:
        """Whether it reads nothing more until some of what is in flight is complete: more may well be there."""

    def is_drained(self) -> bool:
        """Every assigned partition was read to the end that it had when last looked at, and nothing is in flight."""

    def drain(self) -> None:
        """Stops handing out documents; what is in flight may complete."""

    def close(self) -> None:
        """Commits what is complete, leaves the group, joins the threads. Idempotent."""


@dataclass(frozen=True, slots=True)
class LocalDeadLetter:
    """What a LocalSource keeps instead of a dead-letter topic."""

    raw: RawMessage
    job: str
    failure: Failure


class LocalSource:
    """A Source over messages in memory or the lines of a file: one partition, complete when its end is.

    `dead_letters` and `committed` show what a broker would hold. A dead letter is acknowledged at once, from the
    thread that sends it.
    """

    def __init__(
        self,
        messages: Iterable[bytes | None],
        topic: str = "local",
        max_in_flight_documents: int = 4096,
        max_document_bytes: int = 2**20,
    ) -> None:
        self.dead_letters: list[LocalDeadLetter] = []
        self._messages = iter(messages)
        self._max_in_flight = max_in_flight_documents
        self._max_document_bytes = max_document_bytes
        self._lock = threading.Lock()  # guards the tracker
        self._tracker = OffsetTracker()
        self._partition = (topic, 0)
        self._next_offset = 0
        self._is_read = False
        self._draining = False
        self._has_room = threading.Condition(self._lock)

    @classmethod
    def from_jsonl(cls, path: Path, max_in_flight_documents: int = 4096, max_document_bytes: int = 2**20) -> Self:
        """One document a line; blank lines are passed over. Raises SourceError where the file cannot be read."""
        if not path.is_file():
            raise SourceError(f"{path}: no such file")
        return cls(_lines(path), path.name, max_in_flight_documents, max_document_bytes)

    @property
    def committed(self) -> int:
        """One past the last message before which all are complete."""
        with self._lock:
            tracker = self._tracker.partitions.get(self._partition)
            return (tracker.committable or 0) if tracker is not None else self._next_offset

    def start(self) -> None:
        with self._lock:
            if self._partition not in self._tracker.partitions:
                self._tracker.assign(self._partition)

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        with self._has_room:
            if self._draining or self._is_read:
                return []
            room = self._max_in_flight - self._tracker.num_in_flight
            if room <= 0:
                self._has_room.wait(timeout_seconds)
                room = self._max_in_flight - self._tracker.num_in_flight
            raws = self._take(min(max_documents, room))
            self._tracker.start(raws)
        return [decode_document(raw, self._max_document_bytes) for raw in raws]

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        with self._lock:
            raw = self._tracker.raw(position)
            if raw is None:
                return
            self.dead_letters.append(LocalDeadLetter(raw, job, failure))
        then()

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        with self._has_room:
            self._tracker.complete(positions)
            self._has_room.notify()

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        with self._lock:
            self._tracker.hand_back(positions)

    def take_skipped(self) -> Counter[Assignment]:
        return Counter()

    def started_before(self, position: SourcePosition) -> int:
        return 0

    def isolate(self, positions: Sequence[SourcePosition]) -> None:
        """Nothing is noted down: a file has no next owner."""

    def expect_no_clean_end(self) -> None:
        """Nothing is noted down: a file has no next owner."""

    def is_current(self, position: SourcePosition) -> bool:
        return self._tracker.is_current(position)

    @property
    def has_assignment(self) -> bool:
        return self._partition in self._tracker.partitions

    @property
    def num_in_flight(self) -> int:
        return self._tracker.num_in_flight

    @property
    def num_handed_out(self) -> int:
        return self._tracker.num_in_flight

    @property
    def is_paused(self) -> bool:
        return not self._is_read and self._tracker.num_in_flight >= self._max_in_flight

    def is_drained(self) -> bool:
        return self._is_read and self._tracker.num_in_flight == 0

    def drain(self) -> None:
        with self._lock:
            self._draining = True

    def close(self) -> None:
        with self._lock:
            self._draining = True

    def _take(self, num_messages: int) -> list[RawMessage]:
        topic, partition = self._partition
        epoch = self._tracker.partitions[self._partition].epoch
        raws: list[RawMessage] = []
        while len(raws) < num_messages and not self._is_read:
            try:
                value = next(self._messages)
            except StopIteration:
                self._is_read = True
                break
            position = SourcePosition(topic, partition, self._next_offset, epoch)
            raws.append(RawMessage(position, timestamp_ms=-1, key=None, value=value))
            self._next_offset += 1
        return raws


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for line in lines:
            if stripped := line.strip():
                yield stripped
