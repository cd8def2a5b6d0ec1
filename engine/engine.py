"""One model's engine: requests go in, steps are made, outputs come out. Knows when an answer ends. No torch.

Where the runner can, one step runs ahead: while the device computes step n, step n + 1 is planned and launched, and
only then are n's tokens waited for. A token that ends its request is so noticed one step late; what was computed beyond
it is dropped.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.grammar import LabelSets, LabelState
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step_plan import SampledTokens, StepPlan
from schemas.errors import DocumentError, Failure, FailureCode, Stage
from schemas.inference import (
    EngineStats,
    FinishReason,
    InferenceOutput,
    InferenceRequest,
    RequestTiming,
    TokenLogprobs,
)


class Launched(Protocol):
    """A step under way."""

    def collect(self) -> SampledTokens:
        """Waits for it. One entry per run that samples, in the plan's order."""
        ...


class Runner(Protocol):
    """Carries plans out."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done, and takes runs whose last token is not known yet."""
        ...

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        """Whether choosing this request's next token takes the last one on the host: penalties, labels."""
        ...

    @property
    def step_seconds(self) -> Mapping[str, float]:
        """Totals of a step's parts."""
        ...

    def launch(self, plan: StepPlan) -> Launched: ...

    def release(self, request: Request) -> None:
        """The request has ended: forget it. Also for one that was never executed."""
        ...


class Text(Protocol):
    """The text of one growing answer; `engine.detokenizer.TextStream` is one."""

    def append(self, token_id: int) -> str | None: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    plan: StepPlan
    launched: Launched


@dataclass(slots=True)
class _Answer:
    """A request that has not ended, and what its output will say."""

    request: Request
    text: Text
    eos_token_ids: frozenset[int]  # none where the request ignores them
    stop_token_ids: frozenset[int]
    labels: LabelState | None
    added: float
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_scheduled: float | None = None
    first_sampled: float | None = None


