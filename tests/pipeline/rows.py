"""Rows for the sink's tests."""

from datetime import UTC, datetime
from typing import Any

from schemas.document import DocumentResult, ResultSource, SourcePosition

ANSWERED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def position(offset: int, partition: int = 0, epoch: int = 1) -> SourcePosition:
    return SourcePosition("documents", partition, offset, epoch)


def row(offset: int, *, document_id: str | None = None, partition: int = 0, **parts: Any) -> DocumentResult:
    """An answered row of the document at that offset; `parts` are DocumentResult's."""
    given = {"job": "job", "task": "task", "text": f"answer {offset}", "status": "answered", "attempts": 1}
    return DocumentResult(
        id=f"document-{offset}" if document_id is None else document_id,
        kind="generate",
        model="tiny",
        source=ResultSource("documents", partition, offset, 1_700_000_000_000, None),
        worker="worker-1",
        **{**given, "answered_at": ANSWERED_AT, **parts},
    )
