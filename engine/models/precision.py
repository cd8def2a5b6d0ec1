"""In what precision a decoder's matrix products run, and the fused operations that feed them.

Between two products an activation is either a plain tensor or, for FP8 products, rows with a scale each; only the
operations here know which. The language model head and the residual stream stay in the model's own dtype.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.models.linear import Linear
from kernels.activation import silu_and_multiply
from kernels.fp8 import add_rms_norm_fp8, fp8_linear, quantise_rows, quantise_weight, silu_and_multiply_fp8
from kernels.norm import add_rms_norm, rms_norm

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)


class Product(Protocol[A_contra]):
    """One matrix product with a stored weight."""

    def __call__(self, x: A_contra, /) -> torch.Tensor: ...


class Precision(Protocol[A]):
    """How activations enter the products of one decoder."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product[A]:
        """Takes weight (out_features, in_features) in the model's dtype, in the form that the product reads."""
        ...

    def enter(self, x: torch.Tensor) -> A:
        """(num_tokens, n), as attention left it."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> A: ...

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[A, torch.Tensor]:
        """(normed x + residual, x + residual)."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> A: ...


class PlainPrecision:
    """Products in the model's own dtype."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(weight, bias)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_multiply(gate_up)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values (num_rows, n) e4m3; scale (num_rows, 1) float32."""

    values: torch.Tensor
    scale: torch.Tensor


class Fp8Product:
    """An e4m3 weight with a scale an output channel, times e4m3 rows with a scale each."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._scale = quantise_weight(weight)
        self._bias = bias
        self._out_dtype = weight.dtype

    def __call__(self, x: Fp8Rows) -> torch.Tensor:
        return fp8_linear(x.values, x.scale, self._weight, self._scale, self._bias, self._out_dtype)


class Fp8Precision:
    """Weights by channel, activations by token, quantised in the operation that makes them (Hopper, Ada and later)."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Fp8Product:
        return Fp8Product(weight, bias)

    def enter(self, x: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(*quantise_rows(x))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Fp8Rows:
        values, scale, _ = add_rms_norm_fp8(x, None, weight, eps)
        return Fp8Rows(values, scale)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[Fp8Rows, torch.Tensor]:
        values, scale, total = add_rms_norm_fp8(x, residual, weight, eps)
        return Fp8Rows(values, scale), total

    def silu_and_multiply(self, gate_up: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(*silu_and_multiply_fp8(gate_up))
