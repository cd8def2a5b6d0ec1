"""Rotary position embedding, neox style: a head's first half of rotated dimensions pairs with its second half.

The angles are the caller's: cos and sin (max_positions, rotary_dim / 2) float32, with whatever scaling the family has.
Dimensions from rotary_dim on pass through unchanged.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


def apply_rope_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """x (num_tokens, num_heads, head_size), rotated by its tokens' positions, as a new tensor; float32 inside."""
    half = cos.shape[1]
    cos_of_token = cos[positions].unsqueeze(1)
    sin_of_token = sin[positions].unsqueeze(1)
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = (first * cos_of_token - second * sin_of_token, second * cos_of_token + first * sin_of_token)
    return torch.cat((*(part.to(x.dtype) for part in turned), rest), -1)


@triton.jit
def _rope_kernel(
    query_ptr,
    key_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    num_query_heads,
    num_key_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # int64: token * token_stride passes 2^31 on long batches
    position = tl.load(positions_ptr + token).to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    heads = tl.arange(0, HEADS)[:, None]
    in_half = dims < half
    cos = tl.load(cos_ptr + position * half + dims, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + position * half + dims, mask=in_half, other=0.0)

    # In place, in one pass over query's and key's heads; each program owns its token, so nobody else reads them.
    in_query = (heads < num_query_heads) & in_half
    in_key = (heads < num_key_heads) & in_half
    query = query_ptr + token * query_token_stride + heads * query_head_stride + dims
    first = tl.load(query, mask=in_query, other=0.0).to(tl.float32)
    second = tl.load(query + half, mask=in_query, other=0.0).to(tl.float32)
    tl.store(query, (first * cos - second * sin).to(query_ptr.dtype.element_ty), mask=in_query)
    tl.store(query + half, (second * cos + first * sin).to(query_ptr.dtype.element_ty), mask=in_query)

    key = key_ptr + token * key_token_stride + heads * key_head_stride + dims
    first = tl.load(key, mask=in_key, other=0.0).to(tl.float32)
    second = tl.load(key + half, mask=in_key, other=0.0).to(tl.float32)
    tl.store(key, (first * cos - second * sin).to(key_ptr.dtype.element_ty), mask=in_key)
    tl.store(key + half, (second * cos + first * sin).to(key_ptr.dtype.element_ty), mask=in_key)


def apply_rope_triton(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program per token, in place, as `apply_rope` says."""
    _check_rope(query, key, positions, cos, sin)
    num_tokens = query.shape[0]
    if num_tokens:
        half = cos.shape[1]
        _rope_kernel[(num_tokens,)](
            query, key, positions, cos, sin,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), query.shape[1], key.shape[1], half,
            HEADS=triton.next_power_of_2(max(query.shape[1], key.shape[1])), HALF=triton.next_power_of_2(half),
        )  # fmt: skip
    return query, key


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query (num_tokens, num_heads, head_size) and key (num_tokens, num_kv_heads, head_size) in place.

    positions (num_tokens,) int64; cos and sin (max_positions, rotary_dim / 2) float32, rotary_dim at most head_size.
    Both may be strided views (of one fused projection, say). Returns the two tensors it was given.
    """
    if query.is_cuda:
        return apply_rope_triton(query, key, positions, cos, sin)
    _check_rope(query, key, positions, cos, sin)
    rotate(query, key, Rotation.of(positions, cos, sin))
    return query, key


_ROWS_AT_A_TIME = 1024  # on a CPU, whose caches hold what so many make on the way: a fifth of the time of 7,000 at once


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's angles on a CPU, worked out once for all layers."""

    cos: torch.Tensor  # (num_tokens, 1, rotary_dim) float32: the second half is the first
    sin: torch.Tensor  # the same, but the first half is negative

    @classmethod
    def of(cls, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> "Rotation":
        """positions (num_tokens,) int64; cos and sin as `apply_rope`'s."""
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (cos, sin))
        return cls(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> None:
    """`apply_rope` on a CPU."""
    for x in _joined(query, key):
        rotated = x[..., : rotation.cos.shape[2]]
        parts = (tensor.split(_ROWS_AT_A_TIME) for tensor in (rotated, rotation.cos, rotation.sin))
        for rows, cos, sin in zip(*parts, strict=True):
            as_float = rows.float()
            first, second = as_float.chunk(2, -1)
            rows.copy_(torch.cat((second, first), -1).mul_(sin).addcmul_(as_float, cos))


def _joined(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query and key as one tensor where the key's heads follow the query's in memory: half as many calls."""
    num_tokens, num_heads, head_size = query.shape
    follows = key.data_ptr() == query.data_ptr() + num_heads * query.stride(1) * query.itemsize
    if not (follows and key.stride() == query.stride() and key.dtype == query.dtype):
        return query, key
    return (query.as_strided((num_tokens, num_heads + key.shape[1], head_size), query.stride()),)


def _check_rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    assert query.shape[::2] == key.shape[::2], f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    assert positions.shape == query.shape[:1], f"{positions.shape[0]} positions for {query.shape[0]} tokens"
    assert cos.shape == sin.shape, f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    assert cos.dtype == sin.dtype == torch.float32, f"angles are {cos.dtype}, not float32"
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert 2 * cos.shape[1] <= query.shape[2], f"{2 * cos.shape[1]} rotated of {query.shape[2]} dimensions"
    assert query.stride(-1) == 1, f"query's last dimension has stride {query.stride(-1)}"
    assert key.stride(-1) == 1, f"key's last dimension has stride {key.stride(-1)}"
