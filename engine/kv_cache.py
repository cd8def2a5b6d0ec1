"""The pool of pages that holds every layer's keys and values."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys and values: (num_layers, num_blocks, block_size, num_kv_heads, head_size), zeroed at start.

    On a CPU they lie in memory head by head within a block, as its attention reads them.
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
        if device.type == "cpu":
            by_head = (num_layers, num_blocks, num_kv_heads, block_size, head_size)
            return cls(*(_zeros(by_head, dtype, device).transpose(2, 3) for _ in range(2)))
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_size)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values, each (num_blocks, block_size, num_kv_heads, head_size)."""
        return self.keys[layer_id], self.values[layer_id]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clears pages that hold NaN or infinity, before somebody else gets them."""
        indices = torch.tensor(block_ids, dtype=torch.int64, device=self.keys.device)
        self.keys.index_fill_(1, indices, 0.0)
        self.values.index_fill_(1, indices, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system's zeros: memory is taken when it is first written, not all of it at start; and 2 MB at a time where
    # the system has such pages, as taking 4 kB each time is a third of a second of a first step of 7,000 tokens.
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
