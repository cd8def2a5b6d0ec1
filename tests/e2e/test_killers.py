"""A document that takes the worker down together with the engine is found by the workers that come after."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import FailureCode
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess
from tests.fakes import fake_engine_command
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ROOT = Path(__file__).parents[2]
DEADLY_TOKEN = 7
MAX_DEATHS = 3 + 2 + 1  # until the search begins; halving three documents down to one; that one's second


@pytest.mark.parametrize("step_seconds", [0.0, 0.3], ids=["at once", "later"])
def test_a_document_that_kills_worker_and_engine_is_convicted_and_its_neighbours_are_answered(
    step_seconds: float,
    kafka_broker: KafkaBroker,
    elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str],
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    servers = Servers(kafka_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("killers"), {})
    servers.create_topic(2)
    neighbours = {f"{partition}-{i}": partition for partition in range(2) for i in range(2)}
    servers.produce(
        [
            *(
                Sent(name, partition, document(id=name, prompt_token_ids=[100 + number]))
                for number, (name, partition) in enumerate(neighbours.items())
            ),
            Sent("killer", 0, document(id="killer", prompt_token_ids=[DEADLY_TOKEN])),
        ]
    )
    engine = fake_engine_command(end_worker_on_token=DEADLY_TOKEN, step_seconds=step_seconds, requests_per_step=1)
    settings = servers.settings(str(tiny_model), kafka={"group_instance_id": "restarted"})
    exit_codes: list[int] = []
    logs: list[str] = []
    while not exit_codes or exit_codes[-1] == -9:
        worker = WorkerProcess(
            tmp_path,
            f"life-{len(exit_codes)}",
            settings,
            "--until-drained",
            command=["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker", json.dumps(engine)],
        )
        try:
            exit_codes.append(worker.wait())
        finally:
            worker.kill()
        logs.append(worker.log)
        assert len(exit_codes) <= MAX_DEATHS + 1, "\n".join(log[-2000:] for log in logs)
    num_deaths = len(exit_codes) - 1
    assert num_deaths >= MAX_DEATHS - 1, "neighbours that are stored before the search begins spare the halving"
    assert exit_codes == [-9] * num_deaths + [0], logs[-1][-3000:]
    rows = {row["id"]: row for row in servers.rows()}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(neighbours, "answered") | {
        "killer": "failed"
    }
    failure = rows["killer"]["failure"]
    assert failure["code"] == FailureCode.ENGINE_LOST
    assert failure["message"].startswith(
        f"{num_deaths} workers in a row died with this document in flight, the last 2 "
    )
    (letter,) = servers.dead_letters()
    assert json.loads(letter.value)["id"] == "killer"
    assert servers.committed() == {0: 3, 1: 2}
