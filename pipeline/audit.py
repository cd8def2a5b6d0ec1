"""The account's proof from outside: reads the topic again and asks the index for every document's row.

Needs no worker and no memory of one: a document's `_id` and version follow from its message, so a stored version that
is equal or higher says that this delivery or a newer one has its row. Streams: what it holds does not grow.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from elasticsearch import Elasticsearch

from consumers.decode import decode_document
from consumers.log_reader import LogRange, LogReader, open_log_reader
from pipeline.connection import check_reachable, connect
from pipeline.results import row_id, version_of
from pipeline.retry import TemporaryRefusal, call_until_taken
from pipeline.stored_rows import LOOK_UP_ROWS, StoredRow, look_up
from schemas.document import Document, Identity, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import SinkError, SourceError
from schemas.settings import Settings, require_addresses

LOOK_UP_PATIENCE_SECONDS = 60.0  # for an Elasticsearch that does not answer now
NUM_NAMED = 20

Until: TypeAlias = Literal["committed", "end"]


FindingKind: TypeAlias = Literal["missing", "older", "overtaken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One message whose row is not as it must be. `stored` is None where there is no row."""

    kind: FindingKind
    position: SourcePosition
    document_id: str
    row_id: str
    version: int
    stored: StoredRow | None

    def __str__(self) -> str:
        said = f"{self.kind:<10} {self.position}: document {self.document_id!r}, _id {self.row_id!r}: "
        if self.stored is None:
            return f"{said}no row"
        found = f"the row is of {self.stored.topic}/{self.stored.partition}/{self.stored.offset}"
        return f"{said}{found}, version {self.stored.version}, and this message's is {self.version}"


@dataclass(slots=True)
class AuditReport:
    """Every message of the range and job is in exactly one of the four counts.

    messages = stored + superseded + missing + older
    """

    messages: int = 0
    stored: int = 0  # the row of this very delivery
    superseded: int = 0  # the row of a newer delivery or attempt
    missing: int = 0  # no row
    older: int = 0  # only a row of an older delivery: something newer was lost, or overwritten
    overtaken: int = 0  # among the superseded: by a record before it in its partition, with a later timestamp
    of_other_jobs: int = 0  # read and left out
    ranges: list[LogRange] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)  # ranges that the topic lost before they were read
    findings: list[Finding] = field(default_factory=list)  # the first of them
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every message has its row, or that of a newer one."""
        return not (self.missing or self.older or self.losses)

    def lines(self) -> Iterator[str]:
        """For a person."""
        for one in self.ranges:
            yield f"{one.topic}/{one.partition}: offsets {one.start} to {one.stop}"
        yield from self.losses
        yield from map(str, self.findings)
        if (unnamed := self.missing + self.older + self.overtaken - len(self.findings)) > 0:
            yield f"and {unnamed} more"
        if self.overtaken:
            yield (
                "overtaken: timestamps ran backwards in the partition, so an older record counts as the newer one; "
                "message.timestamp.type=LogAppendTime on the topic prevents it"
            )
        others = f" ({self.of_other_jobs} of other jobs left out)" if self.of_other_jobs else ""
        yield (
            f"messages {self.messages}{others} = stored {self.stored} + superseded {self.superseded} + "
            f"missing {self.missing} + older {self.older}; {self.seconds:.1f} s"
        )
        yield "everything is there" if self.is_complete else "NOT everything is there"


def audit(
    settings: Settings,
    *,
    topics: Sequence[str] | None = None,
    until: Until = "committed",
    job: str | None = None,
    num_named: int = NUM_NAMED,
    on_progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Compares the topics (those of the settings where None) with the index, and names the first that are not there.

    `until` is where a partition's check ends: at the group's committed offset, before which everything must be done,
    or at the end that the topic has now. `on_progress` hears how many messages were read, and of how many at most.
    Settings and tasks must be the worker's: the indices, and `kafka.max_document_bytes`, decide where a row is.
    Raises SettingsError, SourceError and SinkError where the comparison cannot be made.
    """
    require_addresses(settings, model=False)
    started = time.monotonic()
    report = AuditReport()
    client = connect(settings.elasticsearch)
    try:
        check_reachable(client, settings.elasticsearch)
        with open_log_reader(settings.kafka) as reader:
            ranges, report.losses = plan_ranges(reader, topics or settings.kafka.topics, until, settings.kafka.group)
            report.ranges = ranges
            num_offsets = sum(one.num_offsets for one in ranges)
            num_read = 0
            for raws in _in_batches(reader.read(ranges), LOOK_UP_ROWS):
                compare(settings, client, raws, report, job, num_named)
                num_read += len(raws)
                if on_progress is not None:
                    on_progress(num_read, num_offsets)
    finally:
        client.close()
    report.seconds = time.monotonic() - started
    return report


