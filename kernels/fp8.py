"""FP8 (e4m3) activations with one dynamic scale a row, made where the values are: in the norm, in SiLU-and-multiply.

A row's scale is its largest magnitude / 448, so x = fp8 * scale; a row of zeros has scale 1. The product
`torch._scaled_mm` takes the rows' scales and the weight's scales by output channel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0  # the largest finite e4m3


@dataclass(frozen=True, slots=True)
class ProductScales:
    """What a product that `fp8_product` left unscaled (num_rows, num_cols) is yet to be multiplied with."""

    rows: torch.Tensor  # (num_rows, 1) float32
    cols: torch.Tensor  # (1, num_cols) float32
    bias: torch.Tensor | None = None  # (num_cols,), added behind them

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        """The truth, in float32."""
        scaled = product.float() * self.rows * self.cols
        return scaled if self.bias is None else scaled + self.bias.float()


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (num_rows, num_cols) -> e4m3 of the same shape and float32 scales (num_rows, 1)."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def add_rms_norm_fp8_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scales: ProductScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 of the normed sum, its scales (num_rows, 1), the sum); without a residual the sum is x.

    `scales`: x is a product yet to be scaled.
    """
    if scales is not None:
        x = scales.apply(x)
    total = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    f = total.float()
    normed = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()
    quantised, scale = quantise_rows_reference(normed)
    return quantised, scale, total


def silu_and_multiply_fp8_reference(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up (num_rows, 2 * num_cols) -> e4m3 of silu(gate) * up, (num_rows, num_cols), and scales (num_rows, 1)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantise_rows_reference(torch.nn.functional.silu(gate) * up)


@triton.jit
def _scale_of(largest):
    return tl.where(largest > 0, largest / 448.0, 1.0)


@triton.jit
def _quantise_rows_kernel(x_ptr, out_ptr, scale_ptr, x_stride, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31 on long batches
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(x), axis=0))
    tl.store(out_ptr + row * num_cols + cols, (x / scale).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _add_rms_norm_fp8_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, sum_ptr, row_scale_ptr, col_scale_ptr, x_stride, num_cols, eps,
    ADD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if SCALE:
        x = x * tl.load(row_scale_ptr + row) * tl.load(col_scale_ptr + cols, mask=mask, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + row * num_cols + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * num_cols + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps) * weight
    scale = _scale_of(tl.max(tl.abs(normed), axis=0))
    tl.store(out_ptr + row * num_cols + cols, (normed / scale).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gated(in_ptr, cols, num_cols):
    mask = cols < num_cols
    gate = tl.load(in_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + num_cols + cols, mask=mask, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _silu_and_multiply_fp8_kernel(
    in_ptr, out_ptr, scale_ptr, in_stride, num_cols, BLOCK: tl.constexpr, REST: tl.constexpr
):
    # The whole row in registers, in two parts, since a row of 18,944 would leave two fifths of one power of two idle.
    row = tl.program_id(0).to(tl.int64)
    in_ptr += row * in_stride
    out_ptr += row * num_cols
    cols = tl.arange(0, BLOCK)
    first = _gated(in_ptr, cols, num_cols)
    largest = tl.max(tl.abs(first), axis=0)
    if REST > 0:
        rest_cols = BLOCK + tl.arange(0, REST)
        rest = _gated(in_ptr, rest_cols, num_cols)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=0))
    scale = _scale_of(largest)
    tl.store(out_ptr + cols, (first / scale).to(tl.float8e4nv), mask=cols < num_cols)
    if REST > 0:
        tl.store(out_ptr + rest_cols, (rest / scale).to(tl.float8e4nv), mask=rest_cols < num_cols)
    tl.store(scale_ptr + row, scale)


def _outputs(num_rows: int, num_cols: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty((num_rows, num_cols), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((num_rows, 1), dtype=torch.float32, device=device),
    )


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row; as `quantise_rows_reference`."""
    num_rows, num_cols = x.shape
    assert x.stride(1) == 1, f"last dimension has stride {x.stride(1)}"
    out, scale = _outputs(num_rows, num_cols, x.device)
    if num_rows:
        block = triton.next_power_of_2(num_cols)
        _quantise_rows_kernel[(num_rows,)](x, out, scale, x.stride(0), num_cols, BLOCK=block, num_warps=8)
    return out, scale


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scales: ProductScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One program a row; as `add_rms_norm_fp8_reference`."""
    num_rows, num_cols = x.shape
    assert x.stride(1) == 1, f"last dimension has stride {x.stride(1)}"
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    assert scales is None or (residual is not None and scales.bias is None), "unscaled products are added, without bias"
    out, scale = _outputs(num_rows, num_cols, x.device)
    total = x if residual is None else torch.empty_like(residual)
    row_scale, col_scale = (scales.rows, scales.cols) if scales is not None else (None, None)
    if num_rows:
        _add_rms_norm_fp8_kernel[(num_rows,)](
            x, residual, weight, out, scale, total, row_scale, col_scale, x.stride(0), num_cols, eps,
            ADD=residual is not None, SCALE=scales is not None, BLOCK=triton.next_power_of_2(num_cols), num_warps=8,
        )  # fmt: skip
    return out, scale, total


def silu_and_multiply_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row; as `silu_and_multiply_fp8_reference`."""
    num_rows, twice = gate_up.shape
    assert gate_up.stride(1) == 1, f"last dimension has stride {gate_up.stride(1)}"
    out, scale = _outputs(num_rows, twice // 2, gate_up.device)
    if num_rows:
        num_cols = twice // 2
        block = 1 << (num_cols.bit_length() - 1)
        rest = triton.next_power_of_2(num_cols - block) if num_cols > block else 0
        _silu_and_multiply_fp8_kernel[(num_rows,)](
            gate_up, out, scale, gate_up.stride(0), num_cols, BLOCK=block, REST=rest, num_warps=16
        )  # fmt: skip
    return out, scale


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (out, in) -> e4m3 of the same shape and float32 scales (1, out), one an output channel."""
    quantised, scale = quantise_rows_reference(weight)
    return quantised, scale.t().contiguous()


def fp8_linear(
    x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x (num_rows, in) e4m3, scale (num_rows, 1); weight (out, in) e4m3, weight_scale (1, out) -> (num_rows, out).

    Accumulates in the tensor cores' fast mode; the bias is added in the product's epilogue.
    """
    if x.shape[0] == 0:
        return torch.empty((0, weight.shape[0]), dtype=out_dtype, device=x.device)
    return torch._scaled_mm(
        x, weight.t(), scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=True
    )


def fp8_product(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """x (num_rows, in) e4m3 times weight (out, in) e4m3, not scaled: (num_rows, out) bf16, whose range holds it.

    `one`: a float32 1 on the device. Faster than `fp8_linear` below some thousand rows; the scales by rows and columns
    are left to whatever reads the product.
    """
    return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
