"""The pool of pages that holds every layer's keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys and values: (num_layers, num_blocks, block_size, num_kv_heads, head_size), zeroed at start.

    One block table addresses all layers. Pages are read past a sequence's end by some kernels, so they must be finite.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_size)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values, each (num_blocks, block_size, num_kv_heads, head_size)."""
        return self.keys[layer_id], self.values[layer_id]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]
