"""Documents of 16 MB each, with Elasticsearch away: the worker's memory is bounded in bytes, not in documents."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch

import tests
from pipeline.query import count_by_status
from pipeline.stored_rows import LOOK_UP_ROWS
from tests.chaos.proxy import FaultProxy
from tests.consumers.harness import produce
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import document
from tests.e2e.servers import Servers
from tests.e2e.workers import wait_until
from tests.fakes import fake_engine_command
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = [pytest.mark.real_servers, pytest.mark.slow]

ROOT = Path(tests.__file__).resolve().parent.parent
MIB = 2**20
NUM_DOCUMENTS, NUM_BAD, DOCUMENT_BYTES = 24, 3, 16_000_000
IN_FLIGHT_BYTES = 64 * MIB
TIMES_AS_MUCH = 16  # 12 seen: raw, fetched, decoded, as a row, written down, and in the buffers of both clients


def test_documents_of_16_mb_take_no_more_memory_than_the_bound_in_bytes_lets_be_in_flight(
    kafka_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, tiny_model: Path,
    fresh_name: Callable[[str], str], start_worker: StartWorker, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engine = json.dumps(list(fake_engine_command()))
    with FaultProxy(elasticsearch_node.port) as proxy, Elasticsearch(elasticsearch_node.url) as client:
        servers = Servers(kafka_broker.bootstrap_servers, proxy.url, fresh_name("large"), {})
        servers.create_topic(1, configs={"max.message.bytes": "20000000"})
        settings = servers.settings(
            str(tiny_model),
            kafka={"max_in_flight_bytes": IN_FLIGHT_BYTES, "max_document_bytes": 20_000_000},
            elasticsearch={"outbox_bytes": IN_FLIGHT_BYTES},
        )
        worker = start_worker(
            "worker",
            settings,
            command=["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker", engine],
        )
        worker.wait_until_ready()
        # As long as something may be answered already it is looked up, and waits for Elasticsearch there.
        first = [document(id=f"first-{number}", prompt="x") for number in range(LOOK_UP_ROWS)]
        produce(kafka_broker.bootstrap_servers, servers.topic, first)
        wait_until("nothing is looked up any more", lambda: servers.committed() == {0: len(first)})
        before = worker.resident_bytes
        proxy.refuse()
        for number in range(NUM_DOCUMENTS):
            good = document(id=f"d{number}", prompt=f"no. {number}", metadata={"text": "x" * DOCUMENT_BYTES})
            produce(kafka_broker.bootstrap_servers, servers.topic, [b"{" + good if number % 8 == 7 else good])
        storing = "pagemill_sink_pending_bytes"
        wait_until("the outbox is full", lambda: worker.metrics()[storing] >= 0.75 * IN_FLIGHT_BYTES)
        in_flight = worker.metrics()["pagemill_source_documents_in_flight"]
        proxy.pass_on()
        wait_until("all is committed", lambda: servers.committed() == {0: len(first) + NUM_DOCUMENTS})
        peak = worker.peak_resident_bytes
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.log[-3000:]
        assert count_by_status(client, servers.index) == {
            "answered": len(first) + NUM_DOCUMENTS - NUM_BAD,
            "failed": NUM_BAD,
        }
    with capsys.disabled():
        print(
            f"\n{NUM_DOCUMENTS} documents of {DOCUMENT_BYTES / MIB:.0f} MiB, {in_flight:.0f} in flight at once: ",
            end="",
        )
        print(f"resident memory {before / MIB:.0f} MiB before, {peak / MIB:.0f} MiB at its peak")
    assert peak - before < TIMES_AS_MUCH * IN_FLIGHT_BYTES
