"""A killed worker's answers are not computed again, be they noted in the commit or only in Elasticsearch."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.engine import Record
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess, wait_until
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ROOT = Path(__file__).parents[2]
SLOW_TOKEN = 7  # the first worker never answers it


class Place:
    """A topic of one partition whose first document is slow, and workers whose engines note what they have answered."""

    def __init__(self, servers: Servers, folder: Path, model: Path, num_quick: int) -> None:
        self.servers = servers
        self.record = Record(folder / "answers")
        self._folder = folder
        self._model = model
        self._started: list[WorkerProcess] = []
        servers.create_topic(1)
        slow = Sent("slow", 0, document(id="slow", prompt_token_ids=[SLOW_TOKEN]))
        quick = (
            Sent(f"d{i}", 0, document(id=f"d{i}", prompt_token_ids=[100 + i % 100, 100 + i // 100]))
            for i in range(num_quick)
        )
        servers.produce([slow, *quick])

    def start(self, name: str, *engine: str, commit_interval_seconds: float = 0.2) -> WorkerProcess:
        command = [sys.executable, "-P", "-m", "tests.chaos.engine", str(self.record.path), "fake", *engine]
        changes: dict[str, Any] = {
            "kafka": {"commit_interval_seconds": commit_interval_seconds, "max_in_flight_documents": 200},
        }
        worker = WorkerProcess(
            self._folder,
            name,
            self.servers.settings(str(self._model), **changes),
            "--until-drained",
            # In a folder of its own, from where the tests are not found by themselves.
            command=["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker", json.dumps(command)],
        )
        self._started.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._started:
            worker.kill()


MakePlace = Callable[[int], Place]


@pytest.fixture
def make_place(
    kafka_broker: KafkaBroker,
    elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str],
    tmp_path: Path,
    tiny_model: Path,
) -> Iterator[MakePlace]:
    made: list[Place] = []

    def make(num_quick: int) -> Place:
        servers = Servers(kafka_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("restart"), {})
        made.append(Place(servers, tmp_path, tiny_model, num_quick))
        return made[-1]

    yield make
    for place in made:
        place.close()


@pytest.mark.parametrize(
    "commit_interval_seconds", [0.2, 3600.0], ids=["told by the commit", "found in Elasticsearch alone"]
)
@pytest.mark.parametrize("num_quick", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_worker_that_dies_with_answers_above_one_slow_document_computes_none_of_them_again(
    make_place: MakePlace, num_quick: int, commit_interval_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_place(num_quick)
    dies = place.start("dies", "--hold-on-token", str(SLOW_TOKEN), commit_interval_seconds=commit_interval_seconds)
    wait_until("all but the slow one have rows", lambda: place.servers.count_rows() == num_quick)
    assert place.record.num_answers == num_quick
    dies.send(signal.SIGKILL)
    assert place.servers.committed() == {0: 0}
    again = place.start("again")
    assert again.wait() == 0, again.log[-3000:]
    rows = {row["id"]: row["worker"] for row in place.servers.rows(num_quick + 1)}
    assert rows.pop("slow") == "again"
    assert set(rows.values()) == {"dies"}
    assert len(rows) == num_quick
    assert place.servers.committed() == {0: num_quick + 1}
    assert f"delivered {num_quick + 1} = indexed 1 + already done {num_quick} + " in again.log
    with capsys.disabled():
        redone = place.record.num_answered_again()
        print(f"\nanswers done above a slow document at the kill: {num_quick}; computed again: {redone}")
    assert redone == 0
