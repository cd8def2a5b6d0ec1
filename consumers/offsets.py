"""What is in flight, by position, and how far each partition may be committed. Knows nothing of Kafka's client.

One thread starts, completes and drops; `raw`, `is_current`, `suspicion` and `started_before` are single look-ups and
may be asked from any.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from consumers.commit_metadata import MAX_OFFSETS, OffsetBitmap, Progress
from schemas.document import RawMessage, SourcePosition, Suspicion

Partition = tuple[str, int]  # topic, partition
CRASHES_TO_ISOLATE = 3  # workers that died in a row over the same documents: from then on these run apart


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
    writer died in the middle of work, that work is suspect until all of it is complete. After CRASHES_TO_ISOLATE such
    deaths the suspects run apart from everything else in groups, which `isolate` notes before each runs. A group that
    a worker died with is `lost`, and the next owner halves it: each death brings the search one step nearer to a
    document, until the same one was alone with a worker that died often enough for whoever reads `losses_alone`.

        suspects   [a b c d e f g h]              three deaths: halves
        isolated   [a b c d]          died        lost: a b c d, halves again; e to h are another group
        isolated   [a b] done, [c d]  died        lost: c d
        isolated   [c]                died        lost: c, alone once
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
        self._must_tell = 0  # the state up to which a next owner must know after a crash; told at once
        self._told_base = 0  # what the broker acknowledged: all below is complete,
        self._told_started = 0  # and nothing from here on has begun
        self._crash_count = 0
        self._suspect_until = 0
        self._lost, self._losses_alone = range(0), 0
        self._isolated = range(0)
        self._group_bounds: Sequence[int] = ()  # suspects between the same two run together, apart from all others
        if left is not None:
            self._take_over(left)

    def _take_over(self, left: Progress) -> None:
        died = not left.is_clean and left.started > left.base
        self._crash_count = left.crash_count + died
        self._suspect_until = left.suspect_until
        self._lost, self._losses_alone = left.lost, left.losses_alone
        if died:
            self._change = self._must_tell = 1  # before the work that may kill again
            if left.isolated:
                is_alone = len(left.isolated) == 1
                before = left.losses_alone if left.lost == left.isolated else 0
                self._lost, self._losses_alone = left.isolated, (before + 1) * is_alone
            else:
                self._suspect_until = left.started
        if self._crash_count < CRASHES_TO_ISOLATE:
            return
        suspects = range(left.base, max(left.base, self._suspect_until))
        if not (unfinished := _unfinished(self._lost, left.completed)):
            self._lost, self._losses_alone = range(0), 0
            unfinished = _unfinished(suspects, left.completed)
        if unfinished:
            middle = unfinished[len(unfinished) // 2]
            ends = (unfinished[0], middle, unfinished[-1] + 1)
            self._group_bounds = sorted({suspects.start, *ends, max(suspects.stop, ends[-1])})

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
    def num_crashes(self) -> int:
        """Workers that died in a row over what was in flight at the beginning."""
        return self._crash_count

    @property
    def has_suspects(self) -> bool:
        """Whether something may be left of what earlier owners died over, as far as the broker knows."""
        return self._crash_count > 0 and self._told_base < self._suspect_until

    @property
    def is_announced(self) -> bool:
        """Whether the broker knows of this epoch what a next owner must know after a crash: that there is work, and
        which of it runs alone."""
        return self._committed_change >= self._must_tell

    def may_begin(self, offset: int) -> bool:
        """Whether work on it may begin. Before the broker knows that there is work, and while something may be left of
        what earlier owners died over, a death over what the broker does not know of would be forgotten, for ever."""
        return offset < self._told_started or (self.is_announced and not self.has_suspects)

    def start(self, raw: RawMessage) -> bool:
        """Takes the message in; it is kept until it completes, so that it can still be dead-lettered.

        False: it was complete before this assignment, and is passed over.
        """
        offset = raw.position.offset
        assert self.next_offset is None or offset >= self.next_offset, f"{offset} after {self.next_offset} was started"
        self.next_offset = offset + 1
        self._change += 1
        self._must_tell = self._must_tell or self._change
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

    @property
    def suspects_some(self) -> bool:
        """Whether `suspicion` says anything of any offset."""
        return self._suspect_until > 0 or len(self._lost) > 0

    def suspicion(self, offset: int) -> Suspicion | None:
        """What earlier owners' deaths say of it; None where it is no suspect."""
        if offset >= self._suspect_until and offset not in self._lost:
            return None
        bounds = self._group_bounds
        place = bisect(bounds, offset)
        if not 0 < place < len(bounds):
            return Suspicion(self._crash_count)
        losses_alone = self._losses_alone if offset in self._lost else 0
        return Suspicion(self._crash_count, range(bounds[place - 1], bounds[place]), losses_alone)

    def isolate(self, offsets: range) -> None:
        """From now on the engine has of this partition these and no others, with nothing else; empty: that is over."""
        if offsets != self._isolated:
            self._isolated = offsets
            self._change += 1
            self._must_tell = self._change

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
            lost=self._lost if suspect_until else range(0),
            losses_alone=self._losses_alone if suspect_until else 0,
            isolated=self._isolated,
        )
        commit = Commit(base, self.epoch, progress, self._change)
        if is_clean:  # where the assignment turns out to go on, a next owner must know that too
            self._change += 1
            self._must_tell = self._change
        return commit

    def acknowledge(self, commit: Commit) -> None:
        """The broker has stored it."""
        self._committed_change = max(self._committed_change, commit.change)
        self._told_base = max(self._told_base, commit.offset)
        if not commit.progress.is_clean:  # which says of nothing that it has begun
            self._told_started = max(self._told_started, commit.progress.started)

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


