"""An engine process without a model: the real process and protocol around answers that depend on token ids alone.

For tests and benchmarks of what stands around the engine. `tests.fakes.fake_engine_command` writes its command line.
"""

import argparse
import os
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine import process
from schemas.errors import Failure, FailureCode, ModelError, SettingsError, Stage
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
)

IDENTITY = b"fake-engine"
VOCAB_SIZE = 1 << 16
MAX_MODEL_LEN = 8192
MAX_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the fake does besides answering. Counts are of answers given; -1: never."""

    step_seconds: float = 0.0
    requests_per_step: int = 256
    load_seconds: float = 0.0
    model_error: str = ""  # what loading fails with
    settings_error: str = ""
    die_after: int = -1  # as by kill -9
    fail_after: int = -1  # the step raises
    hang_after: int = -1  # the step does not end
    garbage_after: int = -1  # sends bytes that are no frame
    die_on_token: int = -1  # dies when a prompt that holds this token is stepped
    end_worker_on_token: int = -1  # likewise, and kills the worker before, as a host does that is out of memory
    hang_on_token: int = -1  # likewise, the step does not end
    not_finite_on_token: int = -1  # likewise, that request fails by NUMERIC_ERROR
    hold_on_token: int = -1  # a prompt that holds this token is never answered


def answer(request: InferenceRequest) -> InferenceOutput:
    """The one answer to these token ids: a few tokens, and a text that names the prompt's checksum."""
    num_prompt_tokens = len(request.token_ids)
    if not num_prompt_tokens:
        failure = Failure(FailureCode.EMPTY_PROMPT, Stage.ENGINE, "the prompt has no tokens")
        return InferenceOutput(request.request_id, failure=failure)
    checksum = zlib.crc32(array("i", request.token_ids).tobytes())
    if request.label_token_ids:
        label_id = checksum % len(request.label_token_ids)
        return InferenceOutput(
            request.request_id,
            token_ids=request.label_token_ids[label_id],
            text=f"label {label_id}",
            finish_reason="stop",
            label_id=label_id,
            num_prompt_tokens=num_prompt_tokens,
        )
    num_tokens = min(request.sampling.max_tokens, MAX_ANSWER_TOKENS)
    return InferenceOutput(
        request.request_id,
        token_ids=tuple([(checksum >> 4 * i) % VOCAB_SIZE for i in range(num_tokens)]),
        text=f"answer {checksum:08x} to {num_prompt_tokens} tokens" if num_tokens else "",
        finish_reason="stop" if num_tokens < request.sampling.max_tokens else "length",
        num_prompt_tokens=num_prompt_tokens,
    )


