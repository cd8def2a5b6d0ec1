"""What Elasticsearch holds of given rows: version and origin, by (index, _id). Reads only."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elasticsearch import Elasticsearch

from pipeline.breaker import CircuitBreaker
from pipeline.retry import (
    Verdict,
    call_until_taken,
    errors_judged,
    judge_row,
    refusal,
    why_stop,
)
from schemas.document import ResultSource, SourcePosition
from schemas.errors import SinkError

LOOK_UP_ROWS = 1000  # in one call: 77 ms on a real node


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row that is there: its external version, the record that it is for, and whether it holds an answer."""

    version: int
    topic: str
    partition: int
    offset: int
    is_answered: bool = False

    def comes_from(self, position: SourcePosition | ResultSource) -> bool:
        """Whether it answers that record, whatever the assignment it was read under."""
        return (self.topic, self.partition, self.offset) == (position.topic, position.partition, position.offset)


def look_up(client: Elasticsearch, wanted: Sequence[tuple[str, str]]) -> list[StoredRow | None]:
    """For each (index or alias, _id) the row there, as of now and not as of the last refresh; None where there is none.

    Raises TemporaryRefusal where asking again may help, SinkError where it will not.
    """
    found: list[StoredRow | None] = []
    for start in range(0, len(wanted), LOOK_UP_ROWS):
        found += _look_up_some(client, wanted[start : start + LOOK_UP_ROWS])
    return found


def look_up_patiently(
    client: Elasticsearch,
    wanted: Sequence[tuple[str, str]],
    breaker: CircuitBreaker,
    *,
    stop: threading.Event,
    max_backoff_seconds: float,
    on_retry: Callable[[BaseException, float], None],
) -> list[StoredRow | None]:
    """`look_up`, waiting where Elasticsearch is away, and no more often than the breaker permits.

    Raises SinkError where it will never answer, TemporaryRefusal where `stop` ended the waiting.
    """

    def attempt() -> list[StoredRow | None]:
        breaker.permit()
        try:
            found = look_up(client, wanted)
        except Exception:  # whatever it is: a probe that is not told of would be the last one
            breaker.failed()
            raise
        breaker.succeeded()
        return found

    return call_until_taken(attempt, stop=stop, max_backoff_seconds=max_backoff_seconds, on_retry=on_retry)


def _look_up_some(client: Elasticsearch, wanted: Sequence[tuple[str, str]]) -> Iterator[StoredRow | None]:
    with errors_judged(lambda judgement: why_stop(judgement, wanted[0][0])):
        entries = client.mget(
            docs=[{"_index": index, "_id": row_id} for index, row_id in wanted],
            realtime=True,
            source_includes=["source.topic", "source.partition", "source.offset", "status"],
        ).body["docs"]
    for (index, _), entry in zip(wanted, entries, strict=True):
        if (refused := entry.get("error")) is not None:
            judgement = judge_row(500, refused.get("type", ""), refused.get("reason", ""))
            raise refusal(judgement) if judgement.verdict is Verdict.RETRY else SinkError(why_stop(judgement, index))
        yield _stored_row(entry)


def _stored_row(entry: dict[str, object]) -> StoredRow | None:
    if not entry.get("found"):
        return None
    match entry:
        case {
            "_version": int(version),
            "_source": {"source": {"topic": str(topic), "partition": int(partition), "offset": int(at)}, **others},
        }:
            return StoredRow(version, topic, partition, at, others.get("status") == "answered")
        case {"_version": int(version)}:  # somebody else's row in our place: it answers no record of ours
            return StoredRow(version, "", -1, -1)
    raise AssertionError(f"found, and without a version: {entry}")
