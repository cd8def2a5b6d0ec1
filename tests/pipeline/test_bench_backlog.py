"""A benchmark's workload takes the worker's way to the engine: its order, its portions, its pace."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.backlog import Requests
from tests.bench.step_model import run

A, B, C = [[token] * 32 for token in (1, 2, 3)]  # two blocks each


def test_groups_stay_together_and_the_one_with_the_longest_output_begins() -> None:
    requests = [([*A, 1], 8), ([*B, 1], 8), ([*A, 2], 16), ([*C, 1], 64), ([*A, 3], 8), ([*B, 2], 32), ([5], 4)]
    device, engine = run(requests, kv_tokens=3200, max_running=1)
    assert device.starts == [3, 1, 5, 0, 2, 4, 6]
    assert engine.stats().num_begun_cached_tokens == 32 * 3
    assert engine.stats().num_begun_tokens == sum(len(prompt) for prompt, _ in requests)


def test_no_more_are_under_way_than_may_be() -> None:
    requests = [([token] * 20, 2) for token in range(9)]
    device, _ = run(requests, kv_tokens=3200, max_in_flight=3)
    assert sorted(device.starts[:3]) == [0, 1, 2]
    assert sorted(device.starts) == list(range(9))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12)), max_size=30),
    st.integers(1, 8),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_request_begins_and_ends_once(
    shapes: list[tuple[int, int, int]], max_running: int, max_in_flight: int, paced: bool
) -> None:
    requests = [([*(A, B, C)[stem], *range(length)], outputs) for stem, length, outputs in shapes]
    device, engine = run(requests, 1600, max_running, paced, max_in_flight)
    assert set(device.starts) == set(range(len(requests)))
    assert engine.stats().num_sampled_tokens == sum(outputs for _, outputs in requests)
    assert engine.stats().num_begun_tokens == sum(len(prompt) for prompt, _ in requests)
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def mixed() -> Requests:
    """20 long answers and 300 short ones, nothing in common."""
    return [([10_000 * i + t for t in range(800)], 300) for i in range(20)] + [
        ([10_000 * i + t for t in range(200)], 20) for i in range(20, 320)
    ]


def test_the_end_of_a_backlog_takes_as_many_steps_with_a_pace_and_less_time() -> None:
    paced, _ = run(mixed(), 200_000)
    unpaced, _ = run(mixed(), 200_000, paced=False)
    assert set(paced.starts[:20]) == set(unpaced.starts[:20]) == set(range(20))
    # The long ones' prompts take two steps, and their answers 299 more.
    assert len(paced.num_tokens) == len(unpaced.num_tokens) == 301
    assert sum(paced.num_tokens) == sum(unpaced.num_tokens)
    assert (round(paced.now, 2), round(unpaced.now, 2)) == (2.60, 2.79)
