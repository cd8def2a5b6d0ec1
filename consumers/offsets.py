"""What is in flight, by position, and how far each partition may be committed. Knows nothing of Kafka's client.

One thread starts, completes and drops; `raw` and `is_current` are single look-ups and may be asked from any.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.document import RawMessage, SourcePosition

Partition = tuple[str, int]  # topic, partition


class PartitionTracker:
    """In-order commit over out-of-order completion, for one assignment of one partition.

    [read before, committable)      complete
    [committable, next_offset)      some complete, some in flight; the first one is in flight, or was handed back
    Offsets need not be contiguous: compaction and transactions leave gaps.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_offset: int | None = None  # one past the last that was started; None: nothing was read yet
        self.committed: int | None = None  # what the broker acknowledged in this epoch, or where reading began
        self._in_flight: dict[int, RawMessage] = {}  # in the order of offsets
        self._handed_back: int | None = None  # the lowest offset that is left to the next owner

    @property
    def committable(self) -> int | None:
        """One past the last offset before which everything is complete; None where nothing was read."""
        first = next(iter(self._in_flight), self.next_offset)
        if self._handed_back is None or first is None:
            return first
        return min(first, self._handed_back)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_bytes(self) -> int:
        return sum(raw.num_bytes for raw in self._in_flight.values())

    def start(self, raw: RawMessage) -> None:
        """Takes the message in; it is kept until it completes, so that it can still be dead-lettered."""
        offset = raw.position.offset
        assert self.next_offset is None or offset >= self.next_offset, f"{offset} after {self.next_offset} was started"
        if self.committed is None:
            self.committed = offset
        self._in_flight[offset] = raw
        self.next_offset = offset + 1

    def complete(self, offset: int) -> RawMessage | None:
        """The message, which is let go; None where it is not in flight (it completed before)."""
        return self._in_flight.pop(offset, None)

    def hand_back(self, offset: int) -> RawMessage | None:
        """Lets go of a message that was not worked on: commits stay before it, and its next owner reads it again."""
        raw = self._in_flight.pop(offset, None)
        if raw is not None and (self._handed_back is None or offset < self._handed_back):
            self._handed_back = offset
        return raw

    def advance(self, position: int) -> None:
        """The reader's position passed what is no document, such as a transaction's end, with nothing in flight."""
        if not self._in_flight and self.next_offset is not None and position > self.next_offset:
            self.next_offset = position

    def raw(self, offset: int) -> RawMessage | None:
        return self._in_flight.get(offset)


@dataclass(frozen=True, slots=True)
class Commit:
    """An offset to commit, and the epoch that it was worked out in."""

    offset: int
    epoch: int


class OffsetTracker:
    """All assigned partitions of one source. A partition that is given up is forgotten with everything in flight."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.num_bytes = 0
        self._partitions: dict[Partition, PartitionTracker] = {}
        self._last_epoch = 0

    @property
    def partitions(self) -> Mapping[Partition, PartitionTracker]:
        return self._partitions

    def assign(self, partition: Partition) -> int:
        """Begins an epoch for a partition that is not tracked; its number, never given before."""
        assert partition not in self._partitions, f"{partition} is tracked already"
        self._last_epoch += 1
        self._partitions[partition] = PartitionTracker(self._last_epoch)
        return self._last_epoch

    def drop(self, partition: Partition) -> int:
        """Ends the partition's epoch: late completions are ignored. The number of documents it leaves to others."""
        tracker = self._partitions.pop(partition, None)
        if tracker is None:
            return 0
        self.num_in_flight -= tracker.num_in_flight
        self.num_bytes -= tracker.num_bytes
        return tracker.num_in_flight

    def start(self, raws: Iterable[RawMessage]) -> None:
        """Messages of assigned partitions, stamped with their current epoch, in the order of their offsets."""
        for raw in raws:
            tracker = self._partitions[raw.position.topic, raw.position.partition]
            assert tracker.epoch == raw.position.epoch, f"{raw.position} is of epoch {raw.position.epoch}"
            tracker.start(raw)
            self.num_in_flight += 1
            self.num_bytes += raw.num_bytes

    def complete(self, positions: Iterable[SourcePosition]) -> int:
        """How many of them were in flight; those of an earlier epoch, or completed before, are ignored."""
        num_completed = 0
        for position in positions:
            tracker = self._partitions.get((position.topic, position.partition))
            if tracker is None or tracker.epoch != position.epoch:
                continue
            if (raw := tracker.complete(position.offset)) is not None:
                self.num_bytes -= raw.num_bytes
                num_completed += 1
        self.num_in_flight -= num_completed
        return num_completed

    def hand_back(self, positions: Iterable[SourcePosition]) -> None:
        """These will not be worked on here: they are not in flight any more, and nothing commits past them."""
        for position in positions:
            tracker = self._partitions.get((position.topic, position.partition))
            if tracker is None or tracker.epoch != position.epoch:
                continue
            if (raw := tracker.hand_back(position.offset)) is not None:
                self.num_in_flight -= 1
                self.num_bytes -= raw.num_bytes

    def commits(self, partitions: Iterable[Partition] | None = None) -> dict[Partition, Commit]:
        """What may be committed and is not yet: of these partitions, or of all; it only grows within an epoch."""
        wanted = self._partitions if partitions is None else set(partitions)
        commits = {}
        for partition, tracker in self._partitions.items():
            offset = tracker.committable
            if partition not in wanted or offset is None or tracker.committed is None or offset <= tracker.committed:
                continue
            commits[partition] = Commit(offset, tracker.epoch)
        return commits

    def acknowledge(self, commits: Mapping[Partition, Commit]) -> None:
        """The broker has stored these."""
        for partition, commit in commits.items():
            tracker = self._partitions.get(partition)
            if tracker is not None and tracker.epoch == commit.epoch and tracker.committed is not None:
                tracker.committed = max(tracker.committed, commit.offset)

    def raw(self, position: SourcePosition) -> RawMessage | None:
        """The message of a document in flight; None where its assignment is gone or it is complete. From any thread."""
        tracker = self._partitions.get((position.topic, position.partition))
        if tracker is None or tracker.epoch != position.epoch:
            return None
        return tracker.raw(position.offset)

    def is_current(self, position: SourcePosition) -> bool:
        """Whether the position's assignment still holds. From any thread."""
        tracker = self._partitions.get((position.topic, position.partition))
        return tracker is not None and tracker.epoch == position.epoch
