"""`python -m tests.soak.driver`: a worker at full speed on real servers for an hour, with a fake model, and a verdict.

It prints a line every five minutes, keeps every sample in a file, and ends with 1 where a rule does not hold. The rules
are in `rules.py`; how disk is bounded stands in `feeder.py`.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticsearch import Elasticsearch

import tests
from pipeline.audit import audit
from schemas.settings import Settings
from tests.chaos.checks import account
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess
from tests.fakes import fake_engine_command
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.jdk import what_is_missing
from tests.servers.kafka_broker import KafkaBroker
from tests.soak import rules
from tests.soak.feeder import TASKS, Feeder
from tests.soak.measure import Sampler
from tests.soak.rules import Books, Finding, Sample
from tests.tiny_models import write_tiny_model

ROOT = Path(tests.__file__).resolve().parent.parent
NAME = "soak"
NUM_IDS = 200_000
BACKLOG = 40_000
LEAST_LAG = 10_000
SAMPLE_SECONDS = 5.0
ROW_SECONDS = 300.0
DRAIN_SECONDS = 300.0
RETENTION_CHECK_MS = 30_000


def soak(
    directory: Path,
    kafka: str,
    elasticsearch: str,
    seconds: float,
    *,
    pids: Sequence[int] = (),
    num_ids: int = NUM_IDS,
    backlog: int = BACKLOG,
    sample_seconds: float = SAMPLE_SECONDS,
    name: str = NAME,
    tell: Callable[[str], None] = print,
) -> tuple[list[Sample], Books]:
    """Feeds a worker for so long, drains it and ends it: its samples and its books.

    `pids` are the servers' processes, whose CPU time is ours.
    """
    servers = Servers(kafka, elasticsearch, name, {})
    feeder = Feeder(servers, num_ids, backlog)
    settings = _settings(servers, write_tiny_model(directory / "model"))
    blocks = directory / "blocks"
    worker = WorkerProcess(directory, name, settings, command=_worker_command(blocks))
    try:
        feeder.start()
        worker.wait_until_ready()
        sampler = Sampler(worker, blocks, [os.getpid(), *pids], [directory])
        samples = _sample(sampler, feeder, worker, seconds, sample_seconds, directory / "samples.jsonl", tell)
        feeder.stop()
        _drain(feeder, worker)
        worker.send(signal.SIGTERM)
        worker.wait()
        books = _close_books(servers, settings, feeder, worker, num_ids)
    finally:
        worker.kill()
        feeder.close()
    return samples, books


def _sample(
    sampler: Sampler,
    feeder: Feeder,
    worker: WorkerProcess,
    seconds: float,
    sample_seconds: float,
    path: Path,
    tell: Callable[[str], None],
) -> list[Sample]:
    """A sample every few seconds, each written to the file at once, and a line of the table now and then."""
    samples = [sampler.take(feeder.lag)]
    row_seconds = min(ROW_SECONDS, seconds / 6)
    row_begin = 0
    tell(rules.heading())
    with path.open("w") as file:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(sample_seconds, left))
            feeder.check()
            samples.append(sampler.take(feeder.lag))
            print(json.dumps(asdict(samples[-1])), file=file, flush=True)
            if samples[-1].seconds - samples[row_begin].seconds >= row_seconds - sample_seconds / 2:
                tell(rules.row(samples[row_begin:]))
                row_begin = len(samples) - 1
    return samples


def _drain(feeder: Feeder, worker: WorkerProcess) -> None:
    """Until everything is committed, or the worker has ended, or it takes too long: the books then say so."""
    give_up_at = time.monotonic() + DRAIN_SECONDS
    feeder.refresh()
    while feeder.lag > 0 and worker.is_running and time.monotonic() < give_up_at:
        time.sleep(0.2)
        feeder.refresh()


def _close_books(
    servers: Servers, settings: dict[str, Any], feeder: Feeder, worker: WorkerProcess, num_ids: int
) -> Books:
    feeder.refresh()
    report = audit(Settings.model_validate(settings))
    with Elasticsearch(servers.elasticsearch, request_timeout=60) as client:
        client.indices.refresh(index=servers.index)
        num_rows = int(client.count(index=servers.index)["count"])
    return Books(
        num_produced=feeder.end_offsets(),
        num_failing=feeder.num_failing,
        num_ids=min(feeder.num_produced, num_ids),
        num_committed=feeder.num_produced - feeder.lag,
        num_rows=num_rows,
        audit_is_complete=report.is_complete,
        audit_stored=report.stored,
        audit_said=list(report.lines())[-2],
        exit_code=worker.exit_code,
        account=account(worker),
    )


def _settings(servers: Servers, model: Path) -> dict[str, Any]:
    """The product's own settings but for names and addresses."""
    return {
        "kafka": {
            "bootstrap_servers": [servers.kafka],
            "topics": [servers.topic],
            "dead_letter_topic": servers.dead_letter_topic,
            "group": servers.name,
        },
        "elasticsearch": {"urls": [servers.elasticsearch], "index": servers.index, "number_of_replicas": 0},
        "model": {"path": str(model)},
        "worker": {"log_format": "json"},
        "tasks": TASKS,
    }


def _worker_command(blocks: Path) -> list[str]:
    engine_command = json.dumps(list(fake_engine_command()))
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.soak.worker", str(blocks), engine_command]


@contextmanager
def open_servers(directory: Path) -> Iterator[tuple[KafkaBroker, ElasticsearchNode]]:
    """A broker that gives the disk of deleted records back soon, and a node."""
    node = ElasticsearchNode.start(directory / "elasticsearch")
    try:
        broker = KafkaBroker.start(directory / "kafka", **{"log.retention.check.interval.ms": str(RETENTION_CHECK_MS)})
        try:
            yield broker, node
        finally:
            broker.stop()
    finally:
        node.stop()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--keep", action="store_true", help="logs and samples, also where all rules hold")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends worker and servers too
    options = parser.parse_args(arguments)
    if (missing := what_is_missing()) is not None:
        print(f"a soak runs on a real Apache Kafka and Elasticsearch, which need {missing}", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="pagemill-soak-"))
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {options.seconds:.0f} s; logs and samples in {directory}", flush=True
    )
    with open_servers(directory) as (broker, node):
        samples, books = soak(
            directory,
            broker.bootstrap_servers,
            node.url,
            options.seconds,
            pids=[broker.pid, node.pid],
            tell=lambda line: print(line, flush=True),
        )
    findings = [*rules.judge_trends(samples, LEAST_LAG), *rules.judge_books(books)]
    return tell_verdict(samples, books, findings, directory, options.keep)


def tell_verdict(
    samples: Sequence[Sample], books: Books, findings: Sequence[Finding], directory: Path, keep: bool
) -> int:
    """Prints it; the folder goes where all holds. The exit code."""
    print("\n".join(map(str, findings)))
    failed = [finding.rule for finding in findings if not finding.holds]
    minutes = (samples[-1].seconds - samples[0].seconds) / 60
    print(
        f"soak of {minutes:.1f} minutes, {books.num_produced} documents: "
        + (f"{len(failed)} rules do NOT hold: {', '.join(failed)}" if failed else "every rule holds"),
        flush=True,
    )
    if not failed and not keep:
        shutil.rmtree(directory)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
