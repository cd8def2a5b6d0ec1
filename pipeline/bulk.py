"""One bulk call: rows as bytes, a verdict each, halves where a call is refused as a whole. No waiting, no threads."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
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

_MAX_VERSION = 2**63 - 1
_REPLY_PARTS = "errors,items.*.status,items.*.error.type,items.*.error.reason"
_FREE_FORM_LOSS = "metadata or output that no JSON for Elasticsearch can hold"


@dataclass(slots=True)
class OutboundRow:
    """A row on its way: serialised once, here, and sent as these bytes however often. Not frozen: that takes longer."""

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
        return orjson.dumps(action, option=orjson.OPT_APPEND_NEWLINE) + _encode_source(row)
    except (orjson.JSONEncodeError, UnicodeEncodeError, ValueError, RecursionError) as error:
        raise RowUnencodable(f"{_FREE_FORM_LOSS}: {type(error).__name__}: {str(error)[:200]}") from None


def _encode_source(row: DocumentResult) -> bytes:
    """Its line, the end of it included."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:  # a lone surrogate, an integer past 64 bits, more than 254 levels: rare, slow, legal
        text = json.dumps(_storable(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return f"{text}\n".encode()


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
    """What became of the rows of one call. A row is in exactly one of the lists; at the end none is in the last two."""

    stored: list[OutboundRow] = field(default_factory=list)
    already_done: list[OutboundRow] = field(default_factory=list)
    superseded: list[OutboundRow] = field(default_factory=list)
    rejected: list[tuple[OutboundRow, Failure]] = field(default_factory=list)
    refused: list[OutboundRow] = field(default_factory=list)  # for now: to be sent again
    conflicts: list[OutboundRow] = field(default_factory=list)
    misfits: list[tuple[OutboundRow, Judgement]] = field(default_factory=list)
    cause: TemporaryRefusal | None = None  # the first refusal
    num_calls: int = 0
    num_bytes: int = 0
    too_large_bytes: int = 0  # the smallest body that got 413; 0: none did

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


class BulkWriter:
    """Sends rows and judges each. Any thread may use it.

    `check_index(alias)` raises SinkError where the index behind it is not one for our rows, and TemporaryRefusal where
    that cannot be told now: asked where rows do not fit the index, which is the row's fault or the index's.
    """

    def __init__(
        self, client: Elasticsearch, request_timeout_seconds: float, check_index: Callable[[str], None]
    ) -> None:
        # The node gives up on a shard that is away before we give up on the node.
        self._client = client
        self._check_index = check_index
        self._timeout = f"{max(1, int(request_timeout_seconds / 2))}s"

    def write(self, rows: Sequence[OutboundRow]) -> BulkOutcome:
        """One call for all rows, or several where it is refused as a whole. Raises SinkError where none can succeed."""
        outcome = BulkOutcome()
        self._send(list(rows), outcome)
        if outcome.conflicts:
            self._tell_conflicts_apart(outcome)
        if outcome.misfits:
            self._tell_misfits_apart(outcome)
        return outcome

    def _send(self, rows: list[OutboundRow], outcome: BulkOutcome) -> None:
        num_bytes = sum(len(row.body) for row in rows)
        outcome.num_calls += 1
        outcome.num_bytes += num_bytes
        try:
            reply = self._client.bulk(
                operations=cast(Any, b"".join([row.body for row in rows])),  # connection.PreparedLines leaves it alone
                require_alias=True,
                timeout=self._timeout,
                filter_path=_REPLY_PARTS,
            ).body
        except (ApiError, TransportError) as error:
            self._judge_call(judge_call(error), rows, num_bytes, outcome)
            return
        self._judge_rows(reply, rows, outcome)

    def _judge_call(self, judgement: Judgement, rows: list[OutboundRow], num_bytes: int, outcome: BulkOutcome) -> None:
        if judgement.verdict is Verdict.STOP:
            raise SinkError(why_stop(judgement, rows[0].index))
        if judgement.verdict is Verdict.RETRY:
            outcome.refuse(rows, refusal(judgement))
            return
        assert judgement.verdict is Verdict.SPLIT, f"a call has no verdict {judgement.verdict}"
        if judgement.status == 413:
            outcome.too_large_bytes = min(outcome.too_large_bytes or num_bytes, num_bytes)
        if len(rows) == 1:
            outcome.reject(rows[0], _why_rejected(judgement, rows[0]))
            return
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            if outcome.cause is not None:  # refused meanwhile: no use in sending more now
                outcome.refuse(half, outcome.cause)
            else:
                self._send(half, outcome)

    def _judge_rows(self, reply: dict[str, Any], rows: list[OutboundRow], outcome: BulkOutcome) -> None:
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
                    outcome.conflicts.append(row)
                case Verdict.RETRY:
                    outcome.refuse([row], refusal(judgement))
                case Verdict.STOP:
                    raise SinkError(why_stop(judgement, row.index))
                case Verdict.MISFIT:
                    outcome.misfits.append((row, judgement))
                case _:
                    outcome.reject(row, _why_rejected(judgement, row))

    def _tell_conflicts_apart(self, outcome: BulkOutcome) -> None:
        """A 409 says that an equal or higher version is there. From our own record: done; from another: superseded,
        and so is the record's own where a replay of it, which has a higher attempt, is there."""
        rows, outcome.conflicts = outcome.conflicts, []
        try:
            found = look_up(self._client, [(row.index, row.row_id) for row in rows])
        except TemporaryRefusal as error:
            outcome.refuse(rows, error)
            return
        for row, stored in zip(rows, found, strict=True):
            if stored is None or stored.version < row.version:  # deleted since, or not to be had now
                outcome.refuse([row], NodeUnavailable("409: a conflicting version that is not there"))
            elif stored.version == row.version and stored.comes_from(row.row.source):
                outcome.already_done.append(row)
            else:
                outcome.superseded.append(row)

    def _tell_misfits_apart(self, outcome: BulkOutcome) -> None:
        """Our rows fit our mapping. Where one does not, the index may have another by now: then no row is to blame."""
        misfits, outcome.misfits = outcome.misfits, []
        try:
            for alias in sorted({row.index for row, _ in misfits}):
                self._check_index(alias)
        except TemporaryRefusal as error:
            outcome.refuse([row for row, _ in misfits], error)
            return
        for row, judgement in misfits:
            outcome.reject(row, _why_rejected(judgement, row))


def _why_rejected(judgement: Judgement, row: OutboundRow) -> str:
    if judgement.status == 413:
        return f"the row of {len(row.body)} bytes is larger than Elasticsearch accepts (its http.max_content_length)"
    return f"Elasticsearch rejects the row: {shortened(str(judgement))}"
