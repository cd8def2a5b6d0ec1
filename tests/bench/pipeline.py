"""The whole pipeline without a model, beside a bare loop that stores the same rows: `python -m tests.bench.pipeline`.

20,000 documents of 20 `prompt_token_ids` each on a real Kafka and a real Elasticsearch; the engine is a real process
without a model. The bare loop polls up to 1,000 records, decodes, stores the very rows that the pipeline stored, under
the same ids and with one bulk call, and commits. Both read the same topic in the same run. The servers go on getting
faster for a minute, so a pass of each comes first, and then the bare loop runs before and after the pipeline: the ratio
is to the mean of both. Everything shares this machine's cores, so only the ratio says anything.
"""

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from elasticsearch import Elasticsearch
from kafka import KafkaConsumer, KafkaProducer
from rich.console import Console
from rich.progress import track

from consumers.topics import ensure_topics
from pipeline.flow import Flow
from pipeline.index import RESULTS_MAPPING
from pipeline.summary import RunSummary
from pipeline.worker import Worker
from schemas.settings import Settings
from schemas.settings_reader import load_settings
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

POLL_RECORDS = 1000
PROMPT_TOKENS = 20
AIM = 0.6


@contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """(Kafka address, Elasticsearch address) of fresh servers."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        node = ElasticsearchNode.start(Path(folder) / "elasticsearch")
        try:
            broker = KafkaBroker.start(Path(folder) / "kafka")
            try:
                yield broker.bootstrap_servers, node.url
            finally:
                broker.stop()
        finally:
            node.stop()


def settings_of(kafka: str, elasticsearch: str, run: int) -> Settings:
    return load_settings(
        None,
        {
            "kafka.bootstrap_servers": kafka,
            "kafka.group": f"pipeline-{run}",
            "elasticsearch.urls": elasticsearch,
            "elasticsearch.index": f"pipeline-{run}",
            "elasticsearch.number_of_replicas": 0,
            "worker.http_port": 0,
        },
        {},
    )


def produce(settings: Settings, num_documents: int) -> None:
    ensure_topics(settings.kafka, create_input=True)
    draw = random.Random(0)
    producer = KafkaProducer(
        bootstrap_servers=list(settings.kafka.bootstrap_servers), linger_ms=20, enable_idempotence=False
    )
    for number in track(range(num_documents), "Producing", console=Console(stderr=True)):
        token_ids = [draw.randrange(256) for _ in range(PROMPT_TOKENS)]
        value = json.dumps({"id": f"d{number}", "job": "bench", "prompt_token_ids": token_ids})
        producer.send(settings.kafka.topics[0], value=value.encode())
    producer.flush()
    producer.close()


def run_pipeline(settings: Settings) -> tuple[RunSummary, list[int]]:
    """The worker until its backlog is done; and this process's memory now and then, in KiB, while documents wait."""
    memory: list[int] = []

    def look(flow: Flow) -> None:
        if flow.totals.account.ended // 1000 > len(memory):
            memory.append(resident_kib())

    worker = Worker(settings, engine_command=fake_engine_command(), tokenizer=ByteTokenizer(), on_turn=look)
    return worker.run(until_drained=True), memory


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def stored_rows(client: Elasticsearch, index: str) -> dict[str, dict[str, Any]]:
    """Document id -> its row, of all that the index holds."""
    client.indices.refresh(index=index)
    rows: dict[str, dict[str, Any]] = {}
    after: dict[str, Any] = {}
    while True:
        page = client.search(index=index, size=5000, sort=["source.partition", "source.offset"], **after)["hits"][
            "hits"
        ]
        if not page:
            return rows
        rows.update((hit["_source"]["id"], hit["_source"]) for hit in page)
        after = {"search_after": page[-1]["sort"]}


def run_bare_loop(settings: Settings, rows: dict[str, dict[str, Any]], run: str) -> float:
    """Documents a second from the first record to the last commit."""
    client: Any = Elasticsearch(list(settings.elasticsearch.urls))
    index = f"bare-{run}"
    client.indices.create(index=index, mappings=RESULTS_MAPPING, settings={"number_of_replicas": 0})
    consumer = KafkaConsumer(
        *settings.kafka.topics,
        bootstrap_servers=list(settings.kafka.bootstrap_servers),
        group_id=index,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    num_stored = 0
    started = None
    while num_stored < len(rows):
        polled = consumer.poll(timeout_ms=200, max_records=POLL_RECORDS)
        records = [record for of_partition in polled.values() for record in of_partition]
        if not records:
            continue
        if started is None:
            started = time.perf_counter()
        lines = bytearray()
        for record in records:
            document = orjson.loads(record.value)
            lines += b'{"index":{"_id":"%b:default:%b"}}\n' % (document["job"].encode(), document["id"].encode())
            lines += orjson.dumps(rows[document["id"]]) + b"\n"
        reply = client.bulk(index=index, body=bytes(lines), filter_path="errors")
        assert not reply.get("errors"), reply
        consumer.commit()
        num_stored += len(records)
    assert started is not None
    seconds = time.perf_counter() - started
    consumer.close()
    client.close()
    return num_stored / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with servers() as (kafka, elasticsearch):
        produce(settings_of(kafka, elasticsearch, 0), options.documents)
        warm_up = settings_of(kafka, elasticsearch, 0)
        run_pipeline(warm_up)
        with Elasticsearch(elasticsearch) as client:
            rows = stored_rows(client, warm_up.elasticsearch.index)
        assert len(rows) == options.documents, f"{len(rows)} rows of {options.documents} documents"
        run_bare_loop(warm_up, rows, "warm-up")
        print(f"rows of {sum(len(orjson.dumps(row)) for row in rows.values()) // len(rows):,} bytes")
        ratios = []
        for run in range(1, options.repeats + 1):
            settings = settings_of(kafka, elasticsearch, run)
            before = run_bare_loop(settings, rows, f"{run}-before")
            summary, memory = run_pipeline(settings)
            assert summary.totals.account.indexed == options.documents, summary.lines()
            after = run_bare_loop(settings, rows, f"{run}-after")
            ratios.append(summary.documents_per_second / statistics.mean((before, after)))
            print(
                f"run {run}: pipeline {summary.documents_per_second:,.0f}/s, bare loop {before:,.0f} and {after:,.0f}, "
                f"ratio {ratios[-1]:.2f}; resident {min(memory) // 1024} to {max(memory) // 1024} MiB"
            )
            print("\n".join("    " + line for line in summary.lines()[2:]))
        median = statistics.median(ratios)
        print(f"median ratio of {len(ratios)}: {median:.2f} (aim: at least {AIM})")


if __name__ == "__main__":
    main()
