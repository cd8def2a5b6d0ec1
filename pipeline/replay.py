"""Sends the messages of dead letters again, each as its document's next attempt, and says which cannot be and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticsearch import Elasticsearch

from consumers.letter_log import MarkKind, StoredLetter, build_mark, build_replay
from consumers.replay import MAX_ATTEMPT
from pipeline.audit import index_of, look_up_patiently
from pipeline.connection import check_reachable, connect
from pipeline.dlq import LetterFilter, LetterState, ListedLetter, open_letters
from pipeline.letter_sender import SEND_BATCH, open_producer, send_records
from pipeline.results import row_id, row_version
from pipeline.stored_rows import StoredRow
from schemas.errors import SourceError
from schemas.settings import Settings, require_addresses

MAX_NAMED = 20
IF_UNMARKED = (
    "Messages of this batch may be sent without a mark: the next replay sends them once more, which costs time and "
    "changes no row"
)


@dataclass(slots=True)
class ReplayReport:
    """What became of the letters that were chosen, which none that was purged is. Each is in one of the counts."""

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
        with open_letters(settings) as box, open_producer(settings) as producer:
            waiting: list[ListedLetter] = []
            for one in box.find(wanted):
                if one.state is LetterState.PURGED:
                    continue  # nobody's work any more, so not among the chosen
                if one.state is LetterState.REPLAYED:
                    report.before += 1
                elif (why := _why_not(one.letter)) is not None:
                    report.refused.append((one.letter.name, why))
                else:
                    waiting.append(one)
                if len(waiting) == SEND_BATCH:
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
    refusals = send_records(producer, [build_replay(letter) for letter in letters], IF_UNMARKED)
    sent = []
    for letter, refusal in zip(letters, refusals, strict=True):
        if refusal is None:
            sent.append(letter)
        else:
            report.refused.append((letter.name, refusal))
    report.sent += len(sent)
    marks = send_records(producer, [build_mark(letter, MarkKind.REPLAYED) for letter in sent], IF_UNMARKED)
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
