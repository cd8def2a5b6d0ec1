"""What is in flight, by position, and how far each partition may be committed. Knows nothing of Kafka's client.

One thread starts, completes and drops; `raw`, `is_current`, `num_crashes` and `started_before` are single look-ups and
may be asked from any.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from consumers.commit_metadata import MAX_OFFSETS, OffsetBitmap, Progress
from schemas.document import RawMessage, SourcePosition

Partition = tuple[str, int]  # topic, partition


@dataclass(frozen=True, slots=True)
class Commit:
    """What to commit: an offset with the progress beyond it, and the epoch and state that it was worked out in."""

    offset: int
    epoch: int
    progress: Progress
    change: int


class PartitionTracker:
    """In-order commit over out-of-order completion, for one assignment of one partition.

    [read before, committable)      complete
    [committable, next_offset)      some complete, some in flight; the first one is in flight, or was handed back
    Offsets need not be contiguous: compaction and transactions leave gaps, which count as complete.

    `left` is what the commit at `begin` said beside its offset: what is complete in it is passed over, and where its
    writer died in the middle of work, that work is suspect until all of it is complete.
    """

    def __init__(self, epoch: int, begin: int | None = None, left: Progress | None = None) -> None:
        self.epoch = epoch
        self.next_offset: int | None = None  # one past the last that was started; None: nothing was read yet
        self.started_before = left.started if left is not None else 0  # one past what earlier owners had in work
        self.num_skipped = 0
        self._begin = begin  # where reading begins; None where that is not known
        self._left = left
        self._in_flight: dict[int, RawMessage] = {}  # in the order of offsets
        self._handed_back: set[int] = set()  # left to the next owner
        self._change = 0
        self._committed_change = 0  # the state that the broker acknowledged; 0: that of the assignment
        self._crash_count = 0
        self._suspect_until = 0
        if left is not None:
            died = not left.is_clean and left.started > left.base
            self._crash_count = left.crash_count + died
            self._suspect_until = left.started if died else left.suspect_until
            self._change += died  # to be committed before the work that may kill again

    @property
    def committable(self) -> int | None:
        """One past the last offset before which everything is complete; None where nothing was read."""
        first = next(iter(self._in_flight), self.next_offset)
        if not self._handed_back or first is None:
            return first
        return min(first, min(self._handed_back))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_bytes(self) -> int:
        return sum(raw.num_bytes for raw in self._in_flight.values())

    @property
    def is_announced(self) -> bool:
        """Whether the broker knows of this epoch what a next owner must know after a crash: that there is work."""
        return self._committed_change > 0 or self._change == 0

    def start(self, raw: RawMessage) -> bool:
        """Takes the message in; it is kept until it completes, so that it can still be dead-lettered.

        False: it was complete before this assignment, and is passed over.
        """
        offset = raw.position.offset
        assert self.next_offset is None or offset >= self.next_offset, f"{offset} after {self.next_offset} was started"
        self.next_offset = offset + 1
        self._change += 1
        if self._left is not None and offset in self._left.completed:
            self.num_skipped += 1
            return False
        self._in_flight[offset] = raw
        return True

    def complete(self, offset: int) -> RawMessage | None:
        """The message, which is let go; None where it is not in flight (it completed before)."""
        raw = self._in_flight.pop(offset, None)
        self._change += raw is not None
        return raw

    def hand_back(self, offset: int) -> RawMessage | None:
        """Lets go of a message that was not worked on: commits stay before it, and its next owner reads it again."""
        raw = self._in_flight.pop(offset, None)
        if raw is not None:
            self._handed_back.add(offset)
            self._change += 1
        return raw

    def advance(self, position: int) -> None:
        """The reader's position passed what is no document, such as a transaction's end, with nothing in flight."""
        known = self._begin if self.next_offset is None else self.next_offset
        if not self._in_flight and known is not None and position > known:
            self.next_offset = position
            self._change += 1

    def raw(self, offset: int) -> RawMessage | None:
        return self._in_flight.get(offset)

    def num_crashes(self, offset: int) -> int:
        """How many workers died in a row with this offset in work; 0 where it is no suspect."""
        return self._crash_count if offset < self._suspect_until else 0

    def commit(self, is_clean: bool = False) -> Commit | None:
        """What the broker does not know yet; None where it knows all. `is_clean`: this assignment ends in order."""
        if self._change == self._committed_change and not is_clean:
            return None
        base = self.committable
        if base is None:
            if self._left is None or not self._change:
                return None
            base = self._left.base
        suspect_until = self._suspect_until if base < self._suspect_until else 0
        next_offset = base if self.next_offset is None else self.next_offset
        progress = Progress(
            base=base,
            started=max(base, next_offset, self.started_before),
            suspect_until=suspect_until,
            crash_count=self._crash_count if suspect_until else 0,
            is_clean=is_clean,
            completed=self._completed(base, next_offset),
        )
        commit = Commit(base, self.epoch, progress, self._change)
        self._change += is_clean  # where the assignment turns out to go on, that must be told too
        return commit

    def acknowledge(self, commit: Commit) -> None:
        """The broker has stored it."""
        self._committed_change = max(self._committed_change, commit.change)

    def _completed(self, base: int, next_offset: int) -> OffsetBitmap:
        """Complete beyond `base`: what is neither in flight nor handed back, and what is not yet read again."""
        num_read = min(next_offset - base, MAX_OFFSETS)
        bits = bytearray(b"\xff" * ((num_read + 7) // 8))
        for offsets in (self._in_flight, self._handed_back):
            for offset in offsets:
                if offset - base < num_read:
                    bits[(offset - base) // 8] &= ~(1 << (offset - base) % 8)
        read = int.from_bytes(bits, "little") & ((1 << num_read) - 1)
        unread = 0
        if self._left is not None and self._left.completed.end > next_offset:
            before = int.from_bytes(self._left.completed.bits, "little")
            shift = base - self._left.base
            before = before >> shift if shift >= 0 else before << -shift
            unread = before >> num_read << num_read & ((1 << MAX_OFFSETS) - 1)
        both = read | unread
        return OffsetBitmap(base, both.to_bytes((both.bit_length() + 7) // 8, "little"))


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

    @property
    def is_announced(self) -> bool:
        """Whether the broker knows of every partition that there is work in it."""
        return all(tracker.is_announced for tracker in self._partitions.values())

    def assign(self, partition: Partition, begin: int | None = None, left: Progress | None = None) -> int:
        """Begins an epoch for a partition that is not tracked; its number, never given before.

        `begin` is the committed offset, where reading begins; `left` is the progress that came with it.
        """
        assert partition not in self._partitions, f"{partition} is tracked already"
        self._last_epoch += 1
        self._partitions[partition] = PartitionTracker(self._last_epoch, begin, left)
        return self._last_epoch

    def drop(self, partition: Partition) -> int:
        """Ends the partition's epoch: late completions are ignored. The number of documents it leaves to others."""
        tracker = self._partitions.pop(partition, None)
        if tracker is None:
            return 0
        self.num_in_flight -= tracker.num_in_flight
        self.num_bytes -= tracker.num_bytes
        return tracker.num_in_flight

    def start(self, raws: Iterable[RawMessage]) -> list[RawMessage]:
        """Messages of assigned partitions, stamped with their current epoch, in the order of their offsets.

        Returns those that are in flight now: what is complete already is passed over.
        """
        in_flight = []
        for raw in raws:
            tracker = self._partitions[raw.position.topic, raw.position.partition]
            assert tracker.epoch == raw.position.epoch, f"{raw.position} is of epoch {raw.position.epoch}"
            if tracker.start(raw):
                self.num_in_flight += 1
                self.num_bytes += raw.num_bytes
                in_flight.append(raw)
        return in_flight

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

    def commits(self, partitions: Iterable[Partition] | None = None, is_clean: bool = False) -> dict[Partition, Commit]:
        """What the broker does not know yet: of these partitions, or of all; offsets only grow within an epoch.

        `is_clean` says to a next owner that this one did not die.
        """
        wanted = self._partitions if partitions is None else set(partitions)
        commits = {}
        for partition, tracker in self._partitions.items():
            if partition in wanted and (commit := tracker.commit(is_clean)) is not None:
                commits[partition] = commit
        return commits

    def acknowledge(self, commits: Mapping[Partition, Commit]) -> None:
        """The broker has stored these."""
        for partition, commit in commits.items():
            tracker = self._partitions.get(partition)
            if tracker is not None and tracker.epoch == commit.epoch:
                tracker.acknowledge(commit)

    def raw(self, position: SourcePosition) -> RawMessage | None:
        """The message of a document in flight; None where its assignment is gone or it is complete. From any thread."""
        tracker = self._current(position)
        return None if tracker is None else tracker.raw(position.offset)

    def is_current(self, position: SourcePosition) -> bool:
        """Whether the position's assignment still holds. From any thread."""
        return self._current(position) is not None

    def num_crashes(self, position: SourcePosition) -> int:
        """How many workers died in a row with this document in work. From any thread."""
        tracker = self._current(position)
        return 0 if tracker is None else tracker.num_crashes(position.offset)

    def started_before(self, position: SourcePosition) -> int:
        """One past the highest offset of the partition that earlier owners are known to have had. From any thread."""
        tracker = self._current(position)
        return 0 if tracker is None else tracker.started_before

    def _current(self, position: SourcePosition) -> PartitionTracker | None:
        tracker = self._partitions.get((position.topic, position.partition))
        return tracker if tracker is not None and tracker.epoch == position.epoch else None
