"""Writes a step's keys and values into their pages: slot = block_id * block_size + offset, -1 for a padding token."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cpu_words import as_words


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Token by token, as `write_kv` says."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_offset_stride,
    key_cache_head_stride,
    value_block_stride,
    value_offset_stride,
    value_cache_head_stride,
    head_size,
    num_cols,
    BLOCK_SIZE: tl.constexpr,
    COLS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        # int64: block * block_stride passes 2^31 elements in a pool of some GiB
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        cols = tl.arange(0, COLS)
        mask = cols < num_cols
        head = cols // head_size
        dim = cols % head_size
        key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim, mask=mask)
        value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + dim, mask=mask)
        key_page = key_cache_ptr + block * key_block_stride + offset * key_offset_stride
        value_page = value_cache_ptr + block * value_block_stride + offset * value_offset_stride
        tl.store(key_page + head * key_cache_head_stride + dim, key, mask=mask)
        tl.store(value_page + head * value_cache_head_stride + dim, value, mask=mask)


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One program per token, as `write_kv` says; unit stride in the last dimension, any in the others."""
    _check_write(key, value, key_cache, value_cache, slot_mapping)
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        assert tensor.stride(-1) == 1, f"{name}'s last dimension has stride {tensor.stride(-1)}"
    num_tokens, num_heads, head_size = key.shape
    if num_tokens:
        _write_kv_kernel[(num_tokens,)](
            key, value, key_cache, value_cache, slot_mapping,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
            value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
            head_size, num_heads * head_size,
            BLOCK_SIZE=key_cache.shape[1], COLS=triton.next_power_of_2(num_heads * head_size),
        )  # fmt: skip


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key and value (num_tokens, num_kv_heads, head_size) into caches (num_blocks, block_size, *the same).

    slot_mapping (num_tokens,) int32 or int64 names each token's place; a token with slot -1 is padding and not written.
    No two tokens share a slot. The caches may be strided views; nothing but the slots named is touched.
    """
    if key_cache.is_cuda:
        write_kv_triton(key, value, key_cache, value_cache, slot_mapping)
        return
    _check_write(key, value, key_cache, value_cache, slot_mapping)
    places = Places.of(slot_mapping, key_cache.shape[1], key_cache.shape[2])
    place_kv(key, value, key_cache, value_cache, places)


@dataclass(frozen=True, slots=True)
class Places:
    """A step's slots on a CPU, worked out once for all layers."""

    written: torch.Tensor | None  # (num_tokens,) bool; None: all
    blocks: torch.Tensor  # (num_written,) int64
    offsets: torch.Tensor
    rows: torch.Tensor  # (num_written x num_kv_heads,) int64, of a cache that lies head by head within a block

    @classmethod
    def of(cls, slot_mapping: torch.Tensor, block_size: int, num_kv_heads: int) -> "Places":
        """slot_mapping as `write_kv`'s."""
        written = slot_mapping >= 0
        is_all = bool(written.all())
        slots = (slot_mapping if is_all else slot_mapping[written]).long()
        blocks, offsets = slots // block_size, slots % block_size
        heads = blocks[:, None] * num_kv_heads + torch.arange(num_kv_heads)
        return cls(None if is_all else written, blocks, offsets, (heads * block_size + offsets[:, None]).flatten())


def place_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, places: Places
) -> None:
    """`write_kv` on a CPU."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        new = new if places.written is None else new[places.written]
        by_head = cache.transpose(1, 2)
        if by_head.is_contiguous():
            head_size = cache.shape[-1]
            target, source = as_words(by_head.view(-1, head_size), new.reshape(-1, head_size))
            target.index_copy_(0, places.rows, source)
        else:
            cache[places.blocks, places.offsets] = new


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    assert key.shape == value.shape, f"key {tuple(key.shape)}, value {tuple(value.shape)}"
    assert key_cache.shape == value_cache.shape, f"caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)}"
    assert key.shape[1:] == key_cache.shape[2:], f"key {tuple(key.shape)} does not fit cache {tuple(key_cache.shape)}"
    assert slot_mapping.shape == key.shape[:1], f"{slot_mapping.shape[0]} slots for {key.shape[0]} tokens"
    assert key.dtype == key_cache.dtype == value.dtype == value_cache.dtype, f"{key.dtype} into {key_cache.dtype}"
