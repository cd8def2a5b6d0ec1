"""Rows on their way out: to the sink, or to the dead letters first. Ends where a document's row is acknowledged.

add ───────────────────────────────> rows ──> storing ──> acknowledged: completed, accounted for
fail ──> dead letter, acknowledged ───^          └──────> rejected: fail, with another row
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from consumers.source import Source
from pipeline.account import Outcome, Totals
from pipeline.failure_limits import FailureLimits, Gate
from pipeline.results import build_rejection_row
from pipeline.retry import Verdict
from pipeline.rows import Row, RowBuilder
from pipeline.sink import RejectedRow
from schemas.document import Document, RejectedDocument, SourcePosition
from schemas.errors import Failure, FailureCode


class RowSink(Protocol):
    """What is asked of pipeline.sink.ElasticsearchSink."""

    @property
    def has_room(self) -> bool: ...
    def put_many(self, rows: Sequence[Row]) -> None: ...
    def flush(self) -> None: ...
    def check(self) -> None: ...


class OutgoingRows:
    """Owned by the pipeline's thread; `acknowledged` and `rejected` are called by the sink's."""

    def __init__(
        self,
        source: Source,
        sink: RowSink,
        rows: RowBuilder,
        totals: Totals,
        limits: FailureLimits,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._sink = sink
        self._rows_of = rows
        self._totals = totals
        self._limits = limits
        self._clock = clock
        self._rows: list[Row] = []
        self._storing: dict[SourcePosition, tuple[float, Failure | None]] = {}  # -> when it was put, why it failed
        self._dead_lettering: dict[SourcePosition, Row] = {}  # the failed row that follows the acknowledgement

        # Written by other threads.
        self._acknowledged: deque[tuple[Sequence[SourcePosition], Verdict]] = deque()
        self._rejected: deque[RejectedRow] = deque()
        self._dead_lettered: deque[SourcePosition] = deque()
        self._has_news = threading.Event()

    def acknowledged(self, positions: Sequence[SourcePosition], verdict: Verdict) -> None:
        """The sink's word: these rows are stored or need not be. Their documents complete at once."""
        self._source.complete(positions)
        self._acknowledged.append((positions, verdict))
        self._has_news.set()

    def rejected(self, rows: Iterable[RejectedRow]) -> None:
        """The sink's word: these rows will never be accepted."""
        self._rejected.extend(rows)
        self._has_news.set()

    def wait(self, timeout_seconds: float) -> None:
        """Until another thread has said something since the last wait; not at all where nothing is on its way out."""
        if self._rows or self._storing or self._dead_lettering:
            self._has_news.wait(timeout_seconds)
            self._has_news.clear()

    @property
    def is_blocked(self) -> bool:
        """Rows wait that the sink has no room for: nothing more should be computed."""
        return bool(self._rows)

    def held(self) -> dict[str, int]:
        """Place -> how many documents are there now. From any thread."""
        return {"rows": len(self._rows), "storing": len(self._storing), "dead_letters": len(self._dead_lettering)}

    def add(self, rows: Sequence[Row]) -> None:
        """Answered rows."""
        self._rows.extend(rows)
        if rows:
            self._limits.passed(Gate.ANSWER, len(rows))

    def fail(self, row: Row, failure: Failure) -> None:
        """A failed row: the dead letter first; its acknowledgement lets the row follow, and that one's completes."""
        self._limits.failed(failure)
        result, _, position, _ = row
        self._dead_lettering[position] = row

        def on_acknowledged() -> None:
            self._dead_lettered.append(position)
            self._has_news.set()

        self._source.dead_letter(position, result.job, failure, on_acknowledged)

    def fail_document(self, document: Document | RejectedDocument, failure: Failure, tries: int = 1) -> None:
        """`fail` of a document without an output."""
        self.fail(self._rows_of.failure_row(document, failure, datetime.now(UTC), tries), failure)

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        """These end without a row: their next owner does them."""
        self._totals.ledger.end(positions, Outcome.HANDED_BACK)
        if positions:
            self._source.hand_back(positions)

    def store(self) -> None:
        """Hands the sink what it has room for. Raises SinkError where the sink has stopped."""
        while self._dead_lettered:
            row = self._dead_lettering.pop(self._dead_lettered.popleft(), None)
            if row is not None:
                self._rows.append(row)
        self._sink.check()
        if not self._rows or not self._sink.has_room:
            return
        now = self._clock()
        for result, _, position, _ in self._rows:
            self._storing[position] = (now, result.failure)
        self._sink.put_many(self._rows)
        self._rows = []

    def flush(self) -> None:
        """Nothing more comes for now: rows need not wait for others."""
        self._sink.flush()

    def settle(self) -> None:
        """Accounts for what the sink's threads have said."""
        ledger, parts = self._totals.ledger, self._totals.time
        now = self._clock()
        while self._acknowledged:
            positions, verdict = self._acknowledged.popleft()
            parts.last_stored = now
            parts.num_stored += len(positions)
            answered: list[SourcePosition] = []
            for position in positions:
                put, failure = self._storing.pop(position)
                parts.storing += now - put
                if failure is None:
                    answered.append(position)
                else:
                    self._failed_row_settled(position, verdict, failure)
            if answered:
                self._limits.passed(Gate.ROW, len(answered))
                ledger.end(answered, _outcome(verdict, None))
        while self._rejected:
            rejected = self._rejected.popleft()
            del self._storing[rejected.position]
            result = build_rejection_row(rejected.row, rejected.failure)
            self.fail((result, rejected.version, rejected.position, rejected.index), rejected.failure)

    def _failed_row_settled(self, position: SourcePosition, verdict: Verdict, failure: Failure) -> None:
        """It passes no gate: it may stand for a row that was rejected."""
        outcome = _outcome(verdict, failure)
        self._totals.ledger.end([position], outcome)
        if outcome in (Outcome.FAILED, Outcome.CANCELLED):
            self._totals.failures[failure.code.value] = self._totals.failures.get(failure.code.value, 0) + 1

    def drop_what_is_not_ours(self) -> list[SourcePosition]:
        """Dead letters of partitions that went elsewhere, which nobody will acknowledge; says which.

        Rows are stored all the same: the answer is right, and its next owner finds it there.
        """
        stale = [position for position in self._dead_lettering if not self._source.is_current(position)]
        for position in stale:
            del self._dead_lettering[position]
        return stale

    def give_up(self) -> list[SourcePosition]:
        """Drops what the sink does not have yet; says which documents that were."""
        dropped = [position for _, _, position, _ in self._rows] + list(self._dead_lettering)
        self._rows = []
        self._dead_lettering.clear()
        return dropped

    def give_up_storing(self) -> list[SourcePosition]:
        """Once the sink is closed: rows that it could not store, and those it rejected last; says which."""
        self.settle()
        dropped = list(self._storing)
        self._storing.clear()
        return dropped + self.give_up()


def _outcome(verdict: Verdict, failure: Failure | None) -> Outcome:
    if verdict is Verdict.ALREADY_DONE:
        return Outcome.ALREADY_DONE
    if verdict is Verdict.SUPERSEDED:
        return Outcome.SUPERSEDED
    if failure is None:
        return Outcome.INDEXED
    return Outcome.CANCELLED if failure.code is FailureCode.CANCELLED else Outcome.FAILED
