"""The sink and a real node with a proxy between them that breaks connections: nothing lost, nothing twice."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elasticsearch import Elasticsearch

from pipeline.retry import Verdict
from pipeline.sink import ElasticsearchSink
from tests.chaos.proxy import FaultProxy
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, Deliveries, open_sink, wait_until
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.server_process import free_ports

pytestmark = pytest.mark.real_servers

FreshName = Callable[[str], str]


@pytest.fixture
def proxy(elasticsearch_node: ElasticsearchNode) -> Iterator[FaultProxy]:
    with FaultProxy(elasticsearch_node.port) as proxy:
        yield proxy


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


def put(sink: ElasticsearchSink, offsets: range, **parts: Any) -> None:
    sink.put_many([(row(n, **parts), n, position(n), None) for n in offsets])


def count(client: Elasticsearch, index: str) -> int:
    client.indices.refresh(index=index)
    return int(client.count(index=index)["count"])


def acknowledged_once_each(deliveries: Deliveries, offsets: range) -> None:
    assert sorted(each.offset for each in deliveries.times) == list(offsets)
    assert set(deliveries.times.values()) == {1}
    assert deliveries.rejected == []
    assert deliveries.offsets(Verdict.SUPERSEDED) == []


def test_rows_that_were_written_though_the_call_timed_out_are_found_done_and_not_written_twice(
    proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=proxy.url, request_timeout_seconds=1.0, num_writers=1) as (sink, deliveries):
        proxy.swallow_answers()
        put(sink, range(400))
        wait_until(lambda: sink.stats().num_retries >= 1, "the first time-out")
        wait_until(lambda: count(client, index) == 400, "the rows that are written though nobody says so")
        assert deliveries.times == {}
        proxy.pass_on()
        assert sink.drain(DRAIN_SECONDS)
    acknowledged_once_each(deliveries, range(400))
    assert deliveries.offsets(Verdict.ALREADY_DONE) == list(range(400))
    assert count(client, index) == 400


def test_a_connection_that_ends_in_mid_bulk_leaves_the_whole_bulk_to_the_next_call(
    proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=proxy.url, num_writers=1, flush_seconds=3600.0) as (sink, deliveries):
        proxy.cut_requests_after(100_000)
        put(sink, range(300), text="x" * 1000)
        assert sink.drain(DRAIN_SECONDS)
        assert sink.stats().num_retries == 1
    acknowledged_once_each(deliveries, range(300))
    assert deliveries.offsets(Verdict.STORED) == list(range(300))  # of half a request the node takes nothing
    assert count(client, index) == 300


@pytest.mark.parametrize("num_bytes", [0, 40, 700])
def test_a_reply_that_is_cut_anywhere_says_nothing_and_its_rows_are_found_done(
    num_bytes: int, proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=proxy.url, num_writers=1, flush_seconds=3600.0) as (sink, deliveries):
        put(sink, range(100))
        proxy.cut_answers_after(num_bytes)  # in the status line, in the headers, in the body
        assert sink.drain(DRAIN_SECONDS)
        assert sink.stats().num_retries == 1
    acknowledged_once_each(deliveries, range(100))
    assert deliveries.offsets(Verdict.ALREADY_DONE) == list(range(100))
    assert count(client, index) == 100


def test_a_slow_line_delays_rows_and_refuses_none(
    proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    with open_sink(index, url=proxy.url) as (sink, deliveries):
        proxy.slow(bytes_per_second=200_000)
        put(sink, range(200), text="x" * 500)
        assert sink.drain(DRAIN_SECONDS)
        stats = sink.stats()
    acknowledged_once_each(deliveries, range(200))
    assert (stats.num_stored, stats.num_retries, stats.num_breaker_openings) == (200, 0, 0)


def test_a_node_that_freezes_past_the_time_out_and_thaws_has_every_row_once(
    elasticsearch_node: ElasticsearchNode, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    settings: dict[str, Any] = {"request_timeout_seconds": 1.0, "breaker_failures": 2}
    with open_sink(index, url=elasticsearch_node.url, **settings) as (sink, deliveries):
        try:
            elasticsearch_node.freeze()
            put(sink, range(300))
            wait_until(lambda: sink.stats().num_breaker_openings > 0, "the breaker to open")
        finally:
            elasticsearch_node.thaw()
        assert sink.drain(DRAIN_SECONDS)
    acknowledged_once_each(deliveries, range(300))
    assert count(client, index) == 300


def test_of_two_addresses_the_one_that_answers_is_used(
    proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    [nobody] = free_ports(1)
    with open_sink(index, url=proxy.url, more_urls=[f"http://127.0.0.1:{nobody}"]) as (sink, deliveries):
        for start in range(0, 200, 20):
            put(sink, range(start, start + 20))
            assert sink.drain(DRAIN_SECONDS)
    acknowledged_once_each(deliveries, range(200))


def test_cuts_at_random_moments_lose_nothing_and_double_nothing(
    proxy: FaultProxy, client: Elasticsearch, fresh_name: FreshName
) -> None:
    index = fresh_name("results")
    done = threading.Event()

    def cut_again_and_again() -> None:
        turn = 0
        while not done.wait(0.03):
            turn += 1
            (proxy.cut, lambda: proxy.cut_requests_after(30_000), lambda: proxy.cut_answers_after(500))[turn % 3]()

    cutting = threading.Thread(target=cut_again_and_again)
    settings: dict[str, Any] = {"bulk_documents": 50, "max_backoff_seconds": 0.05}
    with open_sink(index, url=proxy.url, **settings) as (sink, deliveries):
        cutting.start()
        put(sink, range(2000))
        wait_until(lambda: sink.stats().num_retries >= 20 or not sink.num_pending, "twenty cuts")
        done.set()
        cutting.join()
        proxy.pass_on()
        assert sink.drain(DRAIN_SECONDS)
    acknowledged_once_each(deliveries, range(2000))
    assert count(client, index) == 2000
