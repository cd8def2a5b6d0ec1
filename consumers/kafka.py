"""Documents from Kafka: a thread that reads, decodes and commits, an inbox, and completions on their way back.

Knows nothing of what a document is for. The pipeline's threads only touch the two hand-overs (the inbox, and the
lists of completed positions); everything else belongs to the Kafka thread.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from consumers.dead_letter import DeadLetter, DeadLetterWriter
from consumers.decode import decode_document
from consumers.group_member import GroupMember
from consumers.offsets import OffsetTracker
from consumers.outage import OutageWatch
from consumers.topics import ensure_topics
from schemas.document import Assignment, Document, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import Failure, SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

MAX_RECORDS_PER_READ = 1000
# Between two reads that found nothing: doubling from the first to the second. The wait is ours and not the client's,
# which asks again at once where a server answers "nothing" without waiting, as the embedded one does.
_FIRST_IDLE_SECONDS, _IDLE_SECONDS = 0.002, 0.1
_WITHHELD_SECONDS = 0.01  # the longest of them while documents wait for the broker's answer
_HELD_READ_SECONDS = 0.05  # at most, between two reads while paused: they are only a sign of life
_RESUME_BELOW = 0.9  # of the high marks: the first bulk that is stored makes room, and not the second
_END_LOOKUP_SECONDS = 0.25
_NOTE_SECONDS = 5.0  # for the broker to take down what runs alone
_CLOSE_SECONDS = 5.0  # for each of: the last dead letters, the last commit, leaving the group


class KafkaSource:
    """A Source (consumers/source.py) over one membership of a consumer group."""

    def __init__(self, settings: KafkaSettings, worker: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._tracker = OffsetTracker()
        self._member = GroupMember(settings, self._tracker, self._apply_completions, clock)
        self._outage = OutageWatch(settings, clock)
        self._dead_letters = DeadLetterWriter(
            settings, worker or settings.client_id, self._tracker.is_current, self._fail
        )
        self._thread = threading.Thread(target=self._run, name="pagemill-kafka", daemon=True)
        self._closing = threading.Event()
        self._close_lock = threading.Lock()

        self._arrived = threading.Condition()  # guards the inbox, the failure, and whether we are draining
        self._inbox: deque[Document | RejectedDocument] = deque()
        self._failure: SourceError | None = None
        self._draining = False
        self._to_isolate: Sequence[SourcePosition] | None = None  # to be noted; None: the broker knows
        # Appended by any thread, taken by ours; and the other way round.
        self._completions: deque[Sequence[SourcePosition]] = deque()
        self._has_completions = threading.Event()
        self._handed_back: deque[Sequence[SourcePosition]] = deque()
        self._skipped: deque[Counter[Assignment]] = deque()
        self._undecoded: Sequence[RawMessage] = ()  # ours: just read, and in flight already
        self._withheld: list[Document | RejectedDocument] = []  # ours: until the broker knows that they have begun

        self._has_assignment = False
        self._holds = False
        self._idle_seconds = _FIRST_IDLE_SECONDS
        self._record_bytes = float(settings.max_document_bytes)  # of the messages of late; until then the most
        self._is_at_end = False
        self._end_wanted = False
        self._end_looked_up_at = clock()

    # --- the face: any thread ---

    def start(self) -> None:
        """Connects, checks the topics (the dead-letter topic is made where it is missing), joins the group."""
        reachable = ensure_topics(self._settings, wait_seconds=self._settings.connect_timeout_seconds)
        self._dead_letters.start(reachable)
        try:
            self._member.connect(reachable)
        except SourceError:
            self._dead_letters.close(0.0)
            raise
        self._thread.start()

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        with self._arrived:
            if not self._inbox and self._failure is None:
                self._arrived.wait_for(lambda: self._inbox or self._failure is not None, timeout_seconds)
            if self._failure is not None:
                raise SourceError(str(self._failure)) from self._failure
            if self._draining:
                return []
            taken = [self._inbox.popleft() for _ in range(min(max_documents, len(self._inbox)))]
        return [document for document in taken if self._tracker.is_current(document.position)]

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        raw = self._tracker.raw(position)
        if raw is not None:
            self._dead_letters.put(DeadLetter(raw, job, failure, then))

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        self._completions.append(positions)
        self._has_completions.set()

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        self._handed_back.append(positions)

    def take_skipped(self) -> Counter[Assignment]:
        skipped: Counter[Assignment] = Counter()
        while self._skipped:
            skipped += self._skipped.popleft()
        return skipped

    def started_before(self, position: SourcePosition) -> int:
        return self._tracker.started_before(position)

    def isolate(self, positions: Sequence[SourcePosition]) -> None:
        with self._arrived:
            self._to_isolate = positions
            self._has_completions.set()
            ends = self._arrived.wait_for(lambda: self._to_isolate is None or self._failure is not None, _NOTE_SECONDS)
        if not ends:
            extra = {"documents": len(positions), "seconds": _NOTE_SECONDS}
            logger.warning("what runs alone is not noted in Kafka yet: would it end us, nobody would know", extra=extra)

    def expect_no_clean_end(self) -> None:
        self._member.ends_cleanly = False

    def is_current(self, position: SourcePosition) -> bool:
        return self._tracker.is_current(position)

    @property
    def has_assignment(self) -> bool:
        return self._has_assignment

    @property
    def num_in_flight(self) -> int:
        return self._tracker.num_in_flight

    @property
    def num_handed_out(self) -> int:
        with self._arrived:
            waiting = [document.position for document in (*self._undecoded, *self._inbox, *self._withheld)]
        returned = [one for positions in (*self._completions, *self._handed_back) for one in positions]
        is_current = self._tracker.is_current
        return self._tracker.num_in_flight - sum(map(is_current, waiting)) - sum(map(is_current, returned))

    @property
    def num_bytes_in_flight(self) -> int:
        return self._tracker.num_bytes

    @property
    def is_paused(self) -> bool:
        """Whether a high mark has stopped reading."""
        return self._holds

    def is_drained(self) -> bool:
        self._end_wanted = True
        return self._is_at_end and self._tracker.num_in_flight == 0

    def drain(self) -> None:
        with self._arrived:
            self._draining = True

    def close(self) -> None:
        with self._close_lock:
            self._dead_letters.close(_CLOSE_SECONDS)
            self._closing.set()
            if self._thread.ident is not None:
                self._thread.join(4 * _CLOSE_SECONDS)

    # --- the Kafka thread ---

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._apply_completions()
                if self._failure is not None:
                    self._closing.wait(_HELD_READ_SECONDS)  # what is in flight may still complete, and be committed
                    continue
                try:
                    self._step()
                except SourceError as error:
                    self._fail(error)
                except Exception as error:
                    logger.exception("the Kafka thread failed")
                    self._fail(SourceError(f"reading from Kafka failed unexpectedly: {error!r}"))
            self._apply_completions()
        finally:
            self._member.close(_CLOSE_SECONDS)
            self._has_assignment = False

    def _step(self) -> None:
        self._hold_or_resume()
        raws = self._member.read(1 if self._holds else self._room(), 0.0)
        if raws:
            self._idle_seconds = _FIRST_IDLE_SECONDS
            self._is_at_end = False
            num_bytes = self._tracker.num_bytes
            self._undecoded = in_flight = self._tracker.start(raws)
            if len(in_flight) < len(raws):
                self._count_skipped(raws, in_flight)
            if in_flight:
                mean_bytes = (self._tracker.num_bytes - num_bytes) / len(in_flight)
                self._record_bytes = max(1.0, mean_bytes, 0.8 * self._record_bytes)  # up at once, down slowly
            limit = self._settings.max_document_bytes
            decoded = [
                decode_document(raw, limit) for raw in in_flight
            ]  # of 1,000 large and strange messages: a minute
            if self._tracker.suspects_some:
                decoded = [self._with_suspicion(document) for document in decoded]
            with self._arrived:
                self._undecoded, self._withheld = (), self._withheld + decoded
        self._commit()
        self._hand_over()
        self._outage.look(self._member.silent_seconds)
        self._has_assignment = self._member.is_stable and not self._outage.is_away
        self._look_for_the_end()
        self._hand_back_if_draining()
        if self._holds:
            self._has_completions.wait(_HELD_READ_SECONDS)  # and not in the client: what completes makes room at once
        elif not raws:
            self._closing.wait(self._idle_seconds)
            self._idle_seconds = min(2 * self._idle_seconds, _WITHHELD_SECONDS if self._withheld else _IDLE_SECONDS)

    def _commit(self) -> None:
        to_isolate = self._to_isolate
        if to_isolate is not None:
            self._tracker.isolate(to_isolate)
            self._idle_seconds = _FIRST_IDLE_SECONDS  # somebody waits for the broker's answer
        self._member.commit_if_due()
        if to_isolate is not None and self._tracker.is_announced:
            with self._arrived:
                if self._to_isolate is to_isolate:
                    self._to_isolate = None
                    self._arrived.notify_all()

    def _with_suspicion(self, document: Document | RejectedDocument) -> Document | RejectedDocument:
        if isinstance(document, Document) and (suspicion := self._tracker.suspicion(document.position)) is not None:
            return document._replace(suspicion=suspicion)
        return document

    def _room(self) -> int:
        """How many records fit under both high marks, at their size of late; at least one."""
        settings, tracker = self._settings, self._tracker
        by_count = settings.max_in_flight_documents - tracker.num_in_flight
        by_size = int((settings.max_in_flight_bytes - tracker.num_bytes) / self._record_bytes)
        return max(1, min(MAX_RECORDS_PER_READ, by_count, by_size))

    def _hold_or_resume(self) -> None:
        settings, tracker = self._settings, self._tracker
        fill = max(
            tracker.num_in_flight / settings.max_in_flight_documents,
            tracker.num_bytes / settings.max_in_flight_bytes,
        )
        if self._draining or fill >= 1.0:
            self._holds = True
        elif fill <= _RESUME_BELOW:
            self._holds = False
        self._member.hold(self._holds)

    def _hand_over(self) -> None:
        if not self._withheld:
            return
        with self._arrived:
            withheld, self._withheld = self._withheld, []
            for document in withheld:
                if self._tracker.may_begin(document.position):
                    self._inbox.append(document)
                elif self._tracker.is_current(document.position):
                    self._withheld.append(document)
            self._arrived.notify()

    def _count_skipped(self, raws: list[RawMessage], in_flight: list[RawMessage]) -> None:
        skipped = Counter(raw.position.assignment for raw in raws)
        skipped.subtract(raw.position.assignment for raw in in_flight)
        self._skipped.append(+skipped)

    def _hand_back_if_draining(self) -> None:
        with self._arrived:
            if not self._draining or not (self._inbox or self._withheld):
                return
            untouched = [document.position for document in (*self._inbox, *self._withheld)]
            self._inbox.clear()
            self._withheld.clear()
        self._tracker.hand_back(untouched)

    def _apply_completions(self) -> None:
        self._has_completions.clear()  # first: what is appended from here on sets it again
        while self._completions:
            self._tracker.complete(self._completions.popleft())
        while self._handed_back:
            self._tracker.hand_back(self._handed_back.popleft())

    def _look_for_the_end(self) -> None:
        """Asks the broker where the partitions end, where somebody wants to know and nothing is in flight."""
        now = self._clock()
        idle = self._end_wanted and self._has_assignment and self._tracker.num_in_flight == 0
        if idle and not self._is_at_end and now - self._end_looked_up_at >= _END_LOOKUP_SECONDS:
            self._end_looked_up_at = now
            self._is_at_end = self._member.is_at_end()

    def _fail(self, error: SourceError) -> None:
        logger.error("the source stops reading", extra={"reason": str(error)})
        with self._arrived:
            self._failure = error
            self._arrived.notify_all()
