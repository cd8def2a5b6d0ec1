import pytest

from engine.block_hash import hash_blocks
from engine.block_pool import BlockPool
from engine.request import Request, RequestState
from engine.scheduler import MAX_EMPTY_PLANS, Scheduler
from engine.step_plan import SampledTokens, StepPlan
from schemas.errors import DocumentError, EngineError, FailureCode
from schemas.inference import InferenceRequest, SamplingParams

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int = 100,
    max_tokens_per_step: int = 100,
    max_running: int = 10,
    max_model_len: int = 1000,
    prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks), BLOCK_SIZE, max_model_len, max_tokens_per_step, max_running, b"m", prefix_caching
    )


def inference(request_id: int, prompt: range | list[int], max_tokens: int = 8, priority: int = 0) -> InferenceRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return InferenceRequest(request_id, tuple(prompt), sampling, seed=0, priority=priority)


def add(
    scheduler: Scheduler, request_id: int, prompt: range | list[int], max_tokens: int = 8, priority: int = 0
) -> Request:
    request = inference(request_id, prompt, max_tokens, priority)
    scheduler.check(request)
    return scheduler.add(request)


def runs(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(run.request.request_id, run.start, run.count, run.samples) for run in plan.scheduled]


def sampled(plan: StepPlan, token_id: int = 500) -> SampledTokens:
    count = sum(run.samples for run in plan.scheduled)
    return SampledTokens([token_id] * count, [None] * count, [True] * count)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, sampled(plan))
    scheduler.pool.check()
    return plan


def test_a_prompt_is_computed_then_each_token() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(6), max_tokens=3)
    assert runs(step(scheduler)) == [(1, 0, 6, True)]
    assert request.block_ids == [0, 1]
    assert runs(step(scheduler)) == [(1, 6, 1, True)]
    plan = scheduler.schedule()
    assert runs(plan) == [(1, 7, 1, True)]
    assert scheduler.update(plan, sampled(plan)) == [request]
    assert request.state is RequestState.FINISHED
    assert request.token_ids == [*range(6), 500, 500, 500]
    assert not scheduler.has_unfinished()
    assert scheduler.pool.num_used == 0
    assert runs(scheduler.schedule()) == []


def test_decoding_takes_a_block_when_it_crosses_into_it() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(4))
    step(scheduler)
    assert request.block_ids == [0]
    step(scheduler)  # the first sampled token is at position 4
    assert request.block_ids == [0, 1]


def test_a_long_prompt_is_cut_to_the_budget_and_samples_at_its_end_only() -> None:
    scheduler = make_scheduler(max_tokens_per_step=5)
    add(scheduler, 1, range(12))
    assert [runs(step(scheduler))[0] for _ in range(4)] == [
        (1, 0, 5, False),
        (1, 5, 5, False),
        (1, 10, 2, True),
        (1, 12, 1, True),
    ]


def test_a_step_mixes_decodes_first_then_prefills_under_way_then_new_ones() -> None:
    scheduler = make_scheduler(max_tokens_per_step=10)
    add(scheduler, 1, [1, 2, 3])
    step(scheduler)
    add(scheduler, 2, range(100, 112))
    add(scheduler, 3, range(200, 206))
    assert runs(step(scheduler)) == [(1, 3, 1, True), (2, 0, 9, False)]
    assert runs(step(scheduler)) == [(1, 4, 1, True), (2, 9, 3, True), (3, 0, 6, True)]
    assert runs(step(scheduler)) == [(1, 5, 1, True), (2, 12, 1, True), (3, 6, 1, True)]


def test_admission_is_by_priority_then_arrival() -> None:
    scheduler = make_scheduler()
    for request_id, priority in ((1, 0), (2, 5), (3, -1), (4, 5)):
        add(scheduler, request_id, range(request_id * 10, request_id * 10 + 3), priority=priority)
    assert [run[0] for run in runs(step(scheduler))] == [2, 4, 1, 3]


def test_a_later_request_of_the_same_plan_shares_what_an_earlier_one_is_about_to_compute() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, 1, range(10))
    second = add(scheduler, 2, [*range(8), 77, 78])
    assert runs(step(scheduler)) == [(1, 0, 10, True), (2, 8, 2, True)]
    assert first.block_ids == [0, 1, 2]
    assert second.block_ids == [0, 1, 3]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_only_what_is_planned_so_far_is_shared() -> None:
    scheduler = make_scheduler(max_tokens_per_step=6)
    add(scheduler, 1, range(10))
    assert runs(step(scheduler)) == [(1, 0, 6, False)]
    second = add(scheduler, 2, [*range(8), 77, 78])
    assert runs(step(scheduler)) == [(1, 6, 4, True), (2, 8, 2, True)]
    assert second.block_ids == [0, 1, 3]


