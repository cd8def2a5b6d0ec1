"""How a worker ends: drained and committed, at once, or killed; its engine process goes with it."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.embedded import EmbeddedServer
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import Process, WorkerProcess, is_alive, start_process, wait_until

FULL = Path("/dev/full")
NUM_DOCUMENTS = 400
SMALL_STEPS = {"kafka": {"max_in_flight_documents": 16}, "engine": {"max_running": 4}}


@pytest.fixture
def servers() -> Iterator[Servers]:
    with EmbeddedServer() as server:
        servers = Servers(server.kafka_address, server.elasticsearch_url, "signals", server.kafka_settings())
        servers.create_topic(1)
        servers.produce(
            Sent(
                f"d{i}",
                0,
                document(id=f"d{i}", prompt=f"document {i}", sampling={"ignore_eos": True, "max_tokens": 16}),
            )
            for i in range(NUM_DOCUMENTS)
        )
        yield servers


def start_half_way(servers: Servers, start_worker: StartWorker, tiny_model: Path) -> WorkerProcess:
    """A worker that has stored some rows and has many documents before it."""
    worker = start_worker("worker", servers.settings(str(tiny_model), **SMALL_STEPS))
    wait_until("it has stored rows", lambda: servers.count_rows() >= 20)
    assert worker.is_running
    return worker


def test_sigterm_stores_and_commits_what_is_in_flight_and_begins_nothing_new(
    servers: Servers, start_worker: StartWorker, tiny_model: Path
) -> None:
    worker = start_half_way(servers, start_worker, tiny_model)
    engines = worker.engine_pids()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.log[-3000:]
    num_rows = servers.count_rows()
    assert servers.committed() == {0: num_rows}
    assert num_rows < NUM_DOCUMENTS
    assert engines
    assert not any(map(is_alive, engines))

    rest = start_worker("rest", servers.settings(str(tiny_model)), "--until-drained")
    assert rest.wait() == 0, rest.log[-3000:]
    rows = Counter(row["id"] for row in servers.rows())
    assert rows == {f"d{i}": 1 for i in range(NUM_DOCUMENTS)}
    assert {row["worker"] for row in servers.rows()} == {"worker", "rest"}
    assert servers.committed() == {0: NUM_DOCUMENTS}


@pytest.mark.skipif(not FULL.exists(), reason="needs a disk that is always full")
def test_sigterm_ends_it_well_though_the_disk_under_its_log_is_full(
    servers: Servers, tmp_path: Path, tiny_model: Path
) -> None:
    def start(command: Sequence[str], folder: Path, _: Path) -> Process:
        return start_process(command, folder, FULL)

    worker = WorkerProcess(tmp_path, "worker", servers.settings(str(tiny_model), **SMALL_STEPS), start=start)
    try:
        wait_until("it has stored rows", lambda: servers.count_rows() >= 20)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        worker.kill()
    assert servers.committed() == {0: servers.count_rows()}


def test_a_second_sigterm_ends_it_at_once(servers: Servers, start_worker: StartWorker, tiny_model: Path) -> None:
    worker = start_half_way(servers, start_worker, tiny_model)
    engines = worker.engine_pids()
    worker.send(signal.SIGTERM)
    worker.send(signal.SIGTERM)
    assert worker.wait() in (0, 128 + signal.SIGTERM)  # 0: the first one was already through
    wait_until("no engine process is left", lambda: not any(map(is_alive, engines)))


def test_a_killed_worker_leaves_no_engine_process(
    servers: Servers, start_worker: StartWorker, tiny_model: Path
) -> None:
    worker = start_half_way(servers, start_worker, tiny_model)
    engines = worker.engine_pids()
    assert engines
    worker.kill()
    wait_until("no engine process is left", lambda: not any(map(is_alive, engines)))
