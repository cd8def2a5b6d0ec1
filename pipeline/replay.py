"""Sends the messages of dead letters again, each as its document's next attempt, and says which cannot be and why."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from elasticsearch import Elasticsearch
from kafka import KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError

from consumers.connection import client_options
from consumers.letter_log import OutboundRecord, StoredLetter, as_options, build_mark, build_replay
from consumers.replay import MAX_ATTEMPT
from pipeline.audit import index_of, look_up_patiently
from pipeline.connection import check_reachable, connect
from pipeline.dlq import LetterFilter, LetterState, ListedLetter, open_letters
from pipeline.results import row_id, row_version
from pipeline.stored_rows import StoredRow
from schemas.errors import SourceError
from schemas.settings import Settings, require_addresses

REPLAY_BATCH = 500  # looked up, sent and marked together
SEND_TIMEOUT_SECONDS = 60.0
MAX_NAMED = 20


@dataclass(slots=True)
class ReplayReport:
    """What became of the letters that were chosen. Each is in one of the counts."""

    sent: int = 0
    before: int = 0  # replayed already
    answered: int = 0  # the document was answered meanwhile
    superseded: int = 0  # a newer message of the document, or a later attempt, has a row
    refused: list[tuple[str, str]] = field(default_factory=list)  # letter, why
    is_dry: bool = False

    def lines(self) -> Iterator[str]:
        """For a person."""
        for name, why in self.refused[:MAX_NAMED]:
            yield f"letter {name} cannot be replayed: {why}"
        if len(self.refused) > MAX_NAMED:
            yield f"and {len(self.refused) - MAX_NAMED} more"
        verb = "would be replayed" if self.is_dry else "replayed"
        yield (
            f"{self.sent} {verb}; {self.before} were before, {self.answered} are answered since, "
            f"{self.superseded} have a newer row, {len(self.refused)} cannot be"
        )


def replay(settings: Settings, wanted: LetterFilter, *, is_dry: bool = False) -> ReplayReport:
    """Sends the messages of the letters that fit to their topics again, each as its next attempt, and marks them.

    A crash between sending and marking lets the next replay send a message again: with the same version, so that it
    is computed twice and stored once. Raises SettingsError, SourceError and SinkError; what was sent stays sent.
    """
    require_addresses(settings, model=False)
    report = ReplayReport(is_dry=is_dry)
    client = connect(settings.elasticsearch)
    try:
        check_reachable(client, settings.elasticsearch)
        with open_letters(settings) as box, _producer(settings) as producer:
            waiting: list[ListedLetter] = []
            for one in box.find(wanted):
                if one.state is LetterState.REPLAYED:
                    report.before += 1
                elif (why := _why_not(one.letter)) is not None:
                    report.refused.append((one.letter.name, why))
                else:
                    waiting.append(one)
                if len(waiting) == REPLAY_BATCH:
                    _replay_some(settings, client, producer, waiting, report)
                    waiting = []
            _replay_some(settings, client, producer, waiting, report)
    finally:
        client.close()
    return report


def _why_not(letter: StoredLetter) -> str | None:
    if letter.num_bytes_cut:
        return (
            f"the dead-letter topic had no room for the last {letter.num_bytes_cut} bytes of its message "
            f"({letter.raw.position}): send the document again from where it came"
        )
    if letter.attempt >= MAX_ATTEMPT:
        return f"it has failed {MAX_ATTEMPT + 1} times, and a version counts no further: send it as a new message"
    return None


def _replay_some(
    settings: Settings, client: Elasticsearch, producer: Any, chosen: Sequence[ListedLetter], report: ReplayReport
) -> None:
    if not chosen:
        return
    wanted = [(index_of(settings, one.identity), row_id(one.identity)) for one in chosen]
    letters = []
    for one, row in zip(chosen, look_up_patiently(client, wanted), strict=True):
        match _compared(one.letter, row):
            case "answered":
                report.answered += 1
            case "superseded":
                report.superseded += 1
            case _:
                letters.append(one.letter)
    if report.is_dry:
        report.sent += len(letters)
        return
    refusals = _send(producer, [build_replay(letter) for letter in letters])
    sent = []
    for letter, refusal in zip(letters, refusals, strict=True):
        if refusal is None:
            sent.append(letter)
        else:
            report.refused.append((letter.name, refusal))
    report.sent += len(sent)
    marks = _send(producer, [build_mark(letter) for letter in sent])
    if (refusal := next(filter(None, marks), None)) is not None:
        raise SourceError(
            f"{len(sent)} messages were sent again and could not all be marked in {settings.kafka.dead_letter_topic} "
            f"({refusal}): the next replay may send them once more, which costs time and changes no row"
        )


def _compared(letter: StoredLetter, row: StoredRow | None) -> str | None:
    """What a stored row says about replaying its document; None where nothing speaks against it."""
    version = row_version(letter.raw.timestamp_ms, letter.raw.position.offset, letter.attempt)
    if row is None or row.version < version:
        return None
    if row.is_answered:
        return "answered"
    return "superseded" if row.version > version else None


@contextmanager
def _producer(settings: Settings) -> Iterator[Any]:
    try:
        producer = KafkaProducer(
            **client_options(settings.kafka),
            acks="all",
            enable_idempotence=False,
            allow_auto_create_topics=False,
            linger_ms=20,
            max_request_size=2 * settings.kafka.max_document_bytes + 2**20,
        )
    except KafkaError as error:
        servers = ", ".join(settings.kafka.bootstrap_servers)
        raise SourceError(f"Kafka at {servers} does not answer: {error}") from None
    # The option above does not reach the producer's metadata requests (kafka-python 3.0.12).
    producer._metadata.config["allow_auto_create_topics"] = False
    try:
        yield producer
    finally:
        producer.close(timeout=10)


def _send(producer: Any, records: Sequence[OutboundRecord]) -> list[str | None]:
    """Sends and waits; for each record None, or why that one is refused. Raises SourceError where Kafka takes none."""
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
        raise SourceError(
            f"Kafka does not take messages for {topics}: {error!r}. Messages of this batch may be sent without a mark: "
            "the next replay sends them once more, which costs time and changes no row"
        ) from None
    return refusals
