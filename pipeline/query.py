"""Reading results back: rows by job, task and status, page by page over one consistent view, and their counts."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch, NotFoundError

from pipeline.retry import judge_call
from schemas.errors import FailureCode, SinkError

PAGE_SIZE = 500
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
    with _named(alias):
        client.indices.refresh(index=alias)  # a row is to be found as soon as its document was committed
        view: str = client.open_point_in_time(index=alias, keep_alive=KEEP_ALIVE)["id"]
    last: list[Any] | None = None
    num_found = 0
    try:
        while limit is None or num_found < limit:
            size = page_size if limit is None else min(page_size, limit - num_found)
            with _named(alias):
                page = client.search(
                    pit={"id": view, "keep_alive": KEEP_ALIVE},
                    query=_query(job, task, status, failure_code),
                    sort=[{"answered_at": "asc"}, {"_shard_doc": "asc"}],
                    search_after=last,
                    size=size,
                    track_total_hits=False,
                )
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
    with _named(alias):
        client.indices.refresh(index=alias)
        return {
            status: int(client.count(index=alias, query=_query(job, task, status, None))["count"])
            for status in statuses
        }


def count_failures(
    client: Elasticsearch, alias: str, *, job: str | None = None, task: str | None = None
) -> dict[FailureCode, int]:
    """How many rows failed, by cause; causes that did not occur are left out. Raises SinkError as find_results does."""
    with _named(alias):
        client.indices.refresh(index=alias)
        reply = client.search(
            index=alias,
            query=_query(job, task, "failed", None),
            aggs={"codes": {"terms": {"field": "failure.code", "size": len(FailureCode)}}},
            size=0,
        )
    return {FailureCode(each["key"]): int(each["doc_count"]) for each in reply["aggregations"]["codes"]["buckets"]}


def _query(
    job: str | None, task: str | None, status: Status | None, failure_code: FailureCode | None
) -> dict[str, Any]:
    wanted = {"job": job, "task": task, "status": status, "failure.code": failure_code}
    filters = [{"term": {field: str(value)}} for field, value in wanted.items() if value is not None]
    return {"bool": {"filter": filters}} if filters else {"match_all": {}}


@contextlib.contextmanager
def _named(alias: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError:
        raise SinkError(
            f"there is no {alias!r} in this Elasticsearch: no worker has run, or elasticsearch.index is another"
        ) from None
    except (ApiError, TransportError) as error:
        raise SinkError(f"Elasticsearch does not answer the query on {alias!r}: {judge_call(error)}") from None
