from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.congestion import FORGETTING, GROWTH_STEPS, MIN_BULK_BYTES, QUICK_SECONDS, CongestionWindow

MEGABYTE = 2**20


def sizes(window: CongestionWindow) -> tuple[int, int, int]:
    return window.documents, window.bytes, window.calls


def test_it_starts_at_the_most_and_stays_there_while_calls_are_taken() -> None:
    window = CongestionWindow(1000, MEGABYTE, 4)
    window.taken(MEGABYTE, 0.1)
    assert sizes(window) == (1000, MEGABYTE, 4)


def test_a_refusal_halves_everything_down_to_one_row_of_64_kib_in_one_call() -> None:
    window = CongestionWindow(1000, MEGABYTE, 4)
    seen = []
    for _ in range(11):
        window.refused()
        seen.append(sizes(window))
    assert seen[:4] == [(500, 2**19, 2), (250, 2**18, 1), (125, 2**17, 1), (62, 2**16, 1)]
    assert seen[-1] == (1, MIN_BULK_BYTES, 1)


def test_each_call_that_is_taken_gives_a_sixteenth_back() -> None:
    window = CongestionWindow(1000, MEGABYTE, 4)
    for _ in range(11):
        window.refused()
    seen = []
    for _ in range(16):
        window.taken(1000, 0.1)
        seen.append(sizes(window))
    assert seen[:4] == [(63, 2**17, 1), (125, 2**17 + 2**16, 1), (187, 2**18, 1), (249, 2**18 + 2**16, 2)]
    assert [calls for _, _, calls in seen] == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert seen[-1] == (993, MEGABYTE, 4)


def test_calls_that_take_more_and_more_time_are_made_smaller_and_fewer() -> None:
    window = CongestionWindow(1000, MEGABYTE, 2)
    window.taken(MEGABYTE, 1.0)
    seen = []
    for _ in range(3):
        window.taken(MEGABYTE, 4.0)  # four times the best: the average passes twice the best with the second
        seen.append(sizes(window))
    assert seen == [(1000, MEGABYTE, 2), (500, 2**19, 1), (562, 2**19 + 2**16, 1)]


def test_one_slow_call_among_quick_ones_changes_nothing() -> None:
    window = CongestionWindow(1000, MEGABYTE, 2)
    for seconds in (1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 4.0):
        window.taken(MEGABYTE, seconds)
    assert sizes(window) == (1000, MEGABYTE, 2)


def test_calls_under_a_second_are_never_slow() -> None:
    window = CongestionWindow(1000, MEGABYTE, 2)
    window.taken(MEGABYTE, 0.001)
    for _ in range(100):
        window.taken(MEGABYTE, QUICK_SECONDS)
    assert sizes(window) == (1000, MEGABYTE, 2)


def test_a_larger_call_may_take_longer_and_a_smaller_one_as_long() -> None:
    window = CongestionWindow(1000, MEGABYTE, 2)
    for num_bytes, seconds in ((MEGABYTE // 4, 2.0), (MEGABYTE, 8.0), (1000, 2.0), (MEGABYTE, 8.0)) * 5:
        window.taken(num_bytes, seconds)
    assert sizes(window) == (1000, MEGABYTE, 2)


def test_latency_alone_leaves_an_eighth_and_what_stays_slow_becomes_usual() -> None:
    window = CongestionWindow(1600, 2 * MEGABYTE, 2)
    window.taken(MEGABYTE, 1.0)
    smallest = window.documents
    for _ in range(400):  # 20 s a call, whatever its size: small calls would only make it worse
        window.taken(1000, 20.0)
        smallest = min(smallest, window.documents)
    assert smallest == 1600 // 8
    assert FORGETTING**400 > 20
    assert sizes(window) == (1600, 2 * MEGABYTE, 2)


def test_a_body_that_is_too_large_lowers_the_most_for_good() -> None:
    window = CongestionWindow(1000, MEGABYTE, 2)
    window.too_large(700_000)
    assert sizes(window) == (1000, 350_000, 2)
    for _ in range(100):
        window.taken(1000, 0.1)
    assert window.bytes == 350_000
    window.too_large(900_000)  # a larger one says nothing new
    assert window.bytes == 350_000


def test_rows_fit_by_number_and_by_bytes_and_a_row_larger_than_all_goes_alone() -> None:
    window = CongestionWindow(3, 100, 1)
    assert window.fit([]) == 0
    assert window.fit([10, 10, 10, 10]) == 3
    assert window.fit([60, 40, 1]) == 2
    assert window.fit([500, 1]) == 1
    assert window.is_full(3, 0)
    assert window.is_full(1, 100)
    assert not window.is_full(2, 99)


EVENTS = st.one_of(
    st.tuples(st.just("taken"), st.integers(1, 2**24), st.floats(0.0, 100.0)),
    st.tuples(st.just("refused")),
    st.tuples(st.just("too_large"), st.integers(1, 2**24)),
)


@given(st.integers(1, 5000), st.integers(1, 2**24), st.integers(1, 16), st.lists(EVENTS, max_size=60))
def test_it_stays_between_one_and_the_most_and_comes_back_whatever_happened(
    max_documents: int, max_bytes: int, max_calls: int, events: list[tuple[Any, ...]]
) -> None:
    window = CongestionWindow(max_documents, max_bytes, max_calls)
    ceiling = max_bytes
    for name, *arguments in events:
        before = sizes(window)
        getattr(window, name)(*arguments)
        if name == "too_large":
            ceiling = max(1, min(ceiling, arguments[0] // 2))
        if name != "taken":
            assert all(now <= then for now, then in zip(sizes(window), before, strict=True))
        assert 1 <= window.documents <= max_documents
        assert 1 <= window.bytes <= ceiling
        assert 1 <= window.calls <= max_calls
        assert window.fit([1] * 6000) <= window.documents
        assert window.fit([2**30]) == 1
    for _ in range(2 * GROWTH_STEPS + max_documents % GROWTH_STEPS + max_bytes % GROWTH_STEPS):
        window.taken(1, 0.0)
    assert sizes(window) == (max_documents, ceiling, max_calls)
