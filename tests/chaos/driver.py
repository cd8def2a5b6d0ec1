"""`python -m tests.chaos.driver`: rounds of random faults on real workers and servers, until one does not hold.

The servers run on over the rounds; topic, index, group and workers are each round's own.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch
from kafka import KafkaAdminClient
from kafka.errors import KafkaError

import tests
from tests.chaos import checks
from tests.chaos.engine import Record
from tests.chaos.faults import Crew, Faults, Servers
from tests.chaos.proxy import FaultProxy
from tests.chaos.rounds import (
    KEPT,
    KILLER_TOKEN,
    MAX_BODY_BYTES,
    MAX_DOCUMENT_BYTES,
    NOT_FINITE_TOKEN,
    SESSION_SECONDS,
    Round,
    describe,
    make_round,
)
from tests.e2e import servers as e2e
from tests.e2e.workers import WorkerProcess, is_alive
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.jdk import what_is_missing
from tests.servers.kafka_broker import KafkaBroker
from tests.tiny_models import write_tiny_model

ROOT = Path(tests.__file__).resolve().parent.parent
ROUND_SECONDS = 180.0  # a round that takes longer has come to a stop
TURN_SECONDS = 0.02
COMMITTED_EVERY_SECONDS = 0.3
STEP_SECONDS = 0.02
MAX_ENDED = 5  # workers that end by themselves in a round, each with a sentence

# A node that refuses early, for real: 413 past MAX_BODY_BYTES, 429 for a whole bulk while so much is being indexed,
# 429 for single rows of a bulk for many shards.
CRAMPED = {
    "http.max_content_length": f"{MAX_BODY_BYTES}b",
    "indexing_pressure.memory.limit": "400kb",
    "thread_pool.write.size": "1",
    "thread_pool.write.queue_size": "3",
}


@dataclass(slots=True)
class Outcome:
    """What a round came to."""

    made: Round
    seconds: float = 0.0
    num_again: int = 0  # answers computed beyond the first one of a document
    num_dead_letters_again: int = 0
    findings: list[str] = field(default_factory=list)  # none: all held
    ended: list[str] = field(default_factory=list)  # last words of workers that ended by themselves

    def line(self) -> str:
        share = self.num_again / len(self.made.sent)
        faults = ", ".join(fault.kind.name for fault in self.made.faults)
        return (
            f"seed {self.made.seed}: {'FAILED' if self.findings else 'holds'} in {self.seconds:.1f} s; "
            f"{len(self.made.sent)} documents, {self.num_again} computed again ({share:.1%}); {faults}"
        )


class Chaos:
    """Runs rounds on servers that `open_servers` started."""

    def __init__(self, servers: Servers, model: Path, directory: Path, keeps_logs: bool) -> None:
        self._servers = servers
        self._model = model
        self._directory = directory
        self._keeps_logs = keeps_logs  # of every round, not only of those that do not hold
        self._num_rounds = 0
        self._client = Elasticsearch(servers.node.url, request_timeout=30)

    def run(self, made: Round) -> Outcome:
        """One round. The workers' logs are kept where something did not hold."""
        self._num_rounds += 1
        began = time.monotonic()
        name = f"chaos-{made.seed}-{self._num_rounds}"
        folder = self._directory / name
        folder.mkdir()
        outcome = Outcome(made)
        record = Record(folder / "answers")
        own = e2e.Servers(self._servers.broker.bootstrap_servers, self._servers.node.url, name, {})
        own.create_topic(made.num_partitions)
        own.produce(made.sent)
        settings = self._settings(own, made)
        command = self._worker_command(made, record)
        crew = Crew(lambda worker: WorkerProcess(folder, worker, settings, command=command))
        faults = Faults(self._servers, crew, self._client, f"{own.index}-v1")
        try:
            for _ in range(made.num_workers):
                crew.start_one()
            self._run_until_committed(made, own, crew, faults, record, outcome)
            faults.end_all()
            engines = [pid for worker in crew.running for pid in worker.engine_pids()]
            stuck = crew.stop_all()
            outcome.findings += [f"{worker.name} does not end after SIGTERM" for worker in stuck]
            self._check(own, made, crew, engines, outcome)
        finally:
            faults.end_all()
            crew.kill_all()
        outcome.num_again = record.num_answered_again()
        outcome.seconds = time.monotonic() - began
        self._clear(own)
        if outcome.findings or self._keeps_logs:
            (folder / "round.txt").write_text("\n".join([describe(made), *map(str, made.faults), *outcome.findings]))
        else:
            shutil.rmtree(folder)
        return outcome

    def _run_until_committed(
        self, made: Round, own: e2e.Servers, crew: Crew, faults: Faults, record: Record, outcome: Outcome
    ) -> None:
        waiting = list(made.faults)
        wanted = dict(Counter(one.partition for one in made.sent))
        give_up_at = time.monotonic() + ROUND_SECONDS
        next_look = 0.0
        while True:
            num_answers = record.num_answers
            while waiting and waiting[0].after_answers <= num_answers:
                faults.apply(waiting.pop(0))
            faults.tick()
            crew.replace_ended()
            now = time.monotonic()
            if len(crew.ended) > MAX_ENDED:
                outcome.findings.append(f"{len(crew.ended)} workers ended by themselves")
                return
            if now >= next_look and faults.broker_answers:
                next_look = now + COMMITTED_EVERY_SECONDS
                with suppress(KafkaError):
                    if own.committed() == wanted:
                        return
            if now >= give_up_at:
                outcome.findings.append(
                    f"not committed within {ROUND_SECONDS:.0f} s: {num_answers} answers, {len(waiting)} faults to come"
                )
                return
            time.sleep(TURN_SECONDS)

    def _check(self, own: e2e.Servers, made: Round, crew: Crew, engines: Sequence[int], outcome: Outcome) -> None:
        ends = checks.Ends.of(made.sent)
        keys = [record.key for record in own.dead_letters()]
        outcome.num_dead_letters_again = len(keys) - len(set(keys))
        findings = outcome.findings
        findings += checks.check_rows(own, self._client, ends)
        findings += checks.check_dead_letters(keys, own, ends)
        findings += checks.check_audit(self._settings(own, made), own, ends, len(made.sent))
        for worker in crew.stopped:
            findings += checks.check_stopped(worker)
        for worker in crew.ended:
            findings += checks.check_ended(worker)
            outcome.ended.append(f"{worker.name}: {checks.last_words(worker)}")
        if (committed := own.committed()) != (wanted := dict(Counter(one.partition for one in made.sent))):
            findings.append(f"committed {committed} in place of {wanted}")
        if left := [pid for pid in engines if is_alive(pid)]:
            findings.append(f"{len(left)} engine processes outlived their workers")

    def _settings(self, own: e2e.Servers, made: Round) -> dict[str, Any]:
        return own.settings(
            str(self._model),
            kafka={
                "bootstrap_servers": [self._servers.kafka_proxy.address],
                "session_timeout_seconds": SESSION_SECONDS,
                "max_in_flight_documents": made.max_in_flight,
                "max_document_bytes": MAX_DOCUMENT_BYTES,
                "connect_timeout_seconds": 30.0,
            },
            elasticsearch={
                "urls": [self._servers.node_proxy.url],
                "number_of_shards": made.num_shards,
                "flush_seconds": made.flush_seconds,
                "bulk_documents": made.bulk_documents,
                "request_timeout_seconds": 3.0,
                "connect_timeout_seconds": 30.0,
                "max_backoff_seconds": 1.0,
            },
            worker={"log_format": "json", "grace_seconds": 10.0},
        )

    def _worker_command(self, made: Round, record: Record) -> list[str]:
        python = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m"]
        fake = ["fake", "--step-seconds", str(STEP_SECONDS), "--requests-per-step", str(made.requests_per_step)]
        fake += ["--die-on-token", str(KILLER_TOKEN), "--not-finite-on-token", str(NOT_FINITE_TOKEN)]
        kind = ["real"] if made.has_real_engine else fake
        engine_command = [*python, "tests.chaos.engine", str(record.path), *kind]
        return [*python, "tests.chaos.worker", json.dumps(engine_command)]

    def _clear(self, own: e2e.Servers) -> None:
        """So that the thousandth round finds servers as empty as the first."""
        with suppress(ApiError, TransportError):
            self._client.indices.delete(index=f"{own.index}-v1", ignore_unavailable=True)
        admin = KafkaAdminClient(bootstrap_servers=own.kafka)
        try:
            with suppress(KafkaError):
                admin.delete_topics([own.topic, own.dead_letter_topic])
        finally:
            admin.close()


