from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from elasticsearch import Elasticsearch

from pipeline.query import count_by_status, count_failures, find_results
from schemas.errors import Failure, FailureCode, SinkError, Stage
from tests.pipeline.rows import ANSWERED_AT, position, row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink
from tests.servers.elasticsearch_node import ElasticsearchNode

pytestmark = pytest.mark.real_servers

EMPTY = Failure(FailureCode.EMPTY_PROMPT, Stage.PROMPT, "no tokens")
BAD = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "not JSON")


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


@pytest.fixture
def index(elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str]) -> str:
    """30 rows: 20 of job "one", 10 of "two", every tenth failed; three answered at the same moment."""
    name = fresh_name("results")
    with open_sink(name, url=elasticsearch_node.url) as (sink, _):
        for n in range(30):
            failure = None if n % 10 else (BAD if n else EMPTY)
            parts: dict[str, Any] = {"status": "failed", "failure": failure} if failure else {}
            answered_at = ANSWERED_AT + timedelta(seconds=n // 3)
            job = "one" if n < 20 else "two"
            sink.put(row(n, job=job, answered_at=answered_at, **parts), n, position(n))
        assert sink.drain(DRAIN_SECONDS)
    return name


def test_every_row_is_found_once_in_the_order_of_answering_across_pages(client: Elasticsearch, index: str) -> None:
    found = list(find_results(client, index, page_size=4))
    assert sorted(each["source"]["offset"] for each in found) == list(range(30))
    assert [each["answered_at"] for each in found] == sorted(each["answered_at"] for each in found)


def test_rows_are_chosen_by_job_task_status_and_cause(client: Elasticsearch, index: str) -> None:
    def offsets(**wanted: Any) -> list[int]:
        return sorted(each["source"]["offset"] for each in find_results(client, index, **wanted))

    assert offsets(job="two") == list(range(20, 30))
    assert offsets(status="failed") == [0, 10, 20]
    assert offsets(job="one", status="failed") == [0, 10]
    assert offsets(failure_code=FailureCode.EMPTY_PROMPT) == [0]
    assert offsets(task="another") == []


@pytest.mark.parametrize("limit", [0, 1, 4, 5, 30, 99])
def test_no_more_rows_are_read_than_asked_for(client: Elasticsearch, index: str, limit: int) -> None:
    assert len(list(find_results(client, index, limit=limit, page_size=4))) == min(limit, 30)


def test_a_reader_that_stops_half_way_leaves_no_view_behind(client: Elasticsearch, index: str) -> None:
    rows = find_results(client, index, page_size=2)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    open_views = client.nodes.stats(metric="indices", index_metric="search")["nodes"]
    assert sum(node["indices"]["search"]["open_contexts"] for node in open_views.values()) == 0


def test_rows_are_counted_by_status_and_failures_by_cause(client: Elasticsearch, index: str) -> None:
    assert count_by_status(client, index) == {"answered": 27, "failed": 3}
    assert count_by_status(client, index, job="two") == {"answered": 9, "failed": 1}
    assert count_failures(client, index) == {FailureCode.BAD_MESSAGE: 2, FailureCode.EMPTY_PROMPT: 1}


def test_an_alias_that_is_not_there_is_a_sentence(client: Elasticsearch) -> None:
    with pytest.raises(SinkError, match="there is no 'nowhere' in this Elasticsearch"):
        list(find_results(client, "nowhere"))
    with pytest.raises(SinkError, match="there is no 'nowhere'"):
        count_by_status(client, "nowhere")
