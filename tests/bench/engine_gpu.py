"""The engine on one GPU: is it right, and how long do the six fixed workloads take.

    python -m tests.bench.engine_gpu check                     correctness alone
    python -m tests.bench.engine_gpu time [--precision bf16] [--workloads seed_mix,few_shot] [--runs 1]
    python -m tests.bench.engine_gpu profile --workloads decode_heavy

`time` checks first. The model is the Qwen2.5-7B shape with random weights; requests run greedily to their full length,
in the batcher's order. Needs torch, triton, numpy, transformers (for the check), safetensors; flash-attn 4 where it is.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.block_hash import hash_blocks
from engine.block_pool import BlockPool
from engine.cuda_runner import CudaRunner
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.kv_cache import KVCache
from engine.model_config import FAMILIES, ModelConfig, RopeConfig
from engine.models.decoder import Decoder
from engine.models.precision import Fp8Precision, PlainPrecision
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.step_arrays import MIN_TOKENS_SAVED
from engine.step_plan import StepPlan
from engine.weights.names import expected_parameters
from kernels.fp8 import quantise_rows_reference
from schemas.inference import InferenceOutput, InferenceRequest, SamplingParams
from tests.bench.backlog import Requests, steps

sys.path.insert(0, str(Path(__file__).parent))
import floor
import workloads

DEVICE = torch.device("cuda", 0)

QWEN2_7B = ModelConfig(
    family=FAMILIES[0],
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_size=128,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
    rope=RopeConfig(theta=1_000_000.0),
    tied_embeddings=False,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    windows=(None,) * 28,
    eos_token_ids=frozenset(),
)
QWEN3_600M = replace(
    QWEN2_7B, family=next(family for family in FAMILIES if family.qk_norm),
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8,
    max_position_embeddings=40_960, tied_embeddings=True, qkv_bias=False,
)  # fmt: skip
# Small, with the same head size and group, for the check: 2 layers would hide an error that only a third would show.
CHECKED = replace(
    QWEN2_7B, vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=14, num_kv_heads=2,
    head_size=64, windows=(None,) * 4,
)  # fmt: skip


class NoText:
    """Outputs are token ids; nothing is detokenised here."""

    def append(self, token_id: int) -> str | None:
        return None

    def finish(self) -> str:
        return ""


def random_parameters(
    config: ModelConfig, dtype: torch.dtype, seed: int, peaked: bool, device: torch.device = DEVICE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Drawn on the device. `peaked`: keys and queries large, so that one wrong key among many shows."""
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in expected_parameters(config, "huggingface"):
        if parameter.name.endswith("norm.weight"):
            tensor = torch.ones(parameter.shape, device=device)
        elif len(parameter.shape) == 1:
            tensor = torch.randn(parameter.shape, device=device, generator=generator) * 0.1
        else:
            scale = parameter.shape[-1] ** -0.5 if peaked else 0.02
            tensor = torch.randn(parameter.shape, device=device, generator=generator, dtype=torch.float32) * scale
            if peaked and parameter.name.endswith("qkv.weight"):
                tensor[: config.query_size + config.kv_size] *= 2.0
            if peaked and parameter.name == "head.weight":
                tensor *= 4.0
        yield parameter.name, tensor.to(dtype)
        del tensor


@dataclass(frozen=True)
class Build:
    """An engine's settings in this script."""

    precision: str = "bf16"
    block_size: int = 16
    kv_cache_tokens: int = 1_400_000
    max_tokens_per_step: int = 8192
    max_running: int = 1024
    max_model_len: int = 8192
    with_graphs: bool = True
    min_tokens_saved: int | None = MIN_TOKENS_SAVED


def build_decoder(
    config: ModelConfig, dtype: torch.dtype, precision: str, max_model_len: int, seed: int, peaked: bool
) -> Decoder:
    chosen = Fp8Precision() if precision == "fp8" else PlainPrecision()
    with torch.inference_mode():
        parameters = random_parameters(config, dtype, seed, peaked)
        return Decoder(config, parameters, config.vocab_size, max_model_len, DEVICE, chosen)


