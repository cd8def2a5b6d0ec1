"""KV write: every token lands in its slot, padding nowhere, and no other number changes."""

from collections.abc import Callable

import pytest
import torch

from kernels.kv_cache import write_kv, write_kv_reference, write_kv_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["by_token", "by_head", "strided"])
@pytest.mark.parametrize(("num_kv_heads", "head_size", "block_size"), [(2, 64, 16), (1, 80, 8), (3, 96, 16)])
def test_tokens_land_in_their_slots_and_nothing_else_changes(
    num_kv_heads: int, head_size: int, block_size: int, layout: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, 4 + 2 * num_kv_heads, head_size, generator=generator).to(DEVICE, dtype)
    key, value = qkv[:, 4 : 4 + num_kv_heads], qkv[:, 4 + num_kv_heads :]
    slots = torch.tensor([block_size - 1, -1, block_size, 0, -1, 5 * block_size - 1], device=DEVICE)
    strided = layout == "strided"
    if strided:  # keys and values side by side in one pool
        both = torch.full((5, block_size, num_kv_heads, 2 * head_size), 7.0, dtype=dtype, device=DEVICE)
    else:  # a layer of the engine's pool
        both = torch.full((2, 3, 5, block_size, num_kv_heads, head_size), 7.0, dtype=dtype, device=DEVICE)

    if layout == "by_head":  # that of a CPU
        both = both.transpose(3, 4).contiguous().transpose(3, 4)

    def caches(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (pool[..., :head_size], pool[..., head_size:]) if strided else (pool[0, 1], pool[1, 1])

    expected = both.clone()
    write_kv_reference(key, value, *caches(expected), slots)
    assert int((expected != 7.0).sum()) == 4 * num_kv_heads * head_size * 2
    for write in (write_kv, write_kv_triton):
        pool = both.clone()
        write(key, value, *caches(pool), slots)
        assert torch.equal(pool, expected)


def test_a_known_slot() -> None:
    key_cache, value_cache = torch.zeros(2, 2, 4, 1, 16, device=DEVICE)
    key, value = torch.ones(1, 1, 16, device=DEVICE), torch.full((1, 1, 16), 2.0, device=DEVICE)
    write_kv(key, value, key_cache, value_cache, torch.tensor([6], device=DEVICE))
    assert key_cache.sum(-1).flatten().tolist() == [0, 0, 0, 0, 0, 0, 16, 0]
    assert value_cache.sum(-1).flatten().tolist() == [0, 0, 0, 0, 0, 0, 32, 0]


@pytest.mark.parametrize("write", [write_kv, write_kv_triton])
@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_no_tokens_and_only_padding_write_nothing(write: Callable[..., None], slots: list[int]) -> None:
    caches = torch.zeros(2, 2, 4, 1, 16, device=DEVICE)
    rows = torch.ones(len(slots), 1, 16, device=DEVICE)
    write(rows, rows, caches[0], caches[1], torch.tensor(slots, dtype=torch.int64, device=DEVICE))
    assert not caches.any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs 10 GiB of a CUDA device")
def test_slots_beyond_2_to_the_31_elements_are_written() -> None:
    key_cache = torch.zeros(1100, 256, 64, 128, dtype=torch.float16, device=DEVICE)
    value_cache = torch.zeros_like(key_cache)
    rows = torch.ones(1, 64, 128, dtype=torch.float16, device=DEVICE)
    write_kv(rows, rows, key_cache, value_cache, torch.tensor([1100 * 256 - 1], device=DEVICE))
    assert bool((key_cache[-1, -1] == 1).all())
    assert int(key_cache.count_nonzero()) == int(value_cache.count_nonzero()) == 64 * 128
