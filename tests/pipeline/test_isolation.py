"""Documents that kill workers: exact groups and sentences, and what holds over any lives of workers."""

from math import ceil, log2

from hypothesis import example, given, settings
from hypothesis import strategies as st

from consumers.offsets import CRASHES_TO_ISOLATE
from pipeline.isolation import Isolation, conviction_over_workers
from pipeline.suspects import LOSSES_ALONE
from schemas.document import Document, Suspicion
from schemas.errors import FailureCode
from tests.pipeline.lives import World
from tests.pipeline.parts import MemorySource, make_document


def suspected(offset: int, group: range, partition: int = 0) -> Document:
    return make_document(offset, partition)._replace(suspicion=Suspicion(3, group))


def isolation_of(source: MemorySource, *documents: Document, max_documents: int = 10) -> Isolation:
    isolation = Isolation(source, max_documents)
    for document in documents:
        assert document.suspicion is not None
        isolation.add(document, document.suspicion, arrived=0.0)
    return isolation


def offsets_of_next(isolation: Isolation) -> list[int]:
    return [document.position.offset for document, _ in isolation.next_group()]


def test_groups_run_one_after_another_each_noted_before_and_their_end_too() -> None:
    source = MemorySource()
    first, second = range(2), range(2, 9)
    isolation = isolation_of(
        source,
        suspected(0, first),
        suspected(2, second),
        suspected(1, first),
        suspected(0, first, partition=1),
        suspected(5, second),
    )
    assert (len(isolation), isolation.is_active) == (5, True)
    assert [offsets_of_next(isolation) for _ in range(3)] == [[0, 1], [2, 5], [0]]
    assert (len(isolation), isolation.is_active) == (0, True), "the last one may still be in the engine"
    assert offsets_of_next(isolation) == []
    assert not isolation.is_active
    assert source.isolated == [[0, 1], [2, 5], [0], []]


def test_a_group_is_no_larger_than_what_the_engine_runs_at_once() -> None:
    source = MemorySource()
    isolation = isolation_of(source, *(suspected(offset, range(5)) for offset in range(5)), max_documents=2)
    assert [offsets_of_next(isolation) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_what_is_dropped_does_not_run() -> None:
    isolation = isolation_of(MemorySource(), *(suspected(offset, range(offset // 2, 9)) for offset in range(5)))
    dropped = isolation.drop_where(lambda position: position.offset in (1, 4))
    assert sorted(position.offset for position in dropped) == [1, 4]
    assert [offsets_of_next(isolation) for _ in range(3)] == [[0], [2, 3], []]


def test_a_document_is_convicted_for_two_deaths_alone_and_not_for_one_or_for_many_in_company() -> None:
    assert conviction_over_workers(Suspicion(9, range(4))) is None
    assert conviction_over_workers(Suspicion(4, range(1), losses_alone=1)) is None
    failure = conviction_over_workers(Suspicion(5, range(1), losses_alone=2))
    assert failure is not None
    assert failure.code is FailureCode.ENGINE_LOST
    assert failure.message == (
        "5 workers in a row died with this document in flight, the last 2 while their engines had this document and "
        "nothing else; other documents went on"
    )


def deaths_of_one_search(num_documents: int) -> int:
    """Until it begins; down to one document; and that one's second."""
    return CRASHES_TO_ISOLATE + max(1, ceil(log2(num_documents))) + LOSSES_ALONE - 1


def live_to_the_end(world: World, num_partitions: int) -> None:
    """One worker after another, each with some of the partitions or all, some of them told to end."""
    num_lives = 0
    while not world.is_done:
        num_lives += 1
        assert num_lives < 1000, "this goes on for ever"
        partitions = [one for one in range(num_partitions) if world.random.random() < 0.8] or [0]
        world.live(partitions, world.random.choice([3, 10**6, 10**6]))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 10**6),
)
@example([20], 1, 0, 1)
@example([20, 20], 2, 0, 1)
def test_every_killer_is_convicted_and_everything_else_answered_once_whenever_workers_die(
    num_documents: list[int], num_killers: int, num_outside: int, seed: int
) -> None:
    names = [f"{partition}-{offset}" for partition, number in enumerate(num_documents) for offset in range(number)]
    world = World(num_documents, {}, num_outside, seed)
    chosen = world.random.sample(names, min(num_killers, len(names)))
    world.killers = {name: world.random.choice(["worker", "worker", "engine", "either"]) for name in chosen}
    live_to_the_end(world, len(num_documents))
    assert set(world.rows) == set(names)
    failed = {name for name, row in world.rows.items() if row.status == "failed"}
    unlucky = {name for name, hits in world.hit_alone.items() if hits >= LOSSES_ALONE}
    assert set(chosen) <= failed <= set(chosen) | unlucky
    assert failed <= world.dead_letters <= failed | unlucky
    for name in failed:
        failure = world.rows[name].failure
        assert failure is not None
        assert failure.code is FailureCode.ENGINE_LOST
    assert world.noted(range(len(num_documents))) == [], "nothing is left of the search"


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 10**6))
def test_each_killer_of_workers_costs_no_more_of_them_than_halving_down_to_it(
    num_documents: list[int], num_killers: int, seed: int
) -> None:
    names = [f"{partition}-{offset}" for partition, number in enumerate(num_documents) for offset in range(number)]
    world = World(num_documents, {}, 0, seed)
    chosen = world.random.sample(names, min(num_killers, len(names)))
    world.killers = dict.fromkeys(chosen, "worker")
    world.tells_reads = True
    live_to_the_end(world, len(num_documents))
    assert {name for name, row in world.rows.items() if row.status == "failed"} == set(chosen)
    assert world.num_deaths <= len(chosen) * deaths_of_one_search(max(num_documents))
