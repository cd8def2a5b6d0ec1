"""Where documents come from: the face that the flow sees, and a source from memory for files and tests."""

from collections.abc import Callable, Sequence
from typing import Protocol

from schemas.document import Document, RejectedDocument, SourcePosition
from schemas.errors import Failure


class Source(Protocol):
    """Documents in, completions back. Every method may be called from any thread; `poll` from one only.

    A document is in flight from `poll`'s inbox until `complete`; the source bounds what is in flight by itself,
    in documents and bytes, and goes on polling its broker meanwhile.
    """

    def start(self) -> None:
        """Connects and subscribes. Raises SourceError where the broker is unreachable or refuses us."""

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        """What has arrived, at most that many; an empty list after the timeout. Raises SourceError when the source died."""

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        """Sends the raw message to the dead-letter topic; `then` is called, from the sender's thread, once it is acknowledged.

        A position whose assignment is gone is dropped, and `then` is not called: its next owner does all of it again.
        """

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        """These documents' rows are stored (or superseded): their offsets may be committed, in order."""

    def is_current(self, position: SourcePosition) -> bool:
        """Whether the position's assignment is still ours; work for others may be skipped."""

    @property
    def has_assignment(self) -> bool:
        """Whether the group has given us our partitions (possibly none of them)."""

    @property
    def num_in_flight(self) -> int: ...

    def is_drained(self) -> bool:
        """Every assigned partition was read to the end that it had when last looked at, and nothing is in flight."""

    def drain(self) -> None:
        """Stops handing out documents; what is in flight may complete."""

    def close(self) -> None:
        """Commits what is complete, leaves the group, joins the threads. Idempotent."""
