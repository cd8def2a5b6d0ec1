import pytest

from engine.block_pool import BlockPool
from engine.detokenizer import TextStream
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step_plan import DoneStep, SampledTokens, StepPlan
from schemas.errors import FailureCode
from schemas.inference import InferenceOutput, InferenceRequest, RequestTiming, SamplingParams, TokenLogprobs
from tests.fakes import FakeClock, FakeRunner, LetterTokenizer, tokens_alone

EOS = 25


class ScriptedRunner:
    """Samples what it is told for each request, in order; a step takes a second of the clock."""

    def __init__(self, clock: FakeClock, script: dict[int, list[int]]) -> None:
        self.runs_ahead = False
        self.step_seconds = {"forward": 1.5}
        self.released: list[int] = []
        self._clock = clock
        self._script = {request_id: list(tokens) for request_id, tokens in script.items()}

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        return False

    def launch(self, plan: StepPlan) -> DoneStep:
        self._clock.advance(1.0)
        sampled = SampledTokens()
        for run in plan.scheduled:
            if run.samples:
                token_id = self._script[run.request.request_id].pop(0)
                sampled.token_ids.append(token_id)
                asked = run.request.inference.sampling.logprobs is not None
                sampled.logprobs.append(TokenLogprobs(token_id, -0.5) if asked else None)
                sampled.finite.append(True)
        return DoneStep(sampled)

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)


def make_engine(
    runner: ScriptedRunner | FakeRunner,
    clock: FakeClock | None = None,
    num_blocks: int = 50,
    max_tokens_per_step: int = 50,
    max_running: int = 8,
) -> Engine:
    return Engine(
        runner,
        Scheduler(BlockPool(num_blocks), 4, 100, max_tokens_per_step, max_running),
        text_factory=lambda stop: TextStream(LetterTokenizer(), stop),
        label_sets=LabelSets([EOS]),
        eos_token_ids=[EOS],
        clock=clock or FakeClock(),
    )


