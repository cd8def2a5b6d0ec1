"""Products with stored weights on a CPU are torch's own, with and without a bias, on any number of rows."""

import pytest
import torch
from torch.nn import functional

from engine.models.linear import GatedLinear, Linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_torchs_own(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = (torch.randn(48, 40, generator=generator) / 6).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 40, generator=generator).to(dtype)
    expected = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gate, up = expected.chunk(2, dim=-1)
    for product, truth in ((Linear, expected), (GatedLinear, functional.silu(gate) * up)):
        y = product(weight, bias)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), truth, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [0, 1, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_widened_product_rounds_once_and_only_on_its_way_out(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(48, 40, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if has_bias else None
    x = torch.randn(num_rows, 40, generator=generator).bfloat16()
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    product = Linear(weight, bias, widen=True)
    assert product.unrounded(x).dtype == torch.float32
    torch.testing.assert_close(product.unrounded(x).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(x), exact.bfloat16(), rtol=2**-7, atol=1e-5)
    gate, up = exact.chunk(2, dim=-1)
    gated = GatedLinear(weight, bias, widen=True)(x)
    torch.testing.assert_close(gated, (functional.silu(gate) * up).bfloat16(), rtol=2**-7, atol=1e-5)
