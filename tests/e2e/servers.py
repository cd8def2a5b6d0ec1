"""What the end-to-end tests put into Kafka and read out of Kafka and Elasticsearch, the same for all servers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticsearch import ApiError, Elasticsearch
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import CoordinatorNotAvailableError, InvalidReplicationFactorError, NotCoordinatorError

from pipeline.embedded import PRODUCER_OPTIONS
from tests.e2e.documents import LIMITS, TASKS, Sent
from tests.e2e.workers import wait_until

# The embedded server sends a whole backlog in one reply.
CONSUMER_OPTIONS: dict[str, Any] = {"enable_auto_commit": False, "receive_message_max_bytes": 2**31 - 1}


@dataclass(frozen=True, slots=True)
class Servers:
    """Where they are, and the names that one test has for itself there."""

    kafka: str
    elasticsearch: str
    name: str
    kafka_settings: Mapping[str, Any]  # what these servers need beside the address

    @property
    def topic(self) -> str:
        return f"{self.name}.documents"

    @property
    def dead_letter_topic(self) -> str:
        return f"{self.name}.dead-letters"

    @property
    def index(self) -> str:
        return f"{self.name}-results"

    def settings(self, model: str, **changes: Mapping[str, Any]) -> dict[str, Any]:
        """A worker's settings on these servers: the tests' tasks and limits, and small bulks that are soon full."""
        settings: dict[str, Any] = {
            "kafka": {
                "bootstrap_servers": [self.kafka],
                "topics": [self.topic],
                "dead_letter_topic": self.dead_letter_topic,
                "group": self.name,
                "session_timeout_seconds": 6.0,
                "commit_interval_seconds": 0.2,
                **self.kafka_settings,
            },
            "elasticsearch": {
                "urls": [self.elasticsearch],
                "index": self.index,
                "number_of_replicas": 0,
                "flush_seconds": 0.1,
            },
            "model": {"path": model},
            "engine": {},
            "worker": {"log_format": "console"},
        }
        for part, values in [*LIMITS.items(), *changes.items()]:
            settings[part] = {**settings.get(part, {}), **values}
        return {**settings, "tasks": TASKS}

    def create_topic(
        self, num_partitions: int, replication_factor: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        topic = NewTopic(self.topic, num_partitions, replication_factor, topic_configs=dict(configs or {}))
        admin = KafkaAdminClient(bootstrap_servers=self.kafka)

        def is_made() -> bool:
            try:
                admin.create_topics([topic])
            except InvalidReplicationFactorError:  # a broker that has just come back counts for none yet
                return False
            return True

        try:
            wait_until("the topic is made", is_made)
        finally:
            admin.close()

    def produce(self, sent: Iterable[Sent]) -> None:
        # One request at a time: a batch that is sent again would come behind the next one, and places be others.
        options = {**PRODUCER_OPTIONS, "max_in_flight_requests_per_connection": 1}
        producer = KafkaProducer(bootstrap_servers=self.kafka, **options)
        try:
            records = [
                producer.send(
                    self.topic, one.value, key=one.key, partition=one.partition, headers=[("origin", one.name.encode())]
                )
                for one in sent
            ]
            producer.flush()
            for record in records:
                record.get(timeout=30)
        finally:
            producer.close()

    def dead_letters(self) -> list[Any]:
        """Every record of the dead-letter topic, as kafka-python gives it."""
        consumer = KafkaConsumer(bootstrap_servers=self.kafka, **CONSUMER_OPTIONS)
        try:
            found = consumer.partitions_for_topic(self.dead_letter_topic) or set()
            partitions = [TopicPartition(self.dead_letter_topic, number) for number in sorted(found)]
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            ends = consumer.end_offsets(partitions)
            records: list[Any] = []
            while any(consumer.position(partition) < ends[partition] for partition in partitions):
                for batch in consumer.poll(timeout_ms=500).values():
                    records += batch
            return records
        finally:
            consumer.close()

    def committed(self) -> dict[int, int]:
        """The group's committed offset of each partition that has one."""
        admin = KafkaAdminClient(bootstrap_servers=self.kafka)
        try:
            try:
                offsets = admin.list_group_offsets(self.name)[self.name]
            except (CoordinatorNotAvailableError, NotCoordinatorError):  # until the first group has come to a broker
                return {}
            return {
                partition.partition: entry.offset
                for partition, entry in offsets.items()
                if partition.topic == self.topic and entry.offset >= 0
            }
        finally:
            admin.close()

    def count_rows(self, **terms: str) -> int:
        """Rows with these values, as an Elasticsearch query counts them; 0 before there is an index."""
        client = Elasticsearch(self.elasticsearch)
        try:
            client.indices.refresh(index=self.index)
            query = {"bool": {"filter": [{"term": {name: value}} for name, value in terms.items()]}}
            return int(client.count(index=self.index, query=query)["count"])
        except ApiError:
            return 0
        finally:
            client.close()

    def rows(self, at_most: int = 10_000) -> list[dict[str, Any]]:
        """Every row of the index with its `_id`."""
        client = Elasticsearch(self.elasticsearch)
        try:
            client.indices.refresh(index=self.index)
            hits = client.search(index=self.index, query={"match_all": {}}, size=at_most)["hits"]["hits"]
            return [{"_id": hit["_id"], **hit["_source"]} for hit in hits]
        finally:
            client.close()
