"""One round at a time, with topic, index, group, workers and proxies of its own, on servers that others use too."""

import json
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch
from kafka import KafkaAdminClient
from kafka.errors import KafkaError

import tests
from tests.chaos import checks
from tests.chaos.books import Outcome
from tests.chaos.crew import Crew
from tests.chaos.engine import Record
from tests.chaos.faults import Faults
from tests.chaos.rounds import (
    KILLER_TOKEN,
    MAX_DOCUMENT_BYTES,
    NOT_FINITE_TOKEN,
    SESSION_SECONDS,
    TOPIC_FAULTS,
    WORKER_KILLER_TOKEN,
    Fault,
    Round,
    describe,
)
from tests.chaos.servers import PASSWORD, USER, Servers, Ways
from tests.chaos.topics import Topic
from tests.chaos.zygote import Zygote
from tests.e2e import servers as e2e
from tests.e2e.workers import WorkerProcess, is_alive
from tests.servers.tls_front import TlsFront, basic

ROOT = Path(tests.__file__).resolve().parent.parent
ROUND_SECONDS = 240.0  # a round that takes longer has come to a stop
TURN_SECONDS = 0.02
LOOK_SECONDS = 0.3  # between two looks at what is committed
STEP_SECONDS = 0.02
MAX_ENDED = 8  # workers that end by themselves in a round, each with a sentence
MAX_KILLED = 20  # by a document, until it is found: 3, and 9 of 256 documents in flight, and those that time hid


