"""The broker goes away under a running worker and comes back: nothing that was read is lost, and nothing grows."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch

import tests
from pipeline.query import count_by_status
from tests.chaos.engine import Record
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import wait_until
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ROOT = Path(tests.__file__).resolve().parent.parent
NUM_PARTITIONS = 2
NUM_DOCUMENTS, NUM_BAD = 6000, 60
PLACES = ("looked_up", "arrived", "batcher", "engine", "rows", "storing", "dead_letters")
RECOVERY_SECONDS = 30.0
FLAT_BYTES = 16 * 2**20


def documents(start: int, stop: int) -> Iterator[Sent]:
    for number in range(start, stop):
        is_bad = number % (NUM_DOCUMENTS // NUM_BAD) == 0
        value = b"{" if is_bad else document(id=f"d{number}", prompt=f"document number {number}")
        yield Sent(f"d{number}", number % NUM_PARTITIONS, value)


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    broker = KafkaBroker.start(tmp_path / "kafka")
    yield broker
    broker.stop()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30.0, 600.0])
def test_a_broker_that_is_gone_costs_nothing_but_the_time(
    own_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, tiny_model: Path, tmp_path: Path,
    fresh_name: Callable[[str], str], start_worker: StartWorker, seconds: float, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    servers = Servers(own_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("kafka-away"), {})
    servers.create_topic(NUM_PARTITIONS)
    servers.produce(documents(0, NUM_DOCUMENTS // 2))
    record = Record(tmp_path / "answers")
    engine = [sys.executable, "-P", "-m", "tests.chaos.engine", str(record.path), "fake"]
    engine += ["--step-seconds", "0.05", "--requests-per-step", "10"]  # slow: most is still unread at the kill
    worker = start_worker(
        "worker",
        servers.settings(str(tiny_model), kafka={"max_in_flight_documents": 1000}),
        "--until-drained",
        command=["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker", json.dumps(engine)],
    )
    worker.wait_until_ready()
    wait_until("the first rows", lambda: worker.num_ended("indexed") >= 100)
    own_broker.kill()
    killed = time.monotonic()

    def held() -> dict[str, float]:
        metrics = worker.metrics()
        return {place: metrics[f'pagemill_documents_in_flight{{place="{place}"}}'] for place in PLACES}

    wait_until("only dead letters are held", lambda: sum(held().values()) == held()["dead_letters"])
    indexed, letters = worker.num_ended("indexed"), held()["dead_letters"]
    resident = [worker.resident_bytes]
    while time.monotonic() < killed + seconds:
        time.sleep(0.5)
        resident.append(worker.resident_bytes)
        assert worker.is_running
    assert worker.get("/livez") is not None
    assert worker.get("/readyz") is None
    assert worker.num_ended("indexed") == indexed
    own_broker.restart()
    back = time.monotonic()
    servers.produce(documents(NUM_DOCUMENTS // 2, NUM_DOCUMENTS))
    wait_until("rows are stored again", lambda: worker.num_ended("indexed") > indexed, RECOVERY_SECONDS)
    recovered = time.monotonic() - back
    assert worker.wait() == 0, worker.log[-3000:]  # the account balances
    with capsys.disabled():
        print(
            f"\naway for {seconds:.0f} s with {letters:.0f} dead letters waiting: resident memory "
            f"{resident[0] / 2**20:.0f} MiB, {(max(resident) - resident[0]) / 2**20:+.1f} MiB at the most; rows again "
            f"{recovered:.1f} s after its return; computed again {record.num_answered_again()} of {NUM_DOCUMENTS}"
        )
    assert max(resident) - resident[0] < FLAT_BYTES
    with Elasticsearch(elasticsearch_node.url) as client:
        counted = count_by_status(client, servers.index)
    assert counted == {"answered": NUM_DOCUMENTS - NUM_BAD, "failed": NUM_BAD}
    assert len({letter.key for letter in servers.dead_letters()}) == NUM_BAD
    assert sum(servers.committed().values()) == NUM_DOCUMENTS
