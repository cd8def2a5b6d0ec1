"""The circuit breaker: whether to ask a failing Elasticsearch at all. It sends nothing and waits for nothing itself."""

import threading
import time
from collections.abc import Callable
from enum import Enum

from pipeline.retry import BASE_BACKOFF_SECONDS, BreakerOpen

BREAKER_OPEN_SECONDS = 1.0


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after so many failed calls in a row; after a while lets one call through, and closes if that succeeds.

    Each failed probe doubles the while, up to the maximum. Any thread may use it.
    """

    def __init__(self, num_failures: int, max_open_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_failures = num_failures
        self._max_open_seconds = max_open_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._open_seconds = min(BREAKER_OPEN_SECONDS, max_open_seconds)
        self._open_until: float | None = None
        self._probing = False
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._open_until is None:
                return BreakerState.CLOSED
            return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    def permit(self) -> None:
        """Returns where a call may be made, and then wants to hear how it went; raises BreakerOpen where not."""
        with self._lock:
            if self._open_until is None:
                return
            remaining = self._open_until - self._clock()
            if remaining > 0:
                raise BreakerOpen("the breaker is open", remaining)
            if self._probing:
                raise BreakerOpen("another call is finding out whether Elasticsearch is back", BASE_BACKOFF_SECONDS)
            self._probing = True

    def succeeded(self) -> bool:
        """Closes it; whether it was open, and this is the end of that."""
        with self._lock:
            was_open = self._open_until is not None
            self._failures_in_a_row = 0
            self._open_seconds = min(BREAKER_OPEN_SECONDS, self._max_open_seconds)
            self._open_until = None
            self._probing = False
        return was_open

    def failed(self) -> None:
        with self._lock:
            self._failures_in_a_row += 1
            if self._open_until is not None and not self._probing:
                return  # a call from before the breaker opened: nothing new
            if self._probing:
                self._open_seconds = min(self._open_seconds * 2, self._max_open_seconds)
            elif self._failures_in_a_row < self._num_failures:
                return
            self._probing = False
            self._open_until = self._clock() + self._open_seconds
            self.num_openings += 1