class Lane:
    """Runs rounds one after the other. Everything of theirs is gone after them but the logs of those that failed."""

    def __init__(
        self,
        servers: Servers,
        ways: Ways,
        zygote: Zygote,
        model: Path,
        directory: Path,
        keeps_logs: bool,
    ) -> None:
        self._servers = servers
        self._ways = ways
        self._zygote = zygote
        self._model = model
        self._directory = directory
        self._keeps_logs = keeps_logs  # of every round, not only of those that do not hold

    def run(self, made: Round) -> Outcome:
        """One round. An exception in it is a finding as any other."""
        outcome = Outcome(made)
        began = time.monotonic()
        folder = self._directory / f"chaos-{made.seed}"
        folder.mkdir()
        own = e2e.Servers(self._servers.bootstrap_servers, self._servers.node_url, folder.name, {})
        try:
            with Elasticsearch(own.elasticsearch, request_timeout=30) as client:
                self._play(made, own, client, folder, outcome)
                self._clear(own, client)
        except Exception:
            outcome.findings.append(traceback.format_exc())
        outcome.seconds = time.monotonic() - began
        if outcome.findings or self._keeps_logs:
            (folder / "round.txt").write_text("\n".join([describe(made), *map(str, made.faults), *outcome.findings]))
        else:
            shutil.rmtree(folder)
        return outcome

    def _play(self, made: Round, own: e2e.Servers, client: Elasticsearch, folder: Path, outcome: Outcome) -> None:
        with ExitStack() as stack:
            node_port = self._servers.node_port
            if made.has_tls_node:
                front = TlsFront(self._servers.node_url, self._servers.certificate, [basic(USER, PASSWORD)])
                node_port = stack.enter_context(front).port
            self._ways.switch(made.security_protocol, node_port)
            with self._whole():
                own.create_topic(made.num_partitions)
                own.produce(made.sent)
            records = Records(folder)
            settings = self._settings(own, made, is_proxied=True)

            def start(name: str) -> WorkerProcess:
                command = [json.dumps(self._engine_command(made, records.newest(topic.lives)))]
                return WorkerProcess(folder, name, settings, command=command, start=self._zygote.fork)

            crew = Crew(start)
            topic = Topic(own, made, self._servers.broker, self._servers.broker_log, crew)
            stack.callback(topic.close)
            faults = Faults(self._servers, self._ways, crew, client, f"{own.index}-v1")
            stack.callback(crew.kill_all)
            stack.callback(faults.end_all)
            for _ in range(made.num_workers):
                crew.start_one()
            self._run_until_committed(made, own, crew, faults, topic, records, outcome)
            outcome.findings += topic.check_end()
            faults.end_all()
            engines = [pid for worker in crew.running for pid in worker.engine_pids()]
            stuck = crew.stop_all()
            outcome.findings += [f"{worker.name} does not end after SIGTERM" for worker in stuck]
            self._check_workers(crew, faults, topic, engines, outcome)
            outcome.findings += topic.findings
            with self._whole():
                self._check(own, made, client, topic, outcome)
            outcome.num_again = records.num_answered_again()
            outcome.num_lost = len(topic.lost)

    def _run_until_committed(
        self,
        made: Round,
        own: e2e.Servers,
        crew: Crew,
        faults: Faults,
        topic: Topic,
        records: "Records",
        outcome: Outcome,
    ) -> None:
        waiting = list(made.faults)
        wanted = dict(Counter(one.partition for one in made.every))
        give_up_at = time.monotonic() + ROUND_SECONDS
        with CommitWatch(self._servers, own, topic) as watch:
            while True:
                num_answers = records.num_answers
                for fault in [one for one in waiting if one.after_answers <= num_answers]:
                    if _apply(fault, faults, topic):
                        waiting.remove(fault)
                        outcome.came.append(fault.kind)
                faults.tick()
                crew.tick()
                topic.tick()
                if len(crew.ended) > MAX_ENDED + MAX_KILLED * made.kills_workers:
                    outcome.findings.append(f"{len(crew.ended)} workers ended by themselves")
                    return
                if watch.committed == wanted and crew.is_open:
                    return
                if time.monotonic() >= give_up_at:
                    outcome.findings.append(
                        f"not committed within {ROUND_SECONDS:.0f} s: {num_answers} answers, {watch.committed} of "
                        f"{wanted}, {len(waiting)} faults to come"
                    )
                    return
                time.sleep(TURN_SECONDS)

    def _check_workers(
        self, crew: Crew, faults: Faults, topic: Topic, engines: Sequence[int], outcome: Outcome
    ) -> None:
        findings = outcome.findings
        for worker in crew.stopped:
            if outcome.made.kills_workers and worker.exit_code == -signal.SIGKILL:
                outcome.num_killed += 1
                continue
            has_whole_log = worker not in faults.without_whole_log
            # Our SIGTERM may come when it has said its last words and has but to end.
            if worker.exit_code in (1, -signal.SIGTERM) and topic.is_foretold(worker):
                findings += checks.check_ended(worker, has_whole_log)
                continue
            findings += checks.check_stopped(worker, has_whole_log)
        for worker in crew.ended:
            if outcome.made.kills_workers and worker.exit_code == -signal.SIGKILL:
                outcome.num_killed += 1
                continue
            findings += checks.check_ended(worker, worker not in faults.without_whole_log)
            outcome.ended.append(f"{worker.name}: {checks.last_words(worker)}")
        if left := [pid for pid in engines if is_alive(pid)]:
            findings.append(f"{len(left)} engine processes outlived their workers")

    def _check(self, own: e2e.Servers, made: Round, client: Elasticsearch, topic: Topic, outcome: Outcome) -> None:
        ends = checks.Ends.of(made.every, topic.lost)
        keys = [record.key for record in own.dead_letters()]
        outcome.num_dead_letters_again = len(keys) - len(set(keys)) if topic.lives == 1 else 0
        findings = outcome.findings
        findings += checks.check_rows(own, client, ends)
        findings += checks.check_dead_letters(keys, own, ends)
        findings += checks.check_audit(self._settings(own, made, is_proxied=False), ends, len(made.every), topic.begins)
        if (committed := own.committed()) != (wanted := dict(Counter(one.partition for one in made.every))):
            findings.append(f"committed {committed} in place of {wanted}")

    def _settings(self, own: e2e.Servers, made: Round, is_proxied: bool) -> dict[str, Any]:
        """Of the workers; or without proxies and passwords, for looking at what they did."""
        kafka: dict[str, Any] = {}
        elasticsearch: dict[str, Any] = {}
        if is_proxied:
            kafka = self._kafka_settings(made)
            elasticsearch = self._elasticsearch_settings(made)
        return own.settings(
            str(self._model),
            kafka={
                "session_timeout_seconds": SESSION_SECONDS,
                "max_in_flight_documents": made.max_in_flight,
                "max_document_bytes": MAX_DOCUMENT_BYTES,
                "connect_timeout_seconds": 30.0,
                **kafka,
            },
            elasticsearch={
                "number_of_shards": made.num_shards,
                "flush_seconds": made.flush_seconds,
                "bulk_documents": made.bulk_documents,
                "request_timeout_seconds": 3.0,
                "connect_timeout_seconds": 30.0,
                "max_backoff_seconds": 1.0,
                **elasticsearch,
            },
            worker={"log_format": "json", "grace_seconds": 10.0, "engine_silence_seconds": 4.0},
        )

    def _kafka_settings(self, made: Round) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "bootstrap_servers": [self._ways.kafka.address],
            "security_protocol": made.security_protocol,
        }
        if made.security_protocol.endswith("SSL"):
            settings["ssl_ca_file"] = str(self._servers.authority)
        if made.sasl_mechanism is not None:
            settings["sasl_mechanism"] = made.sasl_mechanism
            settings |= {"sasl_username": USER, "sasl_password_file": str(self._servers.password_file)}
        return settings

    def _elasticsearch_settings(self, made: Round) -> dict[str, Any]:
        if not made.has_tls_node:
            return {"urls": [self._ways.node.url]}
        return {
            "urls": [f"https://{self._ways.node.address}"],
            "ca_file": str(self._servers.authority),
            "username": USER,
            "password_file": str(self._servers.password_file),
        }

    def _engine_command(self, made: Round, record: Record) -> list[str]:
        fake = ["fake", "--step-seconds", str(STEP_SECONDS), "--requests-per-step", str(made.requests_per_step)]
        fake += ["--die-on-token", str(KILLER_TOKEN), "--not-finite-on-token", str(NOT_FINITE_TOKEN)]
        fake += ["--end-worker-on-token", str(WORKER_KILLER_TOKEN)]
        kind = ["real"] if made.has_real_engine else fake
        python = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m"]
        return [*python, "tests.chaos.engine", str(record.path), *kind]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        with self._servers.broker.whole(), self._servers.node.whole():
            yield

    def _clear(self, own: e2e.Servers, client: Elasticsearch) -> None:
        """So that the thousandth round finds servers as empty as the first."""
        with self._whole():
            with suppress(ApiError, TransportError):
                client.indices.delete(index=f"{own.index}-v1", ignore_unavailable=True)
            admin = KafkaAdminClient(bootstrap_servers=own.kafka)
            try:
                for delete, name in (
                    (admin.delete_topics, own.topic),
                    (admin.delete_topics, own.dead_letter_topic),
                    (admin.delete_groups, own.name),
                ):
                    with suppress(KafkaError):  # a group still has the members that were killed
                        delete([name])
            finally:
                admin.close()


