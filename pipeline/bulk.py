"""One bulk call: rows as bytes, a verdict each, halves where a call is refused as a whole. No waiting, no threads."""

import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import orjson
from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch

from pipeline.retry import (
    Judgement,
    NodeUnavailable,
    TemporaryRefusal,
    Verdict,
    judge_call,
    judge_row,
    refusal,
    shortened,
    why_stop,
)
from pipeline.stored_rows import look_up
from schemas.document import DocumentResult, SourcePosition
from schemas.errors import Failure, FailureCode, SinkError, Stage

MIN_BULK_BYTES = 64 * 2**10
GROWTH_STEPS = 16  # good calls from nothing to the full size
_MAX_VERSION = 2**63 - 1
_REPLY_PARTS = "errors,items.*.status,items.*.error.type,items.*.error.reason"
_FREE_FORM_LOSS = "metadata or output that no JSON for Elasticsearch can hold"


@dataclass(frozen=True, slots=True)
class OutboundRow:
    """A row on its way: serialised once, here, and sent as these bytes however often."""

    row: DocumentResult
    position: SourcePosition
    index: str
    row_id: str
    version: int
    body: bytes  # action line and source line
    put_at: float  # monotonic seconds


class RowUnencodable(Exception):
    """This row cannot be written down; the sentence says why. It concerns no other row."""


def encode_row(row: DocumentResult, index: str, row_id: str, version: int) -> bytes:
    """The two lines of a bulk call. Raises RowUnencodable for what Elasticsearch would refuse the whole bulk for."""
    if not 0 <= version <= _MAX_VERSION:
        raise RowUnencodable(f"the version {version} is outside 0 to 2^63 - 1")
    action = {"index": {"_index": index, "_id": row_id, "version": version, "version_type": "external"}}
    try:
        return orjson.dumps(action) + b"\n" + _encode_source(row) + b"\n"
    except (orjson.JSONEncodeError, UnicodeEncodeError, ValueError, RecursionError) as error:
        raise RowUnencodable(f"{_FREE_FORM_LOSS}: {type(error).__name__}: {str(error)[:200]}") from None


