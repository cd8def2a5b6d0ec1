"""Decides which waiting documents go to the engine next: those that share a prefix, side by side. Knows no document,
only keys, sizes and times. Standard library only, so that a benchmark can order a workload with it anywhere."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


# Sorts the window: (its group's rank, then every fourth byte of the chained hashes, end to end; order of arrival,
# unique). A group is whoever has the same first block: groups share nothing, so their order is free, and those with the
# longest outputs begin a lap, lest these run alone at its end. Sorting by the chain is a depth-first walk of the prefix
# tree, without the tree. Equal blocks have equal bytes there, so whoever shares a prefix sorts side by side as with the
# whole hashes, at one memcmp a comparison and with a quarter of the cache misses (20,000 documents of 118 blocks: 38 MB
# otherwise). Siblings whose bytes collide are merely out of order.
_Key: TypeAlias = tuple[bytes, int]


_RECENT_GROUPS = 64  # whose blocks the engine is likely to have yet
_RANK_BYTES = 4
_LAST_RANK = 0xFFFF_FFFF
_GROUP = slice(_RANK_BYTES, _RANK_BYTES + 4)  # of a key's bytes: what is left of the first block's hash


_FIRST_RANK = bytes(_RANK_BYTES)


def _rank(num_outputs: int) -> bytes:
    """Sorts more tokens of output first."""
    return (_LAST_RANK - num_outputs).to_bytes(_RANK_BYTES, "big")


class _Waiting(Generic[T]):
    __slots__ = ("deadline", "document", "is_urgent", "key", "num_outputs", "num_tokens", "old_at", "priority")

    def __init__(
        self,
        document: T,
        key: _Key,
        num_tokens: int,
        num_outputs: int,
        priority: int,
        old_at: float,
        deadline: float | None,
    ) -> None:
        self.document = document
        self.key = key
        self.num_tokens = num_tokens
        self.num_outputs = num_outputs
        self.priority = priority
        self.old_at = old_at  # when its age makes it urgent
        self.deadline = deadline
        self.is_urgent = False


class _Lap:
    """One priority class: its documents in prefix order, and how far the walk has come.

    [.., last_taken)  arrived behind the walk: they wait for its next lap
    (last_taken, ..]  still ahead in this one
    """

    __slots__ = ("first", "is_begun_anew", "keys", "last_taken", "ranks", "recent")

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.last_taken: _Key | None = None  # None: at the beginning of a lap
        self.ranks: dict[bytes, bytes] = {}  # group -> its rank, until the next lap begins
        self.is_begun_anew = False  # before the one before was walked to its end
        self.first: frozenset[bytes] = frozenset()  # groups that begin the lap, whatever their outputs
        self.recent: deque[bytes] = deque(maxlen=_RECENT_GROUPS)  # the groups last taken from

    def add(self, chain: bytes, sequence: int, num_outputs: int) -> _Key:
        """Its key, among its group's or, where it is the group's first, where its own output puts it."""
        group = chain[:4]
        rank = self.ranks.get(group)
        if rank is None:
            rank = self.ranks[group] = _rank(num_outputs)
        key = (rank + chain, sequence)
        insort(self.keys, key)
        return key

    def remove(self, key: _Key) -> None:
        at = bisect_left(self.keys, key)
        assert self.keys[at] == key, "a waiting document is in its class until it is taken"
        del self.keys[at]


class PrefixBatcher(Generic[T]):
    """The window of waiting documents, walked in prefix order, lap after lap.

    Higher priority goes first. Within a priority the walk goes on from its cursor; what arrives behind it waits for
    the next lap. A document that waited `urgent_after_seconds`, or is that near its deadline, becomes urgent and goes
    before all priorities. Urgent documents are taken in closed laps: what becomes urgent during one waits for the
    next, so no stream of newcomers can hold anybody back. Times are seconds of one growing clock of the caller's.
    """

    def __init__(self, urgent_after_seconds: float) -> None:
        self._urgent_after_seconds = urgent_after_seconds
        self._waiting: dict[int, _Waiting[T]] = {}  # by sequence, so the oldest is first
        self._laps: dict[int, _Lap] = {}  # priority -> its class; empty classes are dropped
        self._deadlines: list[tuple[float, int]] = []  # (near at, sequence) of those in `_laps` that have one, sorted
        self._urgent: list[int] = []  # this closed lap, last one first, so that pop() takes in order
        self._urgent_next: list[int] = []
        self._next_sequence = 0
        self._num_tokens = 0
        self._tokens_by_output: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._num_tokens

    @property
    def tokens_by_output(self) -> Mapping[int, int]:
        """Prompt tokens of all that wait, by the most tokens that each may be answered with."""
        return self._tokens_by_output

    def begin_laps(self) -> None:
        """The walk goes on from the front, with long outputs: as nothing more comes, nobody is held back by that.

        Before these goes what is left of the groups last taken from: the engine has their blocks yet. Where more comes
        after all, and then nothing again, a lap that was begun so is walked to its end first.
        """
        for lap in self._laps.values():
            if not lap.is_begun_anew:
                lap.is_begun_anew = True
                lap.last_taken = None
                lap.first = frozenset(lap.recent)

    def add(
        self,
        document: T,
        *,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        now: float,
        num_outputs: int = 0,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Puts a document into the window. `num_tokens` is what it counts against a batch's budget, `num_outputs` the
        most that it may be answered with, in tokens.
        """
        sequence = self._next_sequence
        self._next_sequence += 1
        lap = self._laps.get(priority)
        if lap is None:
            lap = self._laps[priority] = _Lap()
        key = lap.add(b"".join(block_hashes)[::4], sequence, num_outputs)
        self._waiting[sequence] = _Waiting(
            document, key, num_tokens, num_outputs, priority, now + self._urgent_after_seconds, deadline
        )
        if deadline is not None:
            insort(self._deadlines, (deadline - self._urgent_after_seconds, sequence))
        self._num_tokens += num_tokens
        self._tokens_by_output[num_outputs] += num_tokens

    def next_batch(self, token_budget: int, now: float, max_documents: int | None = None) -> list[T]:
        """Takes the next documents out, in order, while they fit the budget; the first one always does.

        Empty where nothing waits or a budget is spent (`token_budget` or `max_documents` below 1).
        """
        self._promote(now)
        taken: list[T] = []
        room = len(self._waiting) if max_documents is None else max_documents
        budget = token_budget
        while room > 0 and budget > 0 and (self._urgent or self._urgent_next):
            if not self._urgent:
                self._close_urgent_lap()
            entry = self._waiting[self._urgent[-1]]
            if taken and entry.num_tokens > budget:
                return taken
            self._urgent.pop()
            taken.append(self._take(entry))
            budget -= entry.num_tokens
            room -= 1
        for priority in sorted(self._laps, reverse=True):
            if room <= 0 or budget <= 0:
                break
            chosen = self._walk(priority, budget, room, must_take=not taken)
            for entry in chosen:
                self._forget_deadline(entry)
                taken.append(self._take(entry))
                budget -= entry.num_tokens
            room -= len(chosen)
            if priority in self._laps:
                break  # the budget ended inside this class
        return taken

    def remove_where(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Drops documents that nobody wants any more, such as those of a revoked partition; says which."""
        unwanted = [entry for entry in self._waiting.values() if is_unwanted(entry.document)]
        urgent = {entry.key[1] for entry in unwanted}
        for entry in unwanted:
            if entry.is_urgent:
                continue
            urgent.discard(entry.key[1])
            self._laps[entry.priority].remove(entry.key)
            self._drop_if_empty(entry.priority)
            self._forget_deadline(entry)
        if urgent:
            self._urgent = [sequence for sequence in self._urgent if sequence not in urgent]
            self._urgent_next = [sequence for sequence in self._urgent_next if sequence not in urgent]
        for entry in unwanted:
            self._take(entry)
        return [entry.document for entry in unwanted]

    def clear(self) -> list[T]:
        """Drops everything; says what that was."""
        return self.remove_where(lambda _: True)

    def _walk(self, priority: int, budget: int, room: int, must_take: bool) -> list[_Waiting[T]]:
        """The next run of one class from its cursor, wrapping once into the next lap."""
        lap = self._laps[priority]
        chosen: list[_Waiting[T]] = []
        for _ in range(2):
            if lap.last_taken is None:
                self._begin(lap)
            start = end = 0 if lap.last_taken is None else bisect_right(lap.keys, lap.last_taken)
            while end < len(lap.keys) and len(chosen) < room and budget > 0:
                entry = self._waiting[lap.keys[end][1]]
                if entry.num_tokens > budget and not (must_take and not chosen):
                    budget = 0
                    break
                chosen.append(entry)
                budget -= entry.num_tokens
                end += 1
            if end > start:
                lap.last_taken = lap.keys[end - 1]
                for key, _ in lap.keys[start:end]:
                    if not lap.recent or lap.recent[-1] != key[_GROUP]:
                        lap.recent.append(key[_GROUP])
                del lap.keys[start:end]
            if start < len(lap.keys):
                break
            lap.last_taken = None  # the lap is done; the next begins at the front
            lap.is_begun_anew, lap.first = False, frozenset()
        self._drop_if_empty(priority)
        return chosen

    def _begin(self, lap: _Lap) -> None:
        """Puts the groups in order for a new lap: by the longest output that each now holds."""
        longest: dict[bytes, int] = {}
        for key, sequence in lap.keys:
            group = key[_GROUP]
            longest[group] = max(longest.get(group, 0), self._waiting[sequence].num_outputs)
        ranks = {
            group: _FIRST_RANK if group in lap.first else _rank(num_outputs) for group, num_outputs in longest.items()
        }
        if any(lap.ranks[group] != rank for group, rank in ranks.items()):
            for _, sequence in lap.keys:
                entry = self._waiting[sequence]
                entry.key = (ranks[entry.key[0][_GROUP]] + entry.key[0][_RANK_BYTES:], sequence)
            lap.keys = sorted(self._waiting[sequence].key for _, sequence in lap.keys)
        lap.ranks = ranks

    def _promote(self, now: float) -> None:
        """Moves what is past its age, or near its deadline, from its class into the next urgent lap."""
        end = bisect_right(self._deadlines, (now, self._next_sequence))
        due = [self._waiting[sequence] for _, sequence in self._deadlines[:end]]
        for entry in self._waiting.values():
            if entry.old_at > now:
                break
            if not entry.is_urgent:
                due.append(entry)
        for entry in due:
            if entry.is_urgent:
                continue  # old as well as near its deadline
            self._laps[entry.priority].remove(entry.key)
            self._drop_if_empty(entry.priority)
            self._forget_deadline(entry)
            entry.is_urgent = True
            self._urgent_next.append(entry.key[1])

    def _close_urgent_lap(self) -> None:
        """Deadlines first, then higher priority, then prefix order."""

        def order(sequence: int) -> tuple[bool, int, _Key]:
            entry = self._waiting[sequence]
            return entry.deadline is None, -entry.priority, entry.key

        self._urgent = sorted(self._urgent_next, key=order, reverse=True)
        self._urgent_next = []

    def _forget_deadline(self, entry: _Waiting[T]) -> None:
        if entry.deadline is not None:
            near_at = entry.deadline - self._urgent_after_seconds
            del self._deadlines[bisect_left(self._deadlines, (near_at, entry.key[1]))]

    def _drop_if_empty(self, priority: int) -> None:
        if not self._laps[priority].keys:
            del self._laps[priority]

    def _take(self, entry: _Waiting[T]) -> T:
        del self._waiting[entry.key[1]]
        self._num_tokens -= entry.num_tokens
        self._tokens_by_output[entry.num_outputs] -= entry.num_tokens
        if not self._tokens_by_output[entry.num_outputs]:
            del self._tokens_by_output[entry.num_outputs]
        return entry.document