class FakeEngine:
    """Answers `requests_per_step` waiting requests a step, in order of priority, then arrival."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        # Looking for tokens in every prompt is the larger part of an answer otherwise.
        self._is_good = all(
            getattr(behaviour, name) < 0 for name in behaviour.__slots__ if "_on_" in name or "_after" in name
        )
        self._waiting: dict[int, deque[InferenceRequest]] = {}  # priority -> requests
        self._aborted: list[InferenceOutput] = []
        self._num_waiting = 0
        self._num_answers = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_sampled_tokens = 0
        self._step_seconds = 0.0
        self._num_begun_tokens = 0

    def add_request(self, request: InferenceRequest) -> None:
        if not self._is_good and self._behaviour.hold_on_token in request.token_ids:
            self._num_begun_tokens += len(request.token_ids)
            return
        self._waiting.setdefault(request.priority, deque()).append(request)
        self._num_waiting += 1

    def expect(self, beyond: Mapping[int, int] | None) -> None: ...

    def abort(self, request_ids: Iterable[int]) -> None:
        wanted = set(request_ids)
        for requests in self._waiting.values():
            for request in [one for one in requests if one.request_id in wanted]:
                requests.remove(request)
                self._num_waiting -= 1
                self._num_begun_tokens += len(request.token_ids)
                self._aborted.append(InferenceOutput(request.request_id, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        return self._num_waiting > 0 or bool(self._aborted)

    def check_idle(self) -> None: ...

    def step(self) -> list[InferenceOutput]:
        started = time.perf_counter()
        outputs, self._aborted = self._aborted, []
        behaviour = self._behaviour
        if behaviour.step_seconds and self._num_waiting:
            time.sleep(behaviour.step_seconds)
        room = behaviour.requests_per_step
        for priority in sorted(self._waiting, reverse=True):
            requests = self._waiting[priority]
            while requests and room:
                if not self._is_good:
                    self._misbehave(requests[0])
                outputs.append(self._answer(requests.popleft()))
                room -= 1
            if not requests:
                del self._waiting[priority]
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - started
        return outputs

    def _answer(self, request: InferenceRequest) -> InferenceOutput:
        output = answer(request)
        if not self._is_good and self._behaviour.not_finite_on_token in request.token_ids:
            failure = Failure(FailureCode.NUMERIC_ERROR, Stage.ENGINE, "told to be not finite")
            output = InferenceOutput(request.request_id, num_prompt_tokens=len(request.token_ids), failure=failure)
        self._num_waiting -= 1
        self._num_answers += 1
        self._num_begun_tokens += len(request.token_ids)
        self._num_prompt_tokens += output.num_prompt_tokens
        self._num_sampled_tokens += len(output.token_ids)
        return output

    def _misbehave(self, request: InferenceRequest) -> None:
        behaviour = self._behaviour
        if behaviour.end_worker_on_token in request.token_ids:
            os.kill(os.getppid(), 9)
            os.kill(os.getpid(), 9)
        if self._num_answers == behaviour.die_after or behaviour.die_on_token in request.token_ids:
            os.kill(os.getpid(), 9)
        if self._num_answers == behaviour.fail_after:
            raise RuntimeError(f"told to fail after {behaviour.fail_after} answers")
        if self._num_answers == behaviour.hang_after or behaviour.hang_on_token in request.token_ids:
            time.sleep(3600)
        if self._num_answers == behaviour.garbage_after:
            os.write(int(sys.argv[-1]), b"\xff" * 64)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self._num_steps,
            num_waiting=self._num_waiting,
            num_prompt_tokens=self._num_prompt_tokens,
            num_sampled_tokens=self._num_sampled_tokens,
            num_computed_tokens=self._num_prompt_tokens + self._num_sampled_tokens,
            step_seconds={"forward": self._step_seconds},
            num_begun_tokens=self._num_begun_tokens,
        )


def parse_behaviour(options: Sequence[str]) -> Behaviour:
    """From `--field value` pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in ((name, getattr(Behaviour(), name)) for name in Behaviour.__slots__):
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return Behaviour(**vars(parser.parse_args(options)))


def load(
    behaviour: Behaviour,
    model: ModelSettings,
    engine: EngineSettings,
    progress: process.Progress,
    fail: process.Fail,
) -> tuple[FakeEngine, EngineInfo]:
    """What the real engine's loading does, as this behaviour has it."""
    progress("weights", 0.0)
    time.sleep(behaviour.load_seconds)
    if behaviour.model_error:
        raise ModelError(behaviour.model_error)
    if behaviour.settings_error:
        raise SettingsError(behaviour.settings_error)
    progress("weights", 1.0)
    info = EngineInfo(
        model=model.name or "fake",
        identity=IDENTITY,
        weights="fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=model.max_model_len or MAX_MODEL_LEN,
        block_size=engine.block_size,
        kv_cache_tokens=engine.kv_cache_tokens,
        device="cpu",
        start_seconds={"weights": behaviour.load_seconds},
    )
    return FakeEngine(behaviour), info


def main(arguments: Sequence[str]) -> int:
    *options, descriptor = arguments
    behaviour = parse_behaviour(options)
    return process.run(int(descriptor), lambda *given: load(behaviour, *given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
