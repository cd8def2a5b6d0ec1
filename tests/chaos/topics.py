"""What happens to a round's topic, and what an operator does where the workers' last words ask for it."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaError, TopicAlreadyExistsError

from consumers.commit_metadata import decode
from tests.chaos.checks import Place, last_words
from tests.chaos.crew import Crew
from tests.chaos.rounds import LOSSES, Fault, FaultKind, Round
from tests.chaos.servers import SharedServer
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess, wait_until

TURN_SECONDS = 0.3  # between two tries of the operator
READING = '"partition assigned"'  # in a worker's log
MADE_AGAIN = "was deleted and made again"
ASKS_FOR_RESET = "--reset-offsets --to-earliest"
_NAMED = re.compile(r"/(\d+): offsets (\d+) to (\d+) were deleted before they were read")


class Topic:
    """One round's topic. `apply` as that of Faults; `tick` goes on with what takes several steps."""

    def __init__(self, own: Servers, made: Round, broker: SharedServer, broker_log: Path, crew: Crew) -> None:
        self._own = own
        self._made = made
        self._broker = broker
        self._broker_log = broker_log
        self._crew = crew
        self._admin = KafkaAdminClient(bootstrap_servers=own.kafka)
        self._begins: dict[int, int] = {}  # partition -> its first offset, where retention came
        self._truncates_at_rest = False
        self._resets_at_rest = False
        self._next_try = 0.0
        self._readers: list[WorkerProcess] = []  # of the topic's earlier life
        self._topic_id: UUID | None = None  # of its second life
        self.findings: list[str] = []
        self.lost: set[Place] = set()  # deleted before anybody had committed them

    @property
    def lives(self) -> int:
        return 1 if self._topic_id is None else 2

    @property
    def begins(self) -> dict[int, int]:
        """Partition -> its first offset now, where it is not 0."""
        return self._begins

    def close(self) -> None:
        self._admin.close()

    def apply(self, fault: Fault) -> bool:
        """False where the broker is away: it is to be tried again."""
        if not self._broker.is_there:
            return False
        match fault.kind:
            case FaultKind.ADD_PARTITION:
                self._add_partition()
            case FaultKind.REMAKE_TOPIC:
                self._remake()
            case FaultKind.TRUNCATE:
                self._truncate()
                if (worker := self._crew.pick(fault.victim)) is not None:
                    self._crew.kill(worker)
                    self._crew.start_one()
            case FaultKind.TRUNCATE_AWAY:
                self._empty_crew()
                self._truncates_at_rest = True
            case _:
                raise AssertionError(fault)
        return True

    def tick(self) -> None:
        asked = [worker for worker in self._crew.ended if ASKS_FOR_RESET in last_words(worker)]
        for worker in asked:
            self._crew.ended.remove(worker)  # as foretold
            if not self._made.has(LOSSES):
                self.findings.append(f"{worker.name} ended: {last_words(worker)}")
            self._check_named(worker)
            self._empty_crew()
            self._resets_at_rest = True
        if not self._broker.is_there or time.monotonic() < self._next_try or not self._crew.is_at_rest:
            return
        self._next_try = time.monotonic() + TURN_SECONDS
        if self._truncates_at_rest:
            self._truncate()
            self._truncates_at_rest = False
            self._fill_crew()
        elif self._resets_at_rest and self._reset():
            self._resets_at_rest = False
            self._fill_crew()

    def committed(self, admin: KafkaAdminClient) -> dict[int, int]:
        """What the group has committed in the topic's present life. From another thread, with its own client."""
        topic_id, entries = self._topic_id, admin.list_group_offsets(self._own.name)[self._own.name]
        committed = {}
        for partition, entry in entries.items():
            if partition.topic == self._own.topic and entry.offset >= 0:
                written = decode(entry.metadata)
                if topic_id is None or (written is not None and written[0] == topic_id):
                    committed[partition.partition] = int(entry.offset)
        return committed

    def is_foretold(self, worker: WorkerProcess) -> bool:
        """Whether it stopped over what happened to the topic, though somebody had asked it to stop as well."""
        words = last_words(worker)
        if self._made.has(LOSSES) and ASKS_FOR_RESET in words:
            self._check_named(worker)
            return True
        return self._topic_id is not None and MADE_AGAIN in words

    def check_end(self) -> Iterator[str]:
        """When all is committed: nobody may still be reading the topic's earlier life."""
        for worker in self._readers:
            if worker in self._crew.running and worker.is_running and MADE_AGAIN not in worker.log:
                yield f"{worker.name} has not noticed that the topic was made again"

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """The broker whole, and heard of by our client, whose first requests after a restart may still fail."""
        with self._broker.whole():
            wait_until("the broker answers the operator", self._is_answered)
            yield

    def _is_answered(self) -> bool:
        try:
            self._admin.list_group_offsets(self._own.name)
        except KafkaError:
            return False
        return True

    def _add_partition(self) -> None:
        number = self._made.num_partitions + 1
        with self._whole():
            self._admin.create_partitions({self._own.topic: number})
            wait_until("the partition is there", lambda: len(self._describe()["partitions"]) == number)
            self._own.produce(self._made.late)

    def _remake(self) -> None:
        """Deletes it, makes it again, and sends the same documents as before."""
        self._readers = [worker for worker in self._crew.running if READING in worker.log]
        with self._whole():
            before = self._describe()["topic_id"]
            self._admin.delete_topics([self._own.topic])
            wait_until("the topic is made again", self._create)
            self._own.produce(self._made.sent)
            topic_id = self._describe()["topic_id"]
        assert topic_id != before
        self._topic_id = topic_id if isinstance(topic_id, UUID) else UUID(str(topic_id))

    def _truncate(self) -> None:
        """In each partition two thirds of what is not committed go.

        Not where nothing is: a group without an offset begins at the earliest, and cannot know that it was another.
        """
        sizes = Counter(one.partition for one in self._made.sent)
        with self._whole():
            for partition, done in self.committed(self._admin).items():
                size = sizes[partition]
                self._begins[partition] = max(self._begins.get(partition, 0), done + (size - done) * 2 // 3)
            deleted = {TopicPartition(self._own.topic, one): begin for one, begin in self._begins.items() if begin}
            self._admin.delete_records(deleted)
            wait_until("the broker has written down where partitions begin", lambda: self._begins_are_durable(deleted))

    def _begins_are_durable(self, begins: Mapping[TopicPartition, int]) -> bool:
        lines = (self._broker_log / "log-start-offset-checkpoint").read_text().splitlines()
        return {f"{topic} {partition} {begin}" for (topic, partition), begin in begins.items()} <= set(lines)

    def _reset(self) -> bool:
        """`kafka-consumer-groups --reset-offsets --to-earliest`; False where the group still has members."""
        with self._whole():
            committed = self.committed(self._admin)
            partitions = [TopicPartition(self._own.topic, number) for number in range(self._made.num_partitions)]
            try:
                found = self._admin.reset_group_offsets(self._own.name, dict.fromkeys(partitions, OffsetSpec.EARLIEST))
            except KafkaError:
                return False
            if any(one["error"].errno for one in found.values()):
                return False
        for partition, begin in self._begins.items():
            self.lost |= {(partition, offset) for offset in range(committed.get(partition, 0), begin)}
        return True

    def _check_named(self, worker: WorkerProcess) -> None:
        """What a worker says was lost was deleted, up to where the partition begins now."""
        named = _NAMED.findall(last_words(worker))
        if not named:
            self.findings.append(f"{worker.name} names no lost offsets: {last_words(worker)}")
        for partition, _, last in named:
            if int(last) != self._begins.get(int(partition), 0) - 1:
                self.findings.append(f"{worker.name} names others than were deleted: {last_words(worker)}")

    def _empty_crew(self) -> None:
        self._crew.is_open = False
        for worker in list(self._crew.running):
            self._crew.stop(worker)

    def _fill_crew(self) -> None:
        self._crew.is_open = True
        for _ in range(self._made.num_workers):
            self._crew.start_one()

    def _create(self) -> bool:
        try:
            self._own.create_topic(self._made.num_partitions)
        except TopicAlreadyExistsError:
            return False
        return True

    def _describe(self) -> dict[str, Any]:
        (described,) = self._admin.describe_topics([self._own.topic])
        return dict(described)
