"""Documents that workers died over. They wait apart, and run in groups with nothing else in the engine.

    Kafka: lost 1 2 3 4, halves  ──>  1 2 | 3 4 | others      three groups; each runs once the one before has ended
    noted: 1 2, answered
    noted: 3 4, the worker dies  ──>  Kafka: lost 3 4          its next owner begins with 3 | 4 | others
    noted: 3, the worker dies twice                            3 is convicted by its next owner

Who belongs together follows from the commits (consumers/offsets.py). That a group runs is noted there before it is even
tokenised, so that the search goes on over the deaths of workers as pipeline/suspects.py does over those of engines, and
costs as many: among n documents at most ceil(log2 n) + 1 once it has begun.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from consumers.source import Source
from pipeline.suspects import LOSSES_ALONE
from schemas.document import Assignment, Document, SourcePosition, Suspicion
from schemas.errors import Failure, FailureCode, Stage

Arrived: TypeAlias = tuple[Document, float]  # and when that was, in monotonic seconds


class Isolation:
    """`is_active`: nobody but the group that `next_group` gave may be in the engine. The pipeline's thread's."""

    def __init__(self, source: Source, max_documents: int) -> None:
        """A group has at most `max_documents`: what the engine runs at once."""
        self._source = source
        self._max_documents = max_documents
        self._groups: dict[tuple[Assignment, range], deque[Arrived]] = {}  # in the order of arrival
        self._is_noted = False  # that something runs apart

    def __len__(self) -> int:
        """Documents that wait."""
        return sum(len(group) for group in self._groups.values())

    @property
    def is_active(self) -> bool:
        return bool(self._groups) or self._is_noted

    def add(self, document: Document, suspicion: Suspicion, arrived: float) -> None:
        """It waits for its group's turn."""
        self._groups.setdefault((document.position.assignment, suspicion.group), deque()).append((document, arrived))

    def next_group(self) -> list[Arrived]:
        """Who runs now, once the engine is empty; that is noted in Kafka. Ends the isolation where nobody is left."""
        if not self._groups:
            self._source.isolate(())
            self._is_noted = False
            return []
        key, waiting = next(iter(self._groups.items()))
        group = [waiting.popleft() for _ in range(min(self._max_documents, len(waiting)))]
        if not waiting:
            del self._groups[key]
        self._is_noted = True
        self._source.isolate([document.position for document, _ in group])
        return group

    def drop_where(self, is_unwanted: Callable[[SourcePosition], bool]) -> list[SourcePosition]:
        """Drops documents that wait; says which."""
        dropped: list[SourcePosition] = []
        for key, waiting in list(self._groups.items()):
            dropped += [document.position for document, _ in waiting if is_unwanted(document.position)]
            kept = deque(one for one in waiting if not is_unwanted(one[0].position))
            if kept:
                self._groups[key] = kept
            else:
                del self._groups[key]
        return dropped


def conviction_over_workers(suspicion: Suspicion) -> Failure | None:
    """What the row and the dead letter of a document say that kills workers; None where that is not known enough."""
    if suspicion.losses_alone < LOSSES_ALONE:
        return None
    return Failure(
        FailureCode.ENGINE_LOST,
        Stage.ENGINE,
        f"{suspicion.num_crashes} workers in a row died with this document in flight, the last "
        f"{suspicion.losses_alone} while their engines had this document and nothing else; other documents went on",
    )
