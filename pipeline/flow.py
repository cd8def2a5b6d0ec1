"""The pipeline thread: documents from the source to the engine, rows from the engine to the sink.

One turn: receive, prepare, feed, poll, make rows, store, settle; what goes to other threads goes in lists. A document
is held in exactly one place at a time, and each place counts by itself, so that `Account.imbalance` notices a lost one:

    looked up ──> arrived ──> window: waiting ──> running (in the engine) ──> rows ──> stored (until acknowledged)
                     ├──────> isolated ──────────────^ │                       ^
                     └─────────────────────────────────┴─> dead letters ───────┘
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from consumers.source import Source
from pipeline.account import Totals
from pipeline.answers import Answers
from pipeline.arrivals import Arrivals
from pipeline.failure_limits import FailureLimits
from pipeline.feed import Feed
from pipeline.isolation import Isolation
from pipeline.outgoing import OutgoingRows, RowSink
from pipeline.prompts import PromptBuilder
from pipeline.reconciliation import Reconciliation
from pipeline.redelivery import LookUp
from pipeline.rows import RowBuilder, Work
from pipeline.supervisor import EngineSupervisor
from pipeline.suspects import LOSSES_ALONE, conviction
from pipeline.window import EngineWindow
from schemas.errors import EngineError
from schemas.inference import EngineInfo, EngineStats, InferenceOutput

logger = structlog.get_logger(__name__)

WAIT_SECONDS = 0.05  # the longest that a turn sleeps
HUNGRY_WAIT_SECONDS = 0.005  # while the engine could run more than it has
LOOK_UP_WAIT_SECONDS = 0.005  # while documents are looked up and nothing else is to be done
SWEEP_SECONDS = 0.25  # between looks for work of revoked partitions


class Flow:
    """Moves every document to its row. `turn` and `run` are one thread's; `request_drain` and what only reads are
    anybody's, and so is what the sink's threads call on `outgoing`.

    Times are seconds of `clock`, which only ever grows; a second try's deadline is `wall_clock`'s.
    """

    def __init__(
        self,
        source: Source,
        sink: RowSink,
        engine: EngineSupervisor,
        make_prompts: Callable[[EngineInfo], PromptBuilder],
        rows: RowBuilder,
        *,
        max_running: int,
        max_tokens_per_step: int,
        urgent_after_seconds: float,
        limits: FailureLimits | None = None,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Without `look_up` what may have been answered before is answered again."""
        self.totals = Totals()
        self._source = source
        self._engine = engine
        self._make_prompts = make_prompts
        self._rows_of = rows
        self._clock = clock
        self.last_turn = clock()

        self._next_sweep = 0.0
        self._drain_until: float | None = None
        self._is_draining = False

        # The places where a document can be; see the module's drawing.
        self._arrivals = Arrivals(source, self.totals, rows, look_up, clock)
        self._isolation = Isolation(source, max_running)
        self._window = EngineWindow(
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            urgent_after_seconds=urgent_after_seconds,
        )
        self._limits = limits or FailureLimits()
        self.outgoing = OutgoingRows(source, sink, rows, self.totals, self._limits, clock)
        # What moves documents from one to the next.
        self._feed = Feed(
            source, engine, self._arrivals, self._isolation, self._window, self.outgoing, self._limits, clock
        )
        self._answers = Answers(rows, self.outgoing, self.totals, wall_clock)
        self.reconciliation = Reconciliation(source, self.totals, lambda: self.num_in_flight, clock)

    # ---- for other threads

    def request_drain(self, grace_seconds: float) -> None:
        """Take nothing more in, end what the engine has, and return from `run`, at the latest after the grace."""
        # An assignment and nothing else: this runs inside signal handlers, where a lock could be ours already.
        self._drain_until = self._clock() + grace_seconds

    @property
    def is_asked_to_drain(self) -> bool:
        return self._drain_until is not None

    def grace_left(self) -> float:
        """Seconds until a requested drain must end; 0 where none was requested."""
        return 0.0 if self._drain_until is None else max(0.0, self._drain_until - self._clock())

    @property
    def num_in_flight(self) -> int:
        """Documents held, counted place by place."""
        return sum(self.held().values())

    def held(self) -> dict[str, int]:
        """Place -> how many documents are there now."""
        return {
            **self._arrivals.held(),
            "isolated": len(self._isolation),
            "batcher": self._window.num_waiting,
            "engine": self._window.num_running,
            **self.outgoing.held(),
        }

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the batcher: the backlog that is known, in the unit that the engine works in."""
        return self._window.waiting_tokens

    @property
    def engine_stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def engine_is_ready(self) -> bool:
        return self._engine.is_ready

    # ---- the thread's own

    def open_engine(self) -> EngineInfo:
        """Starts the engine. Raises ModelError or EngineError."""
        info = self._engine.open()
        self._use(info)
        return info

    def _use(self, info: EngineInfo) -> None:
        self._feed.use(self._make_prompts(info))
        self._rows_of.weights = info.weights

    def run(self, until_drained: bool = False, on_turn: Callable[[], None] | None = None) -> None:
        """Turns until drained: the backlog, where that is wanted, or on request. Raises what stops a worker."""
        while True:
            if self._drain_until is not None and not self._is_draining:
                self._begin_drain()
            self.turn()
            if on_turn is not None:
                on_turn()
            if self._limits.exceeded is not None and not self._is_draining:
                raise self._limits.exceeded
            if self._is_draining and self._drain_until is not None:
                if not self.num_in_flight:
                    return
                if self._clock() >= self._drain_until:
                    self._give_up()
                    return
                self._flush_if_last()
            elif until_drained:
                if not self.num_in_flight and self._source.is_drained():
                    self._arrivals.count_skipped()
                    return
                self._flush_if_last()

    def _flush_if_last(self) -> None:
        """A bulk that nothing more will fill is sent as it is."""
        if not (self._arrivals or self._isolation or self._window.num_running or self._window.num_waiting):
            self.outgoing.flush()

    def turn(self) -> None:
        """One round over all places. Sleeps only where nothing can be done, and not long."""
        spent = self.totals.time.thread
        started = self.last_turn = self._clock()
        self._receive()
        received = self._clock()
        spent["waiting for documents"] += received - started
        self._feed.prepare()
        prepared = self._clock()
        spent["tokenising"] += prepared - received
        outputs: list[InferenceOutput] = []
        lost: EngineError | None = None
        try:
            self._feed.submit(self._is_draining)
            fed = self._clock()
            spent["ordering"] += fed - prepared
            outputs = self._poll_engine()
            polled = self._clock()
            spent["waiting for the engine"] += polled - fed
            if polled >= self._next_sweep:
                self._next_sweep = polled + SWEEP_SECONDS
                self.drop_what_is_not_ours()
        except EngineError as error:
            lost = error
            with suppress(EngineError):  # it may have answered before it died, and sending to it has told us first
                outputs += self._engine.poll(0.0)
            polled = self._clock()
        self.take_outputs(outputs, polled)
        made = self._clock()
        spent["making rows"] += made - polled
        self.outgoing.store()
        self.outgoing.settle()
        spent["storing"] += self._clock() - made
        if not self._is_draining:
            self.reconciliation.check_if_due()
        if lost is not None:
            self._restart_engine(lost)  # last: what it has answered is on its way

    def _receive(self) -> None:
        if not self._is_draining and self._arrivals.has_room:
            self._arrivals.receive(self._idle_seconds())

    def _idle_seconds(self) -> float:
        """How long to wait for documents: not at all where there is something else to be done."""
        window = self._window
        if self._arrivals or self._isolation or window.num_running or window.num_waiting or self.outgoing.is_blocked:
            return 0.0
        return LOOK_UP_WAIT_SECONDS if self._arrivals.is_looking_up else WAIT_SECONDS

    def _poll_engine(self) -> list[InferenceOutput]:
        if not self._window.num_running:
            if not self._arrivals and (self._is_draining or self.outgoing.is_blocked or self._isolation.is_active):
                self.outgoing.wait(WAIT_SECONDS)  # nothing can be taken in or fed: the sink or the broker has the word
            return self._engine.poll(0.0)  # an engine that dies while idle is started again before it is needed
        if self._arrivals:
            timeout = 0.0
        elif self._window.is_hungry and not self._is_draining:
            timeout = HUNGRY_WAIT_SECONDS
        else:
            timeout = WAIT_SECONDS
        return self._engine.poll(timeout)

    def take_outputs(self, outputs: Sequence[InferenceOutput], now: float) -> None:
        """Outputs of the engine become rows, dead letters, or another try."""
        if not outputs:
            return
        # Those without work were aborted, and accounted for then.
        ended = [(work, output) for output in outputs if (work := self._window.end(output.request_id)) is not None]
        again = self._answers.take(ended, now)
        if self._is_draining:
            self._hand_back_works(again)  # nothing is fed any more: their next owner tries again
            return
        self.totals.retries += len(again)
        for work in again:
            self._feed.wait(work, now)

    def drop_what_is_not_ours(self) -> None:
        """Hands back the work of partitions that went to another worker: their next owner does it.

        Raises EngineError where the engine turns out to be lost; the work is handed back all the same.
        """
        is_current = self._source.is_current
        dropped, stale_ids = self._window.drop_where(lambda work: not is_current(work.prepared.document.position))
        stale = self.outgoing.drop_what_is_not_ours()
        stale += self._isolation.drop_where(lambda position: not is_current(position))
        stale += self._arrivals.drop_what_is_not_ours()
        if dropped or stale:
            self._hand_back_works(dropped)
            self.outgoing.hand_back(stale)
            logger.info("handed back the work of revoked partitions", documents=len(dropped) + len(stale))
        if stale_ids:
            self._engine.abort(stale_ids)  # last: what is dropped is accounted for, even if this finds the engine lost

    def _begin_drain(self) -> None:
        """What the engine has not begun costs nothing to hand back; what it has is ended and stored."""
        self._is_draining = True
        self._source.drain()
        self.outgoing.hand_back(self._arrivals.give_up())
        self.outgoing.hand_back(self._isolation.drop_where(lambda _: True))
        self._hand_back_works(self._window.drop_waiting())
        logger.info("draining", **self.held())

    def _give_up(self) -> None:
        """The grace is over. What the sink has stays with it: closing it says what became of that."""
        logger.warning("the grace period ended before the work did", **self.held())
        self._hand_back_works(self._window.drop_running())
        self.outgoing.hand_back(self.outgoing.give_up())

    def give_up(self) -> None:
        """Hands back all that the sink does not have: nothing can be stored any more."""
        if not self._is_draining:
            self._begin_drain()
        self._give_up()

    def hand_back_storing(self) -> None:
        """Once the sink is closed: rows that it could not store, which come again to their next owner."""
        self.outgoing.hand_back(self.outgoing.give_up_storing())

    def _hand_back_works(self, works: Sequence[Work]) -> None:
        self.outgoing.hand_back([work.prepared.document.position for work in works])

    def close(self) -> None:
        """Ends the look-up's thread; after the sink is closed, as that ends the waiting for Elasticsearch."""
        self._arrivals.close()

    def _restart_engine(self, cause: EngineError) -> None:
        """Another engine, for the next turn to feed with those that may have killed this one, in halves, then alone.

        Raises EngineError where that is tried in vain too often, and what a start raises; what the engine had is handed
        back then.
        """
        loss, killer = self._window.lost()
        if killer is not None:
            document = killer.prepared.document
            prompt, sampling = killer.prepared.token_ids, killer.prepared.sampling
            failure = conviction(len(prompt), sampling.max_tokens, cause)
            logger.error("a document kills the engine", id=document.identity.document_id, cause=str(cause))
            self.outgoing.fail_document(document, failure, killer.tries + LOSSES_ALONE)
        info = None
        try:
            info = self._engine.reopen(cause, lambda: self.is_asked_to_drain, loss)
        finally:
            self.totals.engine_restarts = self._engine.num_restarts
            if info is None:
                self._hand_back_works(self._window.drop_running())
        if info is not None:
            self._use(info)
