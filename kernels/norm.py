"""RMS norm over the last dimension, alone or behind the residual sum: y = x / rms(x) * (weight + weight_offset).

`weight_offset` is 1 for families that store weight - 1 (Gemma). It may be a head's (query and key norm).
"""

import torch
import triton
import triton.language as tl


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """(..., n) -> (..., n), float32 inside."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * (weight.float() + weight_offset)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual): the sum is rounded to the residual's dtype, then normed."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm_reference(total, weight, eps, weight_offset), total


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    new_residual_ptr,
    num_inner,
    x_outer_stride,
    x_inner_stride,
    residual_stride,
    num_cols,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31 on long batches
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    x_row = x_ptr + row // num_inner * x_outer_stride + row % num_inner * x_inner_stride
    x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        # Rounded first: what is normed here is what the next layer adds to.
        rounded = x.to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * num_cols + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps)
    out = x * scale * (weight + weight_offset)
    tl.store(out_ptr + row * num_cols + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """One program per row; x is (rows, n) or (tokens, heads, n), with unit stride in the last dimension."""
    assert x.dim() in (2, 3), f"x is (rows, n) or (tokens, heads, n), not {tuple(x.shape)}"
    assert x.stride(-1) == 1, f"last dimension has stride {x.stride(-1)}"
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}"
    assert weight.is_contiguous()
    num_inner = x.shape[1] if x.dim() == 3 else 1
    inner_stride = x.stride(1) if x.dim() == 3 else 0
    num_cols = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(num_cols)
        _rms_norm_kernel[(out.numel() // num_cols,)](
            x, x, weight, out, out, num_inner, x.stride(0), inner_stride, 0, num_cols, eps, weight_offset,
            HAS_RESIDUAL=False, BLOCK=block,
        )  # fmt: skip
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program per row; x and residual are (num_tokens, n) with unit stride in the last dimension."""
    assert x.dim() == 2, f"x is (num_tokens, n), not {tuple(x.shape)}"
    assert x.shape == residual.shape, f"x {tuple(x.shape)}, residual {tuple(residual.shape)}"
    assert x.stride(-1) == 1, f"x's last dimension has stride {x.stride(-1)}"
    assert residual.stride(-1) == 1, f"residual's last dimension has stride {residual.stride(-1)}"
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}"
    assert weight.is_contiguous()
    num_rows, num_cols = x.shape
    out = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device)
    new_residual = torch.empty((num_rows, num_cols), dtype=residual.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(num_cols)
        _rms_norm_kernel[(num_rows,)](
            x, residual, weight, out, new_residual, 1, x.stride(0), 0, residual.stride(0), num_cols, eps, weight_offset,
            HAS_RESIDUAL=True, BLOCK=block,
        )  # fmt: skip
    return out, new_residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """(..., n) -> (..., n) in x's dtype; on CUDA (rows, n) or (tokens, heads, n)."""
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps, weight_offset)
    # Batch norm of rows as channels is the one kernel that scales bf16 rows by float32 numbers in a single pass. The
    # weight comes behind it, so what is not float32 is rounded once more, as in transformers.
    rows = x.reshape(1, -1, x.shape[-1])
    mean_square = torch.linalg.vector_norm(rows[0], dim=-1, dtype=torch.float32).square_().div_(x.shape[-1])
    no_mean = torch.zeros_like(mean_square)
    normed = torch.batch_norm(rows, None, None, no_mean, mean_square, False, 0.0, eps, False)
    return normed.view(x.shape).mul_(weight.float() + weight_offset if weight_offset else weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual) of x + residual, both (num_tokens, n); neither input is changed."""
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps, weight_offset)
    total = x + residual  # float32 inside, one rounding: the same as the truth's
    return rms_norm(total, weight, eps, weight_offset), total