def _unfinished(offsets: range, completed: OffsetBitmap) -> Sequence[int]:
    """Those that may be no document at all count as unfinished; of more than metadata tells of, all do."""
    if len(offsets) > MAX_OFFSETS:
        return offsets
    return [offset for offset in offsets if offset >= completed.base and offset not in completed]


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
        """Whether the broker knows what next owners must know of every partition after a crash."""
        return all(tracker.is_announced for tracker in self._partitions.values())

    @property
    def has_suspects(self) -> bool:
        """Whether a partition has some: then its next owner should know exactly what is in flight."""
        return any(tracker.has_suspects for tracker in self._partitions.values())

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

    def may_begin(self, position: SourcePosition) -> bool:
        """Whether work on it may begin, which for a position of an earlier assignment is never."""
        tracker = self._current(position)
        return tracker is not None and tracker.may_begin(position.offset)

    @property
    def suspects_some(self) -> bool:
        """Whether `suspicion` says anything of any position."""
        return any(tracker.suspects_some for tracker in self._partitions.values())

    def suspicion(self, position: SourcePosition) -> Suspicion | None:
        """What workers that died with this document in work say of it. From any thread."""
        tracker = self._current(position)
        return None if tracker is None else tracker.suspicion(position.offset)

    def isolate(self, positions: Iterable[SourcePosition]) -> None:
        """From now on the engine has these, of one partition, and nothing else; none: anything may be in it."""
        offsets: dict[Partition, list[int]] = {}
        for position in positions:
            if self.is_current(position):
                offsets.setdefault((position.topic, position.partition), []).append(position.offset)
        for partition, tracker in self._partitions.items():
            alone = offsets.get(partition)
            tracker.isolate(range(min(alone), max(alone) + 1) if alone else range(0))

    def started_before(self, position: SourcePosition) -> int:
        """One past the highest offset of the partition that earlier owners are known to have had. From any thread."""
        tracker = self._current(position)
        return 0 if tracker is None else tracker.started_before

    def _current(self, position: SourcePosition) -> PartitionTracker | None:
        tracker = self._partitions.get((position.topic, position.partition))
        return tracker if tracker is not None and tracker.epoch == position.epoch else None
