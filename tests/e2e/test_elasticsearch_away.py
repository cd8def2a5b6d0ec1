"""Elasticsearch goes away under a running worker and comes back: partitions pause, nothing grows, nothing is lost."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elasticsearch import Elasticsearch

import tests
from pipeline.query import count_by_status
from tests.chaos.proxy import FaultProxy
from tests.e2e import servers as e2e
from tests.e2e.documents import Sent, document
from tests.e2e.workers import WorkerProcess, wait_until
from tests.fakes import fake_engine_command
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ROOT = Path(tests.__file__).resolve().parent.parent
SECRET = "aHVudGVyMjpodW50ZXIy"
NUM_PARTITIONS = 2
MAX_IN_FLIGHT = 1000
OUTBOX = 600
RECOVERY_SECONDS = 30.0
FLAT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Away:
    """How Elasticsearch goes, for how long, and how it comes back."""

    leave: Callable[[], None]
    seconds: float
    come_back: Callable[[], None]


class Watched:
    """A worker with a fake engine on servers of which one is to go away."""

    def __init__(self, folder: Path, own: e2e.Servers, model: Path, requests_per_step: int) -> None:
        (folder / "key").write_text(SECRET)
        settings = own.settings(
            str(model),
            # Polled less often than that, it would be put out of the group.
            kafka={"max_in_flight_documents": MAX_IN_FLIGHT, "max_poll_interval_seconds": 6.5},
            elasticsearch={"outbox_documents": OUTBOX, "api_key_file": str(folder / "key")},
            worker={"log_format": "json", "log_level": "debug"},
        )
        python = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker"]
        engine = json.dumps(list(fake_engine_command(step_seconds=0.02, requests_per_step=requests_per_step)))
        self.process = WorkerProcess(folder, "worker", settings, "--until-drained", command=[*python, engine])

    def reading(self, name: str, **label: str) -> float:
        [text] = [f'{{{key}="{value}"}}' for key, value in label.items()] or [""]
        return self.process.metrics().get(name + text, 0.0)

    def indexed(self) -> float:
        return self.reading("pagemill_documents_ended_total", outcome="indexed")

    def held(self, place: str) -> float:
        return self.reading("pagemill_documents_in_flight", place=place)

    def is_paused(self) -> bool:
        return self.reading("pagemill_source_paused") == 1

    def num_assigned(self) -> int:
        return self.process.log.count('"partition assigned"')


def run_through(worker: Watched, own: e2e.Servers, client: Elasticsearch, num_documents: int, away: Away) -> None:
    process = worker.process
    process.wait_until_ready()
    wait_until("the first rows", lambda: worker.indexed() >= 300)
    away.leave()
    wait_until("the outbox is full", lambda: worker.held("storing") >= OUTBOX)
    wait_until("the engine has nothing left to do", lambda: worker.held("engine") == 0)
    wait_until("partitions pause", worker.is_paused)
    # What was complete by then has left; reading goes on at three quarters of the most.
    in_flight = worker.reading("pagemill_source_documents_in_flight")
    assert 0.75 * MAX_IN_FLIGHT < in_flight <= MAX_IN_FLIGHT
    indexed, answered = worker.indexed(), worker.reading("pagemill_tokens_total", kind="completion")
    resident = [process.resident_bytes]
    until = time.monotonic() + away.seconds
    while time.monotonic() < until:
        time.sleep(0.5)
        resident.append(process.resident_bytes)
        assert worker.is_paused()
        assert worker.reading("pagemill_source_documents_in_flight") == in_flight
    assert worker.reading("pagemill_tokens_total", kind="completion") == answered  # nothing is computed into nowhere
    assert worker.indexed() == indexed
    assert max(resident) - resident[0] < FLAT_BYTES
    assert worker.reading("pagemill_sink_breaker_openings_total") >= 1
    metrics = process.get("/metrics") or ""
    away.come_back()
    back = time.monotonic()
    wait_until("rows are stored again", lambda: worker.indexed() > indexed, RECOVERY_SECONDS)
    print(
        f"away for {away.seconds:.0f} s with {in_flight:.0f} documents in flight: resident memory "
        f"{resident[0] / 2**20:.0f} MiB, {(max(resident) - resident[0]) / 2**20:+.1f} MiB at the most; "
        f"rows again {time.monotonic() - back:.1f} s after its return"
    )
    assert process.wait() == 0
    assert worker.num_assigned() == NUM_PARTITIONS  # no rebalance: each was assigned once
    assert count_by_status(client, own.index) == {"answered": num_documents, "failed": 0}
    assert sum(own.committed().values()) == num_documents
    assert SECRET not in process.log + metrics
    assert "hunter2" not in process.log + metrics


def produced(own: e2e.Servers, num_documents: int) -> None:
    own.create_topic(NUM_PARTITIONS)
    own.produce(
        Sent(f"good {number}", number % NUM_PARTITIONS, document(id=f"d{number}", prompt=f"document number {number}"))
        for number in range(num_documents)
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def make(*arguments: Any) -> Watched:
        started.append(Watched(tmp_path, *arguments))
        return started[-1]

    yield make
    for worker in started:
        worker.process.kill()


def test_a_worker_waits_for_elasticsearch_and_goes_on_when_it_is_back(
    start: Callable[..., Watched], kafka_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, tiny_model: Path,
    fresh_name: Callable[[str], str],
) -> None:  # fmt: skip
    with FaultProxy(elasticsearch_node.port) as proxy, Elasticsearch(elasticsearch_node.url) as client:
        own = e2e.Servers(kafka_broker.bootstrap_servers, proxy.url, fresh_name("away"), {})
        produced(own, 3000)
        worker = start(own, tiny_model, 20)
        run_through(worker, own, client, 3000, Away(proxy.refuse, 7.0, proxy.pass_on))


@pytest.mark.slow
def test_a_node_that_is_gone_for_ten_minutes_costs_nothing_but_the_time(
    start: Callable[..., Watched], kafka_broker: KafkaBroker, tiny_model: Path, tmp_path: Path,
    fresh_name: Callable[[str], str],
) -> None:  # fmt: skip
    node = ElasticsearchNode.start(tmp_path / "node")
    try:
        own = e2e.Servers(kafka_broker.bootstrap_servers, node.url, fresh_name("away"), {})
        produced(own, 30_000)
        worker = start(own, tiny_model, 20)
        with Elasticsearch(node.url) as client:
            run_through(worker, own, client, 30_000, Away(node.kill, 600.0, node.restart))
    finally:
        node.stop()
