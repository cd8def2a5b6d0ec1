"""The Triton attention kernels on a CUDA device: decode in bytes a second, prefill in operations a second.

    python -m tests.bench.gpu_attention

Qwen2.5-7B's shape (28 heads, 4 key heads, head size 128) in bf16, pages of 16 in random order. Decode is bound by the
bytes of keys and values read; the device's own copy rate, printed beside it, is the limit.
"""

import time

import torch

from kernels.attention import TritonPrefill
from kernels.attention_plan import AttentionRows
from kernels.gpu_attention import GpuAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 28, 4, 128, 16


def seconds(attention: GpuAttention, rows: list[tuple[int, int]], rounds: int = 20) -> float:
    device = torch.device("cuda")
    max_blocks = -(-max(length for _, length in rows) // BLOCK_SIZE)
    num_blocks = len(rows) * max_blocks
    shape = (2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=device)
    block_tables = torch.randperm(num_blocks, device=device).int().view(len(rows), max_blocks)
    query_starts = torch.tensor([0, *(num_queries for num_queries, _ in rows)]).cumsum(0).int().to(device)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32, device=device)
    query = torch.randn(int(query_starts[-1]), NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    maxima = max(num_queries for num_queries, _ in rows), max(length for _, length in rows)
    num_decode_rows = len(rows) if maxima[0] == 1 else 0
    plan = attention.prepare(AttentionRows(block_tables, query_starts, lengths, *maxima, num_decode_rows))
    for _ in range(3):
        attention(query, pool[0], pool[1], plan, HEAD_SIZE**-0.5)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        attention(query, pool[0], pool[1], plan, HEAD_SIZE**-0.5)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    attention = GpuAttention(TritonPrefill(), properties.multi_processor_count, torch.device("cuda", 0))
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    print(f"copy: {2 * 2**32 / (time.perf_counter() - began) / 1e12:.2f} TB/s")
    for num_rows, length in ((1024, 384), (256, 2048), (100, 4600), (8, 8192)):
        took = seconds(attention, [(1, length)] * num_rows)
        num_bytes = num_rows * length * NUM_KV_HEADS * HEAD_SIZE * 2 * 2
        print(f"decode {num_rows} x {length}: {took * 1e6:.0f} us, {num_bytes / took / 1e12:.2f} TB/s")
    for num_rows, new, length in ((8, 1024, 1024), (1, 8192, 8192), (16, 512, 4096)):
        took = seconds(attention, [(new, length)] * num_rows)
        pairs = num_rows * new * (length - new + (new + 1) / 2)
        print(f"prefill {num_rows} x {new} of {length}: {took * 1e6:.0f} us, "
              f"{4 * pairs * NUM_HEADS * HEAD_SIZE / took / 1e12:.0f} TFLOP/s")  # fmt: skip


if __name__ == "__main__":
    main()
