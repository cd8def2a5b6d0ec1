"""Documents per second through KafkaSource (read, track, decode, hand over, complete, commit), beside a bare loop.

The bare loop polls, parses with orjson and commits. Both read the same records from a real broker on loopback, on
the same cores, one after the other; the median of the runs is printed.

    python -m tests.bench.kafka_source [--documents 40000] [--runs 3]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from kafka import KafkaConsumer, KafkaProducer

from consumers.kafka import KafkaSource
from consumers.topics import ensure_topics
from schemas.settings import KafkaSettings
from tests.servers.kafka_broker import KafkaBroker

NUM_PARTITIONS = 4
TOKENS_PER_DOCUMENT = 64


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--documents", type=int, default=40_000)
    arguments.add_argument("--runs", type=int, default=3)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        broker = KafkaBroker.start(Path(directory) / "kafka")
        try:
            measure(broker, given.documents, given.runs)
        finally:
            broker.stop()


def measure(broker: KafkaBroker, num_documents: int, num_runs: int) -> None:
    settings = KafkaSettings(bootstrap_servers=(broker.bootstrap_servers,), topics=("documents",))
    ensure_topics(settings, create_input=True, num_partitions=NUM_PARTITIONS)
    values = [
        orjson.dumps(
            {"id": f"document-{i}", "prompt_token_ids": [(7 * i + j) % 30_000 for j in range(TOKENS_PER_DOCUMENT)]}
        )
        for i in range(num_documents)
    ]
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, linger_ms=20, batch_size=2**18)
    for i, value in enumerate(values):
        producer.send("documents", value, partition=i % NUM_PARTITIONS)
    producer.close()
    num_bytes = sum(map(len, values))
    print(f"{num_documents:,} documents of {num_bytes / num_documents:.0f} bytes in {NUM_PARTITIONS} partitions")

    bare, source = [], []
    for run in range(num_runs):
        bare.append(num_documents / bare_loop(broker.bootstrap_servers, f"bare-{run}", num_documents))
        source.append(num_documents / source_loop(settings, f"source-{run}", num_documents))
        print(f"run {run + 1}: bare loop {bare[-1]:,.0f} documents/s, KafkaSource {source[-1]:,.0f} documents/s")
    ratio = statistics.median(source) / statistics.median(bare)
    print(f"median: {statistics.median(source):,.0f} documents/s, {ratio:.2f} of the bare loop")


def bare_loop(bootstrap_servers: str, group: str, num_documents: int) -> float:
    """Seconds from the first record to the last commit."""
    consumer: Any = KafkaConsumer(
        "documents",
        bootstrap_servers=bootstrap_servers,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    begun, num_read = 0.0, 0
    while num_read < num_documents:
        batches = consumer.poll(200, max_records=1000)
        begun = begun or (time.perf_counter() if batches else 0.0)
        for records in batches.values():
            num_read += len([orjson.loads(record.value) for record in records])
        consumer.commit()
    seconds = time.perf_counter() - begun
    consumer.close()
    return seconds


def source_loop(settings: KafkaSettings, group: str, num_documents: int) -> float:
    """Seconds from the first document to the last completion."""
    source = KafkaSource(settings.model_copy(update={"group": group}))
    source.start()
    begun, num_read = 0.0, 0
    while num_read < num_documents:
        documents = source.poll(512, 0.2)
        begun = begun or (time.perf_counter() if documents else 0.0)
        num_read += len(documents)
        source.complete([document.position for document in documents])
    seconds = time.perf_counter() - begun
    source.close()
    return seconds


if __name__ == "__main__":
    main()
