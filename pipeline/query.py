"""Reading results back: rows by job, task and status, page by page over one consistent view, and their counts."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from elastic_transport import ObjectApiResponse, TransportError
from elasticsearch import ApiError, Elasticsearch

from pipeline.retry import Judgement, TemporaryRefusal, call_within, errors_judged, shortened
from schemas.errors import FailureCode, SinkError

PAGE_SIZE = 500
ANSWER_SECONDS = 15.0  # a query that is refused for now, or not answered, is asked again for so long
KEEP_ALIVE = "2m"  # of the view, from one page to the next

Status = Literal["answered", "failed"]


def find_results(
    client: Elasticsearch,
    alias: str,
    *,
    job: str | None = None,
    task: str | None = None,
    status: Status | None = None,
    failure_code: FailureCode | None = None,
    limit: int | None = None,
    page_size: int = PAGE_SIZE,
) -> Iterator[dict[str, Any]]:
    """The rows that fit, oldest answer first, as stored (DocumentResult's fields). What is stored later is not seen.

    Raises SinkError where the alias is not there or Elasticsearch does not answer.
    """
    _refresh(client, alias)
    view: str = _ask(alias, lambda: client.open_point_in_time(index=alias, keep_alive=KEEP_ALIVE))["id"]
    last: list[Any] | None = None
    num_found = 0
    try:
        while limit is None or num_found < limit:
            size = page_size if limit is None else min(page_size, limit - num_found)
            next_page = partial(
                client.search,
                pit={"id": view, "keep_alive": KEEP_ALIVE},
                query=_query(job, task, status, failure_code),
                sort=[{"answered_at": "asc"}, {"_shard_doc": "asc"}],
                search_after=last,
                size=size,
                track_total_hits=False,
            )
            page = _ask(alias, next_page)
            view = page.get("pit_id", view)
            hits = page["hits"]["hits"]
            for hit in hits:
                yield hit["_source"]
            num_found += len(hits)
            if len(hits) < size:
                return
            last = hits[-1]["sort"]
    finally:
        with contextlib.suppress(ApiError, TransportError):  # it ends by itself
            client.close_point_in_time(id=view)


def count_by_status(
    client: Elasticsearch, alias: str, *, job: str | None = None, task: str | None = None
) -> dict[Status, int]:
    """How many rows there are, answered and failed. Raises SinkError as find_results does."""
    statuses: tuple[Status, ...] = ("answered", "failed")
    _refresh(client, alias)
    return {
        status: int(_ask(alias, partial(client.count, index=alias, query=_query(job, task, status, None)))["count"])
        for status in statuses
    }


def count_failures(
    client: Elasticsearch, alias: str, *, job: str | None = None, task: str | None = None
) -> dict[FailureCode, int]:
    """How many rows failed, by cause; causes that did not occur are left out. Raises SinkError as find_results does."""
    _refresh(client, alias)
    by_code = partial(
        client.search,
        index=alias,
        query=_query(job, task, "failed", None),
        aggs={"codes": {"terms": {"field": "failure.code", "size": len(FailureCode)}}},
        size=0,
    )
    reply = _ask(alias, by_code)
    return {FailureCode(each["key"]): int(each["doc_count"]) for each in reply["aggregations"]["codes"]["buckets"]}


def _query(
    job: str | None, task: str | None, status: Status | None, failure_code: FailureCode | None
) -> dict[str, Any]:
    wanted = {"job": job, "task": task, "status": status, "failure.code": failure_code}
    filters = [{"term": {field: str(value)}} for field, value in wanted.items() if value is not None]
    return {"bool": {"filter": filters}} if filters else {"match_all": {}}


def _refresh(client: Elasticsearch, alias: str) -> None:
    """A row is to be found as soon as its document was committed."""
    _ask(alias, lambda: client.indices.refresh(index=alias))


def _ask(alias: str, question: Callable[[], ObjectApiResponse[Any]]) -> ObjectApiResponse[Any]:
    def attempt() -> ObjectApiResponse[Any]:
        with errors_judged(lambda judgement: _why_not(judgement, alias)):
            return question()

    try:
        return call_within(ANSWER_SECONDS, attempt)
    except TemporaryRefusal as error:
        raise SinkError(
            f"Elasticsearch does not answer the query on {alias!r} within {ANSWER_SECONDS:g} s: {error}"
        ) from None


def _why_not(judgement: Judgement, alias: str) -> str:
    if judgement.error_type == "search_context_missing_exception":
        return f"the view of {alias!r} is gone, as after a restart of its node or a pause of minutes: ask again"
    if judgement.status == 404:
        return f"there is no {alias!r} in this Elasticsearch: no worker has run, or elasticsearch.index is another"
    return f"Elasticsearch does not answer the query on {alias!r}: {shortened(str(judgement))}"
