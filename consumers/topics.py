"""The topics that a source needs: whether they exist, and making those that may be made."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import InvalidTopicError, KafkaError, TopicAlreadyExistsError, UnknownTopicOrPartitionError

from consumers.connection import check_connection, client_options
from schemas.errors import SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 1_048_588  # the broker's own default of max.message.bytes

_INPUT_CONFIGS = {"message.timestamp.type": "LogAppendTime"}  # a row's version is made from it, so no producer's clock
_DEAD_LETTER_CONFIGS = {"retention.ms": "-1", "cleanup.policy": "delete", "message.timestamp.type": "CreateTime"}


def ensure_topics(
    settings: KafkaSettings, *, create_input: bool = False, num_partitions: int = 4, wait_seconds: float = 0.0
) -> KafkaSettings:
    """The input topics exist, and the dead-letter topic too: it is made where it is missing.

    `create_input` makes missing input topics as well, with `num_partitions` and the broker's append time.
    Brokers that are not there are waited for, for `wait_seconds`. Returns the settings with one that is, for clients.
    Raises SourceError where brokers cannot be reached, refuse us, or lack an input topic.
    """
    reachable = check_connection(settings, wait_seconds)
    with _admin(reachable) as admin:
        existing = set(admin.list_topics())
        missing = [topic for topic in settings.topics if topic not in existing]
        if missing and not create_input:
            raise SourceError(
                f"no such Kafka topic on {', '.join(settings.bootstrap_servers)}: {', '.join(missing)}. "
                "Create it, or correct kafka.topics."
            )
        _create(admin, settings, missing, num_partitions, _INPUT_CONFIGS)
        if settings.dead_letter_topic not in existing:
            _create(admin, settings, [settings.dead_letter_topic], 1, _DEAD_LETTER_CONFIGS)
    return reachable


def max_message_bytes(settings: KafkaSettings, topic: str) -> int:
    """The topic's `max.message.bytes`; the broker's default where we may not read its configuration."""
    try:
        with _admin(settings) as admin:
            described = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
            return int(_find(described, "max.message.bytes"))
    except (KafkaError, SourceError, LookupError, TypeError, ValueError):
        logger.warning("the size limit of a topic cannot be read", extra={"topic": topic}, exc_info=True)
        return DEFAULT_MAX_MESSAGE_BYTES


def delete_records_before(settings: KafkaSettings, offsets: Mapping[tuple[str, int], int]) -> None:
    """Deletes what each (topic, partition) holds before its offset. Raises SourceError where Kafka refuses."""
    with _admin(settings) as admin:
        admin.delete_records({TopicPartition(*partition): offset for partition, offset in offsets.items()})


def _create(
    admin: Any, settings: KafkaSettings, topics: Sequence[str], num_partitions: int, configs: dict[str, str]
) -> None:
    if not topics:
        return
    new = [NewTopic(topic, num_partitions, settings.replication_factor, topic_configs=configs) for topic in topics]
    try:
        admin.create_topics(new, timeout_ms=15_000)
    except TopicAlreadyExistsError:
        pass  # another worker was quicker
    except InvalidTopicError:
        raise SourceError(
            f"Kafka takes no topic called {' or '.join(map(repr, topics))}: a name has 1 to 249 letters, digits, '.', "
            "'_' and '-'"
        ) from None
    except KafkaError as error:
        raise SourceError(f"Kafka does not let us create {', '.join(topics)}: {error}. Create it beforehand.") from None
    _wait_until_usable(admin, topics)
    logger.info("topics created", extra={"topics": list(topics), "num_partitions": num_partitions})


def _wait_until_usable(admin: Any, topics: Sequence[str], timeout_seconds: float = 10.0) -> None:
    """A topic that was just made is not at once known to every broker, or has no leader yet."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            admin.wait_for_topics(list(topics), timeout_ms=1000)
        except (KafkaError, OSError, UnknownTopicOrPartitionError):
            continue
        return
    raise SourceError(f"the topics {', '.join(topics)} were made, but have no leader after {timeout_seconds:.0f} s")


@contextmanager
def _admin(settings: KafkaSettings) -> Iterator[Any]:
    options = client_options(settings)
    try:
        admin = KafkaAdminClient(**options)
    except (KafkaError, OSError) as error:
        raise SourceError(f"Kafka at {', '.join(settings.bootstrap_servers)} does not answer: {error}") from None
    try:
        yield admin
    except (KafkaError, OSError) as error:
        raise SourceError(f"Kafka at {', '.join(settings.bootstrap_servers)} refuses: {error}") from None
    finally:
        admin.close()


def _find(described: Any, name: str) -> Any:
    """The value of one configuration in the nested answer of describe_configs."""
    for by_resource in described.values():
        for configs in by_resource.values():
            return configs[name]["value"]
    raise LookupError(name)
