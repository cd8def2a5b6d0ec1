"""Decode attention: one query a row over keys and values in pages, and the log-sum-exp that merges it with other keys.

Bound by the bytes of keys and values, so the kernel is about reading them: a program takes all key heads of a row (a
page's tokens then lie behind each other), or some, and one of `num_splits` parts of its keys, several tiles in flight.
Query h of a program's heads meets every head's keys in one product, and the scores of foreign heads are masked: matrix
units idle here otherwise. The split of the keys is flash-decoding's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MAX_MERGED_SPLITS = 8  # by the last of a row's programs, one after the other; more are merged by a kernel of their own


def decode_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row over gathered pages, float32 inside; shapes as in `decode_attention`, any device."""
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:2], float("-inf"), device=query.device)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        block_ids = block_tables[row, : -(-length // block_size)].long()
        first = 0 if sliding_window is None else max(length - sliding_window, 0)
        keys = key_cache[block_ids].reshape(-1, num_kv_heads, head_size)[first:length].float()
        values = value_cache[block_ids].reshape(-1, num_kv_heads, head_size)[first:length].float()
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", query[row].float(), keys) * scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values).to(query.dtype)
        lse[row] = scores.logsumexp(dim=-1)
    return out, lse


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How a launch is laid out; from shapes alone, so that a CUDA graph may hold it while lengths change."""

    num_splits: int  # at most so many parts of a row's keys, equal ones
    min_split_tiles: int  # a part has at least so many tiles: shorter rows have fewer parts
    tile_keys: int
    heads_per_program: int  # key heads
    num_warps: int
    num_stages: int


def plan_decode(num_rows: int, num_heads: int, num_kv_heads: int, num_multiprocessors: int) -> DecodeLaunch:
    """A launch that measured well on an H200 at head size 128 (tests/bench/decode_attention.py), by rows alone.

    Few rows are split until four programs, as many as fit, lie on each multiprocessor. Many rows fill it whole: there
    only the long are split, which would else be the last to end. Parts that a row is too short for end at once.
    """
    group = num_heads // num_kv_heads
    heads = 2 if num_kv_heads % 2 == 0 and 2 * group <= 16 else 1
    fill = 4 * num_multiprocessors // max(num_rows * (num_kv_heads // heads), 1)
    if fill >= 4:  # a power of two: merged in tiles of that
        num_splits, min_split_keys = min(1 << (fill.bit_length() - 1), 64), 128
    elif fill >= 1:
        num_splits, min_split_keys = 8, 512
    else:
        num_splits, min_split_keys = 4, 1024
    # 32 pairs of key and head are 8 KiB of keys and as much of values; with four stages three such tiles are held.
    tile_keys = 32 // heads
    return DecodeLaunch(num_splits, min_split_keys // tile_keys, tile_keys, heads, num_warps=4, num_stages=4)


@triton.jit
def _split_of(length, split, sliding_window, num_splits, min_tiles, TILE: tl.constexpr):
    """(first key of the row, first of the split, one past its last, the row's number of splits that have keys)."""
    first = 0
    if sliding_window > 0:
        first = tl.maximum(length - sliding_window, 0)
    begin = first // TILE * TILE
    num_tiles = tl.cdiv(length - begin, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), min_tiles)
    start = begin + split * tiles_per_split * TILE
    stop = tl.minimum(start + tiles_per_split * TILE, length)
    return first, start, stop, tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def _blocks_of(block_table, tile_start, pair_key, stop, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """A tile's block ids, one a pair; where a tile lies in one block, one for all."""
    if BLOCK_SIZE % TILE_KEYS == 0:
        return tl.load(block_table + tile_start // BLOCK_SIZE, mask=tile_start < stop, other=0)
    else:  # noqa: RET505 - triton compiles both ways out otherwise
        key_id = tile_start + pair_key
        return tl.load(block_table + key_id // BLOCK_SIZE, mask=key_id < stop, other=0)


@triton.jit(do_not_specialize=["sliding_window", "num_splits", "min_tiles", "block_table_stride"])
def _decode_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,  # (rows, heads, splits, head size) float32: each split's own attention
    part_lse_ptr,  # (rows, heads, splits) float32, natural
    arrivals_ptr,  # (rows, programs of a split) int32, 0 between launches: parts that are written
    block_tables_ptr,
    lengths_ptr,
    scale_log2,  # scale / ln 2: exp2 is the hardware's
    sliding_window,  # 0: none
    num_splits,
    min_tiles,
    query_row_stride,
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
    HEADS: tl.constexpr,  # key heads per program
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,  # head size, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,  # >= HEADS * GROUP
    TILE_KEYS: tl.constexpr,
    MERGES: tl.constexpr,
):
    first_head = tl.program_id(0) * HEADS  # heads are neighbours in time, as in memory
    row = tl.program_id(1).to(tl.int64)  # int64: row and block times their strides pass 2^31 elements
    split = tl.program_id(2)
    m = tl.arange(0, TILE_M)
    dims = tl.arange(0, DIMS)
    in_head = dims < HEAD_SIZE
    head = first_head * GROUP + m
    is_query = m < HEADS * GROUP
    mask = is_query[:, None] & in_head[None, :]
    length = tl.load(lengths_ptr + row)
    # Asked for before it is known whether the split has keys: length and queries arrive together.
    queries = tl.load(
        query_ptr + row * query_row_stride + head[:, None] * query_head_stride + dims[None, :], mask=mask, other=0.0
    )
    first, start, stop, num_parts = _split_of(length, split, sliding_window, num_splits, min_tiles, TILE_KEYS)
    if start < stop:
        pair = tl.arange(0, TILE_KEYS * HEADS)  # (key, head of it), as they lie in a page
        pair_head = pair % HEADS
        pair_key = pair // HEADS
        # Rows of the tile past the queries are zeros that see the last head's keys: a row without keys would be NaN.
        is_own = tl.minimum(m // GROUP, HEADS - 1)[:, None] == pair_head[None, :]
        key_heads = key_cache_ptr + (first_head + pair_head) * key_head_stride
        value_heads = value_cache_ptr + (first_head + pair_head) * value_head_stride
        block_table = block_tables_ptr + row * block_table_stride

        maximum = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        accumulated = tl.zeros([TILE_M, DIMS], tl.float32)
        # The next tile's blocks are looked up a tile ahead: the pipeline would spend its stages on the look-up else.
        block = _blocks_of(block_table, start, pair_key, stop, BLOCK_SIZE, TILE_KEYS)
        for tile_start in range(start, stop, TILE_KEYS):
            key_id = tile_start + pair_key
            exists = (key_id < stop) & (key_id >= first)
            offset = key_id % BLOCK_SIZE
            wide = block.to(tl.int64)
            keys = tl.load(
                (key_heads + wide * key_block_stride + offset * key_offset_stride)[:, None] + dims[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            values = tl.load(
                (value_heads + wide * value_block_stride + offset * value_offset_stride)[:, None] + dims[None, :],
                mask=exists[:, None] & in_head[None, :],
                other=0.0,
            )
            block = _blocks_of(block_table, tile_start + TILE_KEYS, pair_key, stop, BLOCK_SIZE, TILE_KEYS)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            scores = tl.where(is_own & exists[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_maximum[:, None])
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(weights, axis=1)
            maximum = new_maximum
            accumulated = tl.dot(
                weights.to(values.dtype), values, acc=accumulated * rescale[:, None], input_precision="ieee"
            )

        result = accumulated / total[:, None]
        lse = (maximum + tl.log2(total)) * 0.6931471805599453
        row_head = row * NUM_HEADS + head
        if num_parts == 1:
            tl.store(
                out_ptr + row_head[:, None] * HEAD_SIZE + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask
            )
            tl.store(lse_ptr + row_head, lse, mask=is_query)
        else:
            part = row_head * num_splits + split
            tl.store(part_ptr + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=mask)
            tl.store(part_lse_ptr + part, lse, mask=is_query)
            if MERGES:
                # Whoever is last sees all that the others wrote: each writes, then says so (stream-K's fix-up).
                tl.debug_barrier()
                arrivals = arrivals_ptr + row * tl.num_programs(0) + tl.program_id(0)
                if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                    tl.store(arrivals, 0)
                    whole_maximum = tl.full([TILE_M], float("-inf"), tl.float32)
                    whole_total = tl.zeros([TILE_M], tl.float32)
                    merged = tl.zeros([TILE_M, DIMS], tl.float32)
                    for i in range(num_parts):
                        part = row_head * num_splits + i
                        part_lse = tl.load(part_lse_ptr + part, mask=is_query, other=0.0, cache_modifier=".cg")
                        written = tl.load(
                            part_ptr + part[:, None] * HEAD_SIZE + dims[None, :], mask=mask, other=0.0,
                            cache_modifier=".cg",
                        )  # fmt: skip
                        larger = tl.maximum(whole_maximum, part_lse)
                        kept, added = tl.exp(whole_maximum - larger), tl.exp(part_lse - larger)
                        whole_total = whole_total * kept + added
                        merged = merged * kept[:, None] + written * added[:, None]
                        whole_maximum = larger
                    merged = merged / whole_total[:, None]
                    tl.store(
                        out_ptr + row_head[:, None] * HEAD_SIZE + dims[None, :],
                        merged.to(out_ptr.dtype.element_ty),
                        mask=mask,
                    )
                    tl.store(lse_ptr + row_head, whole_maximum + tl.log(whole_total), mask=is_query)
    elif (split == 0) & (length == 0):
        row_head = row * NUM_HEADS + head
        nothing = tl.zeros([TILE_M, DIMS], out_ptr.dtype.element_ty)
        tl.store(out_ptr + row_head[:, None] * HEAD_SIZE + dims[None, :], nothing, mask=mask)
        tl.store(lse_ptr + row_head, tl.full([TILE_M], float("-inf"), tl.float32), mask=is_query)


@triton.jit(do_not_specialize=["sliding_window", "num_splits", "min_tiles"])
def _merge_splits_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, lengths_ptr, sliding_window, num_splits, min_tiles,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    _, _, _, num_parts = _split_of(length, 0, sliding_window, num_splits, min_tiles, TILE_KEYS)
    if num_parts > 1:  # one part has written the row's answer itself
        splits = tl.arange(0, SPLITS)
        dims = tl.arange(0, DIMS)
        exists = splits < num_parts
        for head in range(tl.program_id(0), NUM_HEADS, tl.num_programs(0)):
            row_head = row * NUM_HEADS + head
            part = row_head * num_splits + splits
            lse = tl.load(part_lse_ptr + part, mask=exists, other=float("-inf"))
            parts = tl.load(
                part_ptr + part[:, None] * HEAD_SIZE + dims[None, :],
                mask=exists[:, None] & (dims < HEAD_SIZE)[None, :],
                other=0.0,
            )
            maximum = tl.max(lse, axis=0)
            weights = tl.exp(lse - maximum)
            total = tl.sum(weights, axis=0)
            merged = tl.sum(parts * weights[:, None], axis=0) / total
            tl.store(out_ptr + row_head * HEAD_SIZE + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)
            tl.store(lse_ptr + row_head, maximum + tl.log(total))


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    launch: DecodeLaunch,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """query (num_rows, num_heads, head_size) -> `out`, the same shape and dtype; returns the log-sum-exp of the scores,
    (num_rows, num_heads) float32, natural.

    Caches are (num_blocks, block_size, num_kv_heads, head_size), views allowed; row r's query sees the lengths[r] keys
    (with a window, the last of them) in the pages that block_tables[r] (num_rows, max_blocks) int32 names. A row of
    length 0 gives zeros and -inf. No host look at lengths, which must fit into the tables. `arrivals`: int32 zeros, and
    zeros again afterwards, one for each row and key head; where there are fewer, a second kernel merges. Launches that
    may overlap must not share them.
    """
    num_rows, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads over {num_kv_heads} key heads"
    assert num_kv_heads % launch.heads_per_program == 0, f"{num_kv_heads} key heads, {launch.heads_per_program} at once"
    assert key_cache.shape == value_cache.shape, f"caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)}"
    assert key_cache.shape[3] == head_size, f"query's head size {head_size}, the cache's {key_cache.shape[3]}"
    assert query.dtype == key_cache.dtype == value_cache.dtype, f"{query.dtype} over {key_cache.dtype}"
    assert out.shape == query.shape, f"query {tuple(query.shape)}, out {tuple(out.shape)}"
    assert out.dtype == query.dtype, f"query {query.dtype}, out {out.dtype}"
    assert out.is_contiguous(), "out must be contiguous"
    assert lengths.shape == (num_rows,), f"{num_rows} rows, lengths {tuple(lengths.shape)}"
    assert block_tables.shape[0] == num_rows, f"{num_rows} rows, {block_tables.shape[0]} block tables"
    assert sliding_window is None or sliding_window > 0, f"a window of {sliding_window} hides every key"
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        assert tensor.stride(-1) == 1, f"{name}'s last dimension has stride {tensor.stride(-1)}"
    assert arrivals.dtype == torch.int32, f"arrivals are {arrivals.dtype}"
    assert block_tables.stride(1) == lengths.stride(0) == 1, "tables and lengths must be contiguous"

    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=query.device)
    if num_rows == 0:
        return lse
    num_splits = launch.num_splits
    parts, part_lse = out, lse  # never written by a launch without splits
    if num_splits > 1:
        parts = torch.empty(num_rows, num_heads, num_splits, head_size, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=query.device)
    group = num_heads // num_kv_heads
    heads = launch.heads_per_program
    merges = 1 < num_splits <= MAX_MERGED_SPLITS and num_rows * (num_kv_heads // heads) <= arrivals.numel()
    dims = max(16, triton.next_power_of_2(head_size))
    _decode_attention_kernel[(num_kv_heads // heads, num_rows, num_splits)](
        query, key_cache, value_cache, out, lse, parts, part_lse, arrivals, block_tables, lengths,
        scale * LOG2_E, sliding_window or 0, num_splits, launch.min_split_tiles, query.stride(0), query.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, HEADS=heads, HEAD_SIZE=head_size, DIMS=dims, BLOCK_SIZE=block_size,
        TILE_M=max(16, triton.next_power_of_2(heads * group)), TILE_KEYS=launch.tile_keys,
        MERGES=merges,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if num_splits > 1 and not merges:
        # Many rows mean few programs a row: most rows have one part, and nothing to merge.
        _merge_splits_kernel[(num_heads if num_rows <= 64 else num_kv_heads, num_rows)](
            out, lse, parts, part_lse, lengths, sliding_window or 0, num_splits, launch.min_split_tiles,
            NUM_HEADS=num_heads, HEAD_SIZE=head_size, DIMS=dims, TILE_KEYS=launch.tile_keys,
            SPLITS=triton.next_power_of_2(num_splits),
            num_warps=1,
        )  # fmt: skip
    return lse
