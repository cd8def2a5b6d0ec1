"""500 documents, 25 of them bad: each ends in exactly one row as foretold, whatever happens to a worker."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.embedded import EmbeddedServer
from schemas.document import DocumentMessage
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import NUM_BAD, NUM_GOOD, Sent, by_position, make_documents
from tests.e2e.servers import Servers
from tests.e2e.workers import is_alive, wait_until
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

NUM_PARTITIONS = 4
IN_FLIGHT = {"max_in_flight_documents": 24}  # so that a kill half way finds most documents still waiting


def assert_every_document_ended_as_foretold(servers: Servers, sent: list[Sent]) -> None:
    rows = servers.rows()
    places = [(row["source"]["partition"], row["source"]["offset"]) for row in rows]
    foretold = dict(by_position(sent))
    assert sorted(places) == sorted(foretold)

    outcomes = {
        place: row["failure"]["code"] if row["failure"] else None for place, row in zip(places, rows, strict=True)
    }
    assert outcomes == {place: one.expected and str(one.expected) for place, one in foretold.items()}
    for place, row in zip(places, rows, strict=True):
        one = foretold[place]
        assert row["status"] == ("failed" if one.expected else "answered")
        assert row["truncated"] == one.truncated
        assert row["source"]["key"] == (one.key.decode() if one.key else None)
        if one.document_id:
            assert row["id"] == one.document_id
            message = DocumentMessage.model_validate_json(one.value or b"")
            assert row["_id"] == f"e2e:{message.task}:{one.document_id}"
    statuses = Counter(row["status"] for row in rows)
    assert statuses == {"answered": NUM_GOOD, "failed": NUM_BAD}

    dead = servers.dead_letters()
    failed = {f"{servers.topic}/{partition}/{offset}" for (partition, offset), one in foretold.items() if one.expected}
    assert {record.key.decode() for record in dead} == failed
    assert len(failed) == NUM_BAD
    by_key = {f"{servers.topic}/{partition}/{offset}": one for (partition, offset), one in foretold.items()}
    for record in dead:
        one = by_key[record.key.decode()]
        headers = dict(record.headers)
        assert record.value == one.value
        assert headers["origin"] == one.name.encode()
        assert headers["pagemill-code"].decode() == one.expected
    print(f"dead letters sent twice: {len(dead) - len(failed)}")


@pytest.mark.real_servers
@pytest.mark.timeout(600)
def test_two_workers_of_which_one_is_killed_half_way_answer_or_fail_every_document_once(
    kafka_broker: KafkaBroker,
    elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str],
    tiny_model: Path,
    start_worker: StartWorker,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servers = Servers(kafka_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("killed"), {})
    servers.create_topic(NUM_PARTITIONS)
    settings = servers.settings(str(tiny_model), kafka=IN_FLIGHT)
    killed, survivor = start_worker("killed", settings), start_worker("survivor", settings)
    killed.wait_until_ready()
    survivor.wait_until_ready()
    sent = make_documents(NUM_PARTITIONS)
    servers.produce(sent)

    wait_until(
        "both have stored rows", lambda: all(servers.count_rows(worker=w.name) >= 40 for w in (killed, survivor))
    )
    engines = killed.engine_pids()
    assert engines
    killed.kill()
    rows_at_the_kill = servers.count_rows()
    replacement = start_worker("replacement", settings)
    wait_until("the killed worker's engine process ends", lambda: not any(map(is_alive, engines)))
    wait_until("every document has a row", lambda: servers.count_rows() == len(sent))

    again = 0.0
    for worker in (survivor, replacement):
        worker.wait_until_ready()
        again += worker.num_ended("already_done") + worker.num_ended("superseded")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.log[-3000:]
    assert rows_at_the_kill < len(sent)
    assert_every_document_ended_as_foretold(servers, sent)
    ends = Counter(one.partition for one in sent)
    assert servers.committed() == dict(ends)
    with capsys.disabled():
        print(f"\nrows at the kill: {rows_at_the_kill} of {len(sent)}; work done twice: {again:.0f} documents")


@pytest.mark.timeout(300)
def test_one_worker_on_the_embedded_server_answers_or_fails_every_document_once(
    tiny_model: Path, start_worker: StartWorker
) -> None:
    with EmbeddedServer() as server:
        servers = Servers(server.kafka_address, server.elasticsearch_url, "embedded", server.kafka_settings())
        servers.create_topic(NUM_PARTITIONS)
        sent = make_documents(NUM_PARTITIONS)
        servers.produce(sent)
        worker = start_worker("worker", servers.settings(str(tiny_model)), "--until-drained")
        assert worker.wait() == 0, worker.log[-3000:]
        assert_every_document_ended_as_foretold(servers, sent)
        assert servers.committed() == dict(Counter(one.partition for one in sent))
