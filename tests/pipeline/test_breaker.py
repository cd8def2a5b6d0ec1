import pytest

from pipeline.breaker import BreakerState, CircuitBreaker
from pipeline.retry import BreakerOpen
from tests.fakes import FakeClock


def open_breaker(clock: FakeClock) -> CircuitBreaker:
    breaker = CircuitBreaker(num_failures=3, max_open_seconds=3.0, clock=clock)
    for _ in range(3):
        breaker.permit()
        breaker.failed()
    return breaker


def test_the_breaker_opens_after_that_many_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(num_failures=3, max_open_seconds=3.0, clock=FakeClock())
    for succeeds in (False, False, True, False, False):
        breaker.permit()
        (breaker.succeeded if succeeds else breaker.failed)()
    assert (breaker.state, breaker.num_openings) == (BreakerState.CLOSED, 0)
    breaker.failed()
    assert (breaker.state, breaker.num_openings) == (BreakerState.OPEN, 1)


def test_an_open_breaker_lets_nothing_through_and_says_for_how_long() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.advance(0.25)
    with pytest.raises(BreakerOpen) as caught:
        breaker.permit()
    assert caught.value.retry_after_seconds == 0.75


def test_a_half_open_breaker_lets_one_call_through_and_closes_when_it_succeeds() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.advance(1.0)
    states = [breaker.state]
    breaker.permit()
    with pytest.raises(BreakerOpen):
        breaker.permit()
    assert breaker.succeeded()
    states.append(breaker.state)
    assert states == [BreakerState.HALF_OPEN, BreakerState.CLOSED]
    assert not breaker.succeeded()
    breaker.permit()
    breaker.permit()


def test_each_failed_probe_doubles_the_time_up_to_the_maximum_and_a_success_resets_it() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    for open_seconds in (1.0, 2.0, 3.0, 3.0):
        clock.advance(open_seconds - 0.001)
        assert breaker.state is BreakerState.OPEN
        clock.advance(0.001)
        breaker.permit()
        breaker.failed()
    clock.advance(3.0)
    breaker.permit()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.advance(1.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_failure_of_a_call_from_before_the_opening_changes_nothing() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.advance(0.5)
    breaker.failed()
    clock.advance(0.5)
    assert breaker.state is BreakerState.HALF_OPEN
