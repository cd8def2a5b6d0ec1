"""Paged attention on a CPU: a batch's keys and values are gathered head by head, then product, softmax, product.

Every query is in one batch, over all its keys, so nothing is merged. Decode rows whose tables begin alike multiply
their shared keys as one product. Query heads that share a key head are folded into the query dimension.

Scores are kept in the model's dtype. What bf16 would lose there is taken out first: softmax does not change when all
keys of a query are moved by one vector, so keys are moved to their mean (SageAttention, https://arxiv.org/abs/2410.02367).
Key biases make scores of 1,400 in Qwen2.5-0.5B, and of 70 behind the move.
"""

import math
import threading

import torch

from kernels.attention_plan import AttentionPlan, AttentionRows
from kernels.cpu_attention_plan import CpuAttentionPlan, DecodeBatch, PrefillRow


class _Memory(threading.local):
    """Where keys, values and scores of one batch lie until the next: fresh pages for each cost twice the copying.

    Each thread has its own.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with whatever was there; the last one of that name is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._bytes or self._bytes[name].numel() < num_bytes:
            with torch.inference_mode(False):  # or no call outside that mode could write to it later
                self._bytes[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[name][:num_bytes].view(dtype).view(shape)


class CpuAttention:
    """The `Attention` of a CPU. Several threads may attend at once."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def prepare(self, rows: AttentionRows) -> CpuAttentionPlan:
        return CpuAttentionPlan(rows)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, CpuAttentionPlan), f"a {type(plan).__name__} was not prepared for a CPU"
        block_size, num_kv_heads, head_size = key_cache.shape[1:]
        num_tokens, num_heads = query.shape[:2]
        batches = plan.batches_for(block_size, num_heads, num_kv_heads, query.dtype, sliding_window)
        # Queries take the power of two, exactly; products with a factor are slow, and so are those left with one.
        power = 2.0 ** math.floor(math.log2(scale))
        by_key_head = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)
        folded = self._memory.take("queries", (by_key_head[1], num_tokens, *by_key_head[2:]), query.dtype)
        torch.mul(query.reshape(by_key_head).transpose(0, 1), power, out=folded)
        attended = self._memory.take("attended", tuple(folded.shape), query.dtype)
        for row in batches.prefills:
            self._attend_prefill(folded, key_cache, value_cache, row, scale / power, attended)
        for batch in batches.decodes:
            self._attend_decodes(folded, key_cache, value_cache, batch, scale / power, attended)
        out = torch.empty(query.shape, dtype=query.dtype)
        out.view(by_key_head).copy_(attended.transpose(0, 1))
        return out

    def _attend_prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        row: PrefillRow,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """query, attended: (num_kv_heads, num_tokens, group, head_size)."""
        num_kv_heads, _, group, head_size = query.shape
        keys = self._gather("keys", key_cache, row.key_index).view(num_kv_heads, -1, head_size)
        values = self._gather("values", value_cache, row.key_index).view(num_kv_heads, -1, head_size)
        keys -= keys.mean(1, keepdim=True)
        for tile in row.tiles:
            queries, out = query[:, tile.tokens].flatten(1, 2), attended[:, tile.tokens].flatten(1, 2)
            shape = (num_kv_heads, queries.shape[1], tile.keys.stop - tile.keys.start)
            scores = self._memory.take("scores", shape, query.dtype)
            torch.baddbmm(scores, queries, keys[:, tile.keys].mT, beta=0, alpha=scale, out=scores)
            scores.unflatten(1, (-1, group))[..., -tile.mask.shape[-1] :].add_(tile.mask)
            torch.softmax(scores, -1, out=scores)
            torch.baddbmm(out, scores, values[:, tile.keys], beta=0, out=out)

    def _attend_decodes(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: DecodeBatch,
        scale: float,
        attended: torch.Tensor,
    ) -> None:
        """query, attended: (num_kv_heads, num_tokens, group, head_size)."""
        num_kv_heads, _, group, head_size = query.shape
        num_rows, num_shared, num_own = batch.num_rows, batch.num_shared, batch.num_own
        num_entries = num_kv_heads * (num_rows // batch.members)
        keys = self._gather("keys", key_cache, batch.key_index)
        values = self._gather("values", value_cache, batch.key_index)
        sizes = [num_entries * num_shared, num_kv_heads * num_rows * num_own]
        shared_keys, own_keys = (part.view(num_entries, -1, head_size) for part in keys.split(sizes))
        shared_values, own_values = (part.view(num_entries, -1, head_size) for part in values.split(sizes))
        centre = (shared_keys if num_shared else own_keys).mean(1, keepdim=True)
        own_keys -= centre
        own_keys, own_values = (x.view(num_kv_heads * num_rows, num_own, head_size) for x in (own_keys, own_values))

        folded = query[:, batch.tokens].reshape(num_kv_heads * num_rows, group, head_size)
        scores = self._memory.take("scores", (*folded.shape[:2], num_shared + num_own), query.dtype)
        of_own = scores[..., num_shared:]
        of_shared = scores.view(num_entries, batch.members * group, -1)[..., :num_shared]
        torch.baddbmm(of_own, folded, own_keys.mT, beta=0, alpha=scale, out=of_own)
        if num_shared:
            shared_keys -= centre
            by_entry = folded.view(num_entries, batch.members * group, head_size)
            torch.baddbmm(of_shared, by_entry, shared_keys.mT, beta=0, alpha=scale, out=of_shared)
        if batch.mask is not None:
            scores.view(num_kv_heads, num_rows, group, -1)[..., -batch.mask.shape[-1] :].add_(batch.mask)
        torch.softmax(scores, -1, out=scores)
        out = torch.bmm(of_own, own_values)
        if num_shared:
            out.view(num_entries, batch.members * group, head_size).baddbmm_(of_shared, shared_values)
        attended[:, batch.tokens] = out.view(num_kv_heads, num_rows, group, head_size)

    def _gather(self, name: str, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(len(index), head_size), by the plan's `key_index`."""
        block_size, num_kv_heads, head_size = cache.shape[1:]
        by_head = cache.transpose(1, 2)
        num_bytes = head_size * cache.itemsize
        if not (by_head.is_contiguous() and num_bytes % 8 == 0):
            blocks_and_heads = index // block_size
            return cache[blocks_and_heads // num_kv_heads, index % block_size, blocks_and_heads % num_kv_heads]
        rows = self._memory.take(name, (len(index), num_bytes // 8), torch.int64)
        # As int64, whatever the dtype: torch copies rows of bf16 element by element.
        torch.index_select(by_head.view(-1, head_size).view(torch.int64), 0, index, out=rows)
        return rows.view(cache.dtype)
