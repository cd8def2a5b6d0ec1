"""Gets rid of dead letters: marks those that fit a filter, so that nobody is shown them again, or deletes the beginning
of their topic.

A log cannot lose single records: what is marked takes its room until the beginning that it stands in is deleted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from consumers.letter_log import MarkKind, OutboundRecord, build_mark
from consumers.log_reader import LogRange
from consumers.topics import delete_records_before
from pipeline.dlq import LetterBox, LetterFilter, LetterState
from pipeline.letter_sender import SEND_BATCH, open_producer, send_records
from schemas.errors import SourceError
from schemas.settings import Settings


def plan_marks(box: LetterBox, wanted: LetterFilter) -> list[OutboundRecord]:
    """The marks for the letters that fit and have none yet."""
    return [build_mark(one.letter, MarkKind.PURGED) for one in box.find(wanted) if one.state is not LetterState.PURGED]


def write_marks(settings: Settings, marks: Sequence[OutboundRecord]) -> None:
    """From then on `list` and `replay` leave these letters out. Raises SourceError where Kafka takes no marks."""
    otherwise = "Letters that are not marked yet are still shown: purge again"
    with open_producer(settings) as producer:
        for start in range(0, len(marks), SEND_BATCH):
            refusals = send_records(producer, marks[start : start + SEND_BATCH], otherwise)
            if (refusal := next(filter(None, refusals), None)) is not None:
                raise SourceError(f"a mark is refused: {refusal}. {otherwise}")


@dataclass(frozen=True, slots=True)
class Deletion:
    """What is to be deleted: the ranges, with so many letters, of which `num_open` were neither replayed nor purged."""

    ranges: tuple[LogRange, ...]
    num_letters: int
    num_open: int

    def lines(self) -> Iterator[str]:
        """For a person."""
        for one in self.ranges:
            yield f"{one.topic}/{one.partition}: offsets {one.start} to {one.stop}"
        yield f"{self.num_letters} letters, {self.num_open} of them never replayed nor purged"


def plan_deletion(box: LetterBox, before: Sequence[str], until_ms: int | None) -> Deletion:
    """`before` are PARTITION/OFFSET, each for everything in front of it; `until_ms` is for what failed before then;
    neither for everything.

    Raises SettingsError where a place is none.
    """
    if before:
        stops = dict(box.place(name) for name in before)
    elif until_ms is not None:
        stops = box.offsets_at(until_ms)
    else:
        stops = {one.partition: one.stop for one in box.ranges}
    ranges = tuple(
        LogRange(one.topic, one.partition, one.start, min(one.stop, stops[one.partition]))
        for one in box.ranges
        if stops.get(one.partition, 0) > one.start
    )
    ends = {one.partition: one.stop for one in ranges}
    states = [
        one.state
        for one in box.find(LetterFilter())
        if one.letter.place.offset < ends.get(one.letter.place.partition, 0)
    ]
    done = states.count(LetterState.REPLAYED) + states.count(LetterState.PURGED)
    return Deletion(ranges, len(states), len(states) - done)


def delete(settings: Settings, planned: Deletion) -> None:
    """Deletes it, for good. Raises SourceError where Kafka refuses."""
    if planned.ranges:
        delete_records_before(settings.kafka, {(one.topic, one.partition): one.stop for one in planned.ranges})
