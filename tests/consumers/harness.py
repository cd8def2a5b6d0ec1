"""What the tests on the real broker have in common: settings, records, and what the broker holds afterwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import OffsetAndMetadata

from consumers.kafka import KafkaSource
from schemas.document import Document, RejectedDocument
from schemas.settings import KafkaSettings

DEADLINE_SECONDS = 40.0  # generous: it only bounds a test that has failed


def kafka_settings(bootstrap_servers: str, topic: str, **changes: Any) -> KafkaSettings:
    """Settings of a test: a group and a dead-letter topic of the topic's own, a short session."""
    given = {
        "bootstrap_servers": (bootstrap_servers,),
        "topics": (topic,),
        "group": f"group-of-{topic}",
        "dead_letter_topic": f"dead-letters-of-{topic}",
        "session_timeout_seconds": 6.0,
        "commit_interval_seconds": 0.2,
        **changes,
    }
    return KafkaSettings.model_validate(given)


@contextmanager
def running(settings: KafkaSettings, worker: str = "worker-1") -> Iterator[KafkaSource]:
    source = KafkaSource(settings, worker)
    source.start()
    try:
        yield source
    finally:
        source.close()


def produce(bootstrap_servers: str, topic: str, values: Sequence[bytes | None], **options: Any) -> None:
    """Sends the values in order, to partition 0 unless `partition` or a list of `headers` says otherwise."""
    producer = KafkaProducer(bootstrap_servers=bootstrap_servers, acks="all", max_request_size=32 * 2**20)
    sent = [producer.send(topic, value, **{"key": b"key", "partition": 0, **options}) for value in values]
    for future in sent:
        future.get(timeout=30)
    producer.close()


def produce_in_transactions(
    bootstrap_servers: str, topic: str, values: Sequence[bytes], aborted: Sequence[int]
) -> None:
    """Sends each value to partition 0 in a transaction of its own; those at the places `aborted` are taken back."""
    producer = KafkaProducer(bootstrap_servers=bootstrap_servers, transactional_id=f"writer-of-{topic}")
    producer.init_transactions()
    for place, value in enumerate(values):
        producer.begin_transaction()
        producer.send(topic, value, partition=0).get(timeout=30)
        if place in aborted:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()


def prompts(*texts: object) -> list[bytes]:
    return [b'{"prompt": "%s"}' % str(text).encode() for text in texts]


def take(source: KafkaSource, num_documents: int) -> list[Document | RejectedDocument]:
    """Exactly that many documents."""
    taken: list[Document | RejectedDocument] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(taken) < num_documents:
        assert time.monotonic() < deadline, f"{len(taken)} of {num_documents} documents after {DEADLINE_SECONDS} s"
        taken += source.poll(num_documents - len(taken), 0.1)
    return taken


def poll_until_it_stops(source: KafkaSource, taken: list[Document | RejectedDocument]) -> None:
    """Polls until the source raises; what it hands out until then goes to `taken`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        taken += source.poll(100, 0.1)


def offsets_of(documents: Sequence[Document | RejectedDocument]) -> list[int]:
    return [document.position.offset for document in documents]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS} s: {what}"
        time.sleep(0.02)


class BrokerView:
    """What the broker itself says, beside any source."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers)
        self._bootstrap_servers = bootstrap_servers

    def committed(self, settings: KafkaSettings, partition: int = 0) -> int | None:
        """The group's offset in the first topic; None where it has none."""
        offsets = self._admin.list_group_offsets(settings.group)[settings.group]
        offset = offsets.get(TopicPartition(settings.topics[0], partition))
        return None if offset is None else int(offset.offset)

    def metadata(self, settings: KafkaSettings, partition: int = 0) -> str:
        """What the group's commit in the first topic says beside its offset."""
        offsets = self._admin.list_group_offsets(settings.group)[settings.group]
        return str(offsets[TopicPartition(settings.topics[0], partition)].metadata)

    def topic_id(self, topic: str) -> UUID:
        (described,) = self._admin.describe_topics([topic])
        return UUID(str(described["topic_id"]))

    def commit(self, settings: KafkaSettings, offset: int, metadata: str = "", partition: int = 0) -> None:
        """As an operator does with no worker running."""
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap_servers, group_id=settings.group, enable_auto_commit=False
        )
        try:
            topic_partition = TopicPartition(settings.topics[0], partition)
            consumer.assign([topic_partition])
            consumer.commit({topic_partition: OffsetAndMetadata(offset, metadata)})
        finally:
            consumer.close()

    def records(self, topic: str, num_records: int) -> list[Any]:
        """The first so many records of the topic's partition 0."""
        consumer = KafkaConsumer(bootstrap_servers=self._bootstrap_servers, auto_offset_reset="earliest")
        consumer.assign([TopicPartition(topic, 0)])
        records: list[Any] = []

        def has_all() -> bool:
            for batch in consumer.poll(200).values():
                records.extend(batch)
            return len(records) >= num_records

        wait_until(has_all, f"{num_records} records in {topic}")
        consumer.close()
        return records

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])

    def create_topic(self, topic: str, num_partitions: int = 1) -> None:
        self._admin.create_topics({topic: {"num_partitions": num_partitions, "replication_factor": 1}})

    def add_partition(self, topic: str, num_partitions: int) -> None:
        """So that the topic has that many."""
        self._admin.create_partitions({topic: num_partitions})

    def set_topic(self, topic: str, configs: dict[str, str]) -> None:
        self._admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs)])

    def delete_records_before(self, topic: str, offset: int) -> None:
        self._admin.delete_records({TopicPartition(topic, 0): offset})

    def close(self) -> None:
        self._admin.close()