def test_the_last_token_of_a_wholly_cached_prompt_is_computed() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, 1, range(8), max_tokens=1)
    step(scheduler)
    assert first.state is RequestState.FINISHED
    again = add(scheduler, 2, range(8), max_tokens=1)
    longer = add(scheduler, 3, range(9), max_tokens=1)
    assert runs(step(scheduler)) == [(2, 4, 4, True), (3, 8, 1, True)]
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (4, 8)


def test_blocks_of_sampled_tokens_are_found_once_they_are_computed() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, range(3), max_tokens=6)
    while scheduler.has_unfinished():
        step(scheduler)
    # 3 + 6 tokens, of which the last was never an input: two full blocks.
    follow_up = add(scheduler, 2, [*range(3), *[500] * 6, 9])
    step(scheduler)
    assert follow_up.num_cached_tokens == 8


def test_hashes_that_come_with_the_request_are_used_and_others_are_made() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, range(9))
    step(scheduler)
    hashes = hash_blocks(range(9), BLOCK_SIZE, b"m")
    given = scheduler.add(InferenceRequest(2, tuple(range(9)), SamplingParams(), seed=0, block_hashes=hashes))
    foreign = hash_blocks(range(9), BLOCK_SIZE, b"another model")
    other = scheduler.add(InferenceRequest(3, tuple(range(9)), SamplingParams(), seed=0, block_hashes=foreign))
    step(scheduler)
    assert (given.num_cached_tokens, other.num_cached_tokens) == (8, 0)


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    add(scheduler, 1, range(9))
    add(scheduler, 2, range(9))
    assert runs(step(scheduler)) == [(1, 0, 9, True), (2, 0, 9, True)]


def test_admission_stops_at_the_slots_and_at_the_budget() -> None:
    scheduler = make_scheduler(max_running=2, max_tokens_per_step=7)
    for request_id in (1, 2, 3):
        add(scheduler, request_id, range(request_id * 10, request_id * 10 + 4))
    assert runs(step(scheduler)) == [(1, 0, 4, True), (2, 0, 3, False)]
    assert runs(step(scheduler)) == [(1, 4, 1, True), (2, 3, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_admission_counts_the_expected_output_of_all_that_run() -> None:
    # Each grows to 4 + 9 - 1 tokens: 3 blocks. Two of them fill the pool, whatever the prompts take now.
    scheduler = make_scheduler(num_blocks=8)
    for request_id in (1, 2, 3):
        add(scheduler, request_id, range(request_id * 10, request_id * 10 + 4), max_tokens=9)
    assert [run[0] for run in runs(step(scheduler))] == [1, 2]
    while scheduler.num_waiting:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_one_that_does_not_fit_holds_back_smaller_ones_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, 1, range(8), max_tokens=5)
    step(scheduler)
    add(scheduler, 2, range(100, 116), max_tokens=1)
    add(scheduler, 3, range(200, 202), max_tokens=1)
    assert [run[0] for run in runs(step(scheduler))] == [1]
    while scheduler.num_waiting:
        plan = step(scheduler)
    assert [run[0] for run in runs(plan)] == [2, 3]


def crowd(scheduler: Scheduler) -> tuple[Request, Request]:
    """Two that run in a pool of 4 blocks, let in since outputs have been short: they need 3 blocks each in the end."""
    scheduler._num_sampled_tokens = 1
    first = add(scheduler, 1, range(10, 14), max_tokens=9)
    second = add(scheduler, 2, range(20, 24), max_tokens=9)
    for _ in range(5):
        step(scheduler)
    assert (len(first.block_ids), len(second.block_ids)) == (2, 2)
    return first, second


def test_the_newest_is_preempted_and_resumes_with_its_tokens_at_the_head() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = crowd(scheduler)
    add(scheduler, 3, range(30, 32), max_tokens=1)
    plan = step(scheduler)
    assert plan.preempted == [second]
    assert runs(plan) == [(1, 8, 1, True)], "what was just preempted is not let in again by the same plan"
    assert second.state is RequestState.WAITING
    assert (second.num_computed_tokens, second.block_ids, second.num_preemptions) == (0, [], 1)
    assert second.token_ids == [*range(20, 24), *[500] * 5]
    assert scheduler.num_recomputed_tokens == 8
    while first.state is not RequestState.FINISHED:
        assert runs(step(scheduler))[0][0] == 1
    resumed = step(scheduler)
    assert runs(resumed)[0] == (2, 4, 5, True), "its first block was still cached; the other one was evicted"
    assert second.num_cached_tokens == 0
    assert len(second.token_ids) == 10


def test_the_lowest_priority_is_preempted_before_the_newest() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler._num_sampled_tokens = 1
    low = add(scheduler, 1, range(10, 14), max_tokens=9, priority=-1)
    high = add(scheduler, 2, range(20, 24), max_tokens=9)
    for _ in range(5):
        step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == [low]
    assert runs(plan) == [(2, 8, 1, True)]
    assert high.num_preemptions == 0


def test_a_higher_priority_takes_a_slot_from_a_lower_one() -> None:
    scheduler = make_scheduler(max_running=2)
    low = add(scheduler, 1, range(10, 14), priority=-1)
    middle = add(scheduler, 2, range(20, 24))
    step(scheduler)
    add(scheduler, 3, range(30, 34), priority=1)
    add(scheduler, 4, range(40, 44), priority=-1)
    plan = step(scheduler)
    assert plan.preempted == [low]
    assert runs(plan) == [(2, 4, 1, True), (3, 0, 4, True)]
    assert step(scheduler).preempted == []
    assert middle.num_preemptions == 0


def test_an_equal_priority_takes_nothing() -> None:
    scheduler = make_scheduler(max_running=1)
    add(scheduler, 1, range(10, 14))
    step(scheduler)
    add(scheduler, 2, range(20, 24))
    assert step(scheduler).preempted == []


def test_a_higher_priority_takes_blocks_from_a_lower_one() -> None:
    scheduler = make_scheduler(num_blocks=4)
    low = add(scheduler, 1, range(8), max_tokens=5, priority=-1)
    step(scheduler)
    add(scheduler, 2, range(20, 28), max_tokens=5)
    plan = step(scheduler)
    assert plan.preempted == [low]
    assert runs(plan) == [(2, 0, 8, True)]


@pytest.mark.parametrize("at", ["waiting", "prefilling", "decoding", "preempted"])
def test_a_request_may_end_at_any_moment_and_leaves_nothing(at: str) -> None:
    scheduler = make_scheduler(max_tokens_per_step=3, max_running=1)
    request = add(scheduler, 1, range(5))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3, "preempted": 3}[at]):
        step(scheduler)
    if at == "preempted":
        add(scheduler, 2, range(50, 52), priority=1)
        assert step(scheduler).preempted == [request]
    scheduler.finish(request)
    scheduler.finish(request)
    scheduler.pool.check()
    while scheduler.has_unfinished():
        assert 1 not in [run[0] for run in runs(step(scheduler))]
    assert scheduler.pool.num_used == 0
    assert scheduler.pool._num_wanting == {}
    assert scheduler._prefix_cache is not None
    assert scheduler._prefix_cache._chains == {}


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "length"), [(9, 5, 10), (9, 1, 10), (4, 3, 7), (4, 99, 10)]
)
def test_output_ends_at_max_tokens_or_at_the_end_of_the_context(
    num_prompt_tokens: int, max_tokens: int, length: int
) -> None:
    scheduler = make_scheduler(max_model_len=10)
    request = add(scheduler, 1, range(num_prompt_tokens), max_tokens)
    while scheduler.has_unfinished():
        step(scheduler)
    assert len(request.token_ids) == length


