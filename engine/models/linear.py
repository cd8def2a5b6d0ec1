"""A matrix product with a stored weight: plain on a GPU, in oneDNN's own weight layout on a CPU.

The layout is chosen once, at load: F.linear reorders the weight in each call instead, which costs a step of 64 rows
20 to 40% (tests/bench/cpu_linear.py). A product that is widened holds and multiplies its weight in float32: what comes
out is what the narrow product would give, sums of exact products rounded once, on CPUs where that is the faster way.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.activation import silu_and_multiply, silu_and_multiply_interleaved
from kernels.gated_product import GatedProduct, interleave_gate_up, supports_gated_product

_PACKABLE = (torch.float32, torch.bfloat16)
# Of the 7B shape's down and the norm behind it (an H200, tests/bench/products_gpu.py): 67 against 65 microseconds at
# 256 rows, 113 against 121 at 512, 1,589 against 1,632 at 8,192.
MIN_ROWS_ADDED = 512


def _is_packable(weight: torch.Tensor) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight.device.type == "cpu" and weight.dtype in _PACKABLE and has_onednn


def _widened(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.float(), None if bias is None else bias.float()


class Linear:
    """y = x @ weight.T + bias. x is (num_tokens, in_features); y is (num_tokens, out_features), in x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, widen: bool = False) -> None:
        """weight (out_features, in_features); it is packed here, so a caller who keeps no reference frees it.

        `widen`: to float32, on a CPU.
        """
        if widen:
            weight, bias = _widened(weight, bias)
        self._bias = bias
        self._is_packed = _is_packable(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.unrounded(x).to(x.dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """y as the product leaves it: in float32 where it is widened."""
        x = x.to(self._weight.dtype)
        if self._is_packed and x.shape[0]:  # oneDNN refuses products of nothing
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y
        if self._is_packed:
            return x.new_empty((0, self._weight.shape[0]))
        return functional.linear(x, self._weight, self._bias)

    def adds_fast(self, num_rows: int) -> bool:
        """Whether `add_to` is worth it: not of few rows, where cuBLAS divides a product otherwise."""
        return self._weight.is_cuda and self._bias is None and num_rows >= MIN_ROWS_ADDED

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual (num_tokens, out_features) += x @ weight.T, in place, in the product's epilogue, rounded once."""
        assert self._bias is None
        residual.addmm_(x, self._weight.t())


class _PackedGate:
    """Gate and up in oneDNN's layout: SiLU and the multiplication are done on the products' sums, before they round."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight (2 x n, in_features): gate's rows, then up's."""
        self._gate, self._up = (torch.ops.mkldnn._reorder_linear_weight(part.contiguous()) for part in weight.chunk(2))
        self._biases: Sequence[torch.Tensor | None] = (None, None) if bias is None else bias.chunk(2)

    def is_fast(self, num_tokens: int) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.shape[0]:  # oneDNN refuses products of nothing
            return x.new_empty((0, self._gate.shape[0]))
        wide = x.to(self._gate.dtype)
        gate = torch.ops.mkldnn._linear_pointwise.default(wide, self._gate, self._biases[0], "swish", [], "")
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(wide, gate, self._up, self._biases[1], "mul")
        return y.to(x.dtype)


class GatedLinear:
    """silu(x @ gate.T) * (x @ up.T). x is (num_tokens, in_features); the result is (num_tokens, out_features / 2)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, widen: bool = False) -> None:
        """weight (out_features, in_features): gate's rows, then up's. `widen`: to float32, on a CPU."""
        if widen:
            weight, bias = _widened(weight, bias)
        self._fused: GatedProduct | _PackedGate | None = None
        if _is_packable(weight):
            self._fused = _PackedGate(weight, bias)
            return
        if bias is None and supports_gated_product(weight):
            weight = interleave_gate_up(weight)
            self._fused = GatedProduct(weight)
        self._linear = Linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is None:
            return silu_and_multiply(self._linear(x))
        if self._fused.is_fast(x.shape[0]):
            return self._fused(x)
        return silu_and_multiply_interleaved(self._linear(x))
