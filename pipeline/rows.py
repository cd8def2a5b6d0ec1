"""Makes rows: what the flow knows about a document, and the engine's output, as the sink takes it."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from typing import TypeAlias

from pipeline.prompts import CompiledTask, PreparedDocument
from pipeline.results import (
    Answer,
    AnswerReader,
    WorkerIdentity,
    build_answer,
    build_failure_row,
    packed_prompt,
    row_id,
    version_of,
)
from schemas.document import Document, DocumentResult, Receipt, RejectedDocument, SourcePosition
from schemas.errors import Failure
from schemas.inference import InferenceOutput

# A row as ElasticsearchSink.put_many takes it: the row, its version, its place, the task's own index.
Row: TypeAlias = tuple[DocumentResult, int, SourcePosition, str | None]


class Work:
    """One document between its preparation and its row. Times are monotonic seconds."""

    __slots__ = ("arrived", "prepared", "submitted", "tries")

    def __init__(self, prepared: PreparedDocument, arrived: float) -> None:
        self.prepared = prepared
        self.arrived = arrived
        self.submitted = 0.0
        self.tries = 0  # outputs so far


class RowBuilder:
    """Rows of one worker. `weights` is the started engine's fingerprint of them, for receipts."""

    def __init__(
        self, tasks: Mapping[str, CompiledTask], made_by: WorkerIdentity, tokenizer_fingerprint: str, receipts: bool
    ) -> None:
        """Raises SettingsError where a task's output_schema is no JSON Schema."""
        self.weights = ""
        self._made_by = made_by
        self._tasks = tasks
        self._readers = {name: AnswerReader(name, task.task) for name, task in tasks.items()}
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._receipts = receipts
        self._engine_version = version("pagemill")

    def read(self, work: Work, output: InferenceOutput) -> Answer:
        """The output as the document's task wants it."""
        return self._readers[work.prepared.task.name].read(output)

    def answer_row(self, work: Work, answer: Answer, output: InferenceOutput, now: float, answered_at: datetime) -> Row:
        """The row of an output, answered or failed."""
        prepared = work.prepared
        document, task = prepared.document, prepared.task.task
        result = build_answer(
            document,
            answer,
            output,
            self._made_by,
            task.kind,
            document.attempt + work.tries,
            answered_at,
            wait_ms=_milliseconds(work.submitted - work.arrived),
            total_ms=_milliseconds(now - work.arrived),
            truncated=prepared.truncated,
            receipt=self._receipt(prepared) if self._receipts else None,
        )
        return result, version_of(document), document.position, task.index

    def failure_row(
        self, document: Document | RejectedDocument, failure: Failure, answered_at: datetime, tries: int = 1
    ) -> Row:
        """The row of a document without an output."""
        task = self._tasks.get(document.identity.task)
        result = build_failure_row(
            document,
            failure,
            self._made_by,
            kind=task.task.kind if task is not None else "generate",
            attempts=document.attempt + tries,
            answered_at=answered_at,
        )
        return result, version_of(document), document.position, task.task.index if task is not None else None

    def address(self, document: Document | RejectedDocument) -> tuple[str | None, str, int]:
        """Where the document's row is or will be: the task's own index, the row's `_id`, its version."""
        task = self._tasks.get(document.identity.task)
        return task.task.index if task is not None else None, row_id(document.identity), version_of(document)

    def _receipt(self, prepared: PreparedDocument) -> Receipt:
        task = prepared.task
        return Receipt(
            self.weights,
            self._tokenizer_fingerprint,
            task.fingerprint,
            # asdict takes longer than all the rest of a row; most documents have the task's own sampling.
            task.plain_sampling if prepared.sampling is task.sampling else asdict(prepared.sampling),
            prepared.seed,
            self._engine_version,
            packed_prompt(prepared.token_ids),
        )


def _milliseconds(seconds: float) -> float:
    """With three digits behind the point; to round to those takes twice as long as to whole microseconds."""
    return round(1e6 * seconds) / 1000
