"""What may have been answered before is looked up before it is computed, and only that."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from pipeline.prompts import compile_tasks
from pipeline.redelivery import AnyDocument, Redeliveries
from pipeline.results import WorkerIdentity, row_version
from pipeline.retry import Verdict
from pipeline.rows import RowBuilder
from pipeline.stored_rows import LOOK_UP_ROWS, StoredRow
from schemas.document import SourcePosition
from schemas.errors import SinkError
from schemas.task import Task
from tests.pipeline.parts import ByteTokenizer, MemorySource, make_document, make_rejected
from tests.pipeline.sinks import wait_until

TASKS = {"default": Task(), "elsewhere": Task(index="other", template="{{ text }}")}


class Index:
    """Rows by (index, _id), and what was asked."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str | None, str], StoredRow] = {}
        self.asked: list[list[tuple[str | None, str]]] = []
        self.error: Exception | None = None

    def store(self, offset: int, *, version: int | None = None, of_offset: int | None = None) -> None:
        """The row of make_document(offset)."""
        origin = offset if of_offset is None else of_offset
        known = row_version(1000 + offset, offset, 0) if version is None else version
        self.rows[None, f"default:default:d{offset}"] = StoredRow(known, "documents", 0, origin)

    def look_up(self, wanted: Sequence[tuple[str | None, str]]) -> list[StoredRow | None]:
        self.asked.append(list(wanted))
        if self.error is not None:
            raise self.error
        return [self.rows.get(place) for place in wanted]


Make = Callable[..., tuple[MemorySource, Index, Redeliveries]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Redeliveries] = []

    def make(started: int = 0) -> tuple[MemorySource, Index, Redeliveries]:
        source, index = MemorySource(), Index()
        source.started = started
        rows = RowBuilder(compile_tasks(TASKS, ByteTokenizer()), WorkerIdentity("w", "m"), "tokenizer", receipts=False)
        made.append(Redeliveries(source, rows, index.look_up))
        return source, index, made[-1]

    yield make
    for redeliveries in made:
        with closing(redeliveries):
            pass


def answers(redeliveries: Redeliveries) -> tuple[list[int], list[tuple[int, Verdict]]]:
    """Offsets to compute, and those that are done, once nothing is held any more."""
    compute: list[AnyDocument] = []
    done: list[tuple[SourcePosition, Verdict]] = []

    def all_answered() -> bool:
        more, ended = redeliveries.take_answers()
        compute.extend(more)
        done.extend(ended)
        return not redeliveries

    wait_until(all_answered, "all are looked up")
    return [d.position.offset for d in compute], [(position.offset, verdict) for position, verdict in done]


def documents(*offsets: int) -> list[AnyDocument]:
    return [make_document(offset) for offset in offsets]


def test_of_a_redelivered_range_only_what_has_no_row_is_computed(make: Make) -> None:
    _, index, redeliveries = make(started=7)
    index.store(1)
    index.store(3, version=1)  # an older delivery's: ours is newer
    index.store(4, version=2**60, of_offset=9)
    index.store(5)
    index.store(6, version=row_version(1006, 6, 1))  # a replay's, of this very record
    assert redeliveries.sift(documents(0, 1, 2, 3, 4, 5, 6)) == []
    assert answers(redeliveries) == (
        [0, 2, 3],
        [(1, Verdict.ALREADY_DONE), (4, Verdict.SUPERSEDED), (5, Verdict.ALREADY_DONE), (6, Verdict.SUPERSEDED)],
    )
    assert len(index.asked) == 1


def test_the_row_of_a_message_that_could_not_be_read_counts_too_and_a_task_is_looked_up_in_its_own_index(
    make: Make,
) -> None:
    _, index, redeliveries = make(started=2)
    index.rows[None, "default:default:documents/0/0"] = StoredRow(row_version(1000, 0, 0), "documents", 0, 0)
    index.rows["other", "default:elsewhere:d1"] = StoredRow(row_version(1001, 1, 0), "documents", 0, 1)
    redeliveries.sift([make_rejected(0), make_document(1, task="elsewhere", fields={"text": "x"})])
    assert answers(redeliveries) == ([], [(0, Verdict.ALREADY_DONE), (1, Verdict.ALREADY_DONE)])


def test_the_search_goes_on_past_what_commits_tell_until_a_thousand_in_a_row_had_no_row(make: Make) -> None:
    _, index, redeliveries = make(started=3)
    last = 3 + 2 * LOOK_UP_ROWS
    index.store(3 + LOOK_UP_ROWS - 1)  # of the dead worker's last moments, which no commit tells of
    redeliveries.sift(documents(*range(last)))
    compute, done = answers(redeliveries)
    assert done == [(3 + LOOK_UP_ROWS - 1, Verdict.ALREADY_DONE)]
    assert len(compute) == last - 1
    assert [len(batch) for batch in index.asked] == [LOOK_UP_ROWS, LOOK_UP_ROWS, 3]
    later = documents(last)
    assert redeliveries.sift(later) == later, "nobody has been here before"
    other = [make_document(0, partition=1)]
    assert redeliveries.sift(other) == [], "each partition is searched by itself"
    answers(redeliveries)


def test_what_was_asked_for_before_its_search_ended_is_not_looked_up_any_more(make: Make) -> None:
    _, index, redeliveries = make()
    elsewhere = [make_document(offset, partition=1) for offset in range(5)]
    index.rows[None, "default:default:d3"] = StoredRow(row_version(1003, 3, 0), "documents", 1, 3)
    redeliveries.sift([*documents(*range(10, 3 * LOOK_UP_ROWS)), *elsewhere])
    compute, done = answers(redeliveries)
    assert [len(batch) for batch in index.asked] == [LOOK_UP_ROWS, 5], "the other partition's search goes on"
    assert sorted(compute) == sorted([*range(10, 3 * LOOK_UP_ROWS), 0, 1, 2, 4])
    assert done == [(3, Verdict.ALREADY_DONE)]


def test_a_new_epoch_is_searched_anew_and_the_old_ones_documents_are_handed_back(make: Make) -> None:
    source, index, redeliveries = make()
    index.error = SinkError("gone")
    redeliveries.sift(documents(0, 1))
    assert len(redeliveries) == 2
    source.epoch = 2
    assert [position.offset for position in redeliveries.drop_what_is_not_ours()] == [0, 1]
    assert len(redeliveries) == 0
    assert redeliveries.sift([make_document(0, epoch=2)]) == []
    assert [position.epoch for position in redeliveries.give_up()] == [2]


def test_a_look_up_that_fails_in_a_way_nobody_thought_of_is_told(make: Make) -> None:
    _, index, redeliveries = make()
    index.error = KeyError("docs")
    redeliveries.check()
    redeliveries.sift(documents(0, 1))
    wait_until(lambda: redeliveries._error is not None, "the thread has ended")
    with pytest.raises(KeyError, match="docs"):
        redeliveries.check()


def test_an_answer_about_what_was_handed_back_meanwhile_is_none(make: Make) -> None:
    _, index, redeliveries = make(started=2)
    index.store(0)
    redeliveries.sift(documents(0, 1))
    assert len(redeliveries.give_up()) == 2
    wait_until(lambda: len(redeliveries._answered) == 2 or not index.asked, "it was asked, or never will be")
    assert redeliveries.take_answers() == ([], [])
