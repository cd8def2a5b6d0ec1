"""A sink with a memory of what it called back, for its tests."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elasticsearch import Elasticsearch

from pipeline.retry import Verdict
from pipeline.sink import ElasticsearchSink, RejectedRow
from schemas.document import SourcePosition
from schemas.settings import ElasticsearchSettings

DRAIN_SECONDS = 60.0


class Deliveries:
    """What came back, by verdict; `first` is set by the first acknowledgement."""

    def __init__(self) -> None:
        self.by_verdict: dict[Verdict, list[SourcePosition]] = {}
        self.rejected: list[RejectedRow] = []
        self.first = threading.Event()
        self._lock = threading.Lock()

    def acknowledged(self, positions: list[SourcePosition], verdict: Verdict) -> None:
        with self._lock:
            self.by_verdict.setdefault(verdict, []).extend(positions)
        self.first.set()

    def reject(self, rows: list[RejectedRow]) -> None:
        with self._lock:
            self.rejected += rows

    def offsets(self, verdict: Verdict) -> list[int]:
        return sorted(position.offset for position in self.by_verdict.get(verdict, []))

    @property
    def times(self) -> Counter[SourcePosition]:
        """How often each position was acknowledged."""
        return Counter(position for positions in self.by_verdict.values() for position in positions)


@contextmanager
def open_sink(
    index: str,
    *,
    url: str = "http://127.0.0.1:9",
    more_urls: Sequence[str] = (),
    client: Elasticsearch | None = None,
    **settings: Any,
) -> Iterator[tuple[ElasticsearchSink, Deliveries]]:
    """A started sink that waits for little, closed at the end."""
    given = {"number_of_replicas": 0, "flush_seconds": 0.02, "max_backoff_seconds": 0.3, **settings}
    deliveries = Deliveries()
    sink = ElasticsearchSink(
        ElasticsearchSettings(urls=(url, *more_urls), index=index, **given),
        on_acknowledged=deliveries.acknowledged,
        on_rejected=deliveries.reject,
        client=client,
    )
    sink.start()
    try:
        yield sink, deliveries
    finally:
        sink.close()


def wait_until(holds: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    """For what another thread or process does. Fails with `what` after the time-out."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_seconds:g} s for: {what}"
        time.sleep(0.005)
