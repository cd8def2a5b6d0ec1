"""Looking stored rows up, on an Elasticsearch in memory and on a real node."""

from collections.abc import Callable, Iterator

import pytest
from elastic_transport import ConnectionError as NodeConnectionError
from elasticsearch import Elasticsearch

from pipeline.retry import NodeUnreachable
from pipeline.stored_rows import LOOK_UP_ROWS, StoredRow, look_up
from schemas.errors import SinkError
from tests.fake_elasticsearch import FakeElasticsearch, api_error
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


def test_a_row_that_is_not_ours_comes_from_no_record_of_ours() -> None:
    server = FakeElasticsearch()
    server.stored["id"] = (9, {"text": "somebody else's"})
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
