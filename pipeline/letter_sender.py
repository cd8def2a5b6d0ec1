"""Sends what is made of dead letters (their messages again, marks) and says of each record whether Kafka took it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError

from consumers.connection import check_connection, client_options
from consumers.letter_log import OutboundRecord, as_options
from schemas.errors import SourceError
from schemas.settings import Settings

SEND_BATCH = 500  # letters that are sent or marked together
SEND_TIMEOUT_SECONDS = 60.0


@contextmanager
def open_producer(settings: Settings) -> Iterator[Any]:
    """For the topics of messages and of dead letters. Raises SourceError where no broker answers."""
    reachable = check_connection(settings.kafka)
    try:
        producer = KafkaProducer(
            **client_options(reachable),
            acks="all",
            enable_idempotence=False,
            allow_auto_create_topics=False,
            linger_ms=20,
            max_request_size=2 * settings.kafka.max_document_bytes + 2**20,
        )
    except (KafkaError, OSError) as error:
        servers = ", ".join(settings.kafka.bootstrap_servers)
        raise SourceError(f"Kafka at {servers} does not answer: {error}") from None
    # The option above does not reach the producer's metadata requests (kafka-python 3.0.12).
    producer._metadata.config["allow_auto_create_topics"] = False
    try:
        yield producer
    finally:
        producer.close(timeout=10)


def send_records(producer: Any, records: Sequence[OutboundRecord], otherwise: str) -> list[str | None]:
    """Sends and waits; for each record None, or why that one is refused.

    Raises SourceError where Kafka takes none; its sentence ends with what that means, `otherwise`.
    """
    try:
        futures = [producer.send(**as_options(record)) for record in records]
        producer.flush(timeout=SEND_TIMEOUT_SECONDS)
        refusals: list[str | None] = []
        for record, future in zip(records, futures, strict=True):
            try:
                future.get(timeout=SEND_TIMEOUT_SECONDS)
                refusals.append(None)
            except MessageSizeTooLargeError:
                refusals.append(f"the topic {record.topic} takes no message of its size any more (max.message.bytes)")
    except KafkaError as error:
        topics = ", ".join(sorted({record.topic for record in records}))
        raise SourceError(f"Kafka does not take messages for {topics}: {error!r}. {otherwise}") from None
    return refusals