@pytest.mark.parametrize("num_prompt_tokens", [10, 11])
def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(DocumentError, match=f"has {num_prompt_tokens} tokens; the context of 10 tokens") as caught:
        make_scheduler(max_model_len=10).check(inference(1, range(num_prompt_tokens)))
    assert caught.value.failure.code is FailureCode.PROMPT_TOO_LONG


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DocumentError) as caught:
        make_scheduler().check(inference(1, []))
    assert caught.value.failure.code is FailureCode.EMPTY_PROMPT


def test_what_would_not_fit_into_the_whole_pool_is_refused_and_what_just_fits_runs() -> None:
    scheduler = make_scheduler(num_blocks=3)
    with pytest.raises(DocumentError, match="need 13 tokens of KV cache; it has 12") as caught:
        scheduler.check(inference(1, range(6), max_tokens=8))
    assert caught.value.failure.code is FailureCode.PROMPT_TOO_LONG
    request = add(scheduler, 2, range(6), max_tokens=7)
    while scheduler.has_unfinished():
        step(scheduler)
    assert len(request.token_ids) == 13


def test_a_row_that_is_not_finite_begins_again_by_itself_and_ends_its_request_the_second_time() -> None:
    scheduler = make_scheduler()
    bad = add(scheduler, 1, range(10))
    good = add(scheduler, 2, range(50, 55))
    plan = scheduler.schedule()
    assert scheduler.update(plan, SampledTokens([0, 500], [None, None], [False, True])) == []
    assert plan.void == {1}
    scheduler.pool.check()
    assert good.token_ids[-1] == 500
    other = add(scheduler, 3, range(10))
    plan = scheduler.schedule()
    assert plan.scrub == [2, 1, 0]
    assert plan.preempted == [bad]
    assert runs(plan) == [(2, 5, 1, True), (1, 0, 10, True), (3, 0, 10, True)], "it neither finds blocks nor is found"
    assert scheduler.update(plan, SampledTokens([501, 0, 502], [None] * 3, [True, False, True])) == [bad]
    assert (len(bad.token_ids), other.token_ids[-1]) == (10, 502)
    scheduler.pool.check()
    again = add(scheduler, 4, range(10))
    assert scheduler.schedule().scrub == [2, 1, 0]
    assert again.num_cached_tokens == 8, "what was found is of request 3"
    assert scheduler.schedule().scrub == []


