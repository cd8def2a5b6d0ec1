"""Matrix products on a CPU: torch's own F.linear beside engine/models/linear.py's, packed, and packed and widened.

    python -m tests.bench.cpu_linear [--threads 2] [--seconds 0.5]

The shapes are the 0.5B model's. All run in turn, in one process, and the best time of each counts, since a shared
machine only ever adds. Printed: GFLOP/s of each (2 x rows x in x out), and the ratios to
F.linear's.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from engine.models.linear import Linear

SHAPES = {"qkv": (1152, 896), "output": (896, 896), "gate_up": (9728, 896), "down": (896, 4864), "head": (151936, 896)}
ROWS = (1, 8, 64, 200, 600, 2048)
MAX_HEAD_ROWS = 200


def best_seconds(calls: Sequence[Callable[[], torch.Tensor]], budget_seconds: float) -> list[float]:
    """The best time of each call, taken in turn until the budget is spent."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    ends = time.perf_counter() + budget_seconds
    while time.perf_counter() < ends:
        for index, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - started)
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads; GFLOP/s")
    print(f"{'dtype':10}{'product':10}{'rows':>6}{'plain':>8}{'packed':>8}{'ratio':>7}{'wide':>8}{'ratio':>7}")
    for dtype in (torch.bfloat16, torch.float32):
        for name, (out_features, in_features) in SHAPES.items():
            weight = torch.randn(out_features, in_features).to(dtype)
            packed, wide = Linear(weight), Linear(weight, widen=True)
            for rows in ROWS:
                if name == "head" and rows > MAX_HEAD_ROWS:
                    continue
                x = torch.randn(rows, in_features).to(dtype)
                calls = [partial(functional.linear, x, weight), partial(packed, x), partial(wide, x)]
                plain_seconds, packed_seconds, wide_seconds = best_seconds(calls, arguments.seconds)
                flop = 2 * rows * out_features * in_features / 1e9
                print(
                    f"{str(dtype).removeprefix('torch.'):10}{name:10}{rows:6}{flop / plain_seconds:8.0f}"
                    f"{flop / packed_seconds:8.0f}{plain_seconds / packed_seconds:7.2f}"
                    f"{flop / wide_seconds:8.0f}{plain_seconds / wide_seconds:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
