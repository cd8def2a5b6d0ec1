"""Notices a Kafka client that reads nothing though there is something to read."""

from collections.abc import Callable
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError

STALL_SECONDS = 30.0  # without a record, while there are some to be read
_LOOKUP_TIMEOUT_MS = 5_000


class StallWatch:
    """One membership's. kafka-python 3.0.12 was seen to heartbeat for minutes and fetch nothing, after its broker had
    been away; nothing but another client helps then."""

    def __init__(self, clock: Callable[[], float], patience_seconds: float) -> None:
        self._clock = clock
        self._look_seconds = patience_seconds / 2
        self._quiet_since = clock()
        self._behind: dict[TopicPartition, int] = {}  # at the last look: where it stood with more to read behind that

    def look(self, consumer: Any, reads: bool, has_read: bool) -> dict[TopicPartition, int]:
        """To be called after every poll. The partitions that are stuck, and where: what is there was not read within
        the patience. `reads` says whether it should read at all."""
        now = self._clock()
        if has_read or not reads:
            self._quiet_since, self._behind = now, {}
            return {}
        if now - self._quiet_since < self._look_seconds:
            return {}
        self._quiet_since = now
        before, self._behind = self._behind, _behind(consumer)
        return {partition: offset for partition, offset in before.items() if self._behind.get(partition) == offset}


def _behind(consumer: Any) -> dict[TopicPartition, int]:
    """The positions that are not at their partitions' ends; {} where the broker does not say."""
    assigned = list(consumer.assignment())
    try:
        ends = consumer.end_offsets(assigned, timeout_ms=_LOOKUP_TIMEOUT_MS)
        positions = {one: consumer.position(one, timeout_ms=_LOOKUP_TIMEOUT_MS) for one in assigned}
    except (KafkaError, OSError):
        return {}
    return {one: offset for one, offset in positions.items() if offset is not None and offset < ends[one]}
