"""The gated product that computes SiLU-and-multiply in its epilogue: quack's kernel, on a Hopper GPU alone."""

import pytest
import torch

from kernels.activation import silu_and_multiply_reference
from kernels.gated_product import GatedProduct, interleave_gate_up, supports_gated_product


def is_supported() -> bool:
    return torch.cuda.is_available() and supports_gated_product(torch.empty(16, 8, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not is_supported(), reason="needs a Hopper GPU and quack, which comes with flash-attn 4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize(("num_cols", "num_inner"), [(8, 8), (200, 72), (1024, 520)])
def test_the_gated_product_is_the_truths(num_rows: int, num_cols: int, num_inner: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(num_rows, num_inner, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(2 * num_cols, num_inner, device="cuda", generator=generator) * num_inner**-0.5).to(dtype)
    expected = silu_and_multiply_reference(x.float() @ weight.float().t())
    torch.testing.assert_close(GatedProduct(interleave_gate_up(weight))(x).float(), expected, rtol=1.6e-2, atol=1e-2)


def test_weights_on_a_cpu_are_not_for_it() -> None:
    assert not supports_gated_product(torch.empty(16, 8, dtype=torch.bfloat16))
