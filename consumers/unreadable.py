"""Why reading from Kafka cannot go on, in words: what was lost, where, and what to do."""

from typing import Any

from kafka import TopicPartition
from kafka.errors import (
    AuthorizationError,
    FencedInstanceIdError,
    KafkaError,
    LogTruncationError,
    OffsetOutOfRangeError,
)

from schemas.settings import KafkaSettings

_LOOKUP_TIMEOUT_MS = 5_000


def why_unreadable(error: Exception, settings: KafkaSettings, consumer: Any) -> str:
    """For an error of the consumer's `poll` that trying again does not mend."""
    if isinstance(error, OffsetOutOfRangeError):
        return _lost_range(error, settings, consumer)
    if isinstance(error, LogTruncationError):
        return _cut_range(error, settings, consumer)
    if isinstance(error, FencedInstanceIdError):
        return (
            f"another worker has taken over the group_instance_id {settings.group_instance_id!r} in the group "
            f"{settings.group!r}: give every worker its own"
        )
    if isinstance(error, AuthorizationError):
        return (
            f"the Kafka user {settings.sasl_username!r} may not read {', '.join(settings.topics)} as group "
            f"{settings.group!r}: {error}"
        )
    assigned = sorted(consumer.assignment())
    where = ", ".join(f"{_name(p)} from offset {_position(consumer, p)}" for p in assigned)
    return (
        f"records from Kafka cannot be read: {type(error).__name__}: {error}. It is in one of: "
        f"{where or 'no partition is assigned'}. A missing compression codec must be installed; a corrupt batch "
        f"must be skipped by setting the group {settings.group!r} past it (kafka-consumer-groups --reset-offsets)."
    )


def _lost_range(error: OffsetOutOfRangeError, settings: KafkaSettings, consumer: Any) -> str:
    wanted: dict[TopicPartition, int] = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
    try:
        starts = consumer.beginning_offsets(list(wanted), timeout_ms=_LOOKUP_TIMEOUT_MS)
        ends = consumer.end_offsets(list(wanted), timeout_ms=_LOOKUP_TIMEOUT_MS)
    except (KafkaError, OSError):
        starts, ends = {}, {}
    told = []
    for partition, offset in wanted.items():
        start, end = starts.get(partition), ends.get(partition)
        if start is not None and offset < start:
            told.append(f"{_name(partition)}: offsets {offset} to {start - 1} were deleted before they were read")
        else:
            told.append(
                f"{_name(partition)}: the group is at {offset}, the partition ends at {end}; was it made again?"
            )
    return (
        f"the group {settings.group!r} cannot go on where it stopped. {'; '.join(told)}. To go on without "
        "them: kafka-consumer-groups --reset-offsets --to-earliest, with no worker running."
    )


def _cut_range(error: LogTruncationError, settings: KafkaSettings, consumer: Any) -> str:
    told = []
    for partition, end in error.divergent_offsets.items():
        where = "some offset" if end is None else f"offset {end.offset}"
        told.append(f"{_name(partition)}: from {where} to {_position(consumer, partition)}")
    return (
        f"the broker has lost records that we had read (an unclean leader election): {'; '.join(told)}. Rows made "
        "of them stay. To go on with what stands there now: kafka-consumer-groups --reset-offsets --to-offset with "
        f"the first of these, for the group {settings.group!r}, with no worker running."
    )


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}/{partition.partition}"


def _position(consumer: Any, partition: TopicPartition) -> object:
    position = consumer._subscription.position(partition)
    return "unknown" if position is None else position.offset
