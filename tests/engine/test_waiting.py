"""The waiting requests: whose turn is next, and the tokens that they bring."""

from engine.request import Request, RequestState
from engine.waiting import WaitingRequests
from schemas.inference import InferenceRequest, SamplingParams


def make(request_id: int, num_tokens: int = 3, max_tokens: int = 8, priority: int = 0) -> Request:
    inference = InferenceRequest(
        request_id, (1,) * num_tokens, SamplingParams(max_tokens=max_tokens), seed=0, priority=priority
    )
    return Request(inference, list(inference.token_ids))


def make_waiting() -> WaitingRequests:
    return WaitingRequests(lambda one: one.inference.sampling.max_tokens - one.num_sampled_tokens)


def take_all(waiting: WaitingRequests) -> list[int]:
    taken = []
    while (request := waiting.head()) is not None:
        waiting.take_head(request)
        request.state = RequestState.RUNNING
        taken.append(request.request_id)
    return taken


def test_higher_priority_goes_first_then_who_came_first_and_one_that_comes_back_before_its_equals() -> None:
    waiting = make_waiting()
    for request in (make(1), make(2, priority=1), make(3), make(4, priority=-1), make(5, priority=1)):
        waiting.append(request)
    waiting.put_first(make(6))
    assert waiting.num_waiting == 6
    assert take_all(waiting) == [2, 5, 6, 1, 3, 4]
    assert (waiting.num_waiting, waiting.tokens_by_output) == (0, {})


def test_one_that_ends_where_it_stands_is_passed_over_and_counts_no_more() -> None:
    waiting = make_waiting()
    first, second = make(1), make(2, num_tokens=5)
    waiting.append(first)
    waiting.append(second)
    waiting.end(first)
    first.state = RequestState.FINISHED
    assert (waiting.num_waiting, waiting.tokens_by_output) == (1, {8: 5})
    assert take_all(waiting) == [2]


def test_tokens_are_counted_by_the_output_that_is_left() -> None:
    waiting = make_waiting()
    waiting.append(make(1, num_tokens=3, max_tokens=8))
    waiting.append(make(2, num_tokens=4, max_tokens=8))
    request = make(3, num_tokens=5, max_tokens=2)
    waiting.append(request)
    assert waiting.tokens_by_output == {8: 7, 2: 5}
    waiting.grow(request, 9)
    assert request.token_ids == [1, 1, 1, 1, 1, 9]
    assert waiting.tokens_by_output == {8: 7, 1: 6}
