"""Reads topics again, outside of any group: from the first record that they still hold up to an end fixed beforehand.

For what looks back (the account's proof, dead letters); what consumes is consumers/kafka.py.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import CoordinatorNotAvailableError, GroupIdNotFoundError, KafkaError, RetriableError

from consumers.connection import check_connection, client_options
from schemas.document import RawMessage, SourcePosition
from schemas.errors import SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

MAX_RECORDS_PER_READ = 1000
_POLL_MS = 200
_LOOKUP_TIMEOUT_MS = 15_000
_STALLED_SECONDS = 60.0  # without one record or a step forward


@dataclass(frozen=True, slots=True)
class LogRange:
    """Offsets [start, stop) of one partition."""

    topic: str
    partition: int
    start: int
    stop: int

    @property
    def num_offsets(self) -> int:
        """An upper bound of its records: compaction and transactions leave gaps."""
        return max(0, self.stop - self.start)


class LogReader:
    """What `open_log_reader` gives. One thread's."""

    def __init__(self, settings: KafkaSettings, consumer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._consumer = consumer
        self._clock = clock

    def whole(self, topics: Sequence[str]) -> list[LogRange]:
        """All that the topics hold now, partition by partition. Raises SourceError where there is no such topic."""
        with _named(self._settings):
            partitions = [
                TopicPartition(topic, number)
                for topic in dict.fromkeys(topics)
                for number in self._partitions_of(topic)
            ]
            starts = self._consumer.beginning_offsets(partitions, timeout_ms=_LOOKUP_TIMEOUT_MS)
            ends = self._consumer.end_offsets(partitions, timeout_ms=_LOOKUP_TIMEOUT_MS)
        return [LogRange(one.topic, one.partition, int(starts[one]), int(ends[one])) for one in partitions]

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """(topic, partition) -> the group's committed offset, where it has one."""
        with _named(self._settings):
            admin = KafkaAdminClient(**client_options(self._settings))
            try:
                offsets = admin.list_group_offsets(group)[group]
            except (CoordinatorNotAvailableError, GroupIdNotFoundError):  # no group has ever come to this broker
                return {}
            finally:
                admin.close()
        return {(one.topic, one.partition): int(entry.offset) for one, entry in offsets.items() if entry.offset >= 0}

    def first_offsets_since(self, ranges: Sequence[LogRange], timestamp_ms: int) -> list[LogRange]:
        """The ranges, each begun at its first record of that time or later."""
        wanted = {TopicPartition(one.topic, one.partition): timestamp_ms for one in ranges}
        with _named(self._settings):
            found = self._consumer.offsets_for_times(wanted, timeout_ms=_LOOKUP_TIMEOUT_MS)
        begun = []
        for one in ranges:
            entry = found.get(TopicPartition(one.topic, one.partition))
            start = one.stop if entry is None else max(one.start, int(entry.offset))
            begun.append(LogRange(one.topic, one.partition, min(start, one.stop), one.stop))
        return begun

    def read(self, ranges: Sequence[LogRange]) -> Iterator[list[RawMessage]]:
        """Every record in the ranges, in order within a partition, at most 1,000 at a time.

        Raises SourceError where a record cannot be read or the broker stays silent.
        """
        stops = {TopicPartition(one.topic, one.partition): one.stop for one in ranges if one.num_offsets}
        if not stops:
            return
        with _named(self._settings):
            self._consumer.assign(list(stops))
            self._consumer.resume(*stops)  # an earlier read paused what it had finished
            for one in ranges:
                if one.num_offsets:
                    self._consumer.seek(TopicPartition(one.topic, one.partition), one.start)
        moved_at = self._clock()
        positions: Mapping[Any, int] = {}
        while stops:
            with _named(self._settings):
                batches = self._poll()
                reached = {partition: self._consumer.position(partition) for partition in stops}
            for partition, records in batches.items():
                raws = [_raw(partition, record) for record in records if record.offset < stops.get(partition, 0)]
                if raws:
                    yield raws
            if batches or reached != positions:
                moved_at, positions = self._clock(), reached
            elif self._clock() - moved_at > _STALLED_SECONDS:
                where = ", ".join(f"{one.topic}/{one.partition} at {reached[one]} of {stops[one]}" for one in stops)
                raise SourceError(
                    f"Kafka sends nothing for {_STALLED_SECONDS:.0f} s, and the end is not reached: {where}"
                )
            if ended := [one for one in stops if reached[one] is not None and reached[one] >= stops[one]]:
                for partition in ended:
                    del stops[partition]
                self._consumer.pause(*ended)

    def _poll(self) -> Mapping[Any, Sequence[Any]]:
        try:
            batches: Mapping[Any, Sequence[Any]] = self._consumer.poll(
                timeout_ms=_POLL_MS, max_records=MAX_RECORDS_PER_READ
            )
        except (RetriableError, OSError) as error:
            logger.warning("reading from Kafka will be tried again", extra={"reason": repr(error)})
            time.sleep(_POLL_MS / 1000)
            return {}
        except Exception as error:  # of many kinds; a second poll past a batch that cannot be read never returns
            raise SourceError(f"records of Kafka cannot be read: {error!r}") from error
        return batches

    def _partitions_of(self, topic: str) -> list[int]:
        found = self._consumer.partitions_for_topic(topic)
        if not found:
            raise SourceError(f"no such Kafka topic on {', '.join(self._settings.bootstrap_servers)}: {topic}")
        return sorted(found)


@contextmanager
def open_log_reader(settings: KafkaSettings) -> Iterator[LogReader]:
    """A reader of what was committed to the log. Raises SourceError where the brokers cannot be reached."""
    reachable = check_connection(settings)
    with _named(settings):
        consumer = KafkaConsumer(
            **client_options(reachable),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            receive_message_max_bytes=2**31 - 1,  # a broker may answer with more than was asked for
        )
    try:
        yield LogReader(reachable, consumer)
    finally:
        consumer.close()


def _raw(partition: Any, record: Any) -> RawMessage:
    headers = tuple((name, value or b"") for name, value in record.headers)
    position = SourcePosition(partition.topic, partition.partition, record.offset)
    return RawMessage(position, record.timestamp, record.key, record.value, headers)


@contextmanager
def _named(settings: KafkaSettings) -> Iterator[None]:
    try:
        yield
    except (KafkaError, OSError) as error:
        raise SourceError(f"Kafka at {', '.join(settings.bootstrap_servers)} cannot be read: {error!r}") from None
