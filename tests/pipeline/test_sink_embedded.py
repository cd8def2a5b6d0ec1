"""The same sink on the embedded server, as the demo uses it."""

from collections.abc import Iterator

import pytest
from elasticsearch import Elasticsearch

from pipeline.embedded import EmbeddedServer
from pipeline.query import count_by_status, count_failures, find_results
from pipeline.results import build_rejection_row
from pipeline.retry import Verdict
from schemas.errors import Failure, FailureCode, Stage
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink, wait_until

pytest.importorskip("noida_db", reason="the embedded server needs `pip install 'pagemill[demo]'`")

REJECTED = Failure(FailureCode.SINK_REJECTED, Stage.SINK, "for a test")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.elasticsearch_url


def test_rows_are_stored_once_replays_are_told_apart_and_found_by_pages(url: str) -> None:
    for worker in (1, 2):
        with open_sink("results", url=url, bulk_documents=20) as (sink, deliveries):
            rows = [row(n, job="two" if n % 2 else "one") for n in range(50)]
            sink.put_many([(each, n + 1, position(n, epoch=worker), None) for n, each in enumerate(rows)])
            sink.put(build_rejection_row(row(99), REJECTED), 99, position(99, epoch=worker))
            assert sink.drain(DRAIN_SECONDS)
            if worker == 2:
                sink.put(row(50, document_id="document-49", job="two"), 1, position(50))  # an older record
                assert sink.drain(DRAIN_SECONDS)
                assert deliveries.offsets(Verdict.SUPERSEDED) == [50]
        expected = Verdict.STORED if worker == 1 else Verdict.ALREADY_DONE
        assert deliveries.offsets(expected) == [*range(50), 99]
    with Elasticsearch(url) as client:
        found = find_results(client, "results", page_size=7)
        assert sorted(each["source"]["offset"] for each in found) == [*range(50), 99]
        assert len(list(find_results(client, "results", job="two", limit=11, page_size=4))) == 11
        assert count_by_status(client, "results") == {"answered": 50, "failed": 1}
        assert count_by_status(client, "results", job="two") == {"answered": 25, "failed": 0}
        assert count_failures(client, "results") == {FailureCode.SINK_REJECTED: 1}


def test_a_rejected_row_is_alone_and_a_block_is_waited_out(url: str) -> None:
    with Elasticsearch(url) as client, open_sink("blocked", url=url) as (sink, deliveries):
        sink.put(row(1, attempts=2**40), 1, position(1))
        sink.put(row(2), 2, position(2))
        assert sink.drain(DRAIN_SECONDS)
        client.indices.put_settings(index="blocked", settings={"index.blocks.read_only_allow_delete": True})
        sink.put(row(3), 3, position(3))
        wait_until(lambda: sink.stats().num_retries > 0, "a refusal")
        client.indices.put_settings(index="blocked", settings={"index.blocks.read_only_allow_delete": None})
        assert sink.drain(DRAIN_SECONDS)
    assert [each.position.offset for each in deliveries.rejected] == [1]
    assert deliveries.offsets(Verdict.STORED) == [2, 3]