def plan_ranges(reader: LogReader, topics: Sequence[str], until: Until, group: str) -> tuple[list[LogRange], list[str]]:
    """What is to be read, and sentences about what can no longer be."""
    whole = reader.whole(topics)
    if until == "end":
        return whole, []
    committed = reader.committed(group)
    if not any((one.topic, one.partition) in committed for one in whole):
        raise SourceError(
            f"the group {group!r} has committed nothing in {', '.join(topics)}, so there is nothing to be proved up to "
            "there: correct kafka.group, or audit until the topic's end"
        )
    ranges, losses = [], []
    for one in whole:
        done = committed.get((one.topic, one.partition), one.start)
        if done < one.start:
            losses.append(
                f"lost       {one.topic}/{one.partition}: offsets {done} to {one.start} were deleted before the group "
                f"{group!r} had read them"
            )
        if done > one.stop:
            losses.append(
                f"lost       {one.topic}/{one.partition}: the group {group!r} has committed {done} and the topic ends "
                f"at {one.stop}: it was made again, or lost its end"
            )
        ranges.append(LogRange(one.topic, one.partition, one.start, max(one.start, min(done, one.stop))))
    return ranges, losses


def compare(
    settings: Settings,
    client: Elasticsearch,
    raws: Sequence[RawMessage],
    report: AuditReport,
    job: str | None = None,
    num_named: int = NUM_NAMED,
) -> None:
    """Adds what the index says about these messages to the report."""
    decoded = [decode_document(raw, settings.kafka.max_document_bytes) for raw in raws]
    documents = [one for one in decoded if job is None or one.identity.job == job]
    report.of_other_jobs += len(decoded) - len(documents)
    if not documents:
        return
    wanted = [(index_of(settings, one.identity), row_id(one.identity)) for one in documents]
    for document, (_, stored_id), row in zip(documents, wanted, look_up_patiently(client, wanted), strict=True):
        report.messages += 1
        version = version_of(document)
        kind: FindingKind | None = None
        if row is None:
            report.missing += 1
            kind = "missing"
        elif row.version < version:
            report.older += 1
            kind = "older"
        elif row.version == version:
            report.stored += 1
        else:
            report.superseded += 1
            if _is_before(row, document.source):
                report.overtaken += 1
                kind = "overtaken"
        if kind is not None and len(report.findings) < num_named:
            report.findings.append(_finding(kind, document, stored_id, version, row))


def index_of(settings: Settings, identity: Identity) -> str:
    """Where a document's row is: a function of its task."""
    task = settings.tasks.get(identity.task)
    return task.index if task is not None and task.index is not None else settings.elasticsearch.index


def look_up_patiently(client: Elasticsearch, wanted: Sequence[tuple[str, str]]) -> list[StoredRow | None]:
    """As `look_up`, and waits for an Elasticsearch that does not answer now. Raises SinkError after a minute."""
    try:
        return call_until_taken(
            lambda: look_up(client, wanted),
            stop=threading.Event(),
            max_backoff_seconds=5.0,
            deadline=time.monotonic() + LOOK_UP_PATIENCE_SECONDS,
        )
    except TemporaryRefusal as error:
        raise SinkError(f"Elasticsearch has not answered for {LOOK_UP_PATIENCE_SECONDS:.0f} s: {error}") from None


def _is_before(row: StoredRow, position: SourcePosition) -> bool:
    return (row.topic, row.partition) == (position.topic, position.partition) and row.offset < position.offset


def _finding(
    kind: FindingKind, document: Document | RejectedDocument, stored_id: str, version: int, row: StoredRow | None
) -> Finding:
    return Finding(kind, document.position, document.identity.document_id, stored_id, version, row)


def _in_batches(reads: Iterable[list[RawMessage]], size: int) -> Iterator[list[RawMessage]]:
    """The same messages in lists of `size`; the last one may be shorter."""
    waiting: list[RawMessage] = []
    for raws in reads:
        waiting += raws
        while len(waiting) >= size:
            yield waiting[:size]
            del waiting[:size]
    if waiting:
        yield waiting
