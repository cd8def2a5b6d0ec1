"""Documents that may have a row already: held back until Elasticsearch has been asked, so that none is computed twice.

    sift ──> held ──> thread: look-up, a thousand at a time ──> take_answers ──> done: complete
      └─> not suspected: go on at once                                      └─> not done: go on

The beginning of every assignment is suspected: up to the offset that earlier owners are known to have had in work, and
on, since their last moments are in no commit, until a thousand documents in a row had no row.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from consumers.source import Source
from pipeline.retry import TemporaryRefusal, Verdict
from pipeline.rows import RowBuilder
from pipeline.stored_rows import LOOK_UP_ROWS, StoredRow
from schemas.document import Document, RejectedDocument, SourcePosition
from schemas.errors import SinkError

logger = structlog.get_logger(__name__)

AnyDocument: TypeAlias = Document | RejectedDocument
# (index or None for the settings', _id) of each -> what is stored; waits where Elasticsearch is away. Raises SinkError
# where it will never answer, TemporaryRefusal where we are ending.
LookUp: TypeAlias = Callable[[Sequence[tuple[str | None, str]]], Sequence[StoredRow | None]]


@dataclass(slots=True)
class _Search:
    """How far one assignment's documents are looked up. The look-up's thread counts, the pipeline's reads."""

    until: int  # at least to there
    num_missing: int = 0  # in a row, beyond it

    @property
    def is_over(self) -> bool:
        return self.num_missing >= LOOK_UP_ROWS

    def count(self, offset: int, has_row: bool) -> None:
        """Of the documents in the order of their offsets."""
        self.num_missing = 0 if has_row or offset < self.until else self.num_missing + 1


class Redeliveries:
    """The pipeline's thread owns all but the look-up itself, which is a thread's of its own."""

    def __init__(self, source: Source, rows: RowBuilder, look_up: LookUp) -> None:
        self._source = source
        self._rows = rows
        self._look_up = look_up
        self._searches: dict[tuple[str, int, int], _Search] = {}  # by topic, partition and epoch
        self._held: dict[SourcePosition, AnyDocument] = {}  # in the order of arrival
        # Between the two threads.
        self._has_work = threading.Condition()
        self._asked: deque[AnyDocument] = deque()
        self._closing = False
        self._answered: deque[tuple[AnyDocument, Verdict | None]] = deque()  # None: there is no row
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Documents that are held."""
        return len(self._held)

    def check(self) -> None:
        """Raises what ended the look-up's thread, unless that is the sink's to say: what is held would never go on."""
        if self._error is not None:
            raise self._error

    def sift(self, documents: Sequence[AnyDocument]) -> list[AnyDocument]:
        """Those that nobody can have worked on before; the others are held."""
        fresh: list[AnyDocument] = []
        held: list[AnyDocument] = []
        for document in documents:
            (held if self._is_suspected(document.position) else fresh).append(document)
        if held:
            self._held.update((document.position, document) for document in held)
            with self._has_work:
                self._asked.extend(held)
                self._has_work.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pagemill-look-up", daemon=True)
                self._thread.start()
        return fresh

    def take_answers(self) -> tuple[list[AnyDocument], list[tuple[SourcePosition, Verdict]]]:
        """Documents to compute, and positions that are done: by their own record, or superseded by a later one's."""
        to_compute: list[AnyDocument] = []
        done: list[tuple[SourcePosition, Verdict]] = []
        while self._answered:
            document, verdict = self._answered.popleft()
            position = document.position
            if self._held.pop(position, None) is None:
                continue  # handed back meanwhile
            if verdict is None:
                to_compute.append(document)
            else:
                done.append((position, verdict))
        return to_compute, done

    def drop_what_is_not_ours(self) -> list[SourcePosition]:
        """Documents of partitions that went elsewhere; says which."""
        stale = [position for position in self._held if not self._source.is_current(position)]
        for position in stale:
            del self._held[position]
        gone = [one for one in self._searches if not self._source.is_current(SourcePosition(one[0], one[1], 0, one[2]))]
        for assignment in gone:
            del self._searches[assignment]
        return stale

    def give_up(self) -> list[SourcePosition]:
        """Drops all that is held; says which documents that were."""
        dropped = list(self._held)
        self._held.clear()
        with self._has_work:
            self._asked.clear()
        return dropped

    def close(self) -> None:
        """Ends the thread, once the look-up that is under way has ended. Idempotent."""
        with self._has_work:
            self._closing = True
            self._has_work.notify()
        if self._thread is not None:
            self._thread.join(5.0)

    def _is_suspected(self, position: SourcePosition) -> bool:
        search = self._search_of(position)
        if search is None:
            key = (position.topic, position.partition, position.epoch)
            search = self._searches[key] = _Search(self._source.started_before(position))
        return not search.is_over

    # The look-up's thread.

    def _run(self) -> None:
        try:
            self._look_up_all()
        except (SinkError, TemporaryRefusal):
            return  # the sink has stopped and says why, or we are ending: what is held is handed back
        except Exception as error:  # a bug, or a reply that is none
            self._error = error

    def _look_up_all(self) -> None:
        """Until the end. Raises what the look-up raises."""
        while True:
            with self._has_work:
                self._has_work.wait_for(lambda: self._asked or self._closing)
                if self._closing:
                    return
                documents = self._next_asked()
            addresses = [self._rows.address(document) for document in documents]
            found = self._look_up([(index, row_id) for index, row_id, _ in addresses]) if documents else []
            num_done = 0
            for document, (_, _, version), row in zip(documents, addresses, found, strict=True):
                verdict = None
                if row is not None and row.version >= version:
                    is_ours = row.version == version and row.comes_from(document.source)  # a replay's is higher
                    verdict = Verdict.ALREADY_DONE if is_ours else Verdict.SUPERSEDED
                    num_done += 1
                if (search := self._search_of(document.position)) is not None:
                    search.count(document.position.offset, verdict is not None)
                self._answered.append((document, verdict))
            if num_done:
                logger.info("found done before", documents=num_done, looked_up=len(documents))

    def _next_asked(self) -> list[AnyDocument]:
        """The next to look up. On the way the others are answered: their searches have ended since they were asked."""
        documents: list[AnyDocument] = []
        while self._asked and len(documents) < LOOK_UP_ROWS:
            document = self._asked.popleft()
            search = self._search_of(document.position)
            if search is not None and search.is_over:
                self._answered.append((document, None))
            else:
                documents.append(document)
        return documents

    def _search_of(self, position: SourcePosition) -> _Search | None:
        """None: its assignment is gone, and so is the document."""
        topic, partition, _, epoch = position
        return self._searches.get((topic, partition, epoch))
