"""Paged attention: causal attention of a step's tokens over keys and values that lie in pages.

Prefill chunks and decode rows go in one call. Row r's queries are tokens [query_starts[r], query_starts[r + 1]) and are
the last ones of its sequence of sequence_lengths[r] tokens; query i of n is at position length - n + i, and sees keys
(position - window, position].
"""

from importlib.util import find_spec

import torch
import triton
import triton.language as tl

from kernels.attention_plan import Attention, AttentionRows
from kernels.cpu_attention import CpuAttention
from kernels.flash_attention import LARGEST_HEAD_SIZE, FlashPrefill
from kernels.gpu_attention import GpuAttention, Prefill


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Row by row over gathered pages, float32 inside; shapes as in `Attention.__call__`, any device."""
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, length in enumerate(sequence_lengths.tolist()):
        queries = query[starts[row] : starts[row + 1]].float()
        num_queries = queries.shape[0]
        if num_queries == 0:
            continue
        block_ids = block_tables[row, : -(-length // block_size)].long()
        keys = key_cache[block_ids].reshape(-1, num_kv_heads, head_size)[:length].float()
        values = value_cache[block_ids].reshape(-1, num_kv_heads, head_size)[:length].float()
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)

        key_positions = torch.arange(length, device=query.device)
        positions = torch.arange(length - num_queries, length, device=query.device)[:, None]
        seen = key_positions <= positions
        if sliding_window is not None:
            seen &= key_positions > positions - sliding_window
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out


@triton.jit
def _paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    out_ptr,
    lse_ptr,  # (tokens, heads) float32, natural; written only where not IS_CAUSAL
    block_tables_ptr,
    query_starts_ptr,
    sequence_lengths_ptr,
    num_rows,
    scale_log2,  # scale / ln 2: exp2 is the hardware's
    sliding_window,  # 0: none
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_offset_stride,
    key_head_stride,
    value_block_stride,
    value_offset_stride,
    value_head_stride,
    block_table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,  # head size, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_M: tl.constexpr,  # >= TILE_QUERIES * GROUP: queries times their heads
    TILE_KEYS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Row r owns tiles [query_starts[r] // TILE_QUERIES + r, the same for r + 1): always enough for its queries, and
    # the grid needs no host look at lengths (as vLLM's unified kernel numbers them). Tiles before the first row's are
    # nobody's. The last r that begins by here:
    low = 0
    high = num_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        begins = tl.load(query_starts_ptr + middle) // TILE_QUERIES + middle
        before = begins <= tile
        low = tl.where((high - low > 1) & before, middle, low)
        high = tl.where((high - low > 1) & (begins > tile), middle, high)
    row = low
    query_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - query_start
    first_query = (tile - query_start // TILE_QUERIES - row) * TILE_QUERIES
    if (first_query >= 0) & (first_query < num_queries):
        length = tl.load(sequence_lengths_ptr + row)
        m = tl.arange(0, TILE_M)
        query_id = first_query + m // GROUP
        head = kv_head * GROUP + m % GROUP
        in_tile = (m < TILE_QUERIES * GROUP) & (query_id < num_queries)
        position = length - num_queries + query_id
        dims = tl.arange(0, DIMS)
        in_head = dims < HEAD_SIZE

        # int64: token * stride and block * stride pass 2^31 elements
        token = (query_start + query_id).to(tl.int64)
        queries = tl.load(
            query_ptr + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :],
            mask=in_tile[:, None] & in_head[None, :],
            other=0.0,
        )
        last_position = length - 1
        if IS_CAUSAL:
            last_position = length - num_queries + tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
        last_seen = position if IS_CAUSAL else position * 0 + last_position
        first_key = 0
        if sliding_window > 0:
            first_key = tl.maximum(length - num_queries + first_query - sliding_window + 1, 0)
            first_key = first_key // TILE_KEYS * TILE_KEYS

        maximum = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        accumulated = tl.zeros([TILE_M, DIMS], tl.float32)
        block_table = block_tables_ptr + tl.cast(row, tl.int64) * block_table_stride
        for start in range(first_key, last_position + 1, TILE_KEYS):
            key_id = start + tl.arange(0, TILE_KEYS)
            exists = key_id <= last_position
            block = tl.load(block_table + key_id // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
            offset = (key_id % BLOCK_SIZE).to(tl.int64)
            keys = tl.load(
                key_cache_ptr
                + (block * key_block_stride + offset * key_offset_stride + kv_head * key_head_stride)[None, :]
                + dims[:, None],
                mask=exists[None, :] & in_head[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2
            seen = exists[None, :] & (key_id[None, :] <= last_seen[:, None])
            if sliding_window > 0:
                seen = seen & (key_id[None, :] > position[:, None] - sliding_window)
            scores = tl.where(seen, scores, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            # A query that has seen no key yet (a window's first tile) keeps weights of 0, not exp(-inf + inf).
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            total = total * rescale + tl.sum(weights, axis=1)
            maximum = new_maximum

            values = tl.load(
                value_cache_ptr
                + (block * value_block_stride + offset * value_offset_stride + kv_head * value_head_stride)[:, None]
                + dims[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            accumulated = accumulated * rescale[:, None]
            accumulated += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

        # Rows of the tile beyond the queries have seen the same keys or none: their 0 / 0 is not stored.
        out = accumulated / total[:, None]
        tl.store(
            out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_SIZE + dims[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=in_tile[:, None] & in_head[None, :],
        )
        if not IS_CAUSAL:
            lse = (maximum + tl.log2(total)) * 0.6931471805599453
            tl.store(lse_ptr + token * NUM_HEADS + head, lse, mask=in_tile)


def paged_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    max_query_length: int,
    max_sequence_length: int,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """One program per tile of a row's queries and key head, which walks the row's keys. Shapes as in
    `Attention.__call__`, but tokens before query_starts[0] belong to no row, and their places in `out` are not written.

    `lse` (num_tokens, num_heads) float32: where given, it receives the natural log-sum-exp of the scores, and every
    query sees all keys of its row.
    """
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_rows = sequence_lengths.shape[0]
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads over {num_kv_heads} key heads"
    assert key_cache.shape == value_cache.shape, f"caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)}"
    assert key_cache.shape[3] == head_size, f"query's head size {head_size}, the cache's {key_cache.shape[3]}"
    assert query.dtype == key_cache.dtype == value_cache.dtype, f"{query.dtype} over {key_cache.dtype}"
    assert query_starts.shape == (num_rows + 1,), f"{num_rows} rows, {query_starts.shape[0]} query starts"
    assert block_tables.shape[0] == num_rows, f"{num_rows} rows, {block_tables.shape[0]} block tables"
    assert block_tables.shape[1] * block_size >= max_sequence_length, (
        f"{block_tables.shape[1]} blocks of {block_size} cannot hold {max_sequence_length} tokens"
    )
    assert sliding_window is None or sliding_window > 0, f"a window of {sliding_window} hides every key"
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        assert tensor.stride(-1) == 1, f"{name}'s last dimension has stride {tensor.stride(-1)}"
    assert block_tables.stride(1) == query_starts.stride(0) == sequence_lengths.stride(0) == 1

    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.is_contiguous(), "out must be contiguous"
    assert lse is None or (lse.is_contiguous() and sliding_window is None), "a window and all keys at once"
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    dims = max(16, triton.next_power_of_2(head_size))
    # tl.dot needs 16 rows; decode rows have `group` of them, prefill chunks plenty.
    tile_m = max(16, triton.next_power_of_2(group))
    if max_query_length > 1:
        tile_m = max(tile_m, 32 if query.dtype == torch.float32 or dims > 128 else 64)
    tile_queries = tile_m // group
    tile_keys = 32 if query.dtype == torch.float32 or dims > 128 else 64
    grid = (num_tokens // tile_queries + num_rows, num_kv_heads)
    _paged_attention_kernel[grid](
        query, key_cache, value_cache, out, out if lse is None else lse, block_tables, query_starts, sequence_lengths,
        num_rows, scale * 1.4426950408889634, sliding_window or 0,
        query.stride(0), query.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size, DIMS=dims, BLOCK_SIZE=block_size,
        TILE_QUERIES=tile_queries, TILE_M=tile_m, TILE_KEYS=tile_keys, SEARCH_STEPS=num_rows.bit_length(),
        IS_CAUSAL=lse is None,
    )  # fmt: skip
    return out


def paged_attention_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    max_query_length: int,
    max_sequence_length: int,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """`CpuAttention` for one layer alone: plans and attends."""
    attention = CpuAttention()
    rows = AttentionRows(block_tables, query_starts, sequence_lengths, max_query_length, max_sequence_length)
    plan = attention.prepare(rows)
    return attention(query, key_cache, value_cache, plan, scale, sliding_window)


class TritonPrefill:
    """As kernels.gpu_attention.Prefill, on any GPU and in any precision."""

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        paged_attention_triton(
            query, key_cache, value_cache, rows.block_tables, rows.query_starts, rows.sequence_lengths,
            rows.max_query_length, rows.max_sequence_length, scale, sliding_window, out,
        )  # fmt: skip

    def attend_to_all(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: AttentionRows,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        out = paged_attention_triton(
            query, key_cache, value_cache, rows.block_tables, rows.query_starts, rows.sequence_lengths,
            rows.max_query_length, rows.max_sequence_length, scale, lse=lse,
        )  # fmt: skip
        return out, lse


def select_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> Attention:
    """The implementation for a device, a type of keys and values and a head size, chosen once, called by every layer.

    Prefill rows go to flash-attn 4 on Hopper and later, in 16 bits, where it is installed; on every other GPU to the
    kernel above.
    """
    if device.type == "cpu":
        return CpuAttention()
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    fits = in_16_bits and head_size % 8 == 0 and head_size <= LARGEST_HEAD_SIZE
    is_hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    prefill: Prefill = TritonPrefill()
    if fits and is_hopper and find_spec("flash_attn") is not None:
        prefill = FlashPrefill()
    return GpuAttention(prefill, torch.cuda.get_device_properties(device).multi_processor_count, device)
