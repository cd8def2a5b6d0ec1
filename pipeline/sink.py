"""The Elasticsearch sink: an outbox, and writer threads that empty it until every row has its verdict.

    put ──> outbox ──> writer: bulk call ──> stored, already done, superseded ──> on_acknowledged
               ^                         ├─> rejected ──────────────────────────> on_rejected
               │                         ├─> refused for now: kept, waited for, sent again
               └── has_room              └─> a wrong deployment: SinkError out of check()

A row is counted in `num_pending` from `put` until its callback has returned, wherever it waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
from elasticsearch import Elasticsearch

from pipeline.breaker import CircuitBreaker
from pipeline.bulk import BulkOutcome, BulkWriter, OutboundRow, RowUnencodable, encode_row
from pipeline.congestion import CongestionWindow
from pipeline.connection import check_reachable, connect
from pipeline.index import check_index, ensure_index
from pipeline.results import row_id
from pipeline.retry import BreakerOpen, TemporaryRefusal, Verdict, call_until_taken
from pipeline.sink_stats import SinkStats
from pipeline.stored_rows import StoredRow, look_up_patiently
from schemas.document import DocumentResult, Identity, SourcePosition
from schemas.errors import Failure, FailureCode, SinkError, Stage
from schemas.settings import ElasticsearchSettings

logger = structlog.get_logger(__name__)

IDLE_SHARE = 4  # a fourth of a bulk is sent while no call is under way: Elasticsearch would only wait with us
CLOSE_SECONDS = 5.0  # for a writer in the middle of a call; what it had is delivered again to the next worker


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that Elasticsearch will never accept. Its document goes to the dead letters, then `build_rejection_row`."""

    row: DocumentResult
    position: SourcePosition
    index: str
    version: int
    failure: Failure


