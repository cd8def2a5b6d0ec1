"""Keeps a worker's backlog non-empty at full speed, on bounded disk.

Ids come again after `num_ids` documents, so that the index holds that many rows however long it goes on: a later
delivery replaces the row, which a deletion by query beside the worker's own load would disturb more. Prompts never come
again. Records are deleted from the topic once they are committed and `num_ids` documents old, so that an audit at the
end still finds the last delivery of every id.
"""

import json
import threading
from collections.abc import Mapping
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.admin import NewTopic, OffsetSpec
from kafka.errors import RetriableError

from tests.e2e.servers import Servers

NUM_PARTITIONS = 4
FAILING_EVERY = 500
_TOP_UP_SECONDS = 0.25
_DELETE_SECONDS = 10.0
_TOPIC_CONFIGS = {
    "message.timestamp.type": "LogAppendTime",
    "retention.ms": "-1",
    "segment.bytes": str(16 * 2**20),
    "file.delete.delay.ms": "1000",
}
TASKS: dict[str, Any] = {
    "default": {"sampling": {"max_tokens": 4}},
    "ask": {"system": "You answer briefly.", "template": "Read it:\n{{ text }}\n\nWhat is it about?"},
    "sentiment": {"kind": "classify", "labels": ["good", "bad"], "chat": False, "template": "{{ text }} is"},
}


def make_document(number: int, num_ids: int) -> bytes:
    """The message of that number: its id and kind come again after `num_ids`, its prompt does not."""
    id_number = number % num_ids
    keys: dict[str, Any] = {"id": f"d{id_number}", "job": f"job-{id_number % 7}"}
    kind = id_number % 10
    if fails(number, num_ids):
        keys |= {"task": "translate", "fields": {}}
    elif kind < 5:
        keys |= {"task": "ask", "fields": {"text": f"The text of document {number}, which is short."}}
    elif kind < 7:
        keys |= {"prompt_token_ids": [1 + (number >> shift & 255) for shift in range(20)]}
    elif kind < 8:
        keys |= {"task": "sentiment", "fields": {"text": f"thing {number}"}}
    else:
        keys |= {"prompt": f"document {number}", "priority": id_number % 3, "metadata": {"number": number}}
    return json.dumps(keys).encode()


def fails(number: int, num_ids: int) -> bool:
    """Whether that document's task is unknown, so that it becomes a dead letter and a failed row."""
    return number % num_ids % FAILING_EVERY == FAILING_EVERY - 1


class Feeder:
    """From `start` to `stop` the topic has `backlog` records that are not committed, as far as the machine can."""

    def __init__(self, servers: Servers, num_ids: int, backlog: int) -> None:
        assert num_ids % NUM_PARTITIONS == 0, "an id stays in its partition"
        self.num_produced = 0
        self._servers = servers
        self._num_ids = num_ids
        self._backlog = backlog
        self._committed: Mapping[int, int] = {}
        self._failure: BaseException | None = None
        self._is_stopped = threading.Event()
        self._admin: Any = KafkaAdminClient(bootstrap_servers=servers.kafka)
        self._admin.create_topics([NewTopic(servers.topic, NUM_PARTITIONS, 1, topic_configs=_TOPIC_CONFIGS)])
        self._producer: Any = KafkaProducer(
            bootstrap_servers=servers.kafka, acks="all", linger_ms=20, batch_size=256 * 1024
        )
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    @property
    def lag(self) -> int:
        """Records that are not committed, as of a moment ago."""
        return self.num_produced - sum(self._committed.values())

    @property
    def num_failing(self) -> int:
        """Documents among the produced ones that must fail."""
        whole, rest = divmod(self.num_produced, self._num_ids)
        return whole * (self._num_ids // FAILING_EVERY) + rest // FAILING_EVERY

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the feeding."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Once everything that was sent is acknowledged."""
        self._is_stopped.set()
        self._thread.join()
        self._producer.close()
        self.check()

    def refresh(self) -> None:
        """Reads anew what is committed; what was read last stands where that cannot be had now. After `stop`."""
        try:
            offsets = self._admin.list_group_offsets(self._servers.name)[self._servers.name]
        except RetriableError:  # as before the first group has come to this broker
            return
        topic = self._servers.topic
        self._committed = {one.partition: max(0, at.offset) for one, at in offsets.items() if one.topic == topic}

    def end_offsets(self) -> int:
        """Records that the topic has ever had: what was in fact produced. After `stop`."""
        latest = {TopicPartition(self._servers.topic, one): OffsetSpec.LATEST for one in range(NUM_PARTITIONS)}
        return sum(found.offset for found in self._admin.list_partition_offsets(latest).values())

    def close(self) -> None:
        self._admin.close()

    def _run(self) -> None:
        try:
            turns_a_deletion = int(_DELETE_SECONDS / _TOP_UP_SECONDS)
            turn = 0
            while not self._is_stopped.wait(_TOP_UP_SECONDS):
                if self.num_produced:
                    self.refresh()
                self._top_up()
                turn += 1
                if turn % turns_a_deletion == 0:
                    self._delete_what_is_old()
        except Exception as error:
            self._failure = error

    def _top_up(self) -> None:
        first, last = self.num_produced, sum(self._committed.values()) + self._backlog
        sent = [
            self._producer.send(
                self._servers.topic, make_document(number, self._num_ids), partition=number % NUM_PARTITIONS
            )
            for number in range(first, last)
        ]
        self._producer.flush()
        for one in sent:
            one.get(timeout=30)
        self.num_produced = max(first, last)

    def _delete_what_is_old(self) -> None:
        kept = self._num_ids // NUM_PARTITIONS + self._backlog  # below it a record is committed and came again
        before = {
            TopicPartition(self._servers.topic, partition): offset - kept
            for partition, offset in self._committed.items()
            if offset > kept
        }
        if before:
            self._admin.delete_records(before)
