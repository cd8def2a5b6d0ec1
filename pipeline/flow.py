"""The pipeline thread: documents from the source to the engine, rows from the engine to the sink.

One turn: receive, prepare, feed, poll, make rows, store, settle; what goes to other threads goes in lists. A document
is held in exactly one place at a time, and each place counts by itself, so that `Account.imbalance` notices a lost one:

    looked up -> arrived -> window: waiting -> running (in the engine) -> rows -> stored (until acknowledged)
                    |\\_> isolated ________/       |                       |
                     \\___________________________\\_-> dead letters ------/
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import structlog

from consumers.source import Source
from pipeline.account import Agreement, Outcome, Totals
from pipeline.failure_limits import FailureLimits, Gate
from pipeline.isolation import Isolation, conviction_over_workers
from pipeline.outgoing import OutgoingRows, RowSink
from pipeline.prompts import PromptBuilder, derived_seed
from pipeline.redelivery import LookUp, Redeliveries
from pipeline.results import ACTIONS, Action
from pipeline.retry import Verdict
from pipeline.rows import Row, RowBuilder, Work
from pipeline.supervisor import EngineSupervisor
from pipeline.suspects import LOSSES_ALONE, conviction
from pipeline.window import EngineWindow
from schemas.document import Document, RejectedDocument, SourcePosition, Suspicion
from schemas.errors import AccountError, DocumentError, EngineError, Failure
from schemas.inference import EngineInfo, EngineStats, InferenceOutput

logger = structlog.get_logger(__name__)

PREPARE_SLICE_SECONDS = 0.02  # then the engine is fed before more is tokenised
POLL_DOCUMENTS = 1000
WAIT_SECONDS = 0.05  # the longest that a turn sleeps
HUNGRY_WAIT_SECONDS = 0.005  # while the engine could run more than it has
LOOK_UP_WAIT_SECONDS = 0.005  # while documents are looked up and nothing else is to be done
SWEEP_SECONDS = 0.25  # between looks for work of revoked partitions
LULL_SECONDS = 1.0  # without a document, though there is room: what is here is taken for all that comes
ACCOUNT_SECONDS = 1.0  # between two comparisons of the account with the source's own count
ACCOUNT_PATIENCE_SECONDS = 20.0  # counts of several threads may differ for a moment, and never for so long
ACCOUNT_WAIT_SECONDS = 0.005  # between two looks whether the source has heard of every ending


class Flow:
    """Moves every document to its row. `turn` and `run` are one thread's; `request_drain` and what only reads are
    anybody's, and so is what the sink's threads call on `outgoing`.

    Times are seconds of `clock`, which only ever grows.
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
    ) -> None:
        """Without `look_up` what may have been answered before is answered again."""
        self.totals = Totals()
        self._source = source
        self._engine = engine
        self._make_prompts = make_prompts
        self._rows_of = rows
        self._clock = clock
        self.last_turn = clock()

        self._prompts: PromptBuilder | None = None
        self._next_sweep = 0.0
        self._last_arrival = clock()
        self._told: Mapping[int, int] | None = None  # what the engine was last told to expect
        self._drain_until: float | None = None
        self._is_draining = False

        self._next_comparison = 0.0
        self._balance, self._agreement = Agreement(ACCOUNT_PATIENCE_SECONDS), Agreement(ACCOUNT_PATIENCE_SECONDS)

        # The places where a document can be; see the module's drawing.
        self._redeliveries = None if look_up is None else Redeliveries(source, rows, look_up)
        self._arrived: deque[tuple[Document | RejectedDocument, float]] = deque()
        self._isolation = Isolation(source, max_running)
        self._window = EngineWindow(
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            urgent_after_seconds=urgent_after_seconds,
        )
        self._limits = limits or FailureLimits()
        self.outgoing = OutgoingRows(source, sink, self.totals, self._limits, clock)

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
            "looked_up": 0 if self._redeliveries is None else len(self._redeliveries),
            "arrived": len(self._arrived),
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
        self._prompts = self._make_prompts(info)
        self._rows_of.weights = info.weights
        self._told = None

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
                    self._count_skipped()
                    return
                self._flush_if_last()

    def _flush_if_last(self) -> None:
        """A bulk that nothing more will fill is sent as it is."""
        if not (self._arrived or self._isolation or self._window.num_running or self._window.num_waiting):
            self.outgoing.flush()

    def turn(self) -> None:
        """One round over all places. Sleeps only where nothing can be done, and not long."""
        spent = self.totals.time.thread
        started = self.last_turn = self._clock()
        self._receive()
        received = self._clock()
        spent["waiting for documents"] += received - started
        self._prepare()
        prepared = self._clock()
        spent["tokenising"] += prepared - received
        outputs: list[InferenceOutput] = []
        lost: EngineError | None = None
        try:
            self._feed()
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
            polled = self._clock()
        self.take_outputs(outputs, polled)
        made = self._clock()
        spent["making rows"] += made - polled
        self.outgoing.store()
        self.outgoing.settle()
        spent["storing"] += self._clock() - made
        if made >= self._next_comparison and not self._is_draining:
            self._next_comparison = made + ACCOUNT_SECONDS
            self.check_account()
        if lost is not None:
            self._restart_engine(lost)  # last: what it has answered is on its way

    def _receive(self) -> None:
        if self._is_draining or len(self._arrived) >= POLL_DOCUMENTS:
            return
        documents = self._source.poll(POLL_DOCUMENTS, self._idle_seconds())
        now = self._clock()
        if documents:
            self._last_arrival = now
            if not self.totals.account.delivered:
                self.totals.time.first_delivered = now
            for document in documents:
                self.totals.ledger.deliver(document.position, document.identity.job)
        self._count_skipped()
        if self._redeliveries is not None:
            documents = self._redeliveries.sift(documents)
            looked_up, done = self._redeliveries.take_answers()
            documents += looked_up
            for position, verdict in done:
                outcome = Outcome.ALREADY_DONE if verdict is Verdict.ALREADY_DONE else Outcome.SUPERSEDED
                self.totals.ledger.end(position, outcome)
            if done:
                self._source.complete([position for position, _ in done])
        self._arrived.extend([(document, now) for document in documents])

    def _idle_seconds(self) -> float:
        """How long to wait for documents: not at all where there is something else to be done."""
        window = self._window
        if self._arrived or self._isolation or window.num_running or window.num_waiting or self.outgoing.is_blocked:
            return 0.0
        return LOOK_UP_WAIT_SECONDS if self._redeliveries else WAIT_SECONDS

    def _count_skipped(self) -> None:
        for assignment, num_documents in self._source.take_skipped().items():
            self.totals.ledger.skip(assignment, num_documents)

    def _prepare(self) -> None:
        """Prompts for what arrived, for a slice of time: a long tokenisation must not starve the engine."""
        if not self._arrived:
            return
        until = self._clock() + PREPARE_SLICE_SECONDS
        while self._arrived:
            if self._limits.exceeded is not None:
                return
            document, arrived = self._arrived.popleft()
            if isinstance(document, RejectedDocument):
                self._fail(document, document.failure)
            elif document.suspicion is not None and document.suspicion.group:
                self._isolate(document, document.suspicion, arrived)
            elif (work := self._work_of(document, arrived)) is not None:
                now = self._clock()
                self._wait(work, now)
                if now >= until:
                    return

    def _work_of(self, document: Document, arrived: float) -> Work | None:
        """None where it cannot become a prompt, and has failed."""
        try:
            prepared = self._prompts_now().prepare(document)
        except DocumentError as error:
            self._fail(document, error.failure)
            return None
        self._limits.passed(Gate.PROMPT)
        return Work(prepared, arrived)

    def _isolate(self, document: Document, suspicion: Suspicion, arrived: float) -> None:
        failure = conviction_over_workers(suspicion)
        if failure is None:
            self._isolation.add(document, suspicion, arrived)
            return
        logger.error("a document kills workers", id=document.identity.document_id, workers=suspicion.num_crashes)
        self._fail(document, failure, suspicion.losses_alone)

    def _wait(self, work: Work, now: float) -> None:
        deadline = work.prepared.document.message.deadline
        self._window.wait(work, now, None if deadline is None else now + self._prompts_now().seconds_left(deadline))

    def _feed(self) -> None:
        """Hands the engine what the window has for it, except what is not ours any more, or too late."""
        if self._is_draining:
            self._expect(None)  # the grace is short: nothing is put off
            return
        if self.outgoing.is_blocked:
            return
        now = self._clock()
        if self._window.is_searching:
            if suspects := self._window.next_suspects(now):
                self._engine.submit(suspects)
            return
        if self._isolation.is_active:
            self._expect(None)  # what waits does not come before these are through
            self._start(self._next_isolated(), now)
            return
        if self._arrived or self._redeliveries or self._source.is_paused:
            self._last_arrival = now
        knows_all = now - self._last_arrival >= LULL_SECONDS
        self._start(self._window.next_batch(self._engine.stats, now, knows_all), now)
        self._expect(self._window.beyond)

    def _start(self, works: Sequence[Work], now: float) -> None:
        if ready := [work for work in works if self._may_start(work)]:
            self._engine.submit(self._window.start(ready, now))

    def _expect(self, beyond: Mapping[int, int] | None) -> None:
        if beyond != self._told and self._engine.is_ready:
            self._engine.expect(beyond)
            self._told = None if beyond is None else dict(beyond)

    def _next_isolated(self) -> list[Work]:
        """The next group that runs apart, once all before it is durable: its answers, should the next one kill us, and
        a conviction, which the note of another group would overwrite."""
        if self._window.num_running:
            return []
        if any(self.outgoing.held().values()):
            self.outgoing.flush()
            return []
        group = self._isolation.next_group()
        return [work for document, arrived in group if (work := self._work_of(document, arrived)) is not None]

    def _may_start(self, work: Work) -> bool:
        """False where the document has ended otherwise: handed back, or failed because its deadline has passed."""
        document = work.prepared.document
        if not self._source.is_current(document.position):
            self._hand_back([document.position])
            return False
        if document.message.deadline is not None:
            try:
                self._prompts_now().require_time(document)
            except DocumentError as error:
                self._fail(document, error.failure)
                return False
        return True

    def _poll_engine(self) -> list[InferenceOutput]:
        if not self._window.num_running:
            if not self._arrived and (self._is_draining or self.outgoing.is_blocked or self._isolation.is_active):
                self.outgoing.wait(WAIT_SECONDS)  # nothing can be taken in or fed: the sink or the broker has the word
            return self._engine.poll(0.0)  # an engine that dies while idle is started again before it is needed
        if self._arrived:
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
        self._count(ended, now)
        rows: list[Row] = []
        answered_at = datetime.now(UTC)
        for work, output in ended:
            work.tries += 1
            answer = self._rows_of.read(work, output)
            if answer.failure is not None and self._runs_again(work, answer.failure):
                if self._is_draining:
                    self._hand_back_works([work])  # nothing is fed any more: its next owner tries again
                else:
                    self.totals.retries += 1
                    self._wait(work, now)
                continue
            row = self._rows_of.answer_row(work, answer, output, now, answered_at)
            if answer.failure is None:
                rows.append(row)
            else:
                self.outgoing.fail(row, answer.failure)
        self.outgoing.add(rows)

    def _count(self, ended: Sequence[tuple[Work, InferenceOutput]], now: float) -> None:
        totals, parts = self.totals, self.totals.time
        totals.prompt_tokens += sum([output.num_prompt_tokens for _, output in ended])
        totals.cached_tokens += sum([output.num_cached_tokens for _, output in ended])
        totals.completion_tokens += sum([len(output.token_ids) for _, output in ended])
        parts.num_answered += len(ended)
        parts.waiting += sum([work.submitted - work.arrived for work, _ in ended])
        parts.engine += sum([now - work.submitted for work, _ in ended])
        parts.engine_queue += sum([output.timing.queue_ms for _, output in ended]) / 1000
        parts.engine_prefill += sum([output.timing.prefill_ms for _, output in ended]) / 1000
        parts.engine_decode += sum([output.timing.decode_ms for _, output in ended]) / 1000

    def _runs_again(self, work: Work, failure: Failure) -> bool:
        """Whether the table wants another try; prepares the work for it."""
        if ACTIONS[failure.code] is Action.RETRY_ONCE and work.tries == 1 and not work.prepared.sampling.is_greedy:
            identity = work.prepared.document.identity
            work.prepared.seed = derived_seed(identity, attempt=work.tries)
            return True
        return False

    def _fail(self, document: Document | RejectedDocument, failure: Failure, tries: int = 1) -> None:
        self.outgoing.fail(self._rows_of.failure_row(document, failure, datetime.now(UTC), tries), failure)

    def drop_what_is_not_ours(self) -> None:
        """Hands back the work of partitions that went to another worker: their next owner does it.

        Raises EngineError where the engine turns out to be lost; the work is handed back all the same.
        """
        is_current = self._source.is_current
        dropped, stale_ids = self._window.drop_where(lambda work: not is_current(work.prepared.document.position))
        stale = self.outgoing.drop_what_is_not_ours()
        stale += self._isolation.drop_where(lambda position: not is_current(position))
        if self._redeliveries is not None:
            stale += self._redeliveries.drop_what_is_not_ours()
        if dropped or stale:
            self._hand_back_works(dropped)
            self._hand_back(stale)
            logger.info("handed back the work of revoked partitions", documents=len(dropped) + len(stale))
        if stale_ids:
            self._engine.abort(stale_ids)  # last: what is dropped is accounted for, even if this finds the engine lost

    def _begin_drain(self) -> None:
        """What the engine has not begun costs nothing to hand back; what it has is ended and stored."""
        self._is_draining = True
        self._source.drain()
        self._hand_back([document.position for document, _ in self._arrived])
        self._arrived.clear()
        self._hand_back(self._isolation.drop_where(lambda _: True))
        self._hand_back_works(self._window.drop_waiting())
        if self._redeliveries is not None:
            self._hand_back(self._redeliveries.give_up())
        self._count_skipped()
        logger.info("draining", **self.held())

    def _give_up(self) -> None:
        """The grace is over. What the sink has stays with it: closing it says what became of that."""
        logger.warning("the grace period ended before the work did", **self.held())
        self._hand_back_works(self._window.drop_running())
        self._hand_back(self.outgoing.give_up())

    def give_up(self) -> None:
        """Hands back all that the sink does not have: nothing can be stored any more."""
        if not self._is_draining:
            self._begin_drain()
        self._give_up()

    def hand_back_storing(self) -> None:
        """Once the sink is closed: rows that it could not store, which come again to their next owner."""
        self._hand_back(self.outgoing.give_up_storing())

    def _hand_back_works(self, works: Sequence[Work]) -> None:
        self._hand_back([work.prepared.document.position for work in works])

    def _hand_back(self, positions: Sequence[SourcePosition]) -> None:
        for position in positions:
            self.totals.ledger.end(position, Outcome.HANDED_BACK)
        if positions:
            self._source.hand_back(positions)

    def close(self) -> None:
        """Ends the look-up's thread; after the sink is closed, as that ends the waiting for Elasticsearch."""
        if self._redeliveries is not None:
            self._redeliveries.close()

    def check_account(self) -> None:
        """Compares the account with the queues, and with what the source itself counts as handed out.

        Raises AccountError where they have differed for longer than threads can be out of step: a document was lost,
        which only its next delivery can mend, or counted twice.
        """
        now, ledger = self._clock(), self.totals.ledger
        in_queues = self._balance.observe(self.totals.account.imbalance(self.num_in_flight), now)
        self.totals.disagreement = self._agreement.observe(self._source.num_handed_out - self._num_open_now(), now)
        if in_queues or self.totals.disagreement:
            raise AccountError(
                f"the account does not balance: {ledger.total.sentence(self.num_in_flight)}, and the source has handed "
                f"out {self._source.num_handed_out} of which {self._num_open_now()} are open here; {ledger.num_twice} "
                "ended twice. Nothing is lost that is in Kafka: start the worker again, and report this"
            )

    def close_account(self, timeout_seconds: float = ACCOUNT_PATIENCE_SECONDS) -> None:
        """At the end, with nothing in flight: waits until the source has heard of every ending, and notes what it has
        not heard of."""
        until = time.monotonic() + timeout_seconds
        while (left := self._source.num_handed_out - self._num_open_now()) and time.monotonic() < until:
            time.sleep(ACCOUNT_WAIT_SECONDS)
        self.totals.disagreement = self.totals.disagreement or left

    def _num_open_now(self) -> int:
        """Documents that the account has open, of assignments that still hold."""
        is_current = self._source.is_current
        return self.totals.ledger.num_open_in(
            lambda assignment: is_current(SourcePosition(assignment.topic, assignment.partition, 0, assignment.epoch))
        )

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
            self._fail(document, failure, killer.tries + LOSSES_ALONE)
        info = None
        try:
            info = self._engine.reopen(cause, lambda: self.is_asked_to_drain, loss)
        finally:
            self.totals.engine_restarts = self._engine.num_restarts
            if info is None:
                self._hand_back_works(self._window.drop_running())
        if info is not None:
            self._use(info)

    def _prompts_now(self) -> PromptBuilder:
        assert self._prompts is not None, "open_engine comes first"
        return self._prompts
