"""Copies on a CPU in pieces of 8 bytes, whatever the dtype: torch copies rows of bf16 element by element."""

import torch


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of one dtype with their last dimension as int64, where all of them can be read so; else as they are.

    For copies between them alone: what the numbers mean is lost.
    """
    return tuple(x.view(torch.int64) for x in tensors) if all(map(_is_readable, tensors)) else tensors


def _is_readable(x: torch.Tensor) -> bool:
    steps = x.shape[-1] | int(x.storage_offset())
    for stride in x.stride()[:-1]:
        steps |= stride
    return x.stride(-1) == 1 and steps * x.itemsize % 8 == 0  # of all of them, where it is of their bits together
