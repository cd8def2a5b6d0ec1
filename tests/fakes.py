"""What tests pass in where the real thing is a clock, a model or a server."""

import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from engine.request import Request
from engine.step_plan import DoneStep, SampledTokens, ScheduledTokens, StepPlan
from schemas.inference import InferenceRequest


class FakeClock:
    """A clock that moves when told to. Call it for the time in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def fake_engine_command(**behaviour: float | str) -> tuple[str, ...]:
    """A command for EngineClient: tests/fake_engine.py with fields of its Behaviour, e.g. `die_after=10`."""
    options = [text for name, value in behaviour.items() for text in ("--" + name.replace("_", "-"), str(value))]
    # -P: tests/ must not come before the root on the path, or tests/engine hides engine.
    return (sys.executable, "-P", str(Path(__file__).parent / "fake_engine.py"), *options)


class LetterTokenizer:
    """Token i is the i-th letter from "a" on. A decoder for TextStream."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    @property
    def token_bytes(self) -> tuple[bytes, ...] | None:
        return tuple(self.decode([token_id]).encode() for token_id in range(26))

    @property
    def drops_first_space(self) -> bool:
        return False


class FakeRunner:
    """A runner whose model is a checksum, with a KV cache that shows what attention would have read.

    A slot holds the checksum of all tokens up to its own, made from the slot before it as the block table has it, as
    keys and values depend on all that was read. Every run asserts that each position it attends to holds what the
    request's tokens make it hold: a stale, foreign, withdrawn or unwritten block is found at once.
    `nan_token_ids` make what is computed from them not finite, and as attention does all of the run that they are in;
    `fail_next` lets the next step raise half way.
    """

    NAN = -1
    UNWRITTEN = -2

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 26, runs_ahead: bool = False) -> None:
        self.runs_ahead = runs_ahead
        self._last_token_ids: dict[int, int] = {}  # request id -> sampled last, perhaps not known to the engine yet
        self.slots = [self.UNWRITTEN] * (num_blocks * block_size)
        self.nan_token_ids: set[int] = set()
        self.fail_next = False
        self.plans: list[StepPlan] = []
        self.rows: set[int] = set()  # ids of requests that were executed and neither preempted nor released
        self.step_seconds: dict[str, float] = {}
        self._tables: dict[int, list[int]] = {}  # of the rows: as a runner copies what is new of a table, it only grows
        self._block_size = block_size
        self._vocab_size = vocab_size

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        return len(inference.token_ids) % 7 == 0  # some of them, so that steps ahead and steps in order mix

    def launch(self, plan: StepPlan) -> DoneStep:
        return DoneStep(self._execute(plan))

    def _execute(self, plan: StepPlan) -> SampledTokens:
        self.plans.append(plan)
        for block_id in plan.scrub:
            for slot in range(block_id * self._block_size, (block_id + 1) * self._block_size):
                self.slots[slot] = self.UNWRITTEN
        for request in plan.preempted:
            self.release(request)
        sampled = SampledTokens()
        for number, run in enumerate(plan.scheduled):
            if self.fail_next and number >= len(plan.scheduled) // 2:
                self.fail_next = False
                raise RuntimeError("the step failed")
            last = self._compute(run)
            if run.samples:
                token_id = next_token(last, self._vocab_size)
                self._last_token_ids[run.request.request_id] = token_id
                sampled.token_ids.append(token_id)
                sampled.logprobs.append(None)
                sampled.finite.append(last != self.NAN)
        return sampled

    def release(self, request: Request) -> None:
        self.rows.discard(request.request_id)
        self._tables.pop(request.request_id, None)

    def _compute(self, run: ScheduledTokens) -> int:
        request, size = run.request, self._block_size
        self.rows.add(request.request_id)
        known = self._tables.get(request.request_id, [])
        assert request.block_ids[: len(known)] == known, f"request {request.request_id} has another table than before"
        self._tables[request.request_id] = list(request.block_ids)
        end = run.start + run.count
        assert run.count > 0
        token_ids = request.token_ids
        if self.runs_ahead and end == len(token_ids) + 1:
            assert run.count == 1, "a token that is not known is computed alone"
            token_ids = [*token_ids, self._last_token_ids[request.request_id]]
        assert end <= len(token_ids)
        assert len(set(request.block_ids)) == len(request.block_ids), "a block twice in one table"
        slots = [block_id * size + offset for block_id in request.block_ids for offset in range(size)]
        is_nan = any(token_id in self.nan_token_ids for token_id in token_ids[run.start : end])
        for position in range(run.start, end):
            before = self.slots[slots[position - 1]] if position else START
            token_id = token_ids[position]
            is_nan = is_nan or before == self.NAN
            self.slots[slots[position]] = self.NAN if is_nan else checksum_after(before, token_id)
        expected = START
        for position in range(end):
            expected = checksum_after(expected, token_ids[position])
            found = self.slots[slots[position]]
            assert found in (expected, self.NAN), f"request {request.request_id}: position {position} holds {found}"
        # Kernels may read whole pages, so that NaN past the end reaches us too.
        return self.NAN if any(self.slots[slot] == self.NAN for slot in slots) else expected


START = 1


def checksum_after(before: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), before)


def next_token(checksum: int, vocab_size: int = 26) -> int:
    """What FakeRunner samples after tokens of this checksum."""
    return (checksum >> 8) % vocab_size


def tokens_alone(prompt: Sequence[int], count: int, vocab_size: int = 26) -> list[int]:
    """What FakeRunner answers to a prompt that runs alone to its end, EOS ignored."""
    checksum = START
    for token_id in prompt:
        checksum = checksum_after(checksum, token_id)
    tokens = []
    for _ in range(count):
        tokens.append(next_token(checksum, vocab_size))
        checksum = checksum_after(checksum, tokens[-1])
    return tokens
