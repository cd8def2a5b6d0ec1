"""Rope and KV write in one pass equals the plain truth, padding is not written, and no other page is touched."""

import pytest
import torch

from kernels.fp8 import ProductScales
from kernels.rope_kv import rope_kv, rope_kv_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(14, 2, 64), (3, 1, 80), (4, 4, 96), (8, 1, 128)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("scaled", ["", "scaled", "with bias"])
def test_queries_keys_and_values_are_as_the_truth_has_them(
    num_heads: int, num_kv_heads: int, head_size: int, normed: bool, scaled: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_tokens, width = 7, (num_heads + 2 * num_kv_heads) * head_size
    padded = torch.randn(num_tokens, width + 8, device=DEVICE).to(dtype)
    qkv = padded[:, :width]  # rows with a stride of their own
    positions = torch.randint(0, 64, (num_tokens,), device=DEVICE)
    angles = torch.randn(64, head_size // 2, device=DEVICE)
    slots = torch.tensor([3, -1, 31, 0, 8, 9, 10], device=DEVICE)
    query_norm, key_norm = (torch.rand(head_size, device=DEVICE) + 0.5 if normed else None for _ in range(2))
    scales = None
    if scaled:
        bias = torch.randn(width, device=DEVICE).to(dtype) if scaled == "with bias" else None
        scales = ProductScales(torch.rand(num_tokens, 1, device=DEVICE), torch.rand(1, width, device=DEVICE), bias)
    pages = torch.full((2, 4, 8, num_kv_heads, head_size), 7.0, device=DEVICE, dtype=dtype)
    expected_pages = pages.clone()
    query = rope_kv(
        qkv,
        positions,
        angles.cos(),
        angles.sin(),
        pages[0],
        pages[1],
        slots,
        num_heads,
        query_norm,
        key_norm,
        scales=scales,
    )
    expected = rope_kv_reference(
        qkv,
        positions,
        angles.cos(),
        angles.sin(),
        expected_pages[0],
        expected_pages[1],
        slots,
        num_heads,
        query_norm,
        key_norm,
        scales=scales,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pages, expected_pages, rtol=tolerance, atol=tolerance)
    untouched = [slot for slot in range(32) if slot not in slots.tolist()]
    assert (pages.view(2, 32, num_kv_heads, head_size)[:, untouched] == 7.0).all()


def test_no_tokens_are_no_work() -> None:
    pages = torch.zeros(2, 1, 8, 1, 16, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    table = torch.ones(4, 8, device=DEVICE)
    query = rope_kv(torch.empty(0, 64, device=DEVICE), none, table, table, pages[0], pages[1], none, num_heads=2)
    assert query.shape == (0, 2, 16)
