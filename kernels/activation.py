"""SiLU-and-multiply, the gate of a gated feed-forward layer: out = silu(gate) * up."""

import torch
import triton
import triton.language as tl


def silu_and_multiply_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * n) -> (..., n): the first half, through SiLU, times the second; float32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_and_multiply_kernel(gate_up_ptr, out_ptr, row_stride, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * row_stride passes 2^31 on long batches of wide layers
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    gate = tl.load(gate_up_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + num_cols + cols, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * num_cols + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_multiply_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """One program per row and 1,024 columns; leading dimensions must flatten without a copy."""
    assert gate_up.shape[-1] % 2 == 0, f"gate and up are not of one width: {gate_up.shape[-1]} columns"
    assert gate_up.stride(-1) == 1, f"last dimension has stride {gate_up.stride(-1)}"
    rows = gate_up.view(-1, gate_up.shape[-1])
    num_rows, num_cols = rows.shape[0], rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], num_cols), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(num_cols))
        grid = (num_rows, triton.cdiv(num_cols, block))
        _silu_and_multiply_kernel[grid](rows, out, rows.stride(0), num_cols, BLOCK=block)
    return out


def silu_and_multiply_interleaved_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """(num_rows, 2 * n) -> (num_rows, n): even columns, through SiLU, times odd ones; float32 inside."""
    gate, up = gate_up[:, ::2].float(), gate_up[:, 1::2].float()
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_and_multiply_interleaved_kernel(gate_up_ptr, out_ptr, row_stride, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * row_stride passes 2^31 on long batches of wide layers
    start = tl.program_id(1) * BLOCK
    pairs = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(gate_up_ptr + row * row_stride + pairs, mask=pairs < 2 * num_cols, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    cols = start + tl.arange(0, BLOCK)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * num_cols + cols, out.to(out_ptr.dtype.element_ty), mask=cols < num_cols)


def silu_and_multiply_interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """One program per row and 1,024 columns; as `silu_and_multiply_interleaved_reference`, rows of unit stride."""
    assert gate_up.shape[1] % 2 == 0, f"gate and up are not of one width: {gate_up.shape[1]} columns"
    assert gate_up.stride(1) == 1, f"last dimension has stride {gate_up.stride(1)}"
    num_rows, num_cols = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, num_cols), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(num_cols))
        grid = (num_rows, triton.cdiv(num_cols, block))
        _silu_and_multiply_interleaved_kernel[grid](gate_up, out, gate_up.stride(0), num_cols, BLOCK=block)
    return out


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * n) -> (..., n) in the input's dtype."""
    if gate_up.is_cuda:
        return silu_and_multiply_triton(gate_up)
    # Two passes of vectorised bf16 rather than a copy of everything in float32: one rounding more, half the bytes.
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