def build_engine(decoder: Decoder, build: Build) -> tuple[Engine, CudaRunner]:
    config = decoder.config
    cache = KVCache.allocate(
        config.num_layers, build.kv_cache_tokens // build.block_size, build.block_size, config.num_kv_heads,
        config.head_size, decoder.dtype, DEVICE,
    )  # fmt: skip
    label_sets = LabelSets(frozenset(), lambda: ())
    runner = CudaRunner(
        decoder, cache, Sampler(label_sets), build.max_running, build.max_model_len, build.max_tokens_per_step,
        build.with_graphs, build.min_tokens_saved,
    )  # fmt: skip
    scheduler = Scheduler(
        BlockPool(cache.num_blocks), build.block_size, build.max_model_len, build.max_tokens_per_step,
        build.max_running,
    )  # fmt: skip
    return Engine(runner, scheduler, lambda stop: NoText(), label_sets, ()), runner


def run(
    engine: Engine, requests: Requests, block_size: int, max_tokens_per_step: int = 8192
) -> dict[int, InferenceOutput]:
    """All requests to their full length."""
    done = steps(engine, requests, block_size, max_tokens_per_step)
    return {output.request_id: output for outputs in done for output in outputs}


def run_in_two_waves(engine: Engine, requests: Requests, block_size: int) -> dict[int, InferenceOutput]:
    """As `run`, every second request coming late and with priority: where room is short, it preempts."""
    for late in (0, 1):
        for i in range(late, len(requests), 2):
            prompt, max_tokens = requests[i]
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            hashes = hash_blocks(prompt, block_size, b"")
            engine.add_request(InferenceRequest(i, tuple(prompt), sampling, seed=0, block_hashes=hashes, priority=late))
        if not late:
            outputs = {output.request_id: output for _ in range(9) for output in engine.step()}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


# ---- correctness


@torch.inference_mode()
def reference_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """(len(output), vocab_size) float32 at the positions where the output was chosen, teacher-forced."""
    ids = torch.tensor([[*prompt, *output]], device=DEVICE)
    logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


