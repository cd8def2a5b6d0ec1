"""Paged attention on a CPU: a batch's keys and values are gathered head by head, then product, softmax, product.

Every query is in one batch, over all its keys, so nothing is merged. Decode rows whose tables begin alike multiply
their shared keys as one product. Query heads that share a key head are folded into the query dimension.

Scores are kept in the model's dtype. What bf16 would lose there is taken out first: softmax does not change when all
keys of a query are moved by one vector, so keys are moved to their mean (SageAttention, https://arxiv.org/abs/2410.02367)
or, in decode rows, by one of them, which is as good. Key biases make scores of 1,400 in Qwen2.5-0.5B, and of 70 behind
the move.
"""

import math
import threading

import torch

from kernels.attention_plan import AttentionPlan, AttentionRows
from kernels.cpu_attention_plan import CpuAttentionPlan, DecodeBatch, PrefillRow
from kernels.cpu_words import as_words


class _Memory(threading.local):
    """Where keys, values and scores of one batch lie until the next: fresh pages for each cost twice the copying.

    Each thread has its own.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}
        self._taken: dict[str, torch.Tensor] = {}  # most layers of a step ask as the one before did

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with whatever was there; the last one of that name is gone."""
        taken = self._taken.get(name)
        if taken is not None and taken.shape == shape and taken.dtype == dtype:
            return taken
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._bytes or self._bytes[name].numel() < num_bytes:
            with torch.inference_mode(False):  # or no call outside that mode could write to it later
                self._bytes[name] = torch.empty(num_bytes, dtype=torch.uint8)
        with torch.inference_mode(False):
            taken = self._taken[name] = self._bytes[name][:num_bytes].view(dtype).view(shape)
        return taken


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
        out = torch.empty(query.shape, dtype=query.dtype)
        attended = out.view(by_key_head).transpose(0, 1)
        for row in batches.prefills:
            self._attend_prefill(folded, key_cache, value_cache, row, scale / power, attended)
        for batch in batches.decodes:
            self._attend_decodes(folded, key_cache, value_cache, batch, scale / power, attended)
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
        keys = self._gather("keys", key_cache, row.block_index).view(num_kv_heads, -1, head_size)
        values = self._gather("values", value_cache, row.block_index).view(num_kv_heads, -1, head_size)
        keys -= keys[:, : row.num_keys].mean(1, keepdim=True)
        for tile in row.tiles:
            queries = query[:, tile.tokens].flatten(1, 2)
            shape = (num_kv_heads, queries.shape[1], tile.keys.stop - tile.keys.start)
            scores = self._memory.take("scores", shape, query.dtype)
            torch.baddbmm(scores, queries, keys[:, tile.keys].mT, beta=0, alpha=scale, out=scores)
            scores.unflatten(1, (-1, group))[..., -tile.mask.shape[-1] :].add_(tile.mask)
            torch.softmax(scores, -1, out=scores)
            attended[:, tile.tokens] = torch.bmm(scores, values[:, tile.keys]).unflatten(1, (-1, group))

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
        keys = self._gather("keys", key_cache, batch.block_index)
        values = self._gather("values", value_cache, batch.block_index)
        sizes = [num_entries * num_shared, num_kv_heads * num_rows * num_own]
        shared_keys, own_keys = keys.split(sizes)
        shared_values, own_values = values.split(sizes)
        own_keys, own_values = (x.view(num_kv_heads * num_rows, num_own, head_size) for x in (own_keys, own_values))

        folded = query[:, batch.tokens].reshape(num_kv_heads * num_rows, group, head_size)
        by_entry = folded.view(num_entries, batch.members * group, head_size)
        scores = self._memory.take("scores", (*folded.shape[:2], num_shared + num_own), query.dtype)
        # The move is added to the products' sums here, by one key: a pass over all rows' own keys costs more.
        if num_shared:
            shared_keys = shared_keys.view(num_entries, num_shared, head_size)
            a_key = shared_keys[:, -1:]
        else:
            a_key = own_keys[:, batch.fewest_own - 1 : batch.fewest_own]
        moves = torch.bmm(by_entry, (a_key * -scale).mT).view(num_kv_heads, num_rows, group, 1)
        by_row = scores.view(num_kv_heads, num_rows, group, -1)
        num_free = by_row.shape[-1] - (0 if batch.mask is None else batch.mask.shape[-1])
        by_row[..., :num_free] = moves
        if batch.mask is not None:
            torch.add(moves, batch.mask, out=by_row[..., num_free:])
        of_own = scores[..., num_shared:]
        torch.baddbmm(of_own, folded, own_keys.mT, alpha=scale, out=of_own)
        of_shared = scores.view(num_entries, batch.members * group, -1)[..., :num_shared]
        if num_shared:
            torch.baddbmm(of_shared, by_entry, shared_keys.mT, alpha=scale, out=of_shared)
        torch.softmax(scores, -1, out=scores)
        out = torch.bmm(of_own, own_values)
        if num_shared:
            weights = self._memory.take("weights", tuple(of_shared.shape), query.dtype)
            target, source = as_words(weights, of_shared)
            target.copy_(source)
            shared_values = shared_values.view(num_entries, num_shared, head_size)
            out.view(num_entries, batch.members * group, head_size).baddbmm_(weights, shared_values)
        attended[:, batch.tokens] = out.view(num_kv_heads, num_rows, group, head_size)

    def _gather(self, name: str, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(len(index) x block_size, head_size), by the plan's `block_index`."""
        block_size, num_kv_heads, head_size = cache.shape[1:]
        by_head = cache.transpose(1, 2)
        if not by_head.is_contiguous():
            return by_head[index // num_kv_heads, index % num_kv_heads].view(-1, head_size)
        gathered = self._memory.take(name, (len(index), block_size * head_size), cache.dtype)
        blocks, target = as_words(by_head.view(-1, block_size * head_size), gathered)
        torch.index_select(blocks, 0, index, out=target)
        return gathered.view(-1, head_size)
