"""Random workloads over tiny pools: whatever happens, every request ends once, with the tokens of running alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.detokenizer import TextStream
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.scheduler import Scheduler
from schemas.errors import FailureCode
from schemas.inference import InferenceOutput, InferenceRequest, SamplingParams
from tests.fakes import FakeRunner, LetterTokenizer, tokens_alone

EOS = 25
NAN = 24
MAX_STEPS = 20_000  # far above what any workload here takes: beyond it one is starved


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    block_size: int
    max_tokens_per_step: int
    max_running: int
    max_model_len: int
    prefix_caching: bool
    is_hopeful: bool  # expects outputs of no length, so that memory runs out
    runs_ahead: bool = False
    expected: tuple[tuple[int, dict[int, int] | None], ...] = ()  # step -> what is said to be yet to come, true or not


@dataclass(frozen=True)
class Arrival:
    """A prompt is a path through shared stems, so that requests share prefixes of every length."""

    stem: int
    stem_length: int
    tail: tuple[int, ...]
    max_tokens: int
    priority: int
    ignore_eos: bool
    at_step: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple((self.stem + i * i) % 5 for i in range(self.stem_length)) + self.tail


setups = st.builds(
    Setup,
    num_blocks=st.integers(2, 24) | st.integers(10, 40),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    max_tokens_per_step=st.integers(1, 40),
    max_running=st.integers(1, 8),
    max_model_len=st.integers(2, 60),
    prefix_caching=st.booleans(),
    is_hopeful=st.booleans(),
    runs_ahead=st.booleans(),
    expected=st.lists(
        st.tuples(
            st.integers(0, 2) | st.integers(0, 40),
            st.none() | st.dictionaries(st.integers(0, 20), st.integers(1, 60), max_size=3),
        ),
        max_size=4,
    ).map(tuple),
)
arrivals = st.builds(
    Arrival,
    stem=st.integers(0, 1),
    stem_length=st.integers(0, 24) | st.integers(12, 24),
    tail=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    max_tokens=st.integers(0, 12),
    priority=st.integers(-1, 1),
    ignore_eos=st.booleans(),
    at_step=st.integers(0, 4) | st.integers(0, 20),
)
aborts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 14)), max_size=4)  # (at step, request)
failures = st.sets(st.integers(0, 12), max_size=3)  # steps whose execution raises


def make_engine(setup: Setup) -> tuple[Engine, Scheduler, FakeRunner]:
    scheduler = Scheduler(
        BlockPool(setup.num_blocks),
        setup.block_size,
        setup.max_model_len,
        setup.max_tokens_per_step,
        setup.max_running,
        b"m",
        setup.prefix_caching,
    )
    if setup.is_hopeful:
        scheduler._num_sampled_tokens = 0
    runner = FakeRunner(setup.num_blocks, setup.block_size, runs_ahead=setup.runs_ahead)
    engine = Engine(
        runner,
        scheduler,
        text_factory=lambda stop: TextStream(LetterTokenizer(), stop),
        label_sets=LabelSets([EOS]),
        eos_token_ids=[EOS],
    )
    return engine, scheduler, runner


def expected_tokens(arrival: Arrival, max_model_len: int) -> tuple[int, ...]:
    count = min(arrival.max_tokens, max_model_len - len(arrival.prompt))
    tokens = tokens_alone(arrival.prompt, count)
    if not arrival.ignore_eos and EOS in tokens:
        tokens = tokens[: tokens.index(EOS) + 1]
    return tuple(tokens)


def check_accounts(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    pool.check()
    assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks
    holders = [0] * pool.num_blocks
    for request in scheduler._running:
        for block_id in request.block_ids:
            holders[block_id] += 1
    assert holders == pool._num_holders, "blocks are held by running requests and by nobody else"


def run(
    setup: Setup, requests: list[Arrival], abort_at: list[tuple[int, int]], fail_at: set[int], runner_nan: bool = False
) -> Iterator[tuple[dict[int, InferenceOutput], Scheduler, FakeRunner]]:
    engine, scheduler, runner = make_engine(setup)
    if runner_nan:
        runner.nan_token_ids = {NAN}
    outputs: dict[int, InferenceOutput] = {}
    step = 0
    while step <= 30 or engine.has_unfinished():
        assert step < MAX_STEPS, "somebody starves"
        for request_id, arrival in enumerate(requests):
            if arrival.at_step == step:
                sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=arrival.ignore_eos)
                engine.add_request(
                    InferenceRequest(request_id, arrival.prompt, sampling, seed=0, priority=arrival.priority)
                )
        for at_step, beyond in setup.expected:
            if at_step == step:
                engine.expect(beyond)
        engine.abort(request_id for at_step, request_id in abort_at if at_step == step)
        runner.fail_next = step in fail_at
        try:
            ended = engine.step()
        except RuntimeError:
            ended = []
        runner.fail_next = False
        for output in ended:
            assert output.request_id not in outputs, "it ended twice"
            outputs[output.request_id] = output
        assert not runner.plans or runner.plans[-1].num_tokens <= setup.max_tokens_per_step
        assert scheduler.num_running <= setup.max_running
        check_accounts(scheduler)
        if not engine.has_unfinished():
            engine.check_idle()
        step += 1
        yield outputs, scheduler, runner


def run_to_the_end(
    setup: Setup, requests: list[Arrival], abort_at: list[tuple[int, int]], fail_at: set[int], runner_nan: bool = False
) -> dict[int, InferenceOutput]:
    for outputs, scheduler, runner in run(setup, requests, abort_at, fail_at, runner_nan):  # noqa: B007
        pass
    assert outputs.keys() == set(range(len(requests))), "every request ends"
    assert scheduler.pool.num_used == 0
    assert scheduler.pool._num_wanting == {}
    assert scheduler._prefix_cache is None or scheduler._prefix_cache._chains == {}
    assert runner.rows == set()
    assert (scheduler.num_waiting, scheduler._waiting.tokens_by_output) == (0, {})
    return outputs


thorough = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(setups, st.lists(arrivals, max_size=14), aborts, failures)
def test_every_request_ends_once_with_the_tokens_of_running_alone(
    setup: Setup, requests: list[Arrival], abort_at: list[tuple[int, int]], fail_at: set[int]
) -> None:
    outputs = run_to_the_end(setup, requests, abort_at, fail_at)
    for request_id, arrival in enumerate(requests):
        output = outputs[request_id]
        if output.failure is not None:
            length = min(len(arrival.prompt) + arrival.max_tokens, setup.max_model_len)
            places = max(len(arrival.prompt), length - 1)
            assert output.failure.code in (FailureCode.PROMPT_TOO_LONG, FailureCode.EMPTY_PROMPT)
            assert (
                not arrival.prompt
                or len(arrival.prompt) >= setup.max_model_len
                or -(-places // setup.block_size) > setup.num_blocks
            )
            continue
        expected = expected_tokens(arrival, setup.max_model_len)
        if output.finish_reason == "abort":
            assert request_id in {aborted for _, aborted in abort_at}
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected
            ended_by_eos = not arrival.ignore_eos and expected[-1:] == (EOS,)
            assert output.finish_reason == ("stop" if ended_by_eos else "length")


@thorough
@given(setups, st.lists(arrivals, max_size=14))
def test_nan_reaches_nobody_whose_own_tokens_are_sound(setup: Setup, requests: list[Arrival]) -> None:
    outputs = run_to_the_end(setup, requests, [], set(), runner_nan=True)
    for request_id, arrival in enumerate(requests):
        output = outputs[request_id]
        if output.failure is not None and output.failure.code is not FailureCode.NUMERIC_ERROR:
            continue
        expected = expected_tokens(arrival, setup.max_model_len)
        # The last token is never an input, so it poisons nothing.
        poisoned = NAN in arrival.prompt + expected[:-1] and arrival.max_tokens > 0
        assert (output.failure is not None) == poisoned
        if not poisoned:
            assert output.token_ids == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(arrivals, min_size=2, max_size=10), st.integers(1, 40))
def test_a_prefix_is_computed_once_whatever_the_size_of_a_step(requests: list[Arrival], budget: int) -> None:
    """With room for all, one after the other: no full block of a prompt is computed twice, last blocks apart."""
    setup = Setup(1000, 4, budget, 1, 1000, True, False)
    engine, _, runner = make_engine(setup)
    seen: set[tuple[int, ...]] = set()
    for request_id, arrival in enumerate(requests):
        if not arrival.prompt:
            continue
        prompt = arrival.prompt
        engine.add_request(InferenceRequest(request_id, prompt, SamplingParams(max_tokens=1), seed=0))
        runner.plans.clear()
        while engine.has_unfinished():
            engine.step()
        full = [prompt[: end * 4] for end in range(1, (len(prompt) - 1) // 4 + 1)]
        num_hits = next((i for i, prefix in enumerate(full) if prefix not in seen), len(full))
        assert sum(plan.num_tokens for plan in runner.plans) == len(prompt) - 4 * num_hits
        seen |= {prompt[: end * 4] for end in range(1, len(prompt) // 4 + 1)}
