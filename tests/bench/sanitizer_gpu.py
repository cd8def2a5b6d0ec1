r"""Every kernel once on odd shapes, and a small engine for some steps, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no \
        python -m tests.bench.sanitizer_gpu [PART ...]

Without torch's cache every tensor is an allocation of its own, so that an access past its end is seen. Each part says
that it is done, for a run that is cut. `broken` reads past a tensor's end: the tool must report it.
"""

import argparse
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from engine.models.decoder import Decoder
from kernels.activation import silu_and_multiply
from kernels.attention_merge import merge_attention_
from kernels.decode_attention import decode_attention, plan_decode
from kernels.kv_cache import write_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope_kv import rope_kv
from kernels.sampling import greedy
from tests.bench.engine_gpu import CHECKED, Build, build_decoder, build_engine, check_requests, run
from tests.kernels.paged import make_step

DEVICE = torch.device("cuda", 0)
ROWS = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 0), (1, 900), (5, 5), (17, 33), (0, 7), (40, 200)]
SHAPES = ((4, 4, 64), (3, 1, 80), (4, 2, 96), (14, 2, 64), (16, 2, 128), (2, 1, 256))  # heads, key heads, head size


def attention(dtype: torch.dtype) -> None:
    for num_heads, num_kv_heads, head_size in SHAPES:
        for window in (None, 13):
            make_step(ROWS, num_heads, num_kv_heads, head_size, dtype=dtype).triton(window)


def decode(dtype: torch.dtype) -> None:
    arrivals = torch.zeros(1000, dtype=torch.int32, device=DEVICE)
    for num_heads, num_kv_heads, head_size in SHAPES:
        step = make_step([(1, n) for n in (1, 15, 16, 17, 0, 900)], num_heads, num_kv_heads, head_size, dtype=dtype)
        for num_rows in (1, 200, 2000):  # as many rows decide how keys are split
            launch = plan_decode(num_rows, num_heads, num_kv_heads, 132)
            for window in (None, 13):
                out = torch.empty(step.query.shape, dtype=dtype, device=DEVICE)
                lse = decode_attention(
                    step.query, step.key_cache, step.value_cache, step.block_tables, step.sequence_lengths,
                    step.scale, launch, out, arrivals, window,
                )  # fmt: skip
        merge_attention_(out.clone(), lse, out, lse, torch.tensor([3], dtype=torch.int32, device=DEVICE))


def elementwise(dtype: torch.dtype) -> None:
    for num_heads, num_kv_heads, head_size in SHAPES:
        width = (num_heads + 2 * num_kv_heads) * head_size
        qkv = torch.randn(7, width, device=DEVICE).to(dtype)
        positions = torch.arange(7, device=DEVICE)
        angles = torch.randn(7, head_size // 2, device=DEVICE)
        slots = torch.tensor([3, -1, 31, 0, 8, 9, 10], device=DEVICE, dtype=torch.int32)
        pages = torch.zeros(2, 4, 8, num_kv_heads, head_size, device=DEVICE, dtype=dtype)
        rope_kv(qkv, positions, angles.cos(), angles.sin(), pages[0], pages[1], slots, num_heads)
        heads = qkv.view(7, -1, head_size)
        write_kv(heads[:, :num_kv_heads], heads[:, num_kv_heads : 2 * num_kv_heads], pages[0], pages[1], slots)
    for size in (1, 63, 64, 1000, 3584):
        x, weight = torch.randn(5, size, device=DEVICE).to(dtype), torch.ones(size, device=DEVICE, dtype=dtype)
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, x.clone(), weight, 1e-6)
        silu_and_multiply(torch.cat((x, x), dim=1))
    greedy(torch.randn(9, 2049, device=DEVICE))


def engine(dtype: torch.dtype, precision: str = "bf16") -> None:
    """No graphs: without torch's cache, a capture would have to allocate."""
    decoder: Decoder = build_decoder(CHECKED, dtype, precision, 2048, 3, True)
    build = Build(
        precision=precision, kv_cache_tokens=3_200, max_tokens_per_step=301, max_running=64, max_model_len=2048,
        min_tokens_saved=256, with_graphs=False,
    )  # fmt: skip
    requests = [(prompt, min(length, 6)) for prompt, length in check_requests(CHECKED)]
    made, runner = build_engine(decoder, build)
    outputs = run(made, requests, build.block_size)
    assert all(output.failure is None for output in outputs.values())
    print(f"    {made.stats().num_steps} steps, {runner.num_shared_steps} of shared prefixes", flush=True)


@triton.jit
def _read_past_the_end(x_ptr, out_ptr, size):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 128)
    tl.store(out_ptr + i, tl.load(x_ptr + size + i))


def broken() -> None:
    x, out = torch.zeros(2**20, device=DEVICE), torch.zeros(128, device=DEVICE)
    _read_past_the_end[(1,)](x, out, x.numel())


PARTS: dict[str, Callable[[], None]] = {
    "decode": lambda: decode(torch.bfloat16),
    "attention": lambda: attention(torch.bfloat16),
    "elementwise": lambda: elementwise(torch.bfloat16),
    "engine bf16": lambda: engine(torch.bfloat16),
    "engine fp8": lambda: engine(torch.bfloat16, "fp8"),
    "engine float32": lambda: engine(torch.float32),
    "decode float32": lambda: decode(torch.float32),
    "attention float32": lambda: attention(torch.float32),
    "elementwise float32": lambda: elementwise(torch.float32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or of: {', '.join([*PARTS, 'broken'])}")
    began = time.perf_counter()
    for name in parser.parse_args().parts or PARTS:
        {**PARTS, "broken": broken}[name]()
        torch.cuda.synchronize()
        print(f"done: {name}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
