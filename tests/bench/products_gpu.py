"""Matrix products of the 7B shape on a GPU: which way to compute them is the fastest at which number of rows.

    python -m tests.bench.products_gpu [--rows 256,512,...]

Distinct weights in one CUDA graph, held for a while, so that neither the cache nor a cool chip flatters. Compared are
cuBLAS with what follows as kernels of ours, and CuTe products with that in their epilogue (quack, beside flash-attn).
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kernels.activation import silu_and_multiply
from kernels.fp8 import fp8_linear, quantise_rows, quantise_weight, silu_and_multiply_fp8
from kernels.norm import add_rms_norm, rms_norm

HIDDEN, QKV, FFN = 3584, 4608, 18_944
NUM_WEIGHTS = 12
HELD_SECONDS = 0.15
# tile rows, tile columns, cluster rows, cluster columns, ping-pong
CONFIGS = (
    (128, 128, 2, 1, True), (128, 160, 2, 1, True), (128, 192, 2, 1, True), (128, 256, 2, 1, False), (256, 128, 2, 1, False), (256, 192, 2, 1, False),
    (128, 256, 1, 2, False),
)  # fmt: skip


def gated(x: Any, w: Any, out: Any, config: Any, colvec: Any = None, rowvec: Any = None) -> None:
    from quack.gemm_act import gemm_act
    from quack.gemm_norm_act import gemm_norm_act_fn

    tm, tn, cm, cn, pingpong = config
    if rowvec is None:
        gemm_act(
            x[None], w[None], None, None, out[None], None, "swiglu", tm, tn, cm, cn, pingpong=pingpong, persistent=True
        )
    else:
        gemm_norm_act_fn(
            x[None], w[None], None, None, out[None], None, "swiglu", tm, tn, cm, cn, pingpong=pingpong,
            rowvec=rowvec, colvec=colvec,
        )  # fmt: skip


def scaled(x: Any, w: Any, out: Any, config: Any, colvec: Any, rowvec: Any) -> None:
    from quack.gemm_norm_act import gemm_norm_act_fn

    tm, tn, cm, cn, pingpong = config
    gemm_norm_act_fn(
        x[None], w[None], None, None, out[None], None, None, tm, tn, cm, cn, pingpong=pingpong,
        rowvec=rowvec, colvec=colvec,
    )  # fmt: skip


def warm(index: int) -> None:
    """Compile one configuration's kernels into the disk cache."""
    config = CONFIGS[index]
    for kind in ("gated", "fp8 gated", "fp8"):
        began = time.perf_counter()
        try:
            check(kind, config)
        except Exception as error:
            print(f"config {config} {kind}: {type(error).__name__} {str(error)[:200]}", flush=True)
        else:
            print(f"config {config} {kind}: {time.perf_counter() - began:.1f} s", flush=True)


def check(kind: str, config: Any) -> None:
    m, k, n = 256, 512, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(n, k, device="cuda", generator=generator) * k**-0.5).bfloat16()
    if kind == "gated":
        out = torch.empty(m, n // 2, dtype=torch.bfloat16, device="cuda")
        gated(x, w, out, config)
        full = x.float() @ w.float().t()
    else:
        xq, xs = quantise_rows(x)
        wq, ws = quantise_weight(w)
        full = (xq.float() * xs) @ (wq.float() * ws.t()).t()
        out = torch.empty(m, n if kind == "fp8" else n // 2, dtype=torch.bfloat16, device="cuda")
        (scaled if kind == "fp8" else gated)(xq, wq, out, config, xs.view(1, m), ws.view(1, n))
    truth = full if kind == "fp8" else torch.nn.functional.silu(full[:, ::2]) * full[:, 1::2]
    error = ((out.float() - truth).norm() / truth.norm()).item()
    assert error < 0.01, f"{kind} {config}: error {error}"


def held(call: Callable[[int], object]) -> float:
    """ms a call; `call(i)` uses weight i."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(NUM_WEIGHTS):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began, count = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - began < HELD_SECONDS:
        graph.replay()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count / NUM_WEIGHTS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="128,256,384,512,640,1024,2048,8192")
    parser.add_argument("--warm", type=int)
    arguments = parser.parse_args()
    if arguments.warm is not None:
        return warm(arguments.warm)
    os.environ.setdefault("QUACK_CACHE_DIR", "/tmp/quack")
    began = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, "-m", "tests.bench.products_gpu", "--warm", str(i)], env=os.environ)
        for i in range(len(CONFIGS))
    ]
    for child in children:
        child.wait()
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    rows = [int(m) for m in arguments.rows.split(",")]
    shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    for name, (n, k) in shapes.items():
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(NUM_WEIGHTS)]
        packed = [quantise_weight(w) for w in weights]
        one = torch.ones(1, device="cuda")
        for m in rows:
            x = torch.randn(m, k, device="cuda").bfloat16()
            xq, xs = quantise_rows(x)
            flop = 2 * m * n * k
            results: dict[str, float] = {}

            def time_it(label: str, call: Callable[[int], object]) -> None:
                try:
                    results[label] = held(call)
                except Exception as error:
                    print(f"{name} {m} {label}: {type(error).__name__} {str(error)[:100]}", flush=True)

            time_it("bf16", lambda i: x @ weights[i].t())
            if name in ("o", "down"):
                residual = torch.randn(m, n, device="cuda").bfloat16()
                norm_weight = torch.ones(n, device="cuda", dtype=torch.bfloat16)
                time_it("bf16 add norm", lambda i: add_rms_norm(x @ weights[i].t(), residual, norm_weight, 1e-6))
                time_it("bf16 addmm_ norm", lambda i: rms_norm(residual.addmm_(x, weights[i].t()), norm_weight, 1e-6))
            time_it("fp8 row", lambda i: fp8_linear(xq, xs, packed[i][0], packed[i][1], None, torch.bfloat16))
            time_it(
                "fp8 one",
                lambda i: torch._scaled_mm(
                    xq, packed[i][0].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
            )
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            half = torch.empty(m, n // 2, dtype=torch.bfloat16, device="cuda")
            for config in CONFIGS:
                if m % 4 == 0 and config[0] <= max(m, 128):
                    time_it(
                        f"fp8 quack {config}",
                        lambda i: scaled(xq, packed[i][0], out, config, xs.view(1, m), packed[i][1]),
                    )
            if name == "gate_up":
                time_it("bf16 silu", lambda i: silu_and_multiply(x @ weights[i].t()))
                time_it(
                    "fp8 row silu quantise",
                    lambda i: silu_and_multiply_fp8(
                        fp8_linear(xq, xs, packed[i][0], packed[i][1], None, torch.bfloat16)
                    ),
                )
                for config in CONFIGS:
                    if config[0] <= max(m, 128):
                        time_it(f"bf16 quack gated {config}", lambda i: gated(x, weights[i], half, config))

                        def fp8_gated(i: int) -> None:
                            gated(xq, packed[i][0], half, config, xs.view(1, m), packed[i][1])
                            quantise_rows(half)

                        time_it(f"fp8 quack gated quantise {config}", fp8_gated)
            best: dict[str, tuple[float, str]] = {}
            for label, ms in results.items():
                key = label.split(" (")[0]
                if key not in best or ms < best[key][0]:
                    best[key] = (ms, label[len(key) :])
            line = "; ".join(
                f"{key}{which} {ms * 1e3:.1f} us {flop / ms / 1e9:.0f}" for key, (ms, which) in best.items()
            )
            print(f"{name:8s} {m:5d}: {line}", flush=True)
        del weights, packed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
