"""How much Elasticsearch is sent at once: rows and bytes in a call, and calls at a time. Pure: no clock, no lock.

Grown additively while calls are taken, halved where one is refused or where calls take longer and longer (AIMD, as
TCP does it; the latency to compare with is the best one seen, as TCP Vegas does it).
"""

from collections.abc import Iterable

MIN_BULK_BYTES = 64 * 2**10  # refusals do not shrink a call below this: it is small for any node
GROWTH_STEPS = 16  # good calls from nothing to the full size
QUICK_SECONDS = 1.0  # a call that takes no longer is not slow, whatever others took
SLOW_RATIO = 2.0  # calls that take so much longer than expected, on the average, are too much for the node
SMOOTHING = 4  # calls that this average looks back on, about
SLOWEST_SHARE = 8  # latency alone leaves an eighth: where calls cost the same at any size, small ones help nobody
FORGETTING = 1.01  # by which the best latency grows a call: after a hundred, what was slow is usual


class CongestionWindow:
    """What may be sent now, from what became of the calls before. It starts at the most that the settings allow."""

    def __init__(self, max_documents: int, max_bytes: int, max_calls: int) -> None:
        self._max_documents = max_documents
        self._max_bytes = max_bytes
        self._max_calls = max_calls
        self._bytes_ceiling = max_bytes  # lowered for good by a 413: the node's limit does not change by itself
        self._call_steps = max_calls * GROWTH_STEPS
        self._best_seconds = 0.0  # of a call of `_best_bytes`: the least time per byte, forgotten slowly
        self._best_bytes = 0
        self._slowness = 1.0  # calls' time over the expected, smoothed
        self.documents = max_documents
        self.bytes = max_bytes

    @property
    def calls(self) -> int:
        """How many calls may be under way at a time."""
        return max(1, self._call_steps // GROWTH_STEPS)

    def fit(self, body_sizes: Iterable[int]) -> int:
        """How many of the first bodies make one call; at least 1 where there is one, however large it is."""
        num_rows = num_bytes = 0
        for size in body_sizes:
            num_bytes += size
            if num_rows == self.documents or (num_rows and num_bytes > self.bytes):
                break
            num_rows += 1
        return num_rows

    def is_full(self, num_documents: int, num_bytes: int) -> bool:
        """Whether so much makes a whole call."""
        return num_documents >= self.documents or num_bytes >= self.bytes

    def taken(self, num_bytes: int, seconds: float) -> None:
        """A call of that many bytes was taken whole, after so many seconds."""
        expected = self._expected_seconds(num_bytes)
        self._slowness += (seconds / expected - self._slowness) / SMOOTHING
        self._remember(num_bytes, seconds)
        if self._slowness > SLOW_RATIO:
            self._slowness = 1.0  # the next calls tell whether this helped
            self._shrink(
                max(1, self._max_documents // SLOWEST_SHARE), max(MIN_BULK_BYTES, self._max_bytes // SLOWEST_SHARE)
            )
        else:
            self._grow()

    def refused(self) -> None:
        """A call, or rows of one, were refused for now: too many requests, no room, no node, no answer in time."""
        self._shrink(1, MIN_BULK_BYTES)

    def too_large(self, num_bytes: int) -> None:
        """A body of that size got 413."""
        self._bytes_ceiling = max(1, min(self._bytes_ceiling, num_bytes // 2))
        self.bytes = min(self.bytes, self._bytes_ceiling)

    def _expected_seconds(self, num_bytes: int) -> float:
        """A smaller call than the best one may take as long as that one did, a larger one longer in proportion."""
        if not self._best_bytes:
            return QUICK_SECONDS
        return max(QUICK_SECONDS, self._best_seconds * max(1.0, num_bytes / self._best_bytes))

    def _remember(self, num_bytes: int, seconds: float) -> None:
        self._best_seconds *= FORGETTING
        if not self._best_bytes or seconds * self._best_bytes <= self._best_seconds * num_bytes:
            self._best_seconds, self._best_bytes = seconds, num_bytes

    def _grow(self) -> None:
        self.documents = min(self._max_documents, self.documents + max(1, self._max_documents // GROWTH_STEPS))
        self.bytes = min(self._bytes_ceiling, self.bytes + max(1, self._max_bytes // GROWTH_STEPS))
        self._call_steps = min(self._max_calls * GROWTH_STEPS, self._call_steps + self._max_calls)

    def _shrink(self, least_documents: int, least_bytes: int) -> None:
        self.documents = min(self.documents, max(least_documents, self.documents // 2))
        self.bytes = min(self.bytes, max(least_bytes, self.bytes // 2))
        self._call_steps = min(self._call_steps, max(GROWTH_STEPS, self._call_steps // 2))