@contextmanager
def open_servers(directory: Path) -> Iterator[Servers]:
    """Real servers, each with a proxy on the way to it."""
    with ExitStack() as stack:
        kafka_proxy, node_proxy = stack.enter_context(FaultProxy()), stack.enter_context(FaultProxy())
        broker = KafkaBroker.start(directory / "kafka", None, kafka_proxy.port)
        stack.callback(broker.stop)
        node = ElasticsearchNode.start(directory / "elasticsearch", **CRAMPED)
        stack.callback(node.stop)
        kafka_proxy.server_port = broker.proxied_port
        node_proxy.server_port = node.port
        yield Servers(broker, node, kafka_proxy, node_proxy)


def run_rounds(seeds: Iterator[int], directory: Path, until: float, keeps_logs: bool) -> list[Outcome]:
    """Rounds until the seeds or the time (monotonic) are used up, each told in a line."""
    outcomes: list[Outcome] = []
    model = write_tiny_model(directory / "model")
    with open_servers(directory) as servers:
        chaos = Chaos(servers, model, directory, keeps_logs)
        for seed in seeds:
            if outcomes and time.monotonic() >= until:
                break
            outcome = chaos.run(make_round(seed))
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            for sentence in [*outcome.ended, *outcome.findings]:
                print(f"    {sentence}", flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """The books of all rounds."""
    num_documents = sum(len(outcome.made.sent) for outcome in outcomes)
    num_again = sum(outcome.num_again for outcome in outcomes)
    num_letters_again = sum(outcome.num_dead_letters_again for outcome in outcomes)
    failed = [outcome.made.seed for outcome in outcomes if outcome.findings]
    kinds = Counter(fault.kind for outcome in outcomes for fault in outcome.made.faults)
    lines = [f"{number:5} x {kind}" for kind, number in sorted(kinds.items(), key=lambda entry: -entry[1])]
    lines.append(
        f"{len(outcomes)} rounds, {num_documents} documents, {num_again} computed again "
        f"({num_again / max(num_documents, 1):.2%}), {num_letters_again} dead letters sent again, "
        f"{sum(len(outcome.ended) for outcome in outcomes)} workers ended by themselves"
    )
    lines.append(
        f"{len(failed)} rounds did not hold: " + ", ".join(f"make chaos SEED={seed}" for seed in failed)
        if failed
        else "every round held"
    )
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="this many; without it as many as fit into the time")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no round after so long (without --rounds)")
    parser.add_argument("--seed", type=int, help="the first round's; the next ones count on")
    parser.add_argument("--keep-logs", action="store_true", help="of every round")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends workers and servers too
    options = parser.parse_args(arguments)
    if (missing := what_is_missing()) is not None:
        print(f"rounds run on a real Apache Kafka and Elasticsearch, which need {missing}", file=sys.stderr)
        return 2
    first = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    rounds = options.rounds or (1 if options.seed is not None else None)
    seeds = itertools.chain(KEPT if options.seed is None else (), range(first, first + (rounds or 10**9)))
    until = float("inf") if rounds else time.monotonic() + options.seconds
    directory = Path(tempfile.mkdtemp(prefix="pagemill-chaos-"))
    print(f"first seed {first}; logs in {directory}", flush=True)
    outcomes = run_rounds(seeds, directory, until, options.keep_logs)
    print("\n".join(summary(outcomes)))
    holds = not any(outcome.findings for outcome in outcomes)
    if holds and not options.keep_logs:
        shutil.rmtree(directory)
    return 0 if holds else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
