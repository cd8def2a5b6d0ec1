"""The sink's threads and its account, on an Elasticsearch that fails on cue."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.breaker import BreakerState
from pipeline.results import build_rejection_row
from pipeline.retry import Verdict
from pipeline.sink import ElasticsearchSink
from schemas.errors import Failure, FailureCode, SinkError, Stage
from schemas.settings import ElasticsearchSettings
from tests.fake_elasticsearch import FakeElasticsearch, api_error
from tests.fakes import FakeClock
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, Deliveries, open_sink, wait_until

REJECTED = Failure(FailureCode.SINK_REJECTED, Stage.SINK, "for a test")


def reject_all(action: dict[str, Any]) -> tuple[int, str]:
    return 400, "document_parsing_exception"


def test_rows_wait_for_a_fourth_of_a_bulk_and_for_a_full_one_while_a_call_is_under_way() -> None:
    server = FakeElasticsearch()
    arrived, may_go_on = threading.Event(), threading.Event()

    def hold(action: dict[str, Any]) -> None:
        arrived.set()
        assert may_go_on.wait(30)

    server.on_bulk.append(hold)
    settings: dict[str, Any] = {"bulk_documents": 12, "flush_seconds": 3600.0, "num_writers": 2}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        for offset in range(3):
            sink.put(row(offset), offset, position(offset))
        assert arrived.wait(30), "a fourth, and Elasticsearch has nothing to do"
        for offset in range(3, 14):
            sink.put(row(offset), offset, position(offset))
        assert (sink.num_pending, sink.stats().num_waiting) == (14, 11)
        sink.put(row(14), 14, position(14))
        wait_until(lambda: len(deliveries.times) == 12, "the full bulk, beside the call that is held")
        may_go_on.set()
        assert sink.drain(DRAIN_SECONDS)
    assert server.bulk_sizes == [3, 12]
    assert deliveries.offsets(Verdict.STORED) == list(range(15))


def test_a_bulk_that_is_full_by_bytes_does_not_wait_either() -> None:
    server = FakeElasticsearch()
    with open_sink("results", client=server.as_client(), bulk_bytes=20_000, flush_seconds=3600.0) as (sink, deliveries):
        sink.put_many([(row(n, text="x" * 9_000), n, position(n), None) for n in range(4)])
        wait_until(lambda: len(deliveries.times) >= 2, "a bulk of 20,000 bytes")
        assert sink.drain(DRAIN_SECONDS)
    assert server.bulk_sizes == [2, 2]


def test_a_row_waits_no_longer_than_flush_seconds() -> None:
    server = FakeElasticsearch()
    with open_sink("results", client=server.as_client(), flush_seconds=0.01) as (sink, deliveries):
        sink.put(row(1), 1, position(1))
        wait_until(lambda: len(deliveries.times) == 1, "the lone row")


def test_the_outbox_says_when_it_has_no_room_and_keeps_what_comes_nevertheless() -> None:
    server = FakeElasticsearch()
    settings: dict[str, Any] = {"outbox_documents": 3, "flush_seconds": 3600.0}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        room = []
        for offset in range(5):
            room.append(sink.has_room)
            sink.put(row(offset), offset, position(offset))
        assert room == [True, True, True, False, False]
        assert sink.drain(DRAIN_SECONDS)
        assert sink.has_room
    assert deliveries.offsets(Verdict.STORED) == [0, 1, 2, 3, 4]


def test_the_outbox_is_full_by_bytes_too_and_all_of_them_are_given_back_whatever_the_verdict() -> None:
    server = FakeElasticsearch()
    settings: dict[str, Any] = {"outbox_bytes": 20_000, "flush_seconds": 3600.0, "num_writers": 1}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        room = []
        for offset in range(3):
            room.append(sink.has_room)
            sink.put(row(offset, text="x" * 10_000), offset, position(offset))
        assert (room, sink.has_room) == ([True, True, False], False)
        assert 30_000 < sink.stats().pending_bytes < 36_000
        sink.put(row(3), -1, position(3))  # cannot be written down
        assert sink.drain(DRAIN_SECONDS)
        assert (sink.has_room, sink.stats().pending_bytes) == (True, 0)
        server.on_bulk.append(reject_all)
        sink.put(row(4), 4, position(4))
        sink.put(row(0, text="again"), 0, position(0))
        assert sink.drain(DRAIN_SECONDS)
        assert (sink.stats().num_pending, sink.stats().pending_bytes) == (0, 0)
    assert [each.position for each in deliveries.rejected] == [position(3), position(4), position(0)]


def test_refused_rows_stay_counted_until_they_are_stored() -> None:
    server = FakeElasticsearch()
    server.on_bulk.extend([api_error(503)] * 6)
    settings: dict[str, Any] = {"breaker_failures": 2, "num_writers": 1, "max_backoff_seconds": 0.02}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        sink.put_many([(row(n), n, position(n), None) for n in range(3)])
        assert sink.drain(DRAIN_SECONDS)
        stats = sink.stats()
    assert deliveries.offsets(Verdict.STORED) == [0, 1, 2]
    assert (stats.num_bulks, stats.num_stored, stats.num_pending) == (7, 3, 0)
    assert stats.num_retries == 6  # waits for the breaker are none
    assert stats.num_breaker_openings == 5
    assert stats.breaker is BreakerState.CLOSED


def test_a_probe_that_fails_by_a_bug_stops_the_sink_and_is_not_the_last() -> None:
    server = FakeElasticsearch()
    server.on_bulk.extend([api_error(503), KeyError("items")])
    settings: dict[str, Any] = {"breaker_failures": 1, "num_writers": 1, "max_backoff_seconds": 0.02}
    with open_sink("results", client=server.as_client(), **settings) as (sink, _):
        sink.put(row(0), 0, position(0))
        with pytest.raises(SinkError, match="writer failed: KeyError: 'items'"):
            sink.drain(DRAIN_SECONDS)
        assert sink.stats().num_breaker_openings == 2


def test_the_counters_tell_the_verdicts_apart() -> None:
    server = FakeElasticsearch()
    settings: dict[str, Any] = {"num_writers": 1, "flush_seconds": 3600.0}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        sink.put(row(1, document_id="a"), 1, position(1))
        sink.put(row(1, document_id="a"), 1, position(1))  # again
        sink.put(row(0, document_id="a"), 0, position(0))  # older
        assert sink.drain(DRAIN_SECONDS)
        server.on_bulk.append(reject_all)
        sink.put(row(2), 2, position(2))
        assert sink.drain(DRAIN_SECONDS)
        stats = sink.stats()
    assert (stats.num_stored, stats.num_already_done, stats.num_superseded, stats.num_rejected) == (1, 1, 1, 1)
    assert stats.num_bytes > 4 * 500
    [rejected] = deliveries.rejected
    assert (rejected.position, rejected.index, rejected.version) == (position(2), "results", 2)
    assert rejected.failure.code is FailureCode.SINK_REJECTED


def test_a_failed_row_of_a_rejected_document_can_be_stored() -> None:
    server = FakeElasticsearch()
    with open_sink("results", client=server.as_client()) as (sink, deliveries):
        server.on_bulk.append(reject_all)
        sink.put(row(1), 1, position(1))
        assert sink.drain(DRAIN_SECONDS)
        [rejected] = deliveries.rejected
        sink.put(
            build_rejection_row(rejected.row, rejected.failure), rejected.version, rejected.position, rejected.index
        )
        assert sink.drain(DRAIN_SECONDS)
    assert deliveries.offsets(Verdict.STORED) == [1]
    assert server.stored["job:task:document-1"][1]["failure"]["code"] == "SINK_REJECTED"


def test_a_failed_row_that_is_rejected_too_stops_the_sink_rather_than_being_lost() -> None:
    server = FakeElasticsearch()
    with open_sink("results", client=server.as_client()) as (sink, deliveries):
        server.on_bulk.append(reject_all)
        sink.put(build_rejection_row(row(1), REJECTED), 1, position(1))
        with pytest.raises(SinkError, match="the failed row of documents/0/1 cannot be stored either"):
            sink.drain(DRAIN_SECONDS)
    assert (deliveries.times, deliveries.rejected) == ({}, [])


def test_a_wrong_deployment_comes_out_of_check_and_nothing_is_acknowledged() -> None:
    server = FakeElasticsearch()
    server.on_bulk.append(api_error(401, "security_exception"))
    with open_sink("results", client=server.as_client()) as (sink, deliveries):
        sink.check()
        sink.put(row(1), 1, position(1))
        with pytest.raises(SinkError, match="credentials"):
            sink.drain(DRAIN_SECONDS)
        with pytest.raises(SinkError, match="credentials"):
            sink.check()
        assert sink.num_pending == 1
    assert deliveries.times == {}


def test_a_callback_that_raises_stops_the_sink() -> None:
    def broken(positions: object, verdict: object) -> None:
        raise ZeroDivisionError("a bug")

    server = FakeElasticsearch()
    settings = ElasticsearchSettings(urls=("http://127.0.0.1:9",), flush_seconds=0.01)
    sink = ElasticsearchSink(settings, on_acknowledged=broken, on_rejected=list.clear, client=server.as_client())
    sink.start()
    sink.put(row(1), 1, position(1))
    with pytest.raises(SinkError, match="ZeroDivisionError: a bug"):
        sink.drain(DRAIN_SECONDS)
    sink.close()


def test_close_cuts_a_wait_short_and_acknowledges_nothing() -> None:
    server = FakeElasticsearch()
    server.on_bulk.append(api_error(429, retry_after="200"))
    with open_sink("results", client=server.as_client(), num_writers=1) as (sink, deliveries):
        sink.put(row(1), 1, position(1))
        wait_until(lambda: sink.stats().num_retries == 1, "the refusal")
    assert all(not writer.is_alive() for writer in sink._writers)
    assert deliveries.times == {}
    assert not sink.drain(0.0)
    sink.close()


def test_rows_from_many_threads_are_acknowledged_once_each_under_every_kind_of_refusal() -> None:
    server = FakeElasticsearch()
    refusals: list[Callable[[dict[str, Any]], tuple[int, str] | None] | Exception] = []
    for number in range(30):
        refusals.append(api_error((429, 503, 413)[number % 3]))
        refusals.append(lambda action: (429, "es_rejected_execution_exception") if action["version"] % 3 else None)
    server.on_bulk.extend(refusals)
    settings: dict[str, Any] = {"bulk_documents": 40, "num_writers": 3, "max_backoff_seconds": 0.01}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):

        def put_all(partition: int) -> None:
            for n in range(300):
                sink.put(row(n, partition=partition, document_id=f"{partition}-{n}"), n, position(n, partition))

        threads = [threading.Thread(target=put_all, args=(partition,)) for partition in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sink.drain(DRAIN_SECONDS)
    assert len(deliveries.times) + len(deliveries.rejected) == 1200
    assert set(deliveries.times.values()) == {1}
    assert len(server.stored) == len(deliveries.times)


def test_a_row_put_while_somebody_drains_reaches_a_writer() -> None:
    server = FakeElasticsearch()
    settings: dict[str, Any] = {"num_writers": 2, "flush_seconds": 3600.0}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        held, may_go_on = threading.Event(), threading.Event()

        def hold(action: dict[str, Any]) -> None:
            held.set()
            assert may_go_on.wait(DRAIN_SECONDS)

        server.on_bulk.append(hold)
        sink.put(row(0), 0, position(0))
        drained: list[bool] = []
        threads = [threading.Thread(target=lambda: drained.append(sink.drain(DRAIN_SECONDS))) for _ in range(5)]
        for thread in threads:
            thread.start()
        assert held.wait(DRAIN_SECONDS)
        sink.put(row(1), 1, position(1))  # five threads wait for the end, and one for work
        wait_until(lambda: deliveries.offsets(Verdict.STORED) == [1], "the writer that is not held")
        may_go_on.set()
        for thread in threads:
            thread.join(DRAIN_SECONDS)
        assert drained == [True] * 5
    assert deliveries.offsets(Verdict.STORED) == [0, 1]


def test_while_refused_the_writers_take_turns_and_with_success_they_call_side_by_side_again() -> None:
    server = FakeElasticsearch()
    held, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def hold(action: dict[str, Any]) -> None:
        held.release()
        assert may_go_on.acquire(timeout=DRAIN_SECONDS)

    settings: dict[str, Any] = {"num_writers": 2, "bulk_documents": 1, "max_backoff_seconds": 0.01}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        assert sink.stats().bulk_calls == 2
        server.on_bulk.extend([api_error(429), *[hold] * 20])
        for offset in range(20):
            sink.put(row(offset), offset, position(offset))
        for num_done in range(8):  # 8 good calls, one at a time, let the second writer call as well
            assert held.acquire(timeout=DRAIN_SECONDS)
            wait_until(lambda most=18 - num_done: sink.stats().num_waiting <= most, "both writers to have rows")  # type: ignore[misc]
            assert (sink.stats().num_calling, sink.stats().bulk_calls) == (1, 1)
            may_go_on.release()
            wait_until(lambda wanted=num_done + 1: len(deliveries.times) == wanted, "the verdict")  # type: ignore[misc]
        assert held.acquire(timeout=DRAIN_SECONDS)
        assert held.acquire(timeout=DRAIN_SECONDS)
        assert (sink.stats().num_calling, sink.stats().bulk_calls) == (2, 2)
        for _ in range(20):
            may_go_on.release()
        assert sink.drain(DRAIN_SECONDS)
    assert deliveries.offsets(Verdict.STORED) == list(range(20))


def test_a_body_that_was_too_large_makes_all_later_ones_smaller() -> None:
    server = FakeElasticsearch()
    settings: dict[str, Any] = {"num_writers": 1, "flush_seconds": 3600.0}
    with open_sink("results", client=server.as_client(), **settings) as (sink, deliveries):
        sink.put_many([(row(n, text="x" * 1000), n, position(n), None) for n in range(8)])
        server.max_body_bytes = 9_000
        assert sink.drain(DRAIN_SECONDS)
        num_refused = len(server.bulk_sizes)
        sink.put_many([(row(n, text="x" * 1000), n, position(n), None) for n in range(8, 24)])
        assert sink.drain(DRAIN_SECONDS)
    assert server.bulk_sizes[:num_refused] == [8, 4, 4]
    assert server.bulk_sizes[num_refused:] == [3, 3, 3, 3, 3, 1]  # as large as the half that was taken, none refused
    assert deliveries.offsets(Verdict.STORED) == list(range(24))


def test_calls_that_take_longer_and_longer_become_smaller_before_anything_is_refused() -> None:
    server, clock = FakeElasticsearch(), FakeClock()
    settings = ElasticsearchSettings(
        urls=("http://127.0.0.1:9",), bulk_documents=8, bulk_bytes=2**30, num_writers=1, flush_seconds=3600.0
    )
    deliveries = Deliveries()
    sink = ElasticsearchSink(
        settings, on_acknowledged=deliveries.acknowledged, on_rejected=deliveries.reject, client=server.as_client(),
        clock=clock,
    )  # fmt: skip
    sink.start()

    def put_and_wait(number: int, seconds: float) -> int:
        def take(action: dict[str, Any]) -> None:
            clock.advance(seconds if action["version"] % 8 == 0 else 0.0)

        server.on_bulk.append(take)
        sink.put_many([(row(n), n, position(n), None) for n in range(8 * number, 8 * number + 8)])
        assert sink.drain(DRAIN_SECONDS)
        return sink.stats().bulk_documents

    assert [put_and_wait(n, 1.0) for n in range(3)] == [8, 8, 8]
    assert [put_and_wait(n, 4.0) for n in range(3, 5)] == [8, 4]
    stats = sink.stats()
    sink.close()
    assert (stats.bulk_seconds, stats.num_retries) == (11.0, 0)
    assert server.bulk_sizes == [8] * 5
