"""Leaders move between two real brokers under a worker that reads, commits and writes dead letters: those of the
documents' partitions, of the dead letters', and of the group's offsets, its coordinator with them."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch
from kafka import KafkaAdminClient, TopicPartition

import tests
from pipeline.query import count_by_status
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import wait_until
from tests.fakes import fake_engine_command
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ROOT = Path(tests.__file__).resolve().parent.parent
NUM_PARTITIONS = 2
OFFSETS_TOPIC = "__consumer_offsets"
FOUND_SECONDS = 30.0  # for a leader to be elected and found, and what waits for it to be done
REQUEST_SECONDS = 30.0  # until the client gives up a request to a broker that is silent


class Cluster:
    """Two brokers. The first is the controller too and stays; the second can be killed."""

    def __init__(self, folder: Path) -> None:
        properties = {
            "offsets.topic.replication.factor": "2",
            "offsets.topic.num.partitions": "1",
            "default.replication.factor": "2",
            "broker.heartbeat.interval.ms": "500",
            "broker.session.timeout.ms": "3000",  # until the controller knows that a broker is dead
        }
        self.first = KafkaBroker.start(folder / "first", **properties)
        try:
            self.second = KafkaBroker.start(folder / "second", None, None, self.first, **properties)
            self._admin = KafkaAdminClient(bootstrap_servers=self.first.bootstrap_servers)
        except BaseException:
            self.first.stop()
            raise

    @property
    def bootstrap_servers(self) -> list[str]:
        return [self.second.bootstrap_servers, self.first.bootstrap_servers]

    def leaders(self, *topics: str) -> set[int]:
        """The brokers that lead their partitions; -1 for none."""
        described = self._admin.describe_topics(list(topics))
        return {one["leader_id"] for topic in described for one in topic["partitions"]}

    def lead_by(self, broker: KafkaBroker, *topics: str) -> None:
        """Moves the leadership of all their partitions, as an operator does: as soon as it is in sync."""
        other = self.first if broker is self.second else self.second
        described = self._admin.describe_topics(list(topics))
        partitions = {topic["name"]: [one["partition_index"] for one in topic["partitions"]] for topic in described}
        wanted = [TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers]
        refused = self._admin.alter_partition_reassignments({one: [broker.node_id, other.node_id] for one in wanted})
        assert not any(refused.values()), refused

        def is_led() -> bool:
            self._admin.elect_leaders(0, partitions, raise_errors=False)
            return self.leaders(*topics) == {broker.node_id}

        wait_until(f"broker {broker.node_id} leads {topics}", is_led, FOUND_SECONDS)

    def close(self) -> None:
        self._admin.close()
        self.second.stop()
        self.first.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


class Watched:
    """A worker on the cluster, and what was sent to it."""

    def __init__(self, cluster: Cluster, servers: Servers, model: Path, start: StartWorker) -> None:
        self._servers = servers
        self._sent: list[Sent] = []
        servers.create_topic(NUM_PARTITIONS, replication_factor=2)
        # Slow enough that documents are in work whenever a leader moves.
        engine = json.dumps(list(fake_engine_command(step_seconds=0.05, requests_per_step=10)))
        python = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.worker", engine]
        kafka = {"bootstrap_servers": cluster.bootstrap_servers, "replication_factor": 2}
        self._worker = start("worker", servers.settings(str(model), kafka=kafka), command=python)
        self.send(100)
        self._worker.wait_until_ready()
        wait_until("the first rows", lambda: servers.count_rows() > 0)

    @property
    def topics(self) -> tuple[str, ...]:
        return self._servers.topic, self._servers.dead_letter_topic, OFFSETS_TOPIC

    def send(self, num_documents: int) -> None:
        """Of every ten one is bad."""
        numbers = range(len(self._sent), len(self._sent) + num_documents)
        sent = []
        for number in numbers:
            value = b"{" if number % 10 == 9 else document(id=f"d{number}", prompt=f"no. {number}")
            sent.append(Sent(f"d{number}", number % NUM_PARTITIONS, value))
        self._servers.produce(sent)
        self._sent += sent

    def go_through(self, move: Callable[[], None], within_seconds: float) -> float:
        """Seconds from the move until all is stored and committed, what the new leaders alone have told included."""
        self.send(100)
        move()
        moved = time.monotonic()
        self.send(100)
        ends = Counter(one.partition for one in self._sent)
        wait_until("all is committed", lambda: self._servers.committed() == ends, within_seconds)
        return time.monotonic() - moved

    def end(self) -> None:
        """Each document has its one row and outcome, and the account balances."""
        self._worker.send(signal.SIGTERM)
        assert self._worker.wait() == 0, self._worker.log[-3000:]
        num_failed = len(self._sent) // 10
        with Elasticsearch(self._servers.elasticsearch) as client:
            counted = count_by_status(client, self._servers.index)
        assert counted == {"answered": len(self._sent) - num_failed, "failed": num_failed}
        assert len({record.key for record in self._servers.dead_letters()}) == num_failed


@pytest.fixture
def watched(
    cluster: Cluster, elasticsearch_node: ElasticsearchNode, tiny_model: Path, fresh_name: Callable[[str], str],
    start_worker: StartWorker,
) -> Watched:  # fmt: skip
    servers = Servers(cluster.first.bootstrap_servers, elasticsearch_node.url, fresh_name("leader"), {})
    return Watched(cluster, servers, tiny_model, start_worker)


def test_leaders_and_the_coordinator_move_by_an_election_and_by_a_death_and_each_document_has_its_row(
    cluster: Cluster, watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    elected = watched.go_through(lambda: cluster.lead_by(cluster.second, *watched.topics), FOUND_SECONDS)
    died = watched.go_through(cluster.second.kill, FOUND_SECONDS)
    with capsys.disabled():
        print(
            f"\nleaders moved: all stored and committed {elected:.1f} s after an election, {died:.1f} s after a death"
        )
    watched.end()


@pytest.mark.slow
def test_leaders_of_a_broker_that_falls_silent_are_found_elsewhere_and_move_back_once_it_is_back(
    cluster: Cluster, watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    def elect() -> None:
        cluster.lead_by(cluster.second, *watched.topics)

    def come_back() -> None:
        cluster.second.restart()
        elect()

    elect()
    silent = watched.go_through(cluster.second.freeze, REQUEST_SECONDS + FOUND_SECONDS)
    cluster.second.thaw()
    moves = {"its return and election": elect, "its death": cluster.second.kill, "its return": come_back}
    seconds = {"its silence": silent, **{name: watched.go_through(move, FOUND_SECONDS) for name, move in moves.items()}}
    with capsys.disabled():
        told = ", ".join(f"{seconds:.1f} s after {name}" for name, seconds in seconds.items())
        print(f"\nall is stored and committed {told} of the leading broker")
    watched.end()
