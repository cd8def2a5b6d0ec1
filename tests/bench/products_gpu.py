"""Matrix products of the 7B shape on a GPU, and what follows them: which way is the fastest at which number of rows.

    python -m tests.bench.products_gpu [--rows 256,512,...]

Distinct weights in one CUDA graph, held for a while, so that neither the cache nor a cool chip flatters. Each result is
compared with the first way's before it is timed. Microseconds, and TFLOP/s of the product in brackets.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import torch

from kernels.activation import silu_and_multiply
from kernels.fp8 import (
    ProductScales,
    add_rms_norm_fp8,
    fp8_linear,
    fp8_product,
    quantise_rows,
    quantise_weight,
    silu_and_multiply_fp8,
)
from kernels.gated_product import GatedProduct, interleave_gate_up
from kernels.norm import add_rms_norm, rms_norm

HIDDEN, QKV, FFN = 3584, 4608, 18_944
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
NUM_WEIGHTS = 12
HELD_SECONDS = 0.15
Way = Callable[[int], torch.Tensor]  # the number of a weight -> the result to compare


def held(way: Way) -> float:
    """Microseconds a call."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(NUM_WEIGHTS):
            way(i)
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began, count = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - began < HELD_SECONDS:
        graph.replay()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count / NUM_WEIGHTS


def ways_of(
    name: str, num_rows: int, weights: list[torch.Tensor], packed: list[tuple[torch.Tensor, torch.Tensor]]
) -> Mapping[str, Way]:
    n, k = SHAPES[name]
    x = torch.randn(num_rows, k, device="cuda").bfloat16()
    values, scale = quantise_rows(x)
    one = torch.ones((), device="cuda")
    residual = torch.randn(num_rows, n, device="cuda").bfloat16()
    norm = torch.ones(n, device="cuda", dtype=torch.bfloat16)

    def fp8(i: int) -> torch.Tensor:
        return fp8_linear(values, scale, *packed[i], None, torch.bfloat16)

    if name == "qkv":
        return {"bf16": lambda i: x @ weights[i].t(), "fp8": fp8}
    if name == "gate_up":
        fused = [GatedProduct(interleave_gate_up(weight)) for weight in weights]
        return {
            "bf16, SiLU behind it": lambda i: silu_and_multiply(x @ weights[i].t()),
            "bf16, SiLU in its epilogue": lambda i: fused[i](x),
            "fp8": fp8,
            "fp8, SiLU and FP8 behind it": lambda i: silu_and_multiply_fp8(fp8(i))[0],
        }

    def added_in_place(i: int) -> torch.Tensor:
        return rms_norm(residual.addmm_(x, weights[i].t()), norm, 1e-6)

    def scaled_behind(i: int) -> torch.Tensor:
        product = fp8_product(values, packed[i][0], one)
        return add_rms_norm_fp8(product, residual, norm, 1e-6, ProductScales(scale, packed[i][1]))[0]

    return {
        "bf16, residual and norm behind it": lambda i: add_rms_norm(x @ weights[i].t(), residual, norm, 1e-6)[0],
        "bf16, residual in its epilogue, norm behind it": added_in_place,
        "fp8, residual and norm behind it": lambda i: add_rms_norm_fp8(fp8(i), residual, norm, 1e-6)[0],
        "fp8, scales, residual and norm behind it": scaled_behind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="128,256,512,1024,2048,8192")
    rows = [int(count) for count in parser.parse_args().rows.split(",")]
    for name, (n, k) in SHAPES.items():
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(NUM_WEIGHTS)]
        packed = [quantise_weight(weight) for weight in weights]
        for num_rows in rows:
            ways = ways_of(name, num_rows, weights, packed)
            truths: dict[str, torch.Tensor] = {}
            parts = []
            for label, way in ways.items():
                precision = label[:4] + str("SiLU" in label)
                result = way(0).float()
                truth = truths.setdefault(precision, result)
                error = ((result - truth).norm() / truth.norm()).item()
                assert error < 0.01, f"{name}, {num_rows} rows, {label}: {error} from the first way"
                microseconds = held(way)
                parts.append(f"{label} {microseconds:.1f} ({2 * num_rows * n * k / microseconds / 1e6:.0f})")
            print(f"{name:8s}{num_rows:5d} rows: {'; '.join(parts)}", flush=True)
        del weights, packed, ways
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
