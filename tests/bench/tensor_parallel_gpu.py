"""One model on two GPUs: is it right, and how much faster is it than on one.

    python -m tests.bench.tensor_parallel_gpu [--precision bf16] [--workloads decode_heavy,seed_mix] [--size 2]
        [--skip-check] [--skip-single] [--limit 280]

Checks a small random model first: in float32 the ranks' greedy tokens are one GPU's; in bf16 and FP8 each lies near the
maximum of a float32 reference that is forced along it. Then times the Qwen2.5-7B shape on all ranks and on one. Every
part prints a line as it ends, and everything ends at the limit. Without a GPU the same runs over gloo on a tiny shape.
Needs what tests.bench.engine_gpu needs, transformers left out.
"""

import argparse
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.block_pool import BlockPool
from engine.cuda_runner import CudaRunner
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.group import Group, join, open_store
from engine.kv_cache import KVCache
from engine.lifetime import die_with_parent
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.precision import Fp8Precision, PlainPrecision
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.tensor_parallel import RankConnection, Ranks, RankStep, Tree
from engine.weights.sharding import shard_config, shard_parameters
from schemas.errors import PagemillError
from schemas.inference import InferenceOutput
from tests.bench import engine_gpu
from tests.bench.engine_gpu import CHECKED, QWEN2_7B, Build, NoText, check_requests
from tests.bench.workloads import WORKLOADS

IS_CUDA = torch.cuda.is_available()
STARTED = time.perf_counter()
COMMAND = (sys.executable, "-m", "tests.bench.tensor_parallel_gpu", "--rank")
TINY = replace(
    CHECKED, vocab_size=301, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_size=16, windows=(None,) * 2,
)  # fmt: skip
MODELS = {"tiny": TINY, "checked": CHECKED, "7B": QWEN2_7B}
SMALL = Build(
    kv_cache_tokens=1_500 * 16, max_tokens_per_step=301, max_running=64, max_model_len=2048, min_tokens_saved=256
)
# How far a chosen token's logit may lie below the float32 reference's largest; logits deviate by about 4.
LIMITS = {"float32": 1e-3, "bf16": 2.0, "fp8": 16.0}
Requests = Sequence[tuple[list[int], int]]


@dataclass(frozen=True)
class Case:
    """A model and an engine over it, for all ranks alike."""

    model: str
    label: str  # float32, bf16, fp8
    build: Build
    peaked: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.label == "float32" else torch.bfloat16


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if IS_CUDA else torch.device("cpu")


def build_decoder(case: Case, group: Group) -> Decoder:
    config, device = MODELS[case.model], device_of(group.rank)
    precision = Fp8Precision() if case.label == "fp8" else PlainPrecision()
    with torch.inference_mode():
        whole = engine_gpu.random_parameters(config, case.dtype, 3, case.peaked, device)
        parameters, local = shard_parameters(whole, config, group), shard_config(config, group)
        return Decoder(local, parameters, config.vocab_size, case.build.max_model_len, device, precision, group)


