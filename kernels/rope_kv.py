"""Rope and KV write in one pass over the fused qkv product: queries come out rotated, keys (rotated) and values go to
their pages. Optionally each query and key head is RMS-normed first (Qwen3).

Bytes: qkv is read once, queries, keys and values are written once: 2 * (num_heads + 2 * num_kv_heads) * head_size
elements a token.
"""

import torch
import triton
import triton.language as tl

from kernels.fp8 import ProductScales


def rope_kv_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scales: ProductScales | None = None,
) -> torch.Tensor:
    """Plain torch. qkv (num_tokens, (num_heads + 2 * num_kv_heads) * head_size); cos, sin (num_positions,
    head_size / 2) float32; caches (num_blocks, block_size, num_kv_heads, head_size), written in place;
    slot -1 is padding. `scales`: of a qkv product that is yet to be scaled.

    Returns the queries, (num_tokens, num_heads, head_size), in qkv's dtype.
    """
    num_kv_heads, head_size = key_cache.shape[-2:]
    dtype = qkv.dtype
    if scales is not None:
        qkv = scales.apply(qkv)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_size)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    def rotate(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x.float()
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
        c, s = cos[positions][:, None], sin[positions][:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(dtype)

    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    key_cache.view(-1, num_kv_heads, head_size)[slots] = rotate(key, key_norm)[kept].to(key_cache.dtype)
    value_cache.view(-1, num_kv_heads, head_size)[slots] = value[kept].to(value_cache.dtype)
    return rotate(query, query_norm)


@triton.jit
def _load(qkv_ptr, row_scale, col_scale_ptr, bias_ptr, offsets, mask, SCALE: tl.constexpr, BIAS: tl.constexpr):
    x = tl.load(qkv_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if SCALE:
        x = x * row_scale * tl.load(col_scale_ptr + offsets, mask=mask, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rotate_heads(
    in_ptr, row_scale, col_scale_ptr, bias_ptr, first_col, out_ptr, norm_ptr, cos, sin, eps, heads, halves, mask,
    HALF: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    offsets = heads[:, None] * (2 * HALF) + halves[None, :]
    columns = first_col + offsets
    first = _load(in_ptr, row_scale, col_scale_ptr, bias_ptr, columns, mask, SCALE, BIAS)
    second = _load(in_ptr, row_scale, col_scale_ptr, bias_ptr, columns + HALF, mask, SCALE, BIAS)
    if NORM:
        columns = halves < HALF
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(norm_ptr + halves, mask=columns, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(norm_ptr + HALF + halves, mask=columns, other=0.0).to(tl.float32)[None, :]
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, (first * cos[None, :] - second * sin[None, :]).to(out_type), mask=mask)
    tl.store(out_ptr + offsets + HALF, (second * cos[None, :] + first * sin[None, :]).to(out_type), mask=mask)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, query_ptr, key_cache_ptr, value_cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    query_norm_ptr, key_norm_ptr, row_scale_ptr, col_scale_ptr, bias_ptr, qkv_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # int64: token * qkv_stride passes 2^31 on long batches
    halves = tl.arange(0, HALF_BLOCK)
    columns = halves < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + halves, mask=columns, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + halves, mask=columns, other=0.0)
    qkv_ptr += token * qkv_stride
    row_scale = 1.0
    if SCALE:
        row_scale = tl.load(row_scale_ptr + token)

    heads = tl.arange(0, HEADS_BLOCK)
    mask = (heads < NUM_HEADS)[:, None] & columns[None, :]
    query_ptr += token * (NUM_HEADS * 2 * HALF)
    _rotate_heads(
        qkv_ptr, row_scale, col_scale_ptr, bias_ptr, 0, query_ptr, query_norm_ptr, cos, sin, eps, heads, halves, mask,
        HALF, NORM, SCALE, BIAS,
    )  # fmt: skip

    slot = tl.load(slots_ptr + token).to(tl.int64)  # int64: slot * heads * size passes 2^31 in large pools
    heads = tl.arange(0, KV_BLOCK)
    mask = (heads < NUM_KV_HEADS)[:, None] & columns[None, :] & (slot >= 0)
    cache_offset = slot * (NUM_KV_HEADS * 2 * HALF)
    key_col = NUM_HEADS * 2 * HALF
    _rotate_heads(
        qkv_ptr, row_scale, col_scale_ptr, bias_ptr, key_col, key_cache_ptr + cache_offset, key_norm_ptr, cos, sin, eps,
        heads, halves, mask, HALF, NORM, SCALE, BIAS,
    )  # fmt: skip
    offsets = heads[:, None] * (2 * HALF) + halves[None, :]
    columns = key_col + NUM_KV_HEADS * 2 * HALF + offsets
    out_type = value_cache_ptr.dtype.element_ty
    first = _load(qkv_ptr, row_scale, col_scale_ptr, bias_ptr, columns, mask, SCALE, BIAS)
    second = _load(qkv_ptr, row_scale, col_scale_ptr, bias_ptr, columns + HALF, mask, SCALE, BIAS)
    tl.store(value_cache_ptr + cache_offset + offsets, first.to(out_type), mask=mask)
    tl.store(value_cache_ptr + cache_offset + offsets + HALF, second.to(out_type), mask=mask)


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scales: ProductScales | None = None,
) -> torch.Tensor:
    """One program a token; arguments as in `rope_kv_reference`. Rotates the whole head; no partial rotation."""
    num_tokens = qkv.shape[0]
    num_kv_heads, head_size = key_cache.shape[-2:]
    half = head_size // 2
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_size, f"qkv is {tuple(qkv.shape)}"
    assert qkv.stride(1) == 1, f"qkv's last dimension has stride {qkv.stride(1)}"
    assert cos.shape[-1] == half, f"cos has {cos.shape[-1]} columns; the head has {head_size}"
    assert key_cache.is_contiguous(), "key_cache must be one layer's contiguous pages"
    assert value_cache.is_contiguous(), "value_cache must be one layer's contiguous pages"
    assert (query_norm is None) == (key_norm is None), "norm both queries and keys, or neither"
    query = torch.empty((num_tokens, num_heads, head_size), dtype=qkv.dtype, device=qkv.device)
    row_scale, col_scale, bias = (scales.rows, scales.cols, scales.bias) if scales is not None else (None, None, None)
    if num_tokens:
        _rope_kv_kernel[(num_tokens,)](
            qkv, query, key_cache, value_cache, cos, sin, positions, slot_mapping, query_norm, key_norm,
            row_scale, col_scale, bias, qkv.stride(0), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half,
            HEADS_BLOCK=triton.next_power_of_2(num_heads), KV_BLOCK=triton.next_power_of_2(num_kv_heads),
            HALF_BLOCK=triton.next_power_of_2(half), NORM=query_norm is not None,
            SCALE=scales is not None, BIAS=bias is not None, num_warps=4,
        )  # fmt: skip
    return query