def _encode_source(row: DocumentResult) -> bytes:
    try:
        return orjson.dumps(row)
    except orjson.JSONEncodeError:  # a lone surrogate, an integer past 64 bits, more than 254 levels: rare, slow, legal
        return json.dumps(_storable(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _storable(value: Any) -> Any:
    """The same value in plain JSON types: lone surrogates written as \\udxxx, NaN and infinity as null."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(_storable(key)): _storable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(member) for member in value]
    if dataclasses.is_dataclass(value):
        return {part.name: _storable(getattr(value, part.name)) for part in dataclasses.fields(value)}
    return value


@dataclass(slots=True)
class BulkOutcome:
    """What became of the rows of one call. A row is in exactly one of the lists."""

    stored: list[OutboundRow] = field(default_factory=list)
    already_done: list[OutboundRow] = field(default_factory=list)
    superseded: list[OutboundRow] = field(default_factory=list)
    rejected: list[tuple[OutboundRow, Failure]] = field(default_factory=list)
    refused: list[OutboundRow] = field(default_factory=list)  # for now: to be sent again
    cause: TemporaryRefusal | None = None  # the first refusal
    num_calls: int = 0
    num_bytes: int = 0

    @property
    def num_settled(self) -> int:
        return len(self.stored) + len(self.already_done) + len(self.superseded) + len(self.rejected)

    def refusal(self) -> TemporaryRefusal:
        """Why rows were refused, as the exception that is waited out."""
        assert self.cause is not None, "nothing was refused"
        self.cause.progressed = self.num_settled > 0
        return self.cause

    def refuse(self, rows: Sequence[OutboundRow], cause: TemporaryRefusal) -> None:
        self.refused.extend(rows)
        self.cause = self.cause or cause

    def reject(self, row: OutboundRow, why: str) -> None:
        self.rejected.append((row, Failure(FailureCode.SINK_REJECTED, Stage.SINK, why)))


class BulkSize:
    """How much a call may hold: halved when Elasticsearch has too much to do, grown step by step while it has not."""

    def __init__(self, max_documents: int, max_bytes: int) -> None:
        self._max_documents = max_documents
        self._max_bytes = max_bytes
        self._bytes_ceiling = max_bytes  # lowered for good by a 413: the node's limit does not change by itself
        self._lock = threading.Lock()
        self.documents = max_documents
        self.bytes = max_bytes

    def take(self, rows: Sequence[OutboundRow]) -> int:
        """How many of the first rows make one call; at least 1, however large it is."""
        with self._lock:
            max_documents, max_bytes = self.documents, self.bytes
        num_bytes = 0
        for index, row in enumerate(rows[:max_documents]):
            num_bytes += len(row.body)
            if num_bytes > max_bytes and index:
                return index
        return min(len(rows), max_documents)

    def shrink(self) -> None:
        with self._lock:
            self.documents = max(1, self.documents // 2)
            self.bytes = max(min(MIN_BULK_BYTES, self._bytes_ceiling), self.bytes // 2)

    def grow(self) -> None:
        with self._lock:
            self.documents = min(self._max_documents, self.documents + max(1, self._max_documents // GROWTH_STEPS))
            self.bytes = min(self._bytes_ceiling, self.bytes + max(1, self._max_bytes // GROWTH_STEPS))

    def too_large(self, num_bytes: int) -> None:
        """A body of that size got 413."""
        with self._lock:
            self._bytes_ceiling = max(1, min(self._bytes_ceiling, num_bytes // 2))
            self.bytes = min(self.bytes, self._bytes_ceiling)


class BulkWriter:
    """Sends rows and judges each."""

    def __init__(self, client: Elasticsearch, size: BulkSize, request_timeout_seconds: float) -> None:
        # The node gives up on a shard that is away before we give up on the node.
        self._client = client
        self._size = size
        self._timeout = f"{max(1, int(request_timeout_seconds / 2))}s"

    def write(self, rows: Sequence[OutboundRow]) -> BulkOutcome:
        """One call for all rows, or several where it is refused as a whole. Raises SinkError where none can succeed."""
        outcome = BulkOutcome()
        conflicts: list[OutboundRow] = []
        self._send(list(rows), outcome, conflicts)
        if conflicts:
            self._tell_conflicts_apart(conflicts, outcome)
        return outcome

    def _send(self, rows: list[OutboundRow], outcome: BulkOutcome, conflicts: list[OutboundRow]) -> None:
        num_bytes = sum(len(row.body) for row in rows)
        outcome.num_calls += 1
        outcome.num_bytes += num_bytes
        try:
            reply = self._client.bulk(
                operations=cast(
                    Any, [row.body for row in rows]
                ),  # bytes pass through the client's serialiser as they are
                require_alias=True,
                timeout=self._timeout,
                filter_path=_REPLY_PARTS,
            ).body
        except (ApiError, TransportError) as error:
            self._judge_call(judge_call(error), rows, num_bytes, outcome, conflicts)
            return
        self._judge_rows(reply, rows, outcome, conflicts)

    def _judge_call(
        self,
        judgement: Judgement,
        rows: list[OutboundRow],
        num_bytes: int,
        outcome: BulkOutcome,
        conflicts: list[OutboundRow],
    ) -> None:
        if judgement.verdict is Verdict.STOP:
            raise SinkError(why_stop(judgement, rows[0].index))
        if judgement.verdict is Verdict.RETRY:
            outcome.refuse(rows, refusal(judgement))
            return
        assert judgement.verdict is Verdict.SPLIT, f"a call has no verdict {judgement.verdict}"
        if judgement.status == 413:
            self._size.too_large(num_bytes)
        if len(rows) == 1:
            outcome.reject(rows[0], _why_rejected(judgement, rows[0]))
            return
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            if outcome.cause is not None:  # refused meanwhile: no use in sending more now
                outcome.refuse(half, outcome.cause)
            else:
                self._send(half, outcome, conflicts)

    def _judge_rows(
        self, reply: dict[str, Any], rows: list[OutboundRow], outcome: BulkOutcome, conflicts: list[OutboundRow]
    ) -> None:
        entries = reply.get("items", [])
        if len(entries) != len(rows):
            outcome.refuse(rows, NodeUnavailable(f"a reply about {len(entries)} of {len(rows)} rows"))
            return
        if not reply.get("errors"):
            outcome.stored.extend(rows)
            return
        for row, entry in zip(rows, entries, strict=True):
            result = entry["index"]
            error = result.get("error") or {}
            judgement = judge_row(result["status"], error.get("type", ""), error.get("reason", ""))
            match judgement.verdict:
                case Verdict.STORED:
                    outcome.stored.append(row)
                case Verdict.CONFLICT:
                    conflicts.append(row)
                case Verdict.RETRY:
                    outcome.refuse([row], refusal(judgement))
                case Verdict.STOP:
                    raise SinkError(why_stop(judgement, row.index))
                case _:
                    outcome.reject(row, _why_rejected(judgement, row))

    def _tell_conflicts_apart(self, rows: list[OutboundRow], outcome: BulkOutcome) -> None:
        """A 409 says that an equal or higher version is there. From our own record: done; from another: superseded."""
        try:
            found = look_up(self._client, [(row.index, row.row_id) for row in rows])
        except TemporaryRefusal as error:
            outcome.refuse(rows, error)
            return
        for row, stored in zip(rows, found, strict=True):
            if stored is None or stored.version < row.version:  # deleted since, or not to be had now
                outcome.refuse([row], NodeUnavailable("409: a conflicting version that is not there"))
            elif stored.comes_from(row.position):
                outcome.already_done.append(row)
            else:
                outcome.superseded.append(row)


def _why_rejected(judgement: Judgement, row: OutboundRow) -> str:
    if judgement.status == 413:
        return f"the row of {len(row.body)} bytes is larger than Elasticsearch accepts (its http.max_content_length)"
    return f"Elasticsearch rejects the row: {shortened(str(judgement))}"
