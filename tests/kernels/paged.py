"""Random steps for attention tests: rows of (queries, length) over shuffled pages of a larger pool."""

from dataclasses import dataclass

import torch

from kernels.attention import paged_attention_cpu, paged_attention_reference, paged_attention_triton
from kernels.attention_plan import AttentionRows
from kernels.cpu_attention import CpuAttention
from kernels.cpu_attention_plan import CpuAttentionPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The truth rounds once, at its end; the others round weights (Triton) or parts of the sum (CPU) as well.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    sequence_lengths: torch.Tensor
    scale: float

    @property
    def tensors(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            self.query, self.key_cache, self.value_cache, self.block_tables, self.query_starts, self.sequence_lengths,
        )  # fmt: skip

    def reference(self, sliding_window: int | None = None) -> torch.Tensor:
        return paged_attention_reference(*self.tensors, self.scale, sliding_window)

    def triton(self, sliding_window: int | None = None) -> torch.Tensor:
        return paged_attention_triton(*self.tensors, *self.maxima(), self.scale, sliding_window)

    def cpu(self, sliding_window: int | None = None) -> torch.Tensor:
        step = self.on_cpu()
        return paged_attention_cpu(*step.tensors, *self.maxima(), self.scale, sliding_window).to(self.query.device)

    def on_cpu(self) -> "Step":
        if not self.query.is_cuda:
            return self  # strides and all
        query, key_cache, value_cache, block_tables, query_starts, lengths = (tensor.cpu() for tensor in self.tensors)
        return Step(query, key_cache, value_cache, block_tables, query_starts, lengths, self.scale)

    def cpu_plan(self) -> CpuAttentionPlan:
        step = self.on_cpu()
        return CpuAttention().prepare(
            AttentionRows(step.block_tables, step.query_starts, step.sequence_lengths, *self.maxima())
        )

    def maxima(self) -> tuple[int, int]:
        num_queries = self.query_starts.diff()
        if len(num_queries) == 0:
            return 0, 0
        return int(num_queries.max()), int(self.sequence_lengths.max())

    def paths(self) -> dict[str, torch.Tensor]:
        return {"cpu": self.cpu(), "triton": self.triton()}


def make_step(
    rows: list[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    peak: float = 1.0,
    seed: int = 0,
) -> Step:
    """Rows (num_queries, length); where a row's past is long enough, its first pages are the same as the others'.

    peak scales the queries: at 8 or so a query attends to a key or two, so one wrong key shows. Everything is a strided
    view: the caches are a layer of a pool whose keys and values lie side by side, the queries part of a wider product.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(counts) + shared_blocks + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shared = [free.pop() for _ in range(shared_blocks)]
    block_tables = torch.zeros(len(rows), max([*counts, 1]), dtype=torch.int32)
    for row_id, ((num_queries, length), count) in enumerate(zip(rows, counts, strict=True)):
        own = shared[: (length - num_queries) // block_size]
        own = own + [free.pop() for _ in range(count - len(own))]
        block_tables[row_id, :count] = torch.tensor(own, dtype=torch.int32)
    num_tokens = sum(num_queries for num_queries, _ in rows)
    pool = torch.randn(num_blocks, block_size, num_kv_heads, 2 * head_size, generator=generator).to(DEVICE, dtype)
    qkv = (torch.randn(num_tokens, num_heads + 2, head_size, generator=generator) * peak).to(DEVICE, dtype)
    query_starts = torch.tensor([0, *(num_queries for num_queries, _ in rows)]).cumsum(0).to(DEVICE, torch.int32)
    return Step(
        qkv[:, 1:-1],
        pool[..., :head_size],
        pool[..., head_size:],
        block_tables.to(DEVICE),
        query_starts,
        torch.tensor([length for _, length in rows], dtype=torch.int32).to(DEVICE),
        head_size**-0.5,
    )


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    if left.numel() == 0:
        return 0.0
    difference = (left.float() - right.float()).abs().max()
    return float("inf") if bool(difference.isnan()) else float(difference)
