"""The way of documents into the engine: prompts of what has arrived, and the requests that go next.

arrived ──> prepared ──> window, in prefix order ──> requests
   └──────> isolated, then prepared by groups ──────────^
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from consumers.source import Source
from pipeline.arrivals import Arrivals
from pipeline.failure_limits import FailureLimits, Gate
from pipeline.isolation import Isolation, conviction_over_workers
from pipeline.outgoing import OutgoingRows
from pipeline.prompts import PromptBuilder
from pipeline.rows import Work
from pipeline.supervisor import EngineSupervisor
from pipeline.window import EngineWindow
from schemas.document import Document, RejectedDocument, Suspicion
from schemas.errors import DocumentError

logger = structlog.get_logger(__name__)

PREPARE_SLICE_SECONDS = 0.02  # then the engine is fed before more is tokenised


class Feed:
    """The pipeline's thread's. Times are seconds of `clock`."""

    def __init__(
        self,
        source: Source,
        engine: EngineSupervisor,
        arrivals: Arrivals,
        isolation: Isolation,
        window: EngineWindow,
        outgoing: OutgoingRows,
        limits: FailureLimits,
        clock: Callable[[], float],
    ) -> None:
        self._prompts: PromptBuilder | None = None
        self._told: Mapping[int, int] | None = None  # what the engine was last told to expect
        self._source = source
        self._engine = engine
        self._arrivals = arrivals
        self._isolation = isolation
        self._window = window
        self._outgoing = outgoing
        self._limits = limits
        self._clock = clock

    def use(self, prompts: PromptBuilder) -> None:
        """Another engine has started, with these."""
        self._prompts = prompts
        self._told = None

    def prepare(self) -> None:
        """Prompts for what arrived, for a slice of time: a long tokenisation must not starve the engine."""
        if not self._arrivals:
            return
        until = self._clock() + PREPARE_SLICE_SECONDS
        while self._arrivals:
            if self._limits.exceeded is not None:
                return
            document, arrived = self._arrivals.take()
            if isinstance(document, RejectedDocument):
                self._outgoing.fail_document(document, document.failure)
            elif document.suspicion is not None and document.suspicion.group:
                self._isolate(document, document.suspicion, arrived)
            elif (work := self._work_of(document, arrived)) is not None:
                now = self._clock()
                self.wait(work, now)
                if now >= until:
                    return

    def _work_of(self, document: Document, arrived: float) -> Work | None:
        """None where it cannot become a prompt, and has failed."""
        try:
            prepared = self._prompts_now().prepare(document)
        except DocumentError as error:
            self._outgoing.fail_document(document, error.failure)
            return None
        self._limits.passed(Gate.PROMPT)
        return Work(prepared, arrived)

    def _isolate(self, document: Document, suspicion: Suspicion, arrived: float) -> None:
        failure = conviction_over_workers(suspicion)
        if failure is None:
            self._isolation.add(document, suspicion, arrived)
            return
        logger.error("a document kills workers", id=document.identity.document_id, workers=suspicion.num_crashes)
        self._outgoing.fail_document(document, failure, suspicion.losses_alone)

    def wait(self, work: Work, now: float) -> None:
        """It waits for its turn in the window."""
        deadline = work.prepared.document.message.deadline
        self._window.wait(work, now, None if deadline is None else now + self._prompts_now().seconds_left(deadline))

    def submit(self, is_draining: bool) -> None:
        """Hands the engine what it should have now, except what is not ours any more, or too late."""
        if is_draining:
            self._expect(None)  # the grace is short: nothing is put off
            return
        if self._outgoing.is_blocked:
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
        self._start(self._window.next_batch(self._engine.stats, now, self._arrivals.is_lull()), now)
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
        if any(self._outgoing.held().values()):
            self._outgoing.flush()
            return []
        group = self._isolation.next_group()
        return [work for document, arrived in group if (work := self._work_of(document, arrived)) is not None]

    def _may_start(self, work: Work) -> bool:
        """False where the document has ended otherwise: handed back, or failed because its deadline has passed.

        A deadline is for the first start: what has run before runs again, as suspects do.
        """
        document = work.prepared.document
        if not self._source.is_current(document.position):
            self._outgoing.hand_back([document.position])
            return False
        if document.message.deadline is not None and not work.tries:
            try:
                self._prompts_now().require_time(document)
            except DocumentError as error:
                self._outgoing.fail_document(document, error.failure)
                return False
        return True

    def _prompts_now(self) -> PromptBuilder:
        assert self._prompts is not None, "open_engine comes first"
        return self._prompts
