"""The sink on a real Elasticsearch node: what it promises under replays, refusals, blocks and a killed node."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from elasticsearch import ApiError, Elasticsearch

from pipeline.retry import Verdict
from schemas.errors import FailureCode
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink, wait_until
from tests.servers.elasticsearch_node import ElasticsearchNode

pytestmark = pytest.mark.real_servers

FreshName = Callable[[str], str]


@pytest.fixture(scope="module")
def cramped_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticsearchNode]:
    """A node that refuses early: bodies over 1 MB (413), more than 300 KB being indexed (429), a third queued write."""
    node = ElasticsearchNode.start(
        tmp_path_factory.mktemp("cramped"),
        **{
            "http.max_content_length": "1mb",
            "indexing_pressure.memory.limit": "300kb",
            "thread_pool.write.size": "1",
            "thread_pool.write.queue_size": "2",
        },
    )
    yield node
    node.stop()


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


class WatchedClient:
    """Passes everything to the real client, and keeps the statuses of bulk calls that failed and of the rows."""

    def __init__(self, client: Elasticsearch) -> None:
        self._client = client
        self.row_statuses: list[int] = []
        self.call_statuses: list[int] = []  # of calls that failed as a whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def bulk(self, **arguments: Any) -> Any:
        try:
            reply = self._client.bulk(**arguments)
        except ApiError as error:
            self.call_statuses.append(error.meta.status)
            raise
        self.row_statuses += [entry["index"]["status"] for entry in reply["items"]]
        return reply

    @property
    def statuses(self) -> list[int]:
        return self.call_statuses + self.row_statuses


def stored(client: Elasticsearch, index: str) -> dict[str, tuple[int, str]]:
    """_id -> version, text"""
    client.indices.refresh(index=index)
    found = client.search(index=index, size=10_000, version=True)["hits"]["hits"]
    return {hit["_id"]: (hit["_version"], hit["_source"]["text"]) for hit in found}


def count(url: str, index: str) -> int:
    with Elasticsearch(url) as client:
        client.indices.refresh(index=index)
        return int(client.count(index=index)["count"])


def test_rows_are_stored_and_acknowledged_once(client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName) -> None:  # fmt: skip # noqa: E501
    index = fresh_name("results")
    with open_sink(index, url=elasticsearch_node.url, bulk_documents=100) as (sink, deliveries):
        sink.put_many([(row(offset), offset, position(offset), None) for offset in range(1050)])
        assert sink.drain(DRAIN_SECONDS)
        stats = sink.stats()
    assert deliveries.offsets(Verdict.STORED) == list(range(1050))
    assert set(deliveries.times.values()) == {1}
    assert len(stored(client, index)) == 1050
    assert (stats.num_stored, stats.num_pending, stats.num_waiting, stats.num_retries) == (1050, 0, 0, 0)


def test_a_replay_is_already_done_and_an_older_record_never_overwrites_a_newer_answer(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=elasticsearch_node.url) as (sink, deliveries):
        sink.put(row(7, document_id="d", text="newer"), 700, position(7))
        assert sink.drain(DRAIN_SECONDS)
    with open_sink(index, url=elasticsearch_node.url) as (sink, deliveries):  # another worker, the same records again
        sink.put(row(7, document_id="d", text="newer, again"), 700, position(7, epoch=2))
        sink.put(row(3, document_id="d", text="older"), 300, position(3, epoch=2))
        assert sink.drain(DRAIN_SECONDS)
    assert deliveries.offsets(Verdict.ALREADY_DONE) == [7]
    assert deliveries.offsets(Verdict.SUPERSEDED) == [3]
    assert stored(client, index) == {"job:task:d": (700, "newer")}


def test_of_two_workers_answers_the_later_records_wins_whichever_comes_first(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    first = open_sink(index, url=elasticsearch_node.url)
    second = open_sink(index, url=elasticsearch_node.url)
    with first as (one, _), second as (other, _):
        for number in range(0, 100, 2):
            one.put(row(1, document_id=f"d{number}", text="first"), 1, position(1))
            other.put(row(2, document_id=f"d{number}", text="second"), 2, position(2))
            other.put(row(2, document_id=f"d{number + 1}", text="second"), 2, position(2))
            one.put(row(1, document_id=f"d{number + 1}", text="first"), 1, position(1))
        assert one.drain(DRAIN_SECONDS)
        assert other.drain(DRAIN_SECONDS)
    assert set(stored(client, index).values()) == {(2, "second")}


def test_a_row_that_the_node_rejects_is_alone_and_its_neighbours_are_stored(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    deep: Any = 1
    for _ in range(400):
        deep = {"a": deep}
    cycle: list[Any] = []
    cycle.append(cycle)
    with open_sink(index, url=elasticsearch_node.url) as (sink, deliveries):
        sink.put(row(0), 0, position(0))
        sink.put(row(1, metadata={"endless": cycle}), 1, position(1))  # cannot be written down
        sink.put(row(2), 2**63, position(2))  # would fail the whole bulk
        sink.put(row(3, attempts=2**40), 3, position(3))  # fails at the node, alone
        sink.put(row(4, metadata={"deep": deep, "\x00": "\ud800"}), 4, position(4))
        sink.put(row(5, document_id="x" * 600), 5, position(5))
        assert sink.drain(DRAIN_SECONDS)
    assert deliveries.offsets(Verdict.STORED) == [0, 4, 5]
    assert sorted(each.position.offset for each in deliveries.rejected) == [1, 2, 3]
    assert {each.failure.code for each in deliveries.rejected} == {FailureCode.SINK_REJECTED}
    assert len(stored(client, index)) == 3


def test_a_poisonous_id_in_a_bulk_is_found_by_halves_on_the_real_node(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = fresh_name("results")
    monkeypatch.setattr("pipeline.sink.row_id", lambda identity: identity.document_id)  # lets a bad _id through
    with open_sink(index, url=elasticsearch_node.url, num_writers=1) as (sink, deliveries):
        ids = ["x" * 513 if offset == 21 else f"d{offset}" for offset in range(50)]
        sink.put_many([(row(n, document_id=each), n, position(n), None) for n, each in enumerate(ids)])
        assert sink.drain(DRAIN_SECONDS)
        assert deliveries.offsets(Verdict.STORED) == [offset for offset in range(50) if offset != 21]
    assert [each.position.offset for each in deliveries.rejected] == [21]
    assert "is too long" in deliveries.rejected[0].failure.message


@pytest.mark.parametrize(
    ("block", "status"),
    [
        ("index.blocks.read_only_allow_delete", 429),  # as of a full disk
        ("index.blocks.write", 403),
        ("index.blocks.read_only", 403),
        ("cluster.blocks.read_only", 403),
    ],
)
def test_a_block_is_waited_out(
    block: str, status: int, client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    def set_block(value: bool | None) -> None:
        if block.startswith("cluster."):
            client.cluster.put_settings(persistent={block: value})
        else:
            client.indices.put_settings(index=index, settings={block: value})

    index = fresh_name("results")
    with Elasticsearch(elasticsearch_node.url) as real:
        watched = WatchedClient(real)
        with open_sink(index, client=cast(Elasticsearch, watched), breaker_failures=2) as (sink, deliveries):
            try:
                set_block(True)
                sink.put_many([(row(offset), offset, position(offset), None) for offset in range(20)])
                wait_until(lambda: sink.stats().num_breaker_openings > 0, "the breaker to open")
                assert (sink.num_pending, deliveries.times, deliveries.rejected) == (20, {}, [])
            finally:
                set_block(None)
            assert sink.drain(DRAIN_SECONDS)
    assert deliveries.offsets(Verdict.STORED) == list(range(20))
    assert set(watched.statuses) == {status, 201}


def test_an_alias_that_is_gone_stops_the_sink_with_a_sentence(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=elasticsearch_node.url) as (sink, deliveries):
        client.indices.delete(index=f"{index}-v1")
        sink.put(row(1), 1, position(1))
        with pytest.raises(Exception, match=f"the alias '{index}' is gone"):
            sink.drain(DRAIN_SECONDS)
    assert (deliveries.times, deliveries.rejected) == ({}, [])
    assert not client.indices.exists(index=index)


def test_rows_go_to_the_index_of_their_task(
    client: Elasticsearch, elasticsearch_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index, other = fresh_name("results"), fresh_name("results")
    for alias in (index, other):  # two sinks make both
        with open_sink(alias, url=elasticsearch_node.url):
            pass
    with open_sink(index, url=elasticsearch_node.url) as (sink, deliveries):
        sink.put(row(1), 1, position(1))
        sink.put(row(2), 2, position(2), other)
        sink.put(row(2), 2, position(2), other)
        assert sink.drain(DRAIN_SECONDS)
    assert [list(stored(client, alias)) for alias in (index, other)] == [
        ["job:task:document-1"],
        ["job:task:document-2"],
    ]
    assert deliveries.offsets(Verdict.ALREADY_DONE) == [2]


def test_a_refusal_of_whole_calls_is_answered_with_smaller_ones(
    cramped_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=cramped_node.url, num_writers=1) as (sink, deliveries):
        # 600 KB in one call are refused every time, by the limit of 300 KB
        sink.put_many([(row(n, text="x" * 2000), n, position(n), None) for n in range(300)])
        assert sink.drain(DRAIN_SECONDS)
        stats = sink.stats()
    assert deliveries.offsets(Verdict.STORED) == list(range(300))
    assert set(deliveries.times.values()) == {1}
    assert stats.num_retries >= 1
    assert count(cramped_node.url, index) == 300


def test_rows_that_are_refused_one_by_one_are_sent_again_and_only_they(
    cramped_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with Elasticsearch(cramped_node.url) as real:
        watched = WatchedClient(real)
        # one call is a write for each of 16 shards, and the node queues 2
        sinks = open_sink(index, client=cast(Elasticsearch, watched), number_of_shards=16, num_writers=1)
        with sinks as (sink, deliveries):
            sink.put_many([(row(n), n, position(n), None) for n in range(200)])
            assert sink.drain(DRAIN_SECONDS)
        real.indices.delete(index=f"{index}-v1")
    assert 429 in watched.row_statuses
    assert watched.row_statuses.count(201) == 200
    assert watched.row_statuses.count(409) == 0
    assert deliveries.offsets(Verdict.STORED) == list(range(200))


def test_a_body_that_is_too_large_is_halved_and_a_row_that_is_too_large_is_rejected_alone(
    cramped_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=cramped_node.url, num_writers=1) as (sink, deliveries):
        texts = ["x" * (2**21 if offset == 5 else 20_000) for offset in range(70)]
        sink.put_many([(row(n, text=text), n, position(n), None) for n, text in enumerate(texts)])
        assert sink.drain(DRAIN_SECONDS)
    assert [each.position.offset for each in deliveries.rejected] == [5]
    assert "larger than Elasticsearch accepts" in deliveries.rejected[0].failure.message
    assert deliveries.offsets(Verdict.STORED) == [offset for offset in range(70) if offset != 5]


def test_a_node_that_is_killed_and_started_again_loses_nothing_and_nothing_is_acknowledged_twice(
    cramped_node: ElasticsearchNode, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=cramped_node.url, bulk_documents=50, breaker_failures=2) as (sink, deliveries):
        sink.put_many([(row(n), n, position(n), None) for n in range(2000)])
        assert deliveries.first.wait(DRAIN_SECONDS)
        cramped_node.kill()
        assert len(deliveries.times) < 2000
        wait_until(lambda: sink.stats().num_breaker_openings > 0, "the breaker to open")
        cramped_node.restart()
        assert sink.drain(DRAIN_SECONDS)
    assert sorted(each.offset for each in deliveries.times) == list(range(2000))
    assert set(deliveries.times.values()) == {1}
    assert deliveries.offsets(Verdict.SUPERSEDED) == []
    assert count(cramped_node.url, index) == 2000