def distances(logits: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    """How far each chosen token's logit lies below its row's largest."""
    below: list[float] = (logits.max(dim=1).values - logits.gather(1, chosen[:, None])[:, 0]).tolist()
    return below


@dataclass(frozen=True)
class Distances:
    """Of the engine's tokens' logits from the reference's largest, teacher-forced."""

    largest: float
    mean: float
    num_others: int  # tokens that are not the reference's
    num_tokens: int


def distances_of(outputs: dict[int, InferenceOutput], requests: Requests, model: Any) -> Distances:
    gaps: list[float] = []
    for i, (prompt, max_tokens) in enumerate(requests):
        assert outputs[i].failure is None, outputs[i]
        assert len(outputs[i].token_ids) == max_tokens
        logits = reference_logits(model, prompt, outputs[i].token_ids)
        gaps += distances(logits, torch.tensor(outputs[i].token_ids, device=DEVICE))
    return Distances(max(gaps), statistics.fmean(gaps), sum(gap > 0 for gap in gaps), len(gaps))


PREEMPTION = "preemption: 3,200 tokens of cache"
# How far chosen tokens' logits may lie below the reference's largest, where logits deviate by about 4: the farthest,
# and all on average. FP8's reference rounds weights and activations to FP8 as the engine does and does all else in
# float32; with attention as peaked as here some of its tokens lie as far as those of a wrong page, but not on average.
LIMITS = {"float32": (0.0, 0.0), "bf16": (2.0, 0.1), "fp8": (16.0, 1.5)}


def transformers_model(config: ModelConfig, dtype: torch.dtype, seed: int) -> Any:
    """The same weights, rounded to `dtype`, in transformers' own float32 model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_size,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=False,
            max_position_embeddings=config.max_position_embeddings, rope_theta=config.rope.theta,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
    ).to(DEVICE).eval()  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    for parameter, (name, tensor) in zip(
        expected_parameters(config, "huggingface"), random_parameters(config, dtype, seed, True), strict=True
    ):
        assert parameter.name == name
        state |= dict(zip(parameter.parts, torch.split(tensor.float(), list(parameter.part_rows)), strict=True))
    model.load_state_dict(state)
    return model


def round_to_fp8(model: Any) -> None:
    """The layers' products take weights by output channel and activations by token, as FP8 holds them."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        values, scale = quantise_rows_reference(x)
        return values.float() * scale

    def product(linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = rounded(linear.weight)

        def forward(x: torch.Tensor) -> torch.Tensor:
            # What reaches a product is bf16 in the engine.
            flat = rounded(x.bfloat16().float().view(-1, x.shape[-1]))
            return torch.nn.functional.linear(flat, weight, linear.bias).view(*x.shape[:-1], -1)

        return forward

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = product(module)  # type: ignore[method-assign, assignment]


def check_requests(config: ModelConfig) -> list[tuple[list[int], int]]:
    """Alone and in groups under long prefixes, at lengths around a block's edge."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (count,), generator=generator).tolist()

    requests = [(ids(n), 24) for n in (1, 15, 16, 17, 31, 33, 64, 100, 257)]
    for length in (640, 1000):
        prefix = ids(length)
        requests += [(prefix + ids(1 + 5 * i), 24) for i in range(12)]
    requests += [(ids(5), 90), (ids(300), 3)]
    return requests


def check() -> None:
    """Raises AssertionError where the engine and transformers disagree; prints the distances."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    requests = check_requests(CHECKED)
    small = Build(
        kv_cache_tokens=1_500 * 16, max_tokens_per_step=301, max_running=64, max_model_len=2048, min_tokens_saved=256
    )
    cases = {
        "graphs, chunks of 301": small,
        "eager": replace(small, with_graphs=False),
        "no shared prefix": replace(small, min_tokens_saved=None),
        PREEMPTION: replace(small, kv_cache_tokens=3_200, max_tokens_per_step=512),
        "blocks of 128": replace(small, block_size=128, max_tokens_per_step=2048),
    }
    failures = []
    for label, (limit, mean_limit) in LIMITS.items():
        dtype = torch.float32 if label == "float32" else torch.bfloat16
        precision = "fp8" if label == "fp8" else "bf16"
        model = transformers_model(CHECKED, dtype, seed=3)
        if label == "fp8":
            round_to_fp8(model)
        for name, build in cases.items():
            if label == "float32" and name == "blocks of 128":
                continue
            decoder = build_decoder(CHECKED, dtype, precision, build.max_model_len, 3, True)
            engine, runner = build_engine(decoder, replace(build, precision=precision))
            answers = (run_in_two_waves if name == PREEMPTION else run)(engine, requests, build.block_size)
            found = distances_of(answers, requests, model)
            if name == PREEMPTION and not engine.stats().num_preemptions:
                failures.append(f"{label}: nothing was preempted")
            print(
                f"check {label:8s}{name:35s} distance at most {found.largest:.5f} (limit {limit}), on average"
                f" {found.mean:.5f} (limit {mean_limit}), {found.num_others} of {found.num_tokens} tokens not the"
                f" reference's; {runner.num_replays} replays, {runner.num_mixed_replays} mixed,"
                f" {runner.num_shared_steps} shared steps, {engine.stats().num_preemptions} preemptions",
                flush=True,
            )
            if found.largest > limit or found.mean > mean_limit:
                failures.append(f"{label}, {name}: {found} is more than {limit}, {mean_limit}")
            del engine, runner, decoder
        for name, mutate in MUTATIONS.items():
            decoder = build_decoder(CHECKED, dtype, precision, small.max_model_len, 3, True)
            _mutate(decoder, mutate)
            engine, _ = build_engine(decoder, replace(small, with_graphs=False, min_tokens_saved=None))
            outputs = run(engine, requests, small.block_size)
            is_finite = all(output.failure is None for output in outputs.values())
            noticed = distances_of(outputs, requests, model) if is_finite else None
            print(f"check {label:8s}mutation, {name:25s} {noticed}, on average more than {mean_limit}", flush=True)
            if noticed is not None and noticed.mean <= mean_limit:
                failures.append(f"{label}: the mutation '{name}' was not noticed, {noticed}")
            del engine, decoder
        del model
        gc.collect()
        torch.cuda.empty_cache()
    assert not failures, "; ".join(failures)


def _mutate(decoder: Decoder, mutate: Callable[[ForwardBatch], ForwardBatch]) -> None:
    right = decoder.forward

    def wrong(batch: ForwardBatch, cache: KVCache, all_written: Callable[[], object] = lambda: None) -> torch.Tensor:
        return right(mutate(batch), cache, all_written)

    decoder.forward = wrong  # type: ignore[method-assign]


def _wrong_block(batch: ForwardBatch) -> ForwardBatch:
    """One page of the longest rows is another's."""
    tables = batch.block_tables.clone()
    if tables.shape[1] > 2:
        tables[:, 1] = tables[:, 2].clamp(min=1)
    return replace(batch, block_tables=tables)


def _last_key_dropped(batch: ForwardBatch) -> ForwardBatch:
    """Of rows whose first query keeps a key all the same."""
    counts = batch.query_starts[1:] - batch.query_starts[:-1]
    lengths = batch.sequence_lengths
    return replace(batch, sequence_lengths=torch.where(lengths > counts, lengths - 1, lengths))


MUTATIONS: dict[str, Callable[[ForwardBatch], ForwardBatch]] = {
    "a wrong block": _wrong_block,
    "positions off by one": lambda batch: replace(batch, positions=batch.positions + (batch.positions > 8).int()),
    "the last key dropped": _last_key_dropped,
    "keys written a slot off": lambda batch: replace(batch, slot_mapping=batch.slot_mapping ^ 1),
}


# ---- time


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StepLog:
    """What each launched step was, and the device's time from the end of the step before it to its own end."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._launch = runner.launch
        self._steps: list[tuple[str, int, int, int]] = []  # kind, decode rows, prompt tokens, keys of decode rows
        self._ends = [_event()]
        self._ends[0].record()
        runner.launch = self._logged  # type: ignore[method-assign]

    def _logged(self, plan: StepPlan) -> Any:
        runner = self._runner
        before = runner.num_replays, runner.num_mixed_replays, runner.num_shared_steps
        launched = self._launch(plan)
        if plan.scheduled:
            decode, mixed, shared = (
                after - count
                for after, count in zip(
                    (runner.num_replays, runner.num_mixed_replays, runner.num_shared_steps), before, strict=True
                )
            )
            kind = ("decode graph" if decode else "mixed graph" if mixed else "eager") + (", shared" if shared else "")
            decodes = [run for run in plan.scheduled if run.count == 1]
            num_prompt = sum(run.count for run in plan.scheduled) - len(decodes)
            self._steps.append((kind, len(decodes), num_prompt, sum(run.start + 1 for run in decodes)))
            self._ends.append(_event())
            self._ends[-1].record()
        return launched

    def report(self) -> None:
        """By kind and size: steps, their seconds, and what their products alone take at 668 TFLOP/s."""
        torch.cuda.synchronize()
        rows: dict[tuple[str, int], list[float]] = {}
        for (kind, decodes, prompts, keys), start, end in zip(
            self._steps, self._ends[:-1], self._ends[1:], strict=True
        ):
            size = 1 << (decodes + prompts - 1).bit_length()
            row = rows.setdefault((kind, size), [0.0] * 5)
            values = (1.0, decodes, prompts, keys * floor.KV_BYTES / floor.COPY, start.elapsed_time(end) / 1e3)
            for i, value in enumerate(values):
                row[i] += value
        for (kind, size), row in sorted(rows.items(), key=lambda e: -e[1][-1]):
            count, num_decodes, num_prompts, reading, seconds = row
            print(
                f"  {kind:21s} to {size:5d} tokens: {count:5.0f} steps, {num_decodes / count:6.1f} decode rows,"
                f" {num_prompts / count:7.1f} prompt tokens, {seconds:6.2f} s, {1e3 * seconds / count:7.2f} ms a step"
                f" (products {1e3 * floor.LAYER_FLOP * (num_decodes + num_prompts) / count / floor.GEMM['bf16']:7.2f},"
                f" keys read {1e3 * reading / count:6.2f})",
                flush=True,
            )


def nano() -> list[tuple[list[int], int]]:
    """The benchmark that nano-vllm publishes: 256 requests of 100 to 1,024 random tokens in and as many out."""
    rng = random.Random(0)
    return [
        ([rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))], rng.randint(100, 1024)) for _ in range(256)
    ]


def time_nano(build: Build) -> None:
    decoder = build_decoder(QWEN3_600M, torch.bfloat16, build.precision, 4096, 0, False)
    few = replace(build, max_running=256, max_model_len=4096, kv_cache_tokens=400_000)
    engine, _ = build_engine(decoder, few)
    requests = nano()
    run(engine, [([t % 1000 for t in range(100 + i)], 16) for i in range(64)], build.block_size)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(engine, requests, build.block_size)
    seconds = time.perf_counter() - began
    outputs = sum(max_tokens for _, max_tokens in requests)
    print(
        f"RESULT nano, Qwen3-0.6B shape, {build.precision}: {seconds:.2f} s, {outputs:,} output tokens,"
        f" {outputs / seconds:,.0f} output tokens/s; host: {engine.stats().step_seconds}",
        flush=True,
    )


def time_workloads(names: Sequence[str], build: Build, runs: int, log_steps: bool) -> None:
    began = time.perf_counter()
    decoder = build_decoder(QWEN2_7B, torch.bfloat16, build.precision, build.max_model_len, 0, False)
    torch.cuda.synchronize()
    print(
        f"weights: {torch.cuda.memory_allocated() / 2**30:.1f} GiB in {time.perf_counter() - began:.1f} s", flush=True
    )
    for name in names:
        requests = workloads.WORKLOADS[name]()
        cap = workloads.KV_TOKENS.get(name)
        fresh, attention, kv_read, kv_private, shared_decode, outputs = floor.count(requests)
        rate = floor.GEMM[build.precision]
        gemm = (
            floor.LAYER_FLOP * (fresh + outputs - len(requests)) / rate + floor.HEAD_FLOP * outputs / floor.GEMM["bf16"]
        )
        flop = 4 * floor.LAYERS * floor.HEADS * floor.HEAD
        prefill = flop * attention / floor.ATTENTION
        plain = gemm + prefill + floor.KV_BYTES * kv_read / floor.COPY
        shared = gemm + prefill + floor.KV_BYTES * kv_private / floor.COPY + flop * shared_decode / floor.ATTENTION
        seconds = []
        for _ in range(runs):
            began = time.perf_counter()
            engine, runner = build_engine(decoder, replace(build, kv_cache_tokens=cap or build.kv_cache_tokens))
            torch.cuda.synchronize()
            start_up = time.perf_counter() - began
            run(engine, [([t % 1000 for t in range(100 + i)], 16) for i in range(64)], build.block_size)
            before = engine.stats()
            gc.collect()
            gc.freeze()  # as the engine's process does once it has started
            torch.cuda.synchronize()
            log = StepLog(runner) if log_steps else None
            began = time.perf_counter()
            done = run(engine, requests, build.block_size, build.max_tokens_per_step)
            seconds.append(time.perf_counter() - began)
            if log is not None:
                log.report()
                del log
            assert all(len(done[i].token_ids) == n for i, (_, n) in enumerate(requests)), "an output is too short"
            stats = engine.stats()
            parts = ", ".join(
                f"{part} {value - before.step_seconds[part]:.2f}" for part, value in stats.step_seconds.items()
            )
            steps = stats.num_steps - before.num_steps
            total = sum(len(p) for p, _ in requests) + outputs
            print(
                f"{name:16s} {build.precision} {seconds[-1]:7.2f} s ({total / seconds[-1]:,.0f} tok/s,"
                f" {outputs / seconds[-1]:,.0f} out); {steps} steps, {runner.num_replays} replays,"
                f" {runner.num_mixed_replays} mixed,"
                f" {runner.num_shared_steps} shared;"
                f" cached {stats.num_cached_tokens - before.num_cached_tokens:,}, computed"
                f" {stats.num_computed_tokens - before.num_computed_tokens:,}, preempted {stats.num_preemptions};"
                f" start {start_up:.1f} s; host: {parts}",
                flush=True,
            )
            del engine, runner
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
        best = statistics.median(seconds)
        print(
            f"RESULT {name:16s} {build.precision} {best:7.2f} s, {min(seconds):.2f} to {max(seconds):.2f};"
            f" floor plain {plain:.1f}, shared {shared:.1f}; {plain / best:.0%} and {shared / best:.0%} of it",
            flush=True,
        )


PROFILED_AFTER = {"seed_mix": 150, "classify_long": 5}  # steps; elsewhere 40


NUM_STEPS = 25


def wall_of_steps(under_way: Iterator[object]) -> float:
    """Seconds of so many steps, whole."""
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        next(under_way)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profile(names: Sequence[str], build: Build) -> None:
    """Time by kernel over a part of a workload, and how long the GPU was idle."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    decoder = build_decoder(QWEN2_7B, torch.bfloat16, build.precision, build.max_model_len, 0, False)
    for name in names:
        cap = workloads.KV_TOKENS.get(name)
        engine, _ = build_engine(decoder, replace(build, kv_cache_tokens=cap or build.kv_cache_tokens))
        requests = workloads.WORKLOADS[name]()
        run(engine, [([t % 1000 for t in range(100 + i)], 16) for i in range(64)], build.block_size)
        under_way = steps(engine, requests, build.block_size, build.max_tokens_per_step)
        for _ in range(PROFILED_AFTER.get(name, 40)):
            next(under_way)
        torch.cuda.synchronize()
        wall_before = wall_of_steps(under_way)
        with torch_profile(activities=[ProfilerActivity.CUDA]) as result:
            wall = wall_of_steps(under_way)
        wall_after = wall_of_steps(under_way)
        events = [e for e in result.events() if e.device_type.name == "CUDA"]
        spans = sorted((e.time_range.start, e.time_range.end) for e in events)
        busy, last = 0.0, 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
        span = spans[-1][1] - spans[0][0]
        gaps = gaps_of(events)
        by_name: dict[str, tuple[float, int]] = {}
        for e in events:
            seconds, count = by_name.get(e.name, (0.0, 0))
            by_name[e.name] = (seconds + e.time_range.end - e.time_range.start, count + 1)
        print(
            f"PROFILE {name} {build.precision}: {NUM_STEPS} steps in {wall * 1e3:.1f} ms; busy {busy / 1e3:.1f} ms,"
            f" {busy / span:.1%} of them; without a profiler as many before {wall_before * 1e3:.1f} ms and"
            f" after {wall_after * 1e3:.1f} ms: busy {2 * busy / 1e6 / (wall_before + wall_after):.1%} of their mean"
        )
        for kernel, (seconds, count) in sorted(by_name.items(), key=lambda entry: -entry[1][0])[:18]:
            print(f"  {seconds / 1e3:9.2f} ms {seconds / busy:6.1%} {count:6d} x  {kernel[:110]}")
        print("  idle between two kernels:")
        for (before, after), (seconds, count) in sorted(gaps.items(), key=lambda entry: -entry[1][0])[:14]:
            print(f"  {seconds / 1e3:9.2f} ms {seconds / span:6.2%} {count:6d} x  {before[:52]} -> {after[:52]}")
        sys.stdout.flush()
        del engine, under_way
        gc.collect()
        torch.cuda.empty_cache()


def gaps_of(events: Sequence[Any]) -> dict[tuple[str, str], tuple[float, int]]:
    """Microseconds in which nothing ran, and how often, by what ended before and what began after."""
    gaps: dict[tuple[str, str], tuple[float, int]] = {}
    ordered = sorted(events, key=lambda event: event.time_range.start)
    latest = ordered[0]
    for event in ordered[1:]:
        gap = event.time_range.start - latest.time_range.end
        if gap > 0:
            seconds, count = gaps.get((latest.name, event.name), (0.0, 0))
            gaps[latest.name, event.name] = (seconds + gap, count + 1)
        if event.time_range.end > latest.time_range.end:
            latest = event
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "profile", "nano"))
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--workloads", default=",".join(workloads.WORKLOADS))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--step", type=int, default=8192, help="max_tokens_per_step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--log-steps", action="store_true", help="the device's time by kind and size of step")
    parser.add_argument("--no-check", action="store_true", help="time alone, where a check has just passed")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    build = Build(precision=arguments.precision, max_tokens_per_step=arguments.step, block_size=arguments.block_size)
    names = arguments.workloads.split(",")
    if arguments.what == "check" or (arguments.what == "time" and not arguments.no_check):
        check()
    if arguments.what == "time":
        time_workloads(names, build, arguments.runs, arguments.log_steps)
    if arguments.what == "nano":
        time_nano(build)
    if arguments.what == "profile":
        profile(names, build)


if __name__ == "__main__":
    main()
