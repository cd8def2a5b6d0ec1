"""How much the engine is given: enough for its next steps, by what it says that it has begun."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.appetite import MAX_HIT_RATE, STEPS_AHEAD, EngineAppetite


def test_three_steps_worth_waits_in_the_engine() -> None:
    appetite = EngineAppetite(max_tokens_per_step=100)
    assert appetite.num_wanted(0, 0) == 300
    appetite.gave(250)
    assert appetite.num_wanted(0, 0) == 50
    assert appetite.num_wanted(100, 0) == 150
    appetite.gave(160)
    assert appetite.num_wanted(100, 0) == -10


def test_tokens_that_were_found_in_the_cache_make_room_for_more() -> None:
    appetite = EngineAppetite(max_tokens_per_step=100)
    appetite.gave(300)
    assert appetite.num_wanted(300, 150) == 600  # half of what waited: twice as many fill as many steps
    appetite.gave(600)
    assert appetite.num_wanted(600, 150) == 400 - 300  # 300 without a hit are half of what that belief was about


def test_the_estimate_has_a_limit() -> None:
    appetite = EngineAppetite(max_tokens_per_step=100)
    appetite.gave(10_000)
    assert appetite.num_wanted(10_000, 10_000) == int(300 / (1 - MAX_HIT_RATE))


def test_another_engine_was_given_nothing_and_the_documents_are_as_alike_as_before() -> None:
    appetite = EngineAppetite(max_tokens_per_step=100)
    appetite.gave(900)
    appetite.num_wanted(300, 150)
    appetite.starts_anew()
    assert appetite.num_wanted(0, 0) == 600


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500), st.floats(0, 1)), max_size=40))
def test_an_engine_that_begins_all_is_always_given_more_and_never_beyond_the_limit(
    turns: list[tuple[int, int, float]],
) -> None:
    appetite = EngineAppetite(max_tokens_per_step=100)
    given_tokens = begun = cached = 0
    for size, waiting, hits in turns:
        new = max(0, given_tokens - waiting - begun)
        begun += new
        cached += int(new * hits)
        wanted = appetite.num_wanted(begun, cached)
        assert wanted <= STEPS_AHEAD * 100 / (1 - MAX_HIT_RATE) + 1 - (given_tokens - begun)
        assert wanted >= STEPS_AHEAD * 100 - (given_tokens - begun)
        if wanted > 0:
            given_tokens += size
            appetite.gave(size)
    assert appetite.num_wanted(given_tokens, cached) >= STEPS_AHEAD * 100