def test_the_row_that_was_under_way_when_its_request_began_again_means_nothing() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(10))
    first = scheduler.schedule()
    ahead = scheduler.schedule()
    assert runs(ahead) == [(1, 10, 1, True)]
    assert scheduler.update(first, SampledTokens([0], [None], [False])) == []
    anew = scheduler.schedule()
    assert runs(anew) == [(1, 0, 10, True)]
    assert scheduler.update(ahead, SampledTokens([7], [None], [True])) == []
    assert request.num_sampled_tokens == 0
    assert scheduler.update(anew, SampledTokens([500], [None], [True])) == []
    assert request.token_ids[10:] == [500]
    scheduler.pool.check()


def test_a_block_that_others_hold_is_not_scrubbed_under_them() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, range(5))
    step(scheduler)
    add(scheduler, 2, [*range(4), 99])
    plan = scheduler.schedule()
    assert runs(plan) == [(1, 5, 1, True), (2, 4, 1, True)]
    scheduler.update(plan, SampledTokens([500, 0], [None, None], [True, False]))
    assert scheduler.schedule().scrub == [2]


def test_an_abandoned_step_is_computed_again_and_nothing_of_it_is_found() -> None:
    scheduler = make_scheduler()
    first, second = add(scheduler, 1, range(10)), add(scheduler, 2, [*range(8), 77])
    plan = scheduler.schedule()
    scheduler.abandon(plan)
    scheduler.pool.check()
    assert scheduler.pool.num_free == 100
    plan = scheduler.schedule()
    assert plan.preempted == [second, first], "the runner may have rows of them"
    assert runs(plan) == [(1, 0, 10, True), (2, 8, 1, True)]
    assert scheduler.num_preemptions == 0


def test_what_earlier_steps_computed_survives_an_abandoned_one() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(4))
    step(scheduler)
    scheduler.abandon(scheduler.schedule())
    assert runs(step(scheduler)) == [(1, 4, 1, True)]
    assert request.token_ids == [*range(4), 500, 500]


def test_a_standstill_names_the_blocked_request() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 17, range(10), max_tokens=3)
    assert scheduler.pool.allocate(2) == [0, 1], "as if two blocks had leaked"
    for _ in range(MAX_EMPTY_PLANS - 1):
        assert runs(scheduler.schedule()) == []
    with pytest.raises(EngineError, match="request 17 has 10 tokens and needs 3 blocks; of 4 blocks 2 are available"):
        scheduler.schedule()


def test_a_step_is_planned_ahead_of_the_token_before_it() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(6), max_tokens=3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert runs(first) == [(1, 0, 6, True)]
    assert runs(second) == [(1, 6, 1, True)]
    assert scheduler.update(first, sampled(first)) == []
    third = scheduler.schedule()
    assert runs(third) == [(1, 7, 1, True)]
    scheduler.update(second, sampled(second))
    assert runs(scheduler.schedule()) == [], "the token that ends it is on its way"
    assert scheduler.update(third, sampled(third)) == [request]
    assert request.token_ids == [*range(6), 500, 500, 500]
    scheduler.pool.check()
    assert scheduler.pool.num_used == 0


def test_a_token_on_its_way_to_a_request_that_ended_is_dropped() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, range(6))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, sampled(first))
    scheduler.finish(request)  # as the engine does for EOS
    assert scheduler.update(second, sampled(second)) == []
    assert request.token_ids == [*range(6), 500]
    scheduler.pool.check()
    assert scheduler.pool.num_used == 0


def test_a_token_on_its_way_to_a_preempted_request_is_kept() -> None:
    scheduler = make_scheduler(max_running=1)
    low = add(scheduler, 1, range(6), priority=-1)
    first = scheduler.schedule()
    add(scheduler, 2, range(50, 53), max_tokens=1)
    second = scheduler.schedule()
    assert second.preempted == [low]
    assert runs(second) == [(2, 0, 3, True)]
    scheduler.update(first, sampled(first, 7))
    scheduler.update(second, sampled(second))
    assert low.token_ids == [*range(6), 7]
    assert runs(scheduler.schedule()) == [(1, 4, 3, True)], "its first block is still cached"
