"""Index arrays from host to device, one copy a step, out of pinned memory that rotates: no copy is waited for."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.step_arrays import IntArray

_ALIGNMENT = 4  # ints: kernels load index tensors 16 bytes at a time
_DEPTH = 3  # copies that may be on their way: of the step that runs, the one launched, the one being made


class Staging:
    """Pinned buffers for one CUDA device's steps."""

    def __init__(self, device: torch.device, num_ints: int) -> None:
        """`num_ints`: the most that a step uploads."""
        self._device = device
        self._buffers = [torch.empty(num_ints, dtype=torch.int32, pin_memory=True) for _ in range(_DEPTH)]
        self._copied = [torch.cuda.Event() for _ in range(_DEPTH)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, arrays: Sequence[IntArray], target: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The arrays as int32 tensors of the same shapes on the device, slices of one; of `target` where given."""
        turn, self._turn = self._turn, (self._turn + 1) % _DEPTH
        self._copied[turn].synchronize()
        buffer = self._buffers[turn]
        host = buffer.numpy()
        end = 0
        offsets = layout([array.shape for array in arrays])
        for array, offset in zip(arrays, offsets, strict=True):
            end = offset + array.size
            np.copyto(host[offset:end].reshape(array.shape), array)
        if target is None:
            target = torch.empty(end, dtype=torch.int32, device=self._device)
        target[:end].copy_(buffer[:end], non_blocking=True)
        self._copied[turn].record()
        return slices(target, [array.shape for array in arrays])


def layout(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each array begins in the one buffer, in ints."""
    offsets, end = [], 0
    for shape in shapes:
        offsets.append(end)
        end += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
    return offsets


def slices(buffer: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Views of a one-dimensional buffer with these shapes, laid out as `layout` says."""
    return [
        buffer[offset : offset + int(np.prod(shape))].view(shape)
        for offset, shape in zip(layout(shapes), shapes, strict=True)
    ]
