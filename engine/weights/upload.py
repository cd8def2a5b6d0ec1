"""Tensors from files to a GPU: read by several threads into pinned buffers, copied from there while others are filled.

Disk and PCIe work at the same time, and both while the device packs what has arrived: the buffers are filled ahead, in
the order in which the tensors will be asked for.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from schemas.errors import ModelError

BUFFER_BYTES = 32 * 2**20
NUM_BUFFERS = 8
NUM_THREADS = 4  # one copies some GB/s out of the page cache; an NVMe disk wants several questions at a time


@dataclass(frozen=True, slots=True)
class FileRange:
    """One tensor's bytes as they lie in a file, row by row."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype


class Upload:
    """Reads `ranges` ahead, in their order; `next_into` takes one after the other. Owns threads and files: a context.

    On a CPU the buffers are not pinned and each copy is done when it returns.
    """

    def __init__(
        self,
        ranges: Sequence[FileRange],
        device: torch.device,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """`buffer_bytes`: a multiple of 8, so that no number is cut. Raises ModelError for what cannot be opened."""
        assert buffer_bytes % 8 == 0, f"buffers of {buffer_bytes} bytes"
        is_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(num_buffers)]
        self._memory = [buffer.numpy().data for buffer in self._buffers]
        # When the last copy out of each buffer is over.
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._ranges = deque(ranges)
        self._to_fill = _pieces(ranges, buffer_bytes)
        self._filling: deque[tuple[FileRange, int, Future[None]]] = deque()  # piece, buffer
        self._files: dict[Path, int] = {}
        self._threads = ThreadPoolExecutor(num_threads, "weights")
        try:
            for path in dict.fromkeys(each.path for each in ranges):
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise _unreadable(path, error) from error
        for buffer_id in range(num_buffers):
            self._fill_next(buffer_id)

    def __enter__(self) -> "Upload":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads; what was not taken is not read. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def next_into(self, out: torch.Tensor) -> None:
        """Copies the next range into `out`: contiguous, on the device, of as many elements, of any float dtype.

        On a GPU the copies are in the order of the current stream and may not be over yet. Raises ModelError where the
        file cannot be read.
        """
        taken = self._ranges.popleft()
        assert out.numel() * taken.dtype.itemsize == taken.num_bytes, f"{tuple(out.shape)} of {taken.num_bytes} bytes"
        flat = out.view(-1)
        first = 0
        while first < flat.shape[0]:
            piece, buffer_id, filled = self._filling.popleft()
            filled.result()
            values = self._buffers[buffer_id][: piece.num_bytes].view(piece.dtype)
            end = first + values.shape[0]
            if piece.dtype == out.dtype:
                flat[first:end].copy_(values, non_blocking=True)
            else:  # converted on the device: before the copy, the host would do it
                flat[first:end].copy_(values.to(self._device, non_blocking=True))
            if self._device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(torch.cuda.current_stream(self._device))
                self._copied[buffer_id] = copied
            self._fill_next(buffer_id)
            first = end

    def _fill_next(self, buffer_id: int) -> None:
        if (piece := next(self._to_fill, None)) is not None:
            self._filling.append((piece, buffer_id, self._threads.submit(self._fill, piece, buffer_id)))

    def _fill(self, piece: FileRange, buffer_id: int) -> None:
        """On a thread."""
        if (copied := self._copied[buffer_id]) is not None:
            copied.synchronize()
        left, offset = self._memory[buffer_id][: piece.num_bytes], piece.offset
        while left:
            try:
                count = os.preadv(self._files[piece.path], [left], offset)
            except OSError as error:
                raise _unreadable(piece.path, error) from error
            if count == 0:
                raise ModelError(f"{piece.path} became shorter than {offset + len(left):,} bytes while it was read")
            left, offset = left[count:], offset + count


def _pieces(ranges: Sequence[FileRange], buffer_bytes: int) -> Iterator[FileRange]:
    """The ranges in their order, cut to buffers; none holds bytes of two."""
    for each in ranges:
        for start in range(0, each.num_bytes, buffer_bytes):
            yield FileRange(each.path, each.offset + start, min(buffer_bytes, each.num_bytes - start), each.dtype)


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror or error}")