def drain(engine: Engine) -> dict[int, InferenceOutput]:
    outputs: dict[int, InferenceOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    engine.check_idle()
    return outputs


def scripted(tokens: list[int], sampling: SamplingParams, labels: tuple[tuple[int, ...], ...] = ()) -> InferenceOutput:
    clock = FakeClock()
    engine = make_engine(ScriptedRunner(clock, {1: tokens}), clock)
    engine.add_request(InferenceRequest(1, (1, 2, 3), sampling, seed=0, label_token_ids=labels))
    return drain(engine)[1]


def test_an_eos_ends_the_answer_and_is_no_part_of_its_text() -> None:
    output = scripted([0, 1, EOS], SamplingParams())
    assert (output.token_ids, output.text) == ((0, 1, EOS), "ab")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_an_ignored_eos_is_a_token_like_others() -> None:
    output = scripted([0, EOS, 1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (output.token_ids, output.text, output.finish_reason) == ((0, EOS, 1), "azb", "length")


def test_a_stop_token_is_named_and_is_no_part_of_the_text() -> None:
    output = scripted([0, 7], SamplingParams(stop_token_ids=(7,), ignore_eos=True))
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ((0, 7), "a", "stop", 7)


def test_a_stop_string_across_tokens_cuts_the_text_exactly_before_it() -> None:
    output = scripted([0, 1, 2, 3], SamplingParams(stop=("cd",)))
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == (
        (0, 1, 2, 3),
        "ab",
        "stop",
        "cd",
    )


def test_max_tokens_ends_with_length_and_a_stop_at_that_very_token_counts_as_stop() -> None:
    output = scripted([0, 1], SamplingParams(max_tokens=2))
    assert (output.token_ids, output.finish_reason) == ((0, 1), "length")
    output = scripted([0, EOS], SamplingParams(max_tokens=2))
    assert (output.token_ids, output.finish_reason) == ((0, EOS), "stop")


def test_no_tokens_asked_is_an_answer_of_none() -> None:
    output = scripted([], SamplingParams(max_tokens=0))
    assert (output.token_ids, output.text, output.finish_reason, output.num_prompt_tokens) == ((), "", "length", 3)


def test_no_tokens_may_be_asked_of_a_prompt_as_long_as_the_context() -> None:
    clock = FakeClock()
    engine = make_engine(ScriptedRunner(clock, {}), clock)
    longest = engine._scheduler._max_model_len
    none = SamplingParams(max_tokens=0)
    engine.add_request(InferenceRequest(1, tuple(range(longest)), none, seed=0))
    engine.add_request(InferenceRequest(2, tuple(range(longest + 1)), none, seed=0))
    outputs = drain(engine)
    assert (outputs[1].failure, outputs[1].finish_reason) == (None, "length")
    failure = outputs[2].failure
    assert failure is not None
    assert failure.code is FailureCode.PROMPT_TOO_LONG


def test_a_label_ends_when_nothing_longer_is_possible() -> None:
    output = scripted([4, 5], SamplingParams(), labels=((3,), (4, 5)))
    assert (output.label_id, output.text, output.finish_reason, output.stop_reason) == (1, "ef", "stop", None)


def test_a_label_that_begins_another_ends_with_eos() -> None:
    assert scripted([4, EOS], SamplingParams(), labels=((4,), (4, 5))).label_id == 0
    assert scripted([4, 5], SamplingParams(), labels=((4,), (4, 5))).label_id == 1


def test_a_label_cut_short_is_none_though_a_shorter_one_is_spelled_so_far() -> None:
    output = scripted([4], SamplingParams(max_tokens=1), labels=((4,), (4, 5)))
    assert (output.label_id, output.finish_reason) == (None, "length")
    output = scripted([4], SamplingParams(max_tokens=1), labels=((4, 6), (4, 5)))
    assert (output.label_id, output.finish_reason) == (None, "length")


def test_logprobs_come_for_every_token_where_they_were_asked_for() -> None:
    output = scripted([0, 1], SamplingParams(max_tokens=2, logprobs=0))
    assert output.logprobs == (TokenLogprobs(0, -0.5), TokenLogprobs(1, -0.5))
    assert scripted([0, 1], SamplingParams(max_tokens=2)).logprobs is None


def test_a_refused_request_is_one_failed_output_and_its_neighbours_are_answered() -> None:
    runner = FakeRunner(50, 4)
    engine = make_engine(runner)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for request_id, length in ((1, 100), (2, 99), (3, 0), (4, 5)):
        engine.add_request(InferenceRequest(request_id, (1,) * length, sampling, seed=0))
    outputs = drain(engine)
    failures = {i: output.failure.code for i, output in outputs.items() if output.failure is not None}
    assert failures == {1: FailureCode.PROMPT_TOO_LONG, 3: FailureCode.EMPTY_PROMPT}
    assert (len(outputs[2].token_ids), outputs[2].finish_reason) == (1, "length")
    assert outputs[4].token_ids == tuple(tokens_alone((1,) * 5, 2))
    assert outputs[1].finish_reason is None


def test_nan_fails_its_request_alone_and_the_next_one_in_its_blocks_is_answered() -> None:
    runner = FakeRunner(3, 4)
    runner.nan_token_ids = {24}
    engine = make_engine(runner, num_blocks=3)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add_request(InferenceRequest(1, (1, 24, 2, 3, 4), sampling, seed=0))
    engine.add_request(InferenceRequest(2, (1, 5), sampling, seed=0))
    engine.add_request(InferenceRequest(3, (6, 7, 8, 9, 10, 11), sampling, seed=0))
    outputs = drain(engine)
    assert outputs[1].failure is not None
    assert outputs[1].failure.code is FailureCode.NUMERIC_ERROR
    assert "after 5 tokens" in outputs[1].failure.message
    assert outputs[2].token_ids == tuple(tokens_alone((1, 5), 2))
    assert outputs[3].token_ids == tuple(tokens_alone((6, 7, 8, 9, 10, 11), 2))
    assert runner.rows == set()


def test_an_aborted_request_ends_once_with_what_it_has() -> None:
    runner = FakeRunner(50, 4)
    engine = make_engine(runner)
    for request_id in (1, 2):
        engine.add_request(InferenceRequest(request_id, (request_id,), SamplingParams(ignore_eos=True), seed=0))
    engine.step()
    engine.add_request(InferenceRequest(3, (3,), SamplingParams(ignore_eos=True), seed=0))
    engine.abort([1, 3, 99])
    engine.abort([1])
    outputs = {output.request_id: output for output in engine.step()}
    assert {i: (o.token_ids, o.finish_reason) for i, o in outputs.items()} == {
        1: (tuple(tokens_alone((1,), 1)), "abort"),
        3: ((), "abort"),
    }
    assert runner.rows == {2}


def test_a_step_that_fails_raises_and_the_next_one_makes_up_for_it() -> None:
    runner = FakeRunner(50, 4)
    engine = make_engine(runner)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    prompts = {1: tuple(range(9)), 2: (*range(8), 20), 3: ()}
    for request_id, prompt in prompts.items():
        engine.add_request(InferenceRequest(request_id, prompt, sampling, seed=0))
    runner.fail_next = True
    with pytest.raises(RuntimeError, match="the step failed"):
        engine.step()
    outputs = drain(engine)
    assert outputs[3].failure is not None, "what had ended before the failing step is not lost with it"
    assert outputs[1].token_ids == tuple(tokens_alone(prompts[1], 3))
    assert outputs[2].token_ids == tuple(tokens_alone(prompts[2], 3))


def test_times_are_of_waiting_of_the_first_token_and_of_the_rest() -> None:
    clock = FakeClock(100.0)
    engine = make_engine(ScriptedRunner(clock, {1: [0, 1, 2], 2: [0]}), clock, max_running=1, max_tokens_per_step=2)
    engine.add_request(InferenceRequest(1, (1, 2, 3), SamplingParams(max_tokens=3), seed=0))
    engine.add_request(InferenceRequest(2, (1, 2), SamplingParams(max_tokens=1), seed=0))
    outputs = drain(engine)
    assert outputs[1].timing == RequestTiming(queue_ms=0.0, prefill_ms=2000.0, decode_ms=2000.0)
    assert outputs[2].timing == RequestTiming(queue_ms=4000.0, prefill_ms=1000.0, decode_ms=0.0)


def test_the_stats_count_what_was_done() -> None:
    clock = FakeClock()
    engine = make_engine(ScriptedRunner(clock, {1: [0, 1], 2: [3, 4]}), clock)
    for request_id in (1, 2):
        engine.add_request(InferenceRequest(request_id, (1, 2, 3, 4, 5), SamplingParams(max_tokens=2), seed=0))
    engine.step()
    stats = engine.stats()
    assert (stats.num_steps, stats.num_running, stats.num_waiting) == (1, 2, 0)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (50, 47, 0)
    drain(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_sampled_tokens) == (10, 4, 4)
    assert stats.num_computed_tokens == 10 - 4 + 2
    assert (stats.num_steps, stats.num_running, stats.num_free_blocks, stats.num_cached_blocks) == (2, 0, 49, 1)
    assert stats.step_seconds == {"schedule": 0.0, "execute": 2.0, "wait": 0.0, "update": 0.0, "forward": 1.5}


def test_a_prompt_has_begun_once_it_waits_no_more_and_counts_once() -> None:
    clock = FakeClock()
    engine = make_engine(ScriptedRunner(clock, {1: [0, 1], 2: [3, 4]}), clock, max_running=1)

    def begun() -> tuple[int, int]:
        stats = engine.stats()
        return stats.num_begun_tokens, stats.num_begun_cached_tokens

    for request_id in (1, 2, 3):
        engine.add_request(InferenceRequest(request_id, (1, 2, 3, 4, 5), SamplingParams(max_tokens=2), seed=0))
    assert begun() == (0, 0)
    engine.step()
    assert begun() == (5, 0)
    engine.step()
    engine.step()
    assert begun() == (10, 4)  # the second has found the first one's block
    engine.abort([2, 3])
    assert begun() == (15, 4)
    engine.add_request(InferenceRequest(4, (), SamplingParams(), seed=0))
    engine.add_request(InferenceRequest(5, (1,) * 200, SamplingParams(), seed=0))
    engine.add_request(InferenceRequest(6, (1, 2), SamplingParams(max_tokens=0), seed=0))
    assert begun() == (217, 4)