class Records:
    """What the engines of a round have answered, for each life of its topic: what is sent again is computed again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[int, Record] = {}

    def newest(self, life: int) -> Record:
        """The one that engines of workers started in that life write to."""
        return self._records.setdefault(life, Record(self._folder / f"answers-{life}"))

    @property
    def num_answers(self) -> int:
        return sum(record.num_answers for record in self._records.values())

    def num_answered_again(self) -> int:
        return sum(record.num_answered_again() for record in self._records.values())


class CommitWatch:
    """`with CommitWatch(...) as watch:` looks at what is committed now and then, in a thread that may have to wait."""

    def __init__(self, servers: Servers, own: e2e.Servers, topic: Topic) -> None:
        self.committed: dict[int, int] = {}
        self._servers = servers
        self._own = own
        self._topic = topic
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"watch {own.name}", daemon=True)

    def __enter__(self) -> "CommitWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        admin: KafkaAdminClient | None = None
        while not self._is_over.wait(LOOK_SECONDS):
            if not self._servers.broker.is_there:
                continue
            try:
                admin = admin or KafkaAdminClient(bootstrap_servers=self._own.kafka, request_timeout_ms=5_000)
                self.committed = self._topic.committed(admin)
            except KafkaError:  # the broker has just gone, or no group has come yet
                if admin is not None:
                    admin.close()
                admin = None
        if admin is not None:
            admin.close()


def _apply(fault: Fault, faults: Faults, topic: Topic) -> bool:
    return topic.apply(fault) if fault.kind in TOPIC_FAULTS else faults.apply(fault)