def build_runner(case: Case, group: Group, ranks: Ranks) -> CudaRunner | ModelRunner:
    decoder, build = build_decoder(case, group), case.build
    cache = allocate_cache(decoder, build.kv_cache_tokens // build.block_size, build.block_size)
    sampler = Sampler(LabelSets(frozenset(), lambda: ()))
    if not IS_CUDA:
        return ModelRunner(decoder, cache, sampler, build.max_running, build.max_model_len, ranks)
    return CudaRunner(
        decoder, cache, sampler, build.max_running, build.max_model_len, build.max_tokens_per_step,
        build.with_graphs, build.min_tokens_saved, ranks,
    )  # fmt: skip


def allocate_cache(decoder: Decoder, num_blocks: int, block_size: int) -> KVCache:
    config, device = decoder.config, decoder.device
    shape = config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_size
    return KVCache.allocate(*shape, decoder.dtype, device)


def build_engine(case: Case, group: Group, ranks: Ranks) -> tuple[Engine, Any]:
    """On rank 0; the other ranks of the group build with it."""
    if group.size > 1:
        ranks.tell({"build": asdict(case)})
    runner = build_runner(case, group, ranks if group.size > 1 else Ranks())
    build = case.build
    scheduler = Scheduler(
        BlockPool(build.kv_cache_tokens // build.block_size), build.block_size, build.max_model_len,
        build.max_tokens_per_step, build.max_running,
    )  # fmt: skip
    return Engine(runner, scheduler, lambda stop: NoText(), LabelSets(frozenset(), lambda: ()), ()), runner


def free(group: Group, ranks: Ranks) -> None:
    """After the engine's last name is gone."""
    if group.size > 1:
        ranks.tell({"free": True})
    collect()


def collect() -> None:
    gc.collect()
    if IS_CUDA:
        torch.cuda.empty_cache()


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


# ---- the other ranks


def be_rank(descriptor: int) -> None:
    die_with_parent()
    connection = RankConnection(descriptor)
    try:
        hello = connection.receive()
        torch.set_num_threads(1)
        group = join(hello["port"], hello["rank"], hello["size"], device_of(hello["rank"]))
        runner: CudaRunner | ModelRunner | None = None
        while True:
            told: Tree = connection.receive()
            if "build" in told:
                case = Case(**{**told["build"], "build": Build(**told["build"]["build"])})
                runner = build_runner(case, group, Ranks())
            elif "free" in told:
                runner = None
                collect()
            elif "reduce" in told:
                time_all_reduces(group, told["reduce"])
            else:
                assert runner is not None
                runner.follow(RankStep(**told))
    except BaseException as error:
        traceback.print_exc()
        connection.fail(error)
        os._exit(1)


# ---- correctness


def check(group: Group, ranks: Ranks) -> None:
    model = "checked" if IS_CUDA else "tiny"
    requests = check_requests(MODELS[model]) if IS_CUDA else cpu_requests()
    tight = replace(SMALL, kv_cache_tokens=3_200 if IS_CUDA else 160, max_tokens_per_step=512)
    failures = []
    for label, limit in LIMITS.items():
        if not IS_CUDA and label != "float32":
            continue
        case = Case(model, label, SMALL, peaked=True)
        reference = build_reference(case)
        alone, _ = answer(case, Group(), Ranks(), requests, engine_gpu.run)
        both, note = answer(case, group, ranks, requests, engine_gpu.run)
        failures += compare(f"{label}", limit, reference, requests, alone, both, note)
        if label != "fp8":
            again, note = answer(replace(case, build=tight), group, ranks, requests, engine_gpu.run_in_two_waves)
            if " 0 preemptions" in note:
                failures.append(f"{label}: nothing was preempted")
            failures += compare(f"{label}, preempted", limit, reference, requests, alone, again, note)
        del reference
        collect()
    assert not failures, "; ".join(failures)


def build_reference(case: Case) -> Decoder:
    """In float32, of the case's weights as they were rounded."""
    config, device = MODELS[case.model], device_of(0)
    with torch.inference_mode():
        whole = engine_gpu.random_parameters(config, case.dtype, 3, case.peaked, device)
        rounded = ((name, tensor.float()) for name, tensor in whole)
        return Decoder(config, rounded, config.vocab_size, case.build.max_model_len, device)


def answer(
    case: Case, group: Group, ranks: Ranks, requests: Requests, run: Callable[..., dict[int, InferenceOutput]]
) -> tuple[dict[int, InferenceOutput], str]:
    engine, runner = build_engine(case, group, ranks)
    outputs = run(engine, requests, case.build.block_size)
    stats = engine.stats()
    note = f"{stats.num_steps} steps, {stats.num_preemptions} preemptions, {stats.num_cached_tokens} cached"
    if IS_CUDA:
        note += f", {runner.num_replays} replays, {runner.num_mixed_replays} mixed, {runner.num_shared_steps} shared"
    del engine, runner
    free(group, ranks)
    return outputs, note


def compare(
    name: str, limit: float, reference: Decoder, requests: Requests, alone: dict[int, InferenceOutput],
    both: dict[int, InferenceOutput], note: str,
) -> list[str]:  # fmt: skip
    """Prints both ways' distances from the reference; what is wrong."""
    num_other = sum(mine != its for i in both for mine, its in zip(both[i].token_ids, alone[i].token_ids, strict=True))
    wrong, lines, means = [], [], []
    for which, outputs in (("one", alone), ("all", both)):
        gaps: list[float] = []
        for i, (prompt, max_tokens) in enumerate(requests):
            assert outputs[i].failure is None, outputs[i]
            assert len(outputs[i].token_ids) == max_tokens
            gaps += distances(reference, prompt, outputs[i].token_ids)
        largest, mean = max(gaps), sum(gaps) / len(gaps)
        means.append(mean)
        lines.append(f"{which}: at most {largest:.5f}, on average {mean:.5f}")
        if which == "all" and largest > limit:
            wrong.append(f"{name}: a token lies {largest} below the reference's, more than {limit}")
    say(f"check {name}: {num_other} tokens differ from one device's; below the reference, {'; '.join(lines)}; {note}")
    if means[1] > 1.5 * means[0] + 0.05:
        wrong.append(f"{name}: tokens lie {means[1]} below the reference's on average, {means[0]} on one device")
    return wrong


@torch.inference_mode()
def distances(reference: Decoder, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """How far each token of the output lies below the reference's largest logit at its place, teacher-forced."""
    ids, device, block_size = [*prompt, *output[:-1]], reference.device, 16
    num_blocks = -(-len(ids) // block_size)

    def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = ForwardBatch(
        token_ids=ints(ids, torch.int64),
        positions=ints(range(len(ids)), torch.int64),
        slot_mapping=ints(range(len(ids)), torch.int64),
        block_tables=ints(range(num_blocks))[None],
        query_starts=ints([0, len(ids)]),
        sequence_lengths=ints([len(ids)]),
        logits_indices=ints(range(len(prompt) - 1, len(ids)), torch.int64),
        max_query_length=len(ids),
        max_sequence_length=len(ids),
    )
    logits = reference.logits(reference.forward(batch, allocate_cache(reference, num_blocks, block_size)))
    return engine_gpu.distances(logits, ints(output, torch.int64))


def cpu_requests() -> Requests:
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(0, TINY.vocab_size, (count,), generator=generator).tolist()

    prefix = ids(40)
    return [(ids(n), 16) for n in (1, 16, 17, 60)] + [(prefix + ids(1 + 5 * i), 16) for i in range(4)]


# ---- time


def time_all_reduces(group: Group, rows: Sequence[int]) -> None:
    """A layer's sums at these numbers of rows, one by one and in a CUDA graph."""
    hidden_size, repeats = QWEN2_7B.hidden_size, 50
    device = device_of(group.rank)
    for num_rows in rows:
        x = torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16, device=device)

        def some(x: torch.Tensor = x) -> None:
            for _ in range(repeats):
                group.all_reduce(x)

        some()
        synchronize()
        began = time.perf_counter()
        some()
        synchronize()
        text = f"{(time.perf_counter() - began) / repeats * 1e6:.0f} us"
        if IS_CUDA:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                some()
            graph.replay()
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            text += f", {(time.perf_counter() - began) / repeats * 1e6:.0f} us in a graph"
        if group.rank == 0:
            say(f"all-reduce of {num_rows} x {hidden_size} bf16, {x.nbytes / 1e6:.1f} MB: {text}")


def time_workloads(names: Sequence[str], case: Case, group: Group, ranks: Ranks) -> dict[str, float]:
    began = time.perf_counter()
    engine, runner = build_engine(case, group, ranks)
    synchronize()
    say(f"{case.model} {case.label} on {group.size}: ready after {time.perf_counter() - began:.1f} s")
    vocab_size = MODELS[case.model].vocab_size
    engine_gpu.run(engine, [([t % vocab_size for t in range(100 + i)], 16) for i in range(64)], case.build.block_size)
    say("warm")
    seconds = {}
    for name in names:
        requests = WORKLOADS[name]() if IS_CUDA else cpu_requests()
        before = engine.stats()
        synchronize()
        began = time.perf_counter()
        done = engine_gpu.run(engine, requests, case.build.block_size)
        seconds[name] = time.perf_counter() - began
        assert all(len(done[i].token_ids) == n for i, (_, n) in enumerate(requests)), "an output is too short"
        stats = engine.stats()
        total = sum(len(prompt) + n for prompt, n in requests)
        parts = ", ".join(f"{p} {value - before.step_seconds[p]:.2f}" for p, value in stats.step_seconds.items())
        say(
            f"{name} {case.label} on {group.size}: {seconds[name]:.2f} s, {total / seconds[name]:,.0f} tok/s;"
            f" {stats.num_steps - before.num_steps} steps; host: {parts}"
        )
    del engine, runner
    free(group, ranks)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--workloads", default="decode_heavy,seed_mix")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for everything")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-single", action="store_true", help="where one GPU's times are known")
    parser.add_argument("--rank", type=int, help="a rank's socket; the script starts these itself")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.rank is not None:
        be_rank(arguments.rank)
    watch = threading.Timer(arguments.limit, lambda: end(f"the limit of {arguments.limit:g} s is reached", 3))
    watch.daemon = True
    watch.start()
    try:
        measure(arguments)
    except BaseException:
        traceback.print_exc()
        end("failed", 1)
    end("done", 0)


def end(text: str, status: int) -> None:
    """At once: a rank's collectives may never end, and the others go with this process."""
    say(text)
    sys.stderr.flush()
    os._exit(status)


def lost(error: PagemillError) -> None:
    end(f"{type(error).__name__}: {error}", 2)


def measure(arguments: argparse.Namespace) -> None:
    size, names = arguments.size, arguments.workloads.split(",")
    name = torch.cuda.get_device_name() if IS_CUDA else "CPU"
    say(f"{size} x {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    torch.set_num_threads(1)
    ranks, store = Ranks(lost), open_store()
    ranks.start({"port": store.port, "size": size}, size - 1, COMMAND)
    group = join(store, 0, size, device_of(0))
    ranks.tell({"reduce": [128, 1024, 8192] if IS_CUDA else [8]})
    time_all_reduces(group, [128, 1024, 8192] if IS_CUDA else [8])
    if not arguments.skip_check:
        check(group, ranks)
        say("check passed")
    build = Build(precision=arguments.precision) if IS_CUDA else SMALL
    case = Case("7B" if IS_CUDA else "tiny", arguments.precision if IS_CUDA else "float32", build, peaked=False)
    together = time_workloads(names, case, group, ranks)
    if not arguments.skip_single:
        alone = time_workloads(names, case, Group(), Ranks())
        for each in names:
            say(
                f"RESULT {each} {case.label}: {alone[each]:.2f} s on 1, {together[each]:.2f} s on {size}:"
                f" {alone[each] / together[each]:.2f} times"
            )


if __name__ == "__main__":
    main()
