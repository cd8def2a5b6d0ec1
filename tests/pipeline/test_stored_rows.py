"""Looking stored rows up, on an Elasticsearch in memory and on a real node."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_transport import ConnectionError as NodeConnectionError
from elasticsearch import Elasticsearch

from pipeline.breaker import BreakerState, CircuitBreaker
from pipeline.retry import NodeUnreachable
from pipeline.stored_rows import LOOK_UP_ROWS, StoredRow, look_up, look_up_patiently
from schemas.errors import SinkError
from tests.fake_elasticsearch import FakeElasticsearch, api_error
from tests.fakes import FakeClock
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink
from tests.servers.elasticsearch_node import ElasticsearchNode


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


def stored_at(offset: int) -> dict[str, object]:
    return {"source": {"topic": "documents", "partition": 0, "offset": offset}}


def test_rows_are_looked_up_in_calls_of_a_thousand_and_answered_in_the_order_asked() -> None:
    server = FakeElasticsearch()
    server.stored = {f"id-{n}": (n, stored_at(n)) for n in range(0, 2 * LOOK_UP_ROWS + 1, 2)}
    found = look_up(server.as_client(), [("results", f"id-{n}") for n in range(2 * LOOK_UP_ROWS + 1)])
    assert found == [None if n % 2 else StoredRow(n, "documents", 0, n) for n in range(2 * LOOK_UP_ROWS + 1)]
    assert server.mget_sizes == [LOOK_UP_ROWS, LOOK_UP_ROWS, 1]


def test_nothing_is_asked_about_no_rows() -> None:
    server = FakeElasticsearch()
    assert look_up(server.as_client(), []) == []
    assert server.mget_sizes == []


def test_a_row_comes_from_its_record_whatever_the_epoch_and_from_no_other() -> None:
    stored = StoredRow(1, "documents", 0, 7)
    assert stored.comes_from(position(7, epoch=5))
    assert not stored.comes_from(position(8))
    assert not stored.comes_from(position(7, partition=1))


@pytest.mark.parametrize(
    "source",
    [
        {"text": "somebody else's"},
        {"source": None},
        {"source": {"topic": "documents"}},
        {"source": {"topic": "documents", "partition": None, "offset": 0}},
        {"source": {"topic": "documents", "partition": 0, "offset": "first"}},
        {"source": {"topic": None, "partition": 0, "offset": 0}},
    ],
)
def test_a_row_that_is_not_ours_comes_from_no_record_of_ours(source: dict[str, Any]) -> None:
    server = FakeElasticsearch()
    server.stored["id"] = (9, source)
    [stored] = look_up(server.as_client(), [("results", "id")])
    assert stored is not None
    assert stored.version == 9
    assert not stored.comes_from(position(0))


def test_what_may_pass_and_what_stops_are_told_apart() -> None:
    server = FakeElasticsearch()
    server.on_mget.extend([NodeConnectionError("reset"), api_error(401, "security_exception")])
    with pytest.raises(NodeUnreachable):
        look_up(server.as_client(), [("results", "id")])
    with pytest.raises(SinkError, match="check the credentials"):
        look_up(server.as_client(), [("results", "id")])


@pytest.mark.parametrize(
    "unexpected", [KeyError("docs"), api_error(401, "security_exception"), NodeConnectionError("reset")]
)
def test_a_probe_that_fails_in_whatever_way_is_not_the_last(unexpected: Exception) -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(num_failures=1, max_open_seconds=1.0, clock=clock)
    breaker.failed()
    clock.advance(1.0)
    server, ending = FakeElasticsearch(), threading.Event()
    server.on_mget.append(unexpected)
    ending.set()  # nothing is waited for
    with pytest.raises((KeyError, SinkError, NodeUnreachable)):
        look_up_patiently(
            server.as_client(), [("results", "id")], breaker,
            stop=ending, max_backoff_seconds=1.0, on_retry=lambda error, seconds: None,
        )  # fmt: skip
    clock.advance(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.permit()


@pytest.mark.real_servers
def test_on_a_real_node_a_row_is_found_before_any_refresh_and_a_lost_index_stops(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str]
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=elasticsearch_node.url) as (sink, _):
        client.indices.put_settings(index=index, settings={"index.refresh_interval": "-1"})
        sink.put(row(3), 300, position(3))
        assert sink.drain(DRAIN_SECONDS)
    found = look_up(client, [(index, "job:task:document-3"), (index, "absent")])
    assert found == [StoredRow(300, "documents", 0, 3, is_answered=True), None]
    client.indices.delete(index=f"{index}-v1")
    with pytest.raises(SinkError, match=f"the alias '{index}' is gone"):
        look_up(client, [(index, "job:task:document-3")])