class Engine:
    """Add requests, then step while there are unfinished ones. Every request ends in exactly one output of a step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        text_factory: Callable[[tuple[str, ...]], Text],  # stop strings -> a new answer's text
        label_sets: LabelSets,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._text_factory = text_factory
        self._label_sets = label_sets
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._answers: dict[int, _Answer] = {}
        self._under_way: _UnderWay | None = None
        self._num_bound = 0  # unfinished requests whose next step needs the last token on the host
        self._ended: list[InferenceOutput] = []  # for the next step to give out
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_sampled_tokens = 0
        self._num_computed_tokens = 0
        self._num_begun_tokens = 0
        self._num_begun_cached_tokens = 0
        self._step_seconds = {"schedule": 0.0, "execute": 0.0, "wait": 0.0, "update": 0.0}

    def add_request(self, inference: InferenceRequest) -> None:
        """Take a request in. One that cannot run is an output with a failure, given by the next step."""
        assert inference.request_id not in self._answers, f"request {inference.request_id} has not ended yet"
        try:
            self._scheduler.check(inference)
        except DocumentError as error:
            self._num_begun_tokens += len(inference.token_ids)
            self._ended.append(_failed(inference, error.failure))
            return
        sampling = inference.sampling
        if sampling.max_tokens == 0:
            num_prompt_tokens = len(inference.token_ids)
            self._num_begun_tokens += num_prompt_tokens
            self._ended.append(
                InferenceOutput(inference.request_id, finish_reason="length", num_prompt_tokens=num_prompt_tokens)
            )
            return
        self._num_bound += self._runner.needs_known_tokens(inference)
        self._answers[inference.request_id] = _Answer(
            request=self._scheduler.add(inference),
            text=self._text_factory(sampling.stop),
            eos_token_ids=frozenset() if sampling.ignore_eos else self._eos_token_ids,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            labels=self._label_sets.state(inference.label_token_ids, ()) if inference.label_token_ids else None,
            added=self._clock(),
        )

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        """What will be added yet: longest output -> prompt tokens; None: nobody knows. As Scheduler.expect."""
        self._scheduler.expect(beyond)

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests now, with what they have; ids that are not known, or no longer, are passed over."""
        for request_id in request_ids:
            if (answer := self._answers.get(request_id)) is not None:
                self._ended.append(self._end(answer, "abort"))

    def has_unfinished(self) -> bool:
        return bool(self._answers or self._ended)

    def check_idle(self) -> None:
        """Raises EngineError where requests that have all ended left blocks behind. O(1)."""
        self._scheduler.check_idle()

    def step(self) -> list[InferenceOutput]:
        """One step; the outputs of the requests that ended since the last one.

        Raises EngineError where nothing can ever move, and whatever the runner raises; in that case the step counts
        as not made, and its requests would be computed again by the next.
        """
        ended, self._ended = self._ended, []
        started = self._clock()
        if self._num_bound and self._under_way is not None:
            ended += self._collect()
        previous, self._under_way = self._under_way, None
        plan = self._scheduler.schedule()
        scheduled = self._clock()
        self._step_seconds["schedule"] += scheduled - started
        if plan.scheduled or plan.preempted or plan.scrub:
            for run in plan.scheduled:
                if run.request.num_sampled_tokens == 0:
                    answer = self._answers[run.request.request_id]
                    if answer.first_scheduled is None:
                        self._begins(answer, scheduled)
            try:
                launched = self._runner.launch(plan)
            except BaseException:
                self._scheduler.abandon(plan)
                self._ended = ended
                if previous is not None:
                    self._ended += self._finish_step(previous.plan, previous.launched)
                raise
            self._step_seconds["execute"] += self._clock() - scheduled
            if self._runner.runs_ahead:
                self._under_way = _UnderWay(plan, launched)
            else:
                ended += self._finish_step(plan, launched)
        if previous is not None:
            ended += self._finish_step(previous.plan, previous.launched)
        return ended

    def _begins(self, answer: _Answer, now: float) -> None:
        answer.first_scheduled = now
        self._num_begun_tokens += answer.request.num_prompt_tokens
        self._num_begun_cached_tokens += answer.request.num_cached_tokens

    def _collect(self) -> list[InferenceOutput]:
        """The step under way, if any, to its end."""
        under_way, self._under_way = self._under_way, None
        return self._finish_step(under_way.plan, under_way.launched) if under_way is not None else []

    def _finish_step(self, plan: StepPlan, launched: Launched) -> list[InferenceOutput]:
        """Waits for a step; the outputs of the requests that it ended."""
        started = self._clock()
        sampled = launched.collect()
        executed = self._clock()
        at_length = self._scheduler.update(plan, sampled)
        ended = self._take(plan, sampled, {request.request_id for request in at_length}, executed)
        self._num_steps += 1
        self._num_computed_tokens += plan.num_tokens
        self._step_seconds["wait"] += executed - started
        self._step_seconds["update"] += self._clock() - executed
        return ended

    def stats(self) -> EngineStats:
        pool = self._scheduler.pool
        return EngineStats(
            num_steps=self._num_steps,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_sampled_tokens=self._num_sampled_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            step_seconds={**self._step_seconds, **self._runner.step_seconds},
            num_recomputed_tokens=self._scheduler.num_recomputed_tokens,
            num_begun_tokens=self._num_begun_tokens,
            num_begun_cached_tokens=self._num_begun_cached_tokens,
        )

    def _take(self, plan: StepPlan, sampled: SampledTokens, at_length: set[int], now: float) -> list[InferenceOutput]:
        """Give each sampled token to its answer; the outputs of those that it ended."""
        outputs: list[InferenceOutput] = []
        rows = zip(sampled.token_ids, sampled.logprobs, sampled.finite, strict=True)
        for run in plan.scheduled:
            if not run.samples:
                continue
            token_id, logprobs, finite = next(rows)
            answer = self._answers.get(run.request.request_id)
            if answer is None or answer.request is not run.request or run.request.request_id in plan.void:
                continue  # it ended, or began again, while this step was under way: its token means nothing
            if answer.first_sampled is None:
                answer.first_sampled = now
            if not finite:
                outputs.append(self._end_not_finite(answer))
                continue
            if logprobs is not None:
                answer.logprobs.append(logprobs)
            is_stop, stop_reason = _take_token(answer, token_id)
            if is_stop:
                outputs.append(self._end(answer, "stop", stop_reason))
            elif run.request.request_id in at_length:
                outputs.append(self._end(answer, "length"))
        return outputs

    def _end(
        self, answer: _Answer, finish_reason: FinishReason, stop_reason: str | int | None = None
    ) -> InferenceOutput:
        request = self._forget(answer)
        return InferenceOutput(
            request.request_id,
            token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
            text=answer.text.finish(),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            label_id=answer.labels.label_id if answer.labels is not None else None,
            logprobs=tuple(answer.logprobs) if request.inference.sampling.logprobs is not None else None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            timing=self._timing(answer),
        )

    def _end_not_finite(self, answer: _Answer) -> InferenceOutput:
        request = self._forget(answer)
        failure = Failure(
            FailureCode.NUMERIC_ERROR,
            Stage.ENGINE,
            f"the model's output after {len(request.token_ids)} tokens is not finite (NaN or infinity)",
        )
        return _failed(request.inference, failure, request, self._timing(answer))

    def _forget(self, answer: _Answer) -> Request:
        request = answer.request
        if answer.first_scheduled is None:
            self._num_begun_tokens += request.num_prompt_tokens
        self._scheduler.finish(request)
        self._runner.release(request)
        del self._answers[request.request_id]
        self._num_bound -= self._runner.needs_known_tokens(request.inference)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_cached_tokens += request.num_cached_tokens
        self._num_sampled_tokens += request.num_sampled_tokens
        return request

    def _timing(self, answer: _Answer) -> RequestTiming:
        now = self._clock()
        first_scheduled = answer.first_scheduled if answer.first_scheduled is not None else now
        first_sampled = answer.first_sampled if answer.first_sampled is not None else now
        return RequestTiming(
            queue_ms=(first_scheduled - answer.added) * 1000,
            prefill_ms=(first_sampled - first_scheduled) * 1000,
            decode_ms=(now - first_sampled) * 1000,
        )


def _take_token(answer: _Answer, token_id: int) -> tuple[bool, str | int | None]:
    """Whether this token stops the answer, and the reason to name: the stop string or stop token; EOS has none."""
    if answer.labels is not None:
        answer.labels.append(token_id)
    if token_id in answer.stop_token_ids:
        return True, token_id
    if token_id in answer.eos_token_ids:
        return True, None
    stop = answer.text.append(token_id)
    if stop is not None:
        return True, stop
    return answer.labels is not None and answer.labels.label_id is not None, None


def _failed(
    inference: InferenceRequest,
    failure: Failure,
    request: Request | None = None,
    timing: RequestTiming | None = None,
) -> InferenceOutput:
    return InferenceOutput(
        inference.request_id,
        num_prompt_tokens=len(inference.token_ids),
        num_cached_tokens=request.num_cached_tokens if request is not None else 0,
        num_preemptions=request.num_preemptions if request is not None else 0,
        timing=timing if timing is not None else RequestTiming(),
        failure=failure,
    )
