"""Documents from the source until the flow takes them; what may have a row already is looked up first.

receive ──> looked up (pipeline/redelivery.py) ──> done: complete
   └──────────────────────┴──────────────────────> arrived ──> take
"""

from collections import deque
from collections.abc import Callable

from consumers.source import Source
from pipeline.account import Outcome, Totals
from pipeline.redelivery import AnyDocument, LookUp, Redeliveries
from pipeline.retry import Verdict
from pipeline.rows import RowBuilder
from schemas.document import SourcePosition

POLL_DOCUMENTS = 1000
LULL_SECONDS = 1.0  # without a document, though there is room: what is here is taken for all that comes


class Arrivals:
    """The pipeline's thread's; what only reads is anybody's. Times are seconds of `clock`."""

    def __init__(
        self, source: Source, totals: Totals, rows: RowBuilder, look_up: LookUp | None, clock: Callable[[], float]
    ) -> None:
        """Without `look_up` what may have been answered before is answered again."""
        self._source = source
        self._totals = totals
        self._clock = clock
        self._last_arrival = clock()
        self._redeliveries = None if look_up is None else Redeliveries(source, rows, look_up)
        self._arrived: deque[tuple[AnyDocument, float]] = deque()

    def __len__(self) -> int:
        """Documents that can be taken."""
        return len(self._arrived)

    @property
    def has_room(self) -> bool:
        return len(self._arrived) < POLL_DOCUMENTS

    @property
    def is_looking_up(self) -> bool:
        return bool(self._redeliveries)

    def held(self) -> dict[str, int]:
        """Place -> how many documents are there now."""
        num_looked_up = 0 if self._redeliveries is None else len(self._redeliveries)
        return {"looked_up": num_looked_up, "arrived": len(self._arrived)}

    def receive(self, timeout_seconds: float) -> None:
        """Takes in what the source has, waiting for it at most so long, and what has been looked up meanwhile.

        Raises what looking up has failed with, where nobody foresaw that.
        """
        if self._redeliveries is not None:
            self._redeliveries.check()  # first: nothing is taken in that would then be in no queue
        documents = self._source.poll(POLL_DOCUMENTS, timeout_seconds)
        now = self._clock()
        if documents:
            self._last_arrival = now
            if not self._totals.account.delivered:
                self._totals.time.first_delivered = now
            for document in documents:
                self._totals.ledger.deliver(document.position, document.identity.job)
        self.count_skipped()
        if self._redeliveries is not None:
            documents = self._redeliveries.sift(documents)
            looked_up, done = self._redeliveries.take_answers()
            documents += looked_up
            for position, verdict in done:
                outcome = Outcome.ALREADY_DONE if verdict is Verdict.ALREADY_DONE else Outcome.SUPERSEDED
                self._totals.ledger.end([position], outcome)
            if done:
                self._source.complete([position for position, _ in done])
        self._arrived.extend([(document, now) for document in documents])

    def is_lull(self) -> bool:
        """Whether nothing has come for LULL_SECONDS, or waits, or is held back by a high mark."""
        now = self._clock()
        if self._arrived or self._redeliveries or self._source.is_paused:
            self._last_arrival = now
        return now - self._last_arrival >= LULL_SECONDS

    def take(self) -> tuple[AnyDocument, float]:
        """The one that waits the longest, and when it arrived."""
        return self._arrived.popleft()

    def count_skipped(self) -> None:
        """Enters what the source passed over, since it was complete before."""
        for assignment, num_documents in self._source.take_skipped().items():
            self._totals.ledger.skip(assignment, num_documents)

    def drop_what_is_not_ours(self) -> list[SourcePosition]:
        """Documents of partitions that went elsewhere and are being looked up; says which. Others are seen when they
        are to start."""
        return [] if self._redeliveries is None else self._redeliveries.drop_what_is_not_ours()

    def give_up(self) -> list[SourcePosition]:
        """Drops all; says which documents that were."""
        dropped = [document.position for document, _ in self._arrived]
        self._arrived.clear()
        if self._redeliveries is not None:
            dropped += self._redeliveries.give_up()
        self.count_skipped()
        return dropped

    def close(self) -> None:
        """Ends the look-up's thread; after the sink is closed, as that ends the waiting for Elasticsearch."""
        if self._redeliveries is not None:
            self._redeliveries.close()
