"""What stands between the matrix products, on a GPU: bytes moved, bytes a second, and their share of a plain copy's.

    python -m tests.bench.elementwise_gpu

The 7B shape in bf16. A kernel is compared with its truth first, then timed as replays of a CUDA graph of calls that go
through several inputs, which together pass the L2 by far. Bytes are those that must be read and written once.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.activation import silu_and_multiply, silu_and_multiply_reference
from kernels.fp8 import (
    add_rms_norm_fp8,
    add_rms_norm_fp8_reference,
    quantise_rows,
    quantise_rows_reference,
    silu_and_multiply_fp8,
    silu_and_multiply_fp8_reference,
)
from kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kernels.rope_kv import rope_kv, rope_kv_reference
from kernels.sampling import greedy

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, VOCAB = 3584, 18_944, 28, 4, 128, 152_064
L2_BYTES = 60_000_000
REPLAYS = 15
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """`make`: new inputs; `call` and `truth` take them and give tensors to compare."""

    name: str
    num_bytes: int
    make: Callable[[], Tensors]
    call: Callable[[Tensors], Tensors]
    truth: Callable[[Tensors], Tensors]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def kernels_at(rows: int) -> list[Kernel]:
    weight = torch.rand(HIDDEN, device="cuda").bfloat16()
    wide, gated = rows * HIDDEN, rows * FFN
    positions = torch.randint(0, 8192, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(rows, device="cuda").int()
    angles = torch.rand(8192, HEAD // 2, device="cuda")
    pages = torch.zeros(2, rows // 16, 16, KV_HEADS, HEAD, device="cuda", dtype=torch.bfloat16)
    truth_pages = torch.zeros_like(pages)
    table = angles.cos(), angles.sin()

    def rope(x: Tensors) -> Tensors:
        query = rope_kv(x[0], positions, *table, pages[0], pages[1], slots, HEADS)
        return query, pages

    def rope_truth(x: Tensors) -> Tensors:
        query = rope_kv_reference(x[0], positions, *table, truth_pages[0], truth_pages[1], slots, HEADS)
        return query, truth_pages

    def two() -> Tensors:
        return random(rows, HIDDEN), random(rows, HIDDEN)

    return [
        Kernel("norm", 4 * wide, lambda: [random(rows, HIDDEN)], lambda x: [rms_norm(x[0], weight, 1e-6)],
               lambda x: [rms_norm_reference(x[0], weight, 1e-6)]),
        Kernel("add, norm", 8 * wide, two, lambda x: add_rms_norm(x[0], x[1], weight, 1e-6),
               lambda x: add_rms_norm_reference(x[0], x[1], weight, 1e-6)),
        Kernel("add, norm, to FP8", 7 * wide, two, lambda x: add_rms_norm_fp8(x[0], x[1], weight, 1e-6),
               lambda x: add_rms_norm_fp8_reference(x[0], x[1], weight, 1e-6)),
        Kernel("to FP8", 3 * wide, lambda: [random(rows, HIDDEN)], lambda x: quantise_rows(x[0]),
               lambda x: quantise_rows_reference(x[0])),
        Kernel("SiLU and multiply", 6 * gated, lambda: [random(rows, 2 * FFN)], lambda x: [silu_and_multiply(x[0])],
               lambda x: [silu_and_multiply_reference(x[0])]),
        Kernel("SiLU and multiply, to FP8", 5 * gated, lambda: [random(rows, 2 * FFN)],
               lambda x: silu_and_multiply_fp8(x[0]), lambda x: silu_and_multiply_fp8_reference(x[0])),
        Kernel("rope and KV write", 4 * rows * (HEADS + 2 * KV_HEADS) * HEAD,
               lambda: [random(rows, (HEADS + 2 * KV_HEADS) * HEAD)], rope, rope_truth),
    ]  # fmt: skip


def sampling() -> Kernel:
    rows = 1024

    def make() -> Tensors:
        return [torch.randn(rows, VOCAB, device="cuda")]

    return Kernel("greedy", 4 * rows * VOCAB, make, lambda x: [greedy(x[0])[0]], lambda x: [x[0].argmax(dim=1)])


def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median over replays of one call's share."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / len(calls))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read and written a second, by a kernel: the copy engine that `copy_` uses in a graph moves 2.7 TB/s."""
    source = torch.zeros(500_000_000, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds([lambda: torch.mul(source, 1.0, out=target)]) * 1e3


def report(kernel: Kernel, rows: int, limit: float) -> None:
    count = max(4, -(-3 * L2_BYTES // kernel.num_bytes))
    inputs = [kernel.make() for _ in range(min(count, 24))]
    for actual, expected in zip(kernel.call(inputs[0]), kernel.truth(inputs[0]), strict=True):
        difference = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
        assert difference.item() < 0.02, f"{kernel.name}, {rows} rows: {difference.item()} from its truth"
    took = milliseconds([lambda x=x: kernel.call(x) for x in inputs])  # type: ignore[misc]
    rate = kernel.num_bytes / took * 1e3
    print(
        f"{kernel.name:26s}{rows:6d} rows {kernel.num_bytes / 1e6:8.1f} MB {took * 1e3:8.1f} us {rate / 1e12:6.2f} TB/s"
        f" {rate / limit:5.0%} of a copy",
        flush=True,
    )


def main() -> None:
    limit = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {limit / 1e12:.2f} TB/s")
    for rows in (256, 1024, 8192):
        for kernel in kernels_at(rows):
            report(kernel, rows, limit)
            torch.cuda.empty_cache()
    report(sampling(), 1024, limit)


if __name__ == "__main__":
    main()
