"""The window's order: shared prefixes side by side, laps, priorities, and nobody waiting for ever."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pipeline.batcher import PrefixBatcher

A, B, C = b"A" * 16, b"B" * 16, b"C" * 16


def make() -> PrefixBatcher[str]:
    return PrefixBatcher(urgent_after_seconds=100.0)


def add(
    batcher: PrefixBatcher[str],
    name: str,
    hashes: Sequence[bytes] = (),
    tokens: int = 10,
    now: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    outputs: int = 0,
) -> None:
    batcher.add(
        name,
        block_hashes=hashes,
        num_tokens=tokens,
        num_outputs=outputs,
        now=now,
        priority=priority,
        deadline=deadline,
    )


def test_documents_that_share_a_prefix_come_out_side_by_side() -> None:
    batcher = make()
    for name, hashes in (("a1", (A, B)), ("c", (C,)), ("a2", (A, C)), ("b", (B,)), ("a3", (A, B))):
        add(batcher, name, hashes)
    assert batcher.next_batch(1000, now=0.0) == ["a1", "a3", "a2", "b", "c"]
    assert len(batcher) == 0


def test_the_group_with_the_longest_output_begins_and_stays_together() -> None:
    batcher = make()
    for name, hashes, outputs in (("a", (A,), 8), ("b1", (B, A), 8), ("short", (), 64), ("b2", (B, C), 512)):
        add(batcher, name, hashes, outputs=outputs)
    assert batcher.next_batch(1000, now=0.0) == ["b1", "b2", "short", "a"]


def test_a_groups_place_holds_for_a_lap_whatever_arrives_and_is_decided_anew_for_the_next() -> None:
    batcher = make()
    add(batcher, "a", (A,), outputs=64)
    add(batcher, "b", (B,), outputs=8)
    assert batcher.next_batch(10, now=0.0) == ["a"]
    add(batcher, "b, longer", (B,), outputs=512)
    add(batcher, "c", (C,), outputs=32)  # a new group: between the two
    add(batcher, "a2", (A,), outputs=64)  # beside the one just taken, so still ahead of the walk
    assert batcher.next_batch(1000, now=0.0) == ["a2", "c", "b", "b, longer"]
    add(batcher, "a3", (A,), outputs=16)
    add(batcher, "b3", (B,), outputs=512)
    assert batcher.next_batch(1000, now=0.0) == ["b3", "a3"]


def test_a_batch_ends_where_the_next_document_does_not_fit_the_budget() -> None:
    batcher = make()
    for name in "abc":
        add(batcher, name, tokens=10)
    assert batcher.num_tokens == 30
    assert batcher.next_batch(25, now=0.0) == ["a", "b"]
    assert batcher.num_tokens == 10
    assert batcher.next_batch(25, now=0.0) == ["c"]
    assert batcher.next_batch(25, now=0.0) == []


def test_a_document_larger_than_the_budget_goes_alone() -> None:
    batcher = make()
    add(batcher, "large", tokens=100)
    add(batcher, "small", tokens=1)
    assert batcher.next_batch(10, now=0.0) == ["large"]
    assert batcher.next_batch(10, now=0.0) == ["small"]


def test_no_budget_takes_nothing() -> None:
    batcher = make()
    add(batcher, "a")
    assert batcher.next_batch(0, now=0.0) == []
    assert batcher.next_batch(10, now=0.0, max_documents=0) == []
    assert len(batcher) == 1


def test_what_arrives_behind_the_cursor_waits_for_the_next_lap() -> None:
    batcher = make()
    add(batcher, "a", (A,))
    add(batcher, "b", (B,))
    add(batcher, "c", (C,))
    assert batcher.next_batch(20, now=0.0) == ["a", "b"]
    add(batcher, "a2", (A,))
    add(batcher, "c2", (C,))
    assert batcher.next_batch(1000, now=0.0) == ["c", "c2", "a2"]


def test_when_nothing_more_comes_the_walk_begins_anew_with_what_the_engine_has_yet_then_long_outputs() -> None:
    batcher = make()
    for name, hashes, outputs in (("a", (A,), 64), ("b", (B,), 8), ("c", (C,), 16)):
        add(batcher, name, hashes, outputs=outputs)
    assert batcher.next_batch(20, now=0.0) == ["a", "c"]
    add(batcher, "a2", (A,), outputs=8)
    add(batcher, "d, long", (b"D" * 16,), outputs=512)
    add(batcher, "c2", (C,), outputs=8)
    add(batcher, "b, longer", (B,), outputs=32)
    batcher.begin_laps()
    assert batcher.next_batch(1000, now=0.0) == ["a2", "c2", "d, long", "b", "b, longer"]
    add(batcher, "b2", (B,), outputs=8)
    add(batcher, "e", (b"E" * 16,), outputs=16)
    assert batcher.next_batch(1000, now=0.0) == ["e", "b2"]  # the next lap has no groups that come first


def test_lulls_in_a_trickle_of_long_outputs_hold_nobody_back_twice() -> None:
    batcher = make()
    add(batcher, "short", (A,), outputs=8)
    add(batcher, "b", (B,), outputs=16)
    assert batcher.next_batch(10, now=0.0) == ["b"]
    for name, group, next_ones in (("long", C, ["long"]), ("longer", B, ["short"]), ("longest", A, ["longest"])):
        add(batcher, name, (group,), outputs=512)
        batcher.begin_laps()
        assert batcher.next_batch(10, now=0.0) == next_ones
    assert batcher.next_batch(10, now=0.0) == ["longer"]


def test_higher_priority_goes_first_also_when_it_arrives_later() -> None:
    batcher = make()
    add(batcher, "low", (A,), priority=-1)
    add(batcher, "middle", (B,))
    add(batcher, "high", (C,), priority=5)
    assert batcher.next_batch(10, now=0.0) == ["high"]
    add(batcher, "higher", (C,), priority=6)
    assert batcher.next_batch(1000, now=0.0) == ["higher", "middle", "low"]


def test_a_document_past_its_age_goes_before_every_priority() -> None:
    batcher = make()
    add(batcher, "old", (C,), now=0.0, priority=-10)
    add(batcher, "new", (A,), now=99.0, priority=10)
    assert batcher.next_batch(10, now=100.0) == ["old"]


def test_a_document_near_its_deadline_goes_before_the_merely_old() -> None:
    batcher = make()
    add(batcher, "old", (A,), now=0.0)
    add(batcher, "soon", (C,), now=50.0, deadline=190.0)
    add(batcher, "later", (B,), now=50.0, deadline=1000.0)
    assert batcher.next_batch(1000, now=100.0) == ["soon", "old", "later"]


def test_what_becomes_urgent_during_an_urgent_lap_waits_for_the_next_one() -> None:
    batcher = make()
    for name, hashes in (("1b", (B,)), ("1c", (C,))):
        add(batcher, name, hashes, now=0.0)
    add(batcher, "2a", (A,), now=50.0)
    assert batcher.next_batch(10, now=100.0) == ["1b"]
    assert batcher.next_batch(1000, now=150.0) == ["1c", "2a"]


def test_unwanted_documents_leave_wherever_they_wait() -> None:
    batcher = make()
    add(batcher, "urgent", (A,), now=0.0)
    add(batcher, "urgent too", (B,), now=0.0)
    add(batcher, "waits", (B,), now=90.0)
    add(batcher, "waits too", (C,), now=90.0)
    assert batcher.next_batch(10, now=100.0) == ["urgent"]
    assert batcher.remove_where(lambda name: name in ("urgent too", "waits")) == ["urgent too", "waits"]
    assert batcher.num_tokens == 10
    assert batcher.next_batch(1000, now=100.0) == ["waits too"]
    assert batcher.clear() == []


_HASHES = st.lists(st.sampled_from([A, B, C]), max_size=4)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _HASHES, st.integers(1, 30), st.integers(-2, 2), st.none() | st.floats(0, 300)),
        st.tuples(st.just("take"), st.integers(0, 60), st.integers(0, 4)),
        st.tuples(st.just("wait"), st.floats(0, 60)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("begin")),
    ),
    max_size=60,
)


@given(_STEPS)
def test_every_document_leaves_exactly_once(steps: list[tuple[object, ...]]) -> None:
    batcher: PrefixBatcher[int] = PrefixBatcher(urgent_after_seconds=100.0)
    sizes: list[int] = []
    left: list[int] = []
    now = 0.0
    for step in steps:
        match step:
            case ("add", list(hashes), int(tokens), int(priority), deadline):
                assert deadline is None or isinstance(deadline, float)
                batcher.add(
                    len(sizes),
                    block_hashes=hashes,
                    num_tokens=tokens,
                    num_outputs=len(sizes) % 3,
                    now=now,
                    priority=priority,
                    deadline=deadline,
                )
                sizes.append(tokens)
            case ("take", int(budget), int(most)):
                taken = batcher.next_batch(budget, now, most)
                assert len(taken) <= most
                assert len(taken) <= 1 or sum(sizes[i] for i in taken) <= budget
                assert taken or not len(batcher) or not budget or not most
                left += taken
            case ("wait", float(seconds)):
                now += seconds
            case ("begin",):
                batcher.begin_laps()
            case ("drop", int(remainder)):
                dropped = batcher.remove_where(lambda document, remainder=remainder: document % 6 == remainder)  # type: ignore[misc]
                assert all(document % 6 == remainder for document in dropped)
                left += dropped
        assert len(batcher) == len(sizes) - len(left)
        assert batcher.num_tokens == sum(sizes) - sum(sizes[i] for i in left)
        expected: Counter[int] = Counter()
        for document in set(range(len(sizes))) - set(left):
            expected[document % 3] += sizes[document]
        assert batcher.tokens_by_output == expected
    left += batcher.next_batch(10**9, now)
    assert sorted(left) == list(range(len(sizes)))


@given(st.lists(_HASHES, max_size=40), st.integers(1, 7))
def test_one_lap_is_in_prefix_order_however_it_is_cut_into_batches(documents: list[list[bytes]], most: int) -> None:
    batcher: PrefixBatcher[tuple[bytes, ...]] = PrefixBatcher(urgent_after_seconds=100.0)
    for hashes in documents:
        batcher.add(tuple(hashes), block_hashes=hashes, num_tokens=1, now=0.0)
    order: list[tuple[bytes, ...]] = []
    while batch := batcher.next_batch(1000, 0.0, most):
        order += batch
    assert order == sorted(tuple(hashes) for hashes in documents)


@given(st.lists(st.tuples(_HASHES, st.integers(-2, 2)), min_size=1, max_size=30), st.integers(1, 3))
def test_no_stream_of_newcomers_can_starve_a_document(waiting: list[tuple[list[bytes], int]], most: int) -> None:
    batcher: PrefixBatcher[int] = PrefixBatcher(urgent_after_seconds=10.0)
    for number, (hashes, priority) in enumerate(waiting):
        batcher.add(number, block_hashes=hashes, num_tokens=1, now=0.0, priority=priority)
    left: set[int] = set()
    now = 0.0
    # As many newcomers as places, each just ahead of the cursor and of the highest priority.
    for turn in range(10 + len(waiting)):
        for _ in range(most):
            batcher.add(-1, block_hashes=(A,), num_tokens=1, now=now, priority=10)
        left.update(batcher.next_batch(1000, now, most))
        now += 1.0
        assert turn < 10 + len(waiting)
    assert left >= set(range(len(waiting)))


def test_a_document_old_as_well_as_near_its_deadline_is_urgent_once() -> None:
    batcher = make()
    add(batcher, "both", deadline=110.0)
    add(batcher, "young", now=50.0)
    add(batcher, "later", now=50.0, deadline=500.0)
    assert batcher.next_batch(10, now=100.0) == ["both"]
    assert batcher.next_batch(100, now=100.0) == ["young", "later"]
    assert (len(batcher), batcher.num_tokens) == (0, 0)
