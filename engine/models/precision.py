"""In what precision a decoder's matrix products run, and the fused operations that feed them.

Between two products an activation is either a plain tensor or, for FP8 products, rows with a scale each; only the
operations here know which. The language model head and the residual stream stay in the model's own dtype.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from engine.group import Group
from engine.models.linear import GatedLinear, Linear
from kernels.fp8 import (
    ProductScales,
    add_rms_norm_fp8,
    fp8_linear,
    fp8_product,
    quantise_rows,
    quantise_weight,
    silu_and_multiply_fp8,
)
from kernels.norm import add_rms_norm, rms_norm

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)


class Product(Protocol[A_contra]):
    """One matrix product with a stored weight."""

    def __call__(self, x: A_contra, /) -> torch.Tensor: ...


class PartialProduct:
    """The sum, over several ranks, of each one's product of its part of the input with its part of the weight."""

    def __init__(self, product: Product[Any], group: Group) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: Any) -> torch.Tensor:
        return self._group.all_reduce(self._product(x))


class Gated(Protocol[A]):
    """A gated feed-forward layer's first product, and its gate."""

    def __call__(self, x: A, /) -> A: ...


class Precision(Protocol[A]):
    """How activations enter the products of one decoder."""

    widens: bool  # a CPU's products hold and multiply their weights in float32

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product[A]:
        """Takes weight (out_features, in_features) in the model's dtype, in the form that the product reads."""
        ...

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Gated[A]:
        """The same of weight (2 * n, in_features), gate's rows and then up's: a product with SiLU-and-multiply."""
        ...

    def enter(self, x: torch.Tensor) -> A:
        """(num_tokens, n), as attention left it."""
        ...

    def project(self, product: Any, x: A) -> tuple[torch.Tensor, ProductScales | None]:
        """One of our products of x, and what it is yet to be scaled with, where its reader does that."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> A: ...

    def add_norm(
        self, product: Any, x: A, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[A, torch.Tensor]:
        """(the normed sum, the sum) of the residual and one of our products of x. The residual may be overwritten."""
        ...


class PlainPrecision:
    """Activations in the model's own dtype, and products too unless they are widened."""

    def __init__(self, widens: bool = False) -> None:
        self.widens = widens

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(weight, bias, self.widens)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GatedLinear:
        return GatedLinear(weight, bias, self.widens)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def project(self, product: Linear, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return product(x), None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self,
        product: Linear | PartialProduct,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(product, PartialProduct) or not product.adds_fast(x.shape[0]):
            return add_rms_norm(product(x), residual, weight, eps)
        product.add_to(residual, x)
        return rms_norm(residual, weight, eps), residual


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values (num_rows, n) e4m3; scale (num_rows, 1) float32."""

    values: torch.Tensor
    scale: torch.Tensor


# Up to so many rows a product without scales is the faster one, and the norm behind it can apply them: 33 against 51
# microseconds at 256 rows of the 7B shape's down, 108 against 116 at 1,024, 233 against 226 at 2,048 (an H200).
_MAX_ROWS_UNSCALED = 1024


class Fp8Product:
    """An e4m3 weight with a scale an output channel, times e4m3 rows with a scale each."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._scale = quantise_weight(weight)
        self._bias = bias
        self._out_dtype = weight.dtype
        self._one = torch.ones((), device=weight.device)

    def project(self, x: Fp8Rows) -> tuple[torch.Tensor, ProductScales | None]:
        """The product, and what it is yet to be scaled with, if anything."""
        if self._out_dtype == torch.bfloat16 and 0 < x.values.shape[0] <= _MAX_ROWS_UNSCALED:
            return fp8_product(x.values, self._weight, self._one), ProductScales(x.scale, self._scale, self._bias)
        return self(x), None

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def __call__(self, x: Fp8Rows) -> torch.Tensor:
        return fp8_linear(x.values, x.scale, self._weight, self._scale, self._bias, self._out_dtype)


class Fp8Precision:
    """Weights by channel, activations by token, quantised in the operation that makes them (Hopper, Ada and later)."""

    widens = False

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Fp8Product:
        return Fp8Product(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Gated[Fp8Rows]:
        product = Fp8Product(weight, bias)
        return lambda x: Fp8Rows(*silu_and_multiply_fp8(product(x)))

    def enter(self, x: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(*quantise_rows(x))

    def project(self, product: Fp8Product, x: Fp8Rows) -> tuple[torch.Tensor, ProductScales | None]:
        return product.project(x)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Fp8Rows:
        values, scale, _ = add_rms_norm_fp8(x, None, weight, eps)
        return Fp8Rows(values, scale)

    def add_norm(
        self, product: Fp8Product | PartialProduct, x: Fp8Rows, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[Fp8Rows, torch.Tensor]:
        # Ranks' rows have scales of their own, so a sum over ranks is of scaled products.
        if isinstance(product, PartialProduct) or product.has_bias:
            summand, scales = product(x), None
        else:
            summand, scales = product.project(x)
        values, scale, total = add_rms_norm_fp8(summand, residual, weight, eps, scales)
        return Fp8Rows(values, scale), total
