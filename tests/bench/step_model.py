"""The steps of the six workloads without a GPU: the worker's order and portions, the engine's own scheduler and pace,
and a device that takes the time that an H200 was counted to take.

    python -m tests.bench.step_model [--workloads seed_mix,few_shot] [--times 1] [--max-running 1024] [--no-pace]

A step takes its products (the weights' reading at least, and at each size the rate that was measured for it), its
prefill attention, the keys and values of its decode rows, a shared prefix once, and its logits. What lies between
kernels is not in it, so a modelled time is a bound to compare orders with, and no forecast. `--times`: the workload so
many times over, each with prompts of its own: a backlog that is longer than what is known of it.
"""

import argparse
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step_plan import SampledTokens, StepPlan
from schemas.inference import InferenceRequest
from tests.bench.backlog import MAX_IN_FLIGHT, Requests, steps

sys.path.append(str(Path(__file__).parent))
import floor
import workloads

BLOCK_SIZE = 16
MAX_TOKENS_PER_STEP = 8192
KV_TOKENS = 1_400_000

# Rows of a step -> milliseconds of the layers' products, bf16, as measured; between them in proportion.
PRODUCTS = ((1, 3.6), (100, 3.6), (184, 5.2), (256, 6.05), (600, 13.2), (1024, 20.5), (8192, 160.0))
HEAD_MS = 0.25  # at the least: its weights are read
ATTENTION_FLOP = 4 * floor.LAYERS * floor.HEADS * floor.HEAD  # a query and a key


def products_ms(rows: int) -> float:
    """Of the layers, for a step of so many tokens."""
    for (low, low_ms), (high, high_ms) in pairwise(PRODUCTS):
        if rows <= high:
            return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
    return PRODUCTS[-1][1] * rows / PRODUCTS[-1][0]


def step_ms(plan: StepPlan, num_used_tokens: int) -> float:
    """`num_used_tokens`: in blocks that somebody holds, each counted once."""
    read = pairs = 0
    for run in plan.scheduled:
        if run.count == 1:
            read += run.start + 1
        else:
            pairs += run.count * run.start + run.count * (run.count + 1) // 2
    num_samples = sum(run.samples for run in plan.scheduled)
    head = max(HEAD_MS, 1e3 * num_samples * floor.HEAD_FLOP / floor.GEMM["bf16"]) if num_samples else 0.0
    attention = 1e3 * pairs * ATTENTION_FLOP / floor.ATTENTION
    reading = 1e3 * min(read, num_used_tokens) * floor.KV_BYTES / floor.COPY
    return float(products_ms(plan.num_tokens) + head + attention + reading)


@dataclass
class ModelledDevice:
    """A runner that computes nothing; its clock stands still but for the device's steps."""

    pool: BlockPool
    now: float = 0.0  # seconds
    runs_ahead: bool = True
    step_seconds: dict[str, float] = field(default_factory=dict)
    free_at: float = 0.0
    num_tokens: list[int] = field(default_factory=list)  # of each step
    starts: list[int] = field(default_factory=list)  # request ids in the order in which they began
    peak_tokens: int = 0

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        return False

    def launch(self, plan: StepPlan) -> "ModelledStep":
        for run in plan.scheduled:
            if run.start == run.request.num_cached_tokens and run.request.num_sampled_tokens == 0:
                self.starts.append(run.request.request_id)
        used = self.pool.num_used * BLOCK_SIZE
        self.peak_tokens = max(self.peak_tokens, used)
        self.num_tokens.append(plan.num_tokens)
        self.free_at = max(self.free_at, self.now) + step_ms(plan, used) / 1e3
        return ModelledStep(self, self.free_at, sum(run.samples for run in plan.scheduled))

    def release(self, request: Request) -> None: ...


@dataclass(frozen=True)
class ModelledStep:
    device: ModelledDevice
    ends_at: float
    num_samples: int

    def collect(self) -> SampledTokens:
        self.device.now = max(self.device.now, self.ends_at)
        return SampledTokens([5] * self.num_samples, [None] * self.num_samples, [True] * self.num_samples)


class NoText:
    def append(self, token_id: int) -> str | None:
        return None

    def finish(self) -> str:
        return ""


class UnpacedEngine(Engine):
    """As if more might always come."""

    def expect(self, beyond: object) -> None: ...


def repeated(name: str, times: int) -> Requests:
    """The workload so many times over, no two of them with a prompt or prefix in common."""
    requests: list[tuple[list[int], int]] = []
    for i in range(times):
        requests += [([(token + 7919 * i) % workloads.VOCAB for token in p], n) for p, n in workloads.WORKLOADS[name]()]
    return requests


def run(
    requests: Requests, kv_tokens: int, max_running: int = 1024, paced: bool = True, max_in_flight: int = MAX_IN_FLIGHT
) -> tuple[ModelledDevice, Engine]:
    """All requests to their full length."""
    pool = BlockPool(kv_tokens // BLOCK_SIZE)
    device = ModelledDevice(pool)
    scheduler = Scheduler(pool, BLOCK_SIZE, MAX_TOKENS_PER_STEP, MAX_TOKENS_PER_STEP, max_running)
    label_sets = LabelSets(frozenset(), lambda: ())
    make = Engine if paced else UnpacedEngine
    engine = make(device, scheduler, lambda stop: NoText(), label_sets, (), lambda: device.now)
    num_ended = 0
    for outputs in steps(
        engine, requests, BLOCK_SIZE, MAX_TOKENS_PER_STEP, max_in_flight=max_in_flight, clock=lambda: device.now
    ):
        num_ended += len(outputs)
    assert num_ended == len(requests)
    return device, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(workloads.WORKLOADS))
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=MAX_IN_FLIGHT)
    parser.add_argument("--no-pace", action="store_true")
    options = parser.parse_args()
    for name in options.workloads.split(","):
        requests = repeated(name, options.times)
        kv_tokens = workloads.KV_TOKENS.get(name, KV_TOKENS)
        device, engine = run(requests, kv_tokens, options.max_running, not options.no_pace, options.in_flight)
        stats = engine.stats()
        longest = max(n for _, n in requests)
        last_long = max(place for place, i in enumerate(device.starts) if requests[i][1] == longest)
        sizes = sorted(device.num_tokens)
        print(
            f"{name:16s} {device.now:7.2f} s modelled; {len(sizes)} steps of {sizes[len(sizes) // 2]} tokens in the"
            f" middle; computed {stats.num_computed_tokens:,}, found {stats.num_begun_cached_tokens:,}; KV at most"
            f" {device.peak_tokens:,}; preempted {stats.num_preemptions}; the last of the longest outputs began as"
            f" number {last_long + 1} of {len(device.starts)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
