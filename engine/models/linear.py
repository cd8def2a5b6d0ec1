"""A matrix product with a stored weight: plain on a GPU, in oneDNN's own weight layout on a CPU.

The layout is chosen once, at load: F.linear reorders the weight in each call instead, which costs a step of 64 rows
20 to 40% (tests/bench/cpu_linear.py).
"""

import torch
from torch.nn import functional

_PACKABLE = (torch.float32, torch.bfloat16)


class Linear:
    """y = x @ weight.T + bias. x is (num_tokens, in_features); y is (num_tokens, out_features), in x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight (out_features, in_features); it is packed here, so a caller who keeps no reference frees it."""
        self._bias = bias
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._is_packed = weight.device.type == "cpu" and weight.dtype in _PACKABLE and has_onednn
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed and x.shape[0]:  # oneDNN refuses products of nothing
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        if self._is_packed:
            return x.new_empty((0, self._weight.shape[0]))
        return functional.linear(x, self._weight, self._bias)