class ElasticsearchSink:
    """`put` from any thread, never blocking; the callbacks come from writer threads, and must not block for long.

    `put` refuses nothing: what the engine has computed is kept. Whoever feeds the engine looks at `has_room` first.
    """

    def __init__(
        self,
        settings: ElasticsearchSettings,
        *,
        on_acknowledged: Callable[[list[SourcePosition], Verdict], None],
        on_rejected: Callable[[list[RejectedRow]], None],
        indices: Iterable[str] = (),
        client: Elasticsearch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`indices` are the aliases that tasks name beside `settings.index`. A client given here is not closed here."""
        self._settings = settings
        self._indices = tuple(dict.fromkeys((settings.index, *indices)))
        self._on_acknowledged = on_acknowledged
        self._on_rejected = on_rejected
        self._client = client
        self._owns_client = client is None
        self._clock = clock
        self._breaker = CircuitBreaker(settings.breaker_failures, settings.max_backoff_seconds, clock)
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards everything below
        # A condition each, or a `put` might wake who waits for the end instead of a writer.
        self._work_came = threading.Condition(self._lock)
        self._all_settled = threading.Condition(self._lock)
        self._may_call = threading.Condition(self._lock)
        self._window = CongestionWindow(settings.bulk_documents, settings.bulk_bytes, settings.num_writers)
        self._num_calling = 0
        self._outbox: deque[OutboundRow] = deque()
        self._outbox_bytes = 0
        self._unencodable: list[RejectedRow] = []
        self._num_pending = 0
        self._pending_bytes = 0  # of their bodies; a row that cannot be written down has none
        self._num_draining = 0  # callers of drain: do not wait for a bulk to fill
        self._is_flushing = False  # nor while this holds, which is until the outbox is empty
        self._error: SinkError | None = None
        self._stats = SinkStats()
        self._writers: list[threading.Thread] = []

    def start(self) -> None:
        """Connects, sees to the indices, starts the writers. Raises SettingsError or SinkError; nothing runs then."""
        assert not self._writers, "started twice"
        client = self._client if self._client is not None else connect(self._settings)
        try:
            check_reachable(client, self._settings, self._stopping)
            for alias in self._indices:
                ensure_index(client, alias, self._settings, self._stopping)
        except BaseException:
            if self._owns_client:
                client.close()
            raise
        self._client = client
        bulk = BulkWriter(client, self._settings.request_timeout_seconds, lambda alias: check_index(client, alias))
        for number in range(self._settings.num_writers):
            writer = threading.Thread(target=self._run, args=(bulk,), name=f"sink-writer-{number}", daemon=True)
            self._writers.append(writer)
            writer.start()

    @property
    def has_room(self) -> bool:
        """Whether the outbox is below its limits. Everything not yet settled counts, in a writer's hands or not."""
        settings = self._settings
        return self._num_pending < settings.outbox_documents and self._pending_bytes < settings.outbox_bytes

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def put(self, row: DocumentResult, version: int, position: SourcePosition, index: str | None = None) -> None:
        """Hands a row over. `version` is row_version's; `index` is the task's alias where it has one of its own.

        A row that cannot be written down is rejected alone, by callback like any other.
        """
        self.put_many([(row, version, position, index)])

    def put_many(self, rows: Sequence[tuple[DocumentResult, int, SourcePosition, str | None]]) -> None:
        """`put` of each (row, version, position, index), under one lock."""
        outbound: list[OutboundRow] = []
        unencodable: list[RejectedRow] = []
        now = self._clock()
        for row, version, position, index in rows:
            alias = index if index is not None else self._settings.index
            identity = row_id(Identity(row.job, row.task, row.id))
            try:
                body = encode_row(row, alias, identity, version)
            except RowUnencodable as error:
                failure = Failure(FailureCode.SINK_REJECTED, Stage.SINK, str(error))
                unencodable.append(RejectedRow(row, position, alias, version, failure))
            else:
                outbound.append(OutboundRow(row, position, alias, identity, version, body, now))
        num_bytes = _num_bytes(outbound)
        with self._lock:
            was_empty = not self._outbox
            self._num_pending += len(rows)
            self._pending_bytes += num_bytes
            self._unencodable += unencodable
            self._outbox.extend(outbound)
            self._outbox_bytes += num_bytes
            # A writer waits for the first row, then for enough; every row between would only wake it for nothing.
            if unencodable or (outbound and was_empty) or self._has_enough():
                self._work_came.notify()

    def look_up(self, wanted: Sequence[tuple[str | None, str]]) -> list[StoredRow | None]:
        """What is stored under each (index, or None for the settings'; `_id`), waiting where Elasticsearch is away.

        Raises SinkError where it will never answer, which stops the sink; TemporaryRefusal where the sink is closed.
        """
        client = self._client
        assert client is not None, "looked up before the start"
        rows = [(index if index is not None else self._settings.index, row_id) for index, row_id in wanted]
        try:
            return look_up_patiently(
                client,
                rows,
                self._breaker,
                stop=self._stopping,
                max_backoff_seconds=self._settings.max_backoff_seconds,
                on_retry=self._note_retry,
            )
        except SinkError as error:
            self._stop(error)
            raise

    def check(self) -> None:
        """Raises the SinkError that stopped the writers, if one did."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Nothing more comes for now: what is in the outbox need not wait for its bulk to fill. Does not block."""
        with self._lock:
            if self._outbox and not self._is_flushing:
                self._is_flushing = True
                self._work_came.notify()

    def drain(self, timeout_seconds: float) -> bool:
        """Waits until every row that was put is settled, without waiting for full bulks. False: not in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._num_draining += 1
            self._work_came.notify_all()
            try:
                while self._num_pending and self._error is None and not self._stopping.is_set():
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        break
                    self._all_settled.wait(remaining)
            finally:
                self._num_draining -= 1
        self.check()
        return self._num_pending == 0

    def close(self) -> None:
        """Stops at once, waits cut short. What is not settled is not acknowledged, and so comes again. Idempotent."""
        self._stopping.set()
        self._wake_everybody()
        deadline = time.monotonic() + CLOSE_SECONDS
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))
        if self._owns_client and self._client is not None:
            self._client.close()

    def stats(self) -> SinkStats:
        with self._lock:
            return replace(
                self._stats,
                num_pending=self._num_pending,
                pending_bytes=self._pending_bytes,
                num_waiting=len(self._outbox),
                num_breaker_openings=self._breaker.num_openings,
                breaker=self._breaker.state,
                num_calling=self._num_calling,
                bulk_documents=self._window.documents,
                bulk_calls=self._window.calls,
            )

    # The writer threads.

    def _run(self, bulk: BulkWriter) -> None:
        try:
            while not self._stopping.is_set():
                unencodable, rows = self._next_bulk()
                if unencodable:
                    self._report_rejected(unencodable)
                if rows:
                    self._write_all(bulk, rows)
        except SinkError as error:
            self._stop(error)
        except TemporaryRefusal:
            assert self._stopping.is_set(), "a refusal is waited out unless we stop"
        except Exception as error:  # a bug, here or in a callback: nothing may go on as if rows were written
            logger.exception("sink writer failed")
            self._stop(SinkError(f"the sink's writer failed: {type(error).__name__}: {error}"))

    def _stop(self, error: SinkError) -> None:
        with self._lock:
            self._error = self._error or error
        self._stopping.set()
        self._wake_everybody()

    def _wake_everybody(self) -> None:
        with self._lock:
            self._work_came.notify_all()
            self._all_settled.notify_all()
            self._may_call.notify_all()

    def _next_bulk(self) -> tuple[list[RejectedRow], list[OutboundRow]]:
        """Waits for enough, or for the oldest row's flush_seconds, a drain, a row to reject, or the end."""
        with self._lock:
            while not self._stopping.is_set():
                if self._unencodable:
                    unencodable, self._unencodable = self._unencodable, []
                    return unencodable, []
                if not self._outbox:
                    self._work_came.wait()
                    continue
                age = self._clock() - self._outbox[0].put_at
                if self._has_enough() or self._num_draining or self._is_flushing or age >= self._settings.flush_seconds:
                    return [], self._take_bulk()
                self._work_came.wait(self._settings.flush_seconds - age)
            return [], []

    def _has_enough(self) -> bool:
        """For a call: a full bulk, or a share of one while none is under way."""
        share = 1 if self._num_calling else IDLE_SHARE
        return self._window.is_full(share * len(self._outbox), share * self._outbox_bytes)

    def _take_bulk(self) -> list[OutboundRow]:
        num_rows = self._window.fit(len(row.body) for row in self._outbox)
        rows = [self._outbox.popleft() for _ in range(num_rows)]
        self._outbox_bytes -= _num_bytes(rows)
        self._is_flushing = self._is_flushing and bool(self._outbox)
        if self._outbox:
            self._work_came.notify()  # another writer may have its bulk, or has to wait for its time
        return rows

    def _write_all(self, bulk: BulkWriter, rows: list[OutboundRow]) -> None:
        while rows and not self._stopping.is_set():
            call_until_taken(
                lambda: self._attempt(bulk, rows),
                stop=self._stopping,
                max_backoff_seconds=self._settings.max_backoff_seconds,
                on_retry=self._note_retry,
            )

    def _attempt(self, bulk: BulkWriter, rows: list[OutboundRow]) -> None:
        """One call for the first of `rows`; what is settled leaves the list, what is refused goes to its end."""
        with self._turn():
            if self._stopping.is_set():
                return
            self._breaker.permit()
            with self._lock:
                num_sent = self._window.fit(len(row.body) for row in rows)
            started = self._clock()
            try:
                outcome = bulk.write(rows[:num_sent])
            except Exception:  # no outcome to learn from; and a probe that is not told of would be the last one
                self._breaker.failed()
                raise
            self._learn(outcome, self._clock() - started)
        rows[:num_sent] = []
        rows.extend(outcome.refused)
        self._settle(outcome)
        if outcome.refused:
            raise outcome.refusal()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Of making a call, among as many as the window lets be under way."""
        with self._lock:
            while self._num_calling >= self._window.calls and not self._stopping.is_set():
                self._may_call.wait()
            self._num_calling += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calling -= 1
                self._may_call.notify_all()  # the window may have grown as well

    def _learn(self, outcome: BulkOutcome, seconds: float) -> None:
        """What a call's end says about the next: how much to send, and whether to send at all."""
        if outcome.num_settled:
            if self._breaker.succeeded():
                logger.info("elasticsearch takes rows again", pending=self._num_pending)
        else:
            self._breaker.failed()
        with self._lock:
            self._stats = replace(self._stats, bulk_seconds=self._stats.bulk_seconds + seconds)
            if outcome.too_large_bytes:
                self._window.too_large(outcome.too_large_bytes)
            if outcome.refused:
                self._window.refused()
            elif outcome.num_calls == 1:
                self._window.taken(outcome.num_bytes, seconds)

    def _note_retry(self, error: BaseException, wait_seconds: float) -> None:
        if isinstance(error, BreakerOpen):
            return  # nothing was sent
        with self._lock:
            self._stats = replace(self._stats, num_retries=self._stats.num_retries + 1)
        logger.warning("bulk refused", cause=str(error)[:300], wait_seconds=round(wait_seconds, 3))

    def _settle(self, outcome: BulkOutcome) -> None:
        acknowledged = (
            (Verdict.STORED, outcome.stored),
            (Verdict.ALREADY_DONE, outcome.already_done),
            (Verdict.SUPERSEDED, outcome.superseded),
        )
        with self._lock:
            self._stats = self._stats.with_outcome(outcome)
        for verdict, rows in acknowledged:
            if rows:
                self._on_acknowledged([row.position for row in rows], verdict)
                self._settled(len(rows), _num_bytes(rows))
        if outcome.rejected:
            self._report_rejected(
                [RejectedRow(row.row, row.position, row.index, row.version, why) for row, why in outcome.rejected],
                _num_bytes([row for row, _ in outcome.rejected]),
            )

    def _report_rejected(self, rejected: Sequence[RejectedRow], num_bytes: int = 0) -> None:
        for each in rejected:
            if each.row.failure is not None and each.row.failure.code is FailureCode.SINK_REJECTED:
                raise SinkError(  # the row that says "rejected" was rejected: there is no third way to keep the account
                    f"the failed row of {each.position} cannot be stored either: {each.failure.message}"
                )
        with self._lock:
            self._stats = replace(self._stats, num_rejected=self._stats.num_rejected + len(rejected))
        self._on_rejected(list(rejected))
        self._settled(len(rejected), num_bytes)

    def _settled(self, num_rows: int, num_bytes: int) -> None:
        with self._lock:
            self._num_pending -= num_rows
            self._pending_bytes -= num_bytes
            if not self._num_pending:
                self._all_settled.notify_all()


def _num_bytes(rows: Iterable[OutboundRow]) -> int:
    return sum([len(row.body) for row in rows])
