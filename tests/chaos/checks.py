"""What must hold after a round, looked at from outside: rows, dead letters, commits, the workers' accounts."""

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticsearch import Elasticsearch

from pipeline.audit import audit
from schemas.settings import Settings
from tests.chaos.engine import TOLD_TO_FAIL
from tests.e2e.documents import Sent, by_position
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess

_NUM_SHOWN = 5  # of what is wrong in the same way
_STOPPED_WHILE_STARTING = (143, -15)  # SIGTERM before anything was consumed

Place = tuple[int, int]  # partition, offset


@dataclass(frozen=True, slots=True)
class Ends:
    """What must have become of the documents of a fresh topic."""

    rows: dict[Place, Sent]
    failed: dict[Place, Sent]  # their dead letters
    lost: dict[Place, Sent]  # they may have ended as foretold, or not have been read

    @classmethod
    def of(cls, sent: Sequence[Sent], lost: Container[Place] = ()) -> "Ends":
        """`lost` are places that nobody had to read; no document has one there and one elsewhere."""
        last: dict[str, Place] = {}  # of documents that came several times, the last one's row stays
        every = dict(by_position(list(sent)))
        for place, one in every.items():
            if one.document_id:
                last[one.document_id] = max(place, last.get(one.document_id, place))
        rows = {place: one for place, one in every.items() if not one.document_id or last[one.document_id] == place}
        failed = {place: one for place, one in every.items() if one.expected}
        return cls(
            {place: one for place, one in rows.items() if place not in lost},
            {place: one for place, one in failed.items() if place not in lost},
            {place: one for place, one in every.items() if place in lost},
        )


def check_rows(servers: Servers, client: Elasticsearch, ends: Ends) -> Iterator[str]:
    """Every document has exactly one row, with the outcome that was foretold."""
    found = list(_rows(servers, client))
    places = Counter(place for place, _ in found)
    yield from _some(
        "documents have no row", [_named(place, one) for place, one in ends.rows.items() if place not in places]
    )
    yield from _some("rows are there twice", [place for place, number in places.items() if number > 1])
    known = ends.rows | ends.lost
    yield from _some("rows belong to no document, or to one that came again", [p for p in places if p not in known])
    wrong = []
    for place, row in found:
        one = known.get(place)
        if one is None:
            continue
        outcome = row["status"], (row.get("failure") or {}).get("code"), row["truncated"], row["id"]
        foretold = (
            "failed" if one.expected else "answered",
            str(one.expected) if one.expected else None,
            one.truncated,
            one.document_id or row["id"],
        )
        if outcome != foretold:
            wrong.append(f"{_named(place, one)}: {outcome} in place of {foretold}")
    yield from _some("rows have another outcome than foretold", wrong)


def check_dead_letters(keys: Iterable[bytes], servers: Servers, ends: Ends) -> Iterator[str]:
    """The distinct keys of the dead letters are those of the failed documents."""
    found = {key.decode() for key in keys}
    foretold = {f"{servers.topic}/{partition}/{offset}": one for (partition, offset), one in ends.failed.items()}
    may_be = {f"{servers.topic}/{partition}/{offset}" for (partition, offset), one in ends.lost.items() if one.expected}
    yield from _some(
        "failed documents have no dead letter", [f"{k} {foretold[k].name}" for k in foretold.keys() - found]
    )
    yield from _some("dead letters of documents that should not have failed", list(found - foretold.keys() - may_be))


def check_audit(settings: Mapping[str, Any], ends: Ends, num_sent: int, begins: Mapping[int, int]) -> Iterator[str]:
    """`pagemill audit` proves the same from topic and index alone, of what the topic still holds."""
    report = audit(Settings.model_validate(settings))
    found = report.stored, report.superseded
    num_stored = sum(offset >= begins.get(partition, 0) for partition, offset in ends.rows)
    foretold = num_stored, num_sent - sum(begins.values()) - num_stored
    if not report.is_complete or found != foretold:
        yield f"the audit says: {'; '.join(report.lines())}"


def check_stopped(worker: WorkerProcess, has_whole_log: bool) -> Iterator[str]:
    """A worker that got SIGTERM ended well, and its account balances."""
    code, end = worker.exit_code, account(worker)
    if not has_whole_log and code == 0:
        return  # by its code the account balanced
    if code in _STOPPED_WHILE_STARTING and end is None:
        return
    if code != 0 or end is None:
        yield f"{worker.name} ended with {code} after SIGTERM: {last_words(worker)}"
    elif end["imbalance"] or end["in_flight"]:
        yield f"{worker.name}'s account does not balance: {end}"


def check_ended(worker: WorkerProcess, has_whole_log: bool) -> Iterator[str]:
    """A worker that ended by itself said why, in a sentence."""
    end = account(worker)
    if not has_whole_log and end is None and worker.exit_code == 1:
        return  # it could not say it
    lines = worker.log.splitlines()
    # A traceback within a line is a library's log of what it went on from; an engine that was told to fail has one.
    num_tracebacks = sum(line.startswith("Traceback") for line in lines) - lines.count(f"RuntimeError: {TOLD_TO_FAIL}")
    if num_tracebacks > 0 or not last_words(worker).startswith("pagemill: "):
        yield f"{worker.name} ended with {worker.exit_code} by itself: {last_words(worker)}"
    elif end is not None and end["imbalance"]:
        yield f"{worker.name}'s account does not balance: {end}"


def account(worker: WorkerProcess) -> dict[str, Any] | None:
    """The event with which a worker ends; None where it wrote none."""
    for line in reversed(worker.log.splitlines()):
        if '"worker ended"' in line:
            with suppress(ValueError):  # torn, on a full disk
                event: dict[str, Any] = json.loads(line)
                return event
    return None


def last_words(worker: WorkerProcess) -> str:
    lines = worker.log.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("pagemill: ")), lines[-1] if lines else "")


def _rows(servers: Servers, client: Elasticsearch) -> Iterator[tuple[Place, dict[str, Any]]]:
    client.indices.refresh(index=servers.index)
    fields = ["id", "status", "failure.code", "truncated", "source.partition", "source.offset"]
    hits = client.search(index=servers.index, size=10_000, source_includes=fields)["hits"]["hits"]
    for hit in hits:
        row = hit["_source"]
        yield (row["source"]["partition"], row["source"]["offset"]), row


def _named(place: Place, one: Sent) -> str:
    return f"{place[0]}/{place[1]} {one.name}"


def _some(what: str, which: Sequence[object]) -> Iterator[str]:
    if which:
        shown = ", ".join(map(str, which[:_NUM_SHOWN]))
        yield f"{len(which)} {what}: {shown}{', ...' if len(which) > _NUM_SHOWN else ''}"
