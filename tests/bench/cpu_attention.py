"""CPU attention per layer and step, beside torch's own attention called row by row over gathered pages.

    python -m tests.bench.cpu_attention [--threads 2]

Qwen2.5-0.5B's shape (14 heads, 2 key heads, head size 64, 24 layers, pages of 16): 64 decode rows over about 500
tokens, the first 400 in the same pages (of all, or of two each), and prefill chunks of 100 tokens behind those 400.
Prints milliseconds a layer (best of 20 rounds over all layers, so that pages come from memory as in a step), the
plan's own, and the keys read.
"""

import argparse
import time
from collections.abc import Callable

import torch

from kernels.attention_plan import AttentionRows
from kernels.cpu_attention import CpuAttention

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 24, 14, 2, 64, 16
SHARED_TOKENS = 400


def best_ms(run: Callable[[], object], rounds: int = 20) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def row_by_row(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: list[tuple[int, int]],
) -> None:
    start = 0
    for row, (num_queries, length) in enumerate(rows):
        block_ids = block_tables[row, : -(-length // BLOCK_SIZE)].long()
        keys = key_cache[block_ids].flatten(0, 1)[:length].transpose(0, 1)[None]
        values = value_cache[block_ids].flatten(0, 1)[:length].transpose(0, 1)[None]
        queries = query[start : start + num_queries].transpose(0, 1)[None]
        mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        start += num_queries


def measure(name: str, rows: list[tuple[int, int]], dtype: torch.dtype, in_pairs: bool = False) -> None:
    generator = torch.Generator().manual_seed(0)
    num_shared = SHARED_TOKENS // BLOCK_SIZE
    counts = [-(-length // BLOCK_SIZE) for _, length in rows]
    num_blocks = num_shared + sum(counts)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shared = [free.pop() for _ in range(num_shared)]
    block_tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        block_tables[row, :count] = torch.tensor(shared + [free.pop() for _ in range(count - num_shared)])
    if in_pairs:  # of two rows on one document each, rather than one template for all
        for row in range(len(rows)):
            first = torch.arange(num_shared) + row // 2 * num_shared
            block_tables[row, :num_shared] = first % num_blocks
    query_starts = torch.tensor([0, *(num_queries for num_queries, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in rows]).int()
    shape = (NUM_LAYERS, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query = torch.randn(int(query_starts[-1]), NUM_HEADS, HEAD_SIZE).to(dtype)
    attention = CpuAttention()
    maxima = max(num_queries for num_queries, _ in rows), int(lengths.max())
    scale = HEAD_SIZE**-0.5
    kind = BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, dtype, None

    def plan_step() -> None:
        attention.prepare(AttentionRows(block_tables, query_starts, lengths, *maxima)).batches_for(*kind)

    plan = attention.prepare(AttentionRows(block_tables, query_starts, lengths, *maxima))

    def step() -> None:
        for layer in range(NUM_LAYERS):
            attention(query, keys[layer], values[layer], plan, scale)

    def baseline() -> None:
        row_by_row(query, keys[0], values[0], block_tables, rows)

    ours, theirs = best_ms(step) / NUM_LAYERS, best_ms(baseline, 5)
    batches = plan.batches_for(*kind)
    indices = [row.block_index for row in batches.prefills] + [batch.block_index for batch in batches.decodes]
    keys_read = sum(map(len, indices)) // NUM_KV_HEADS * kind[0]
    print(
        f"{name:36} {str(dtype)[6:]:9} {ours:7.2f} ms a layer, plan {best_ms(plan_step, 5):6.2f} ms; row by row "
        f"{theirs:7.2f} ms a layer ({theirs / ours:4.1f} times); {keys_read} keys read for {int(lengths.sum())} named"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    decodes = [(1, 440 + 2 * row) for row in range(64)]
    chunks = [(100, 500)] * 8
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            measure("64 decode rows", decodes, dtype)
            measure("64 decode rows, pairs on a document", decodes, dtype, in_pairs=True)
            measure("8 chunks of 100", chunks, dtype)
            measure("8 chunks and 56 decode rows", chunks + decodes[:56], dtype)


if __name__ == "__main__":
    main()
