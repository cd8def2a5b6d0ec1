"""Tensors out of a GGUF file, dequantised as they are read.

The common block formats are a few lines of torch each, bit for bit what gguf's numpy gives and several times faster;
the others go through the gguf package, imported only then. Formats: ggml's `block_*` structures (ggml-common.h).
"""

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.weights.checkpoint import sampled_digest
from engine.weights.gguf_metadata import GGUFMetadata, GGUFTensor, read_gguf_metadata
from engine.weights.names import Naming
from engine.weights.upload import FileRange
from schemas.errors import ModelError

_CHUNK_ELEMENTS = 2**20  # dequantised at a time: float32 intermediates stay near the cache


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor type stores its elements: blocks of so many elements in so many bytes, and the way back."""

    name: str
    block_elements: int
    block_bytes: int
    dequantise: Callable[[torch.Tensor], torch.Tensor]  # (n, block_bytes) uint8 -> (n, block_elements) float


class GGUFCheckpoint:
    """A GGUF file as named tensors. The file stays mapped as long as the object lives."""

    naming: Naming = "gguf"

    def __init__(self, metadata: GGUFMetadata) -> None:
        """Raises ModelError where the file is shorter than its header says, or holds a type that nobody can read."""
        self.where = str(metadata.path)
        self._metadata = metadata
        self._tensors = {tensor.name: tensor for tensor in metadata.tensors}
        self._formats = {tensor.name: block_format(tensor, metadata.path) for tensor in metadata.tensors}
        end = max((t.offset + self._num_bytes(t) for t in metadata.tensors), default=metadata.data_start)
        if metadata.file_bytes < end:
            raise ModelError(
                f"{metadata.path} is cut short: its header promises {end:,} bytes, it has {metadata.file_bytes:,}; "
                "fetch it again"
            )
        with metadata.path.open("rb") as file:
            # Copy on write: torch wants writable memory, and nothing here writes.
            self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    @classmethod
    def open(cls, path: Path) -> "GGUFCheckpoint":
        return cls(read_gguf_metadata(path))

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensors[name].shape))

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fills `out`, of the tensor's shape and any float dtype and device, a million elements at a time."""
        tensor, form = self._tensors[name], self._formats[name]
        assert tuple(out.shape) == self.shape(name), f"{name}: {tuple(out.shape)} for {self.shape(name)}"
        assert out.is_contiguous()
        num_bytes = self._num_bytes(tensor)
        raw = torch.frombuffer(self._view, dtype=torch.uint8, offset=tensor.offset, count=num_bytes)
        blocks, flat = raw.view(-1, form.block_bytes), out.view(-1)
        step = max(1, _CHUNK_ELEMENTS // form.block_elements)
        for first in range(0, blocks.shape[0], step):
            values = form.dequantise(blocks[first : first + step]).view(-1)
            start = first * form.block_elements
            flat[start : start + values.shape[0]].copy_(values)

    def stored_at(self, name: str) -> FileRange | None:
        """Plain numbers lie there as they are; blocks are for `read_into`."""
        tensor = self._tensors[name]
        if (dtype := _PLAIN.get(tensor.ggml_type)) is None:
            return None
        return FileRange(self._metadata.path, tensor.offset, self._num_bytes(tensor), dtype)

    def fingerprint(self) -> str:
        """Over the whole header, vocabulary included, and pages of every tensor."""
        header = bytes(self._view[: self._metadata.data_start])
        pages = (
            (tensor.name, self._view[tensor.offset : tensor.offset + self._num_bytes(tensor)])
            for tensor in self._metadata.tensors
        )
        return sampled_digest([header], pages)

    def _num_bytes(self, tensor: GGUFTensor) -> int:
        form = self._formats[tensor.name]
        return _num_elements(tensor) // form.block_elements * form.block_bytes


def block_format(tensor: GGUFTensor, path: Path) -> BlockFormat:
    """The format of a tensor's type. Raises ModelError for a type that neither we nor the gguf package can read."""
    form = _FORMATS.get(tensor.ggml_type) or _format_of_gguf_package(tensor, path)
    if not tensor.shape or tensor.shape[0] % form.block_elements:
        raise ModelError(
            f"{path}: {tensor.name} has rows of {tensor.shape[:1]}; a multiple of {form.block_elements} is needed"
        )
    return form


def _format_of_gguf_package(tensor: GGUFTensor, path: Path) -> BlockFormat:
    refusal = f"{path}: {tensor.name} is of the tensor type {tensor.ggml_type}"
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"{refusal}, which needs the package gguf") from error
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(torch.zeros(1, block_bytes, dtype=torch.uint8).numpy(), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{refusal}, which cannot be dequantised ({error})") from error

    def dequantise(blocks: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))

    return BlockFormat(kind.name, block_elements, block_bytes, dequantise)


def _num_elements(tensor: GGUFTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _half(columns: torch.Tensor) -> torch.Tensor:
    """(n, 2k) bytes -> (n, k) float32, read as float16."""
    return columns.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(n, k) bytes -> (n, 2k): all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """(n, k) bytes -> (n, 8k) of 0 and 1, each byte's lowest bit first."""
    return (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:  # scale, 16 bytes of nibbles
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).float() - 8.0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:  # scale, minimum, nibbles
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).float() + _half(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:  # scale, 32 fifth bits, nibbles
    quants = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks[:, :2]) * (quants.float() - 16.0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:  # scale, minimum, 32 fifth bits, nibbles
    quants = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks[:, :2]) * quants.float() + _half(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:  # scale, 32 signed bytes
    return _half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8).float()


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes hold 8 scales and 8 minimums of 6 bits; the last four have their high bits in the first ones'."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=1)
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=1)
    return scales.float(), minimums.float()


def _scaled_k(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """quants (n, 8, 32), each run of 32 with its own scale and minimum out of the block's first 16 bytes."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks[:, :2]) * scales).unsqueeze(2)
    minimum = (_half(blocks[:, 2:4]) * minimums).unsqueeze(2)
    return (scale * quants.float() - minimum).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:  # scale, minimum, 12 bytes of scales, 4 x 32 bytes of nibbles
    packed = blocks[:, 16:].view(-1, 4, 1, 32)
    return _scaled_k(blocks, torch.cat((packed & 15, packed >> 4), dim=2).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:  # as Q4_K, with 32 bytes of fifth bits before the nibbles
    packed = blocks[:, 48:].view(-1, 4, 1, 32)
    low = torch.cat((packed & 15, packed >> 4), dim=2).view(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    return _scaled_k(blocks, low | high << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:  # 2 x 64 bytes of nibbles, 2 x 32 of bit pairs, 16 scales, scale
    packed = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat((packed & 15, packed >> 4), dim=2).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).view(-1, 8, 32)
    quants = (low | high << 4).float().view(-1, 16, 16) - 32.0
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(2) * quants).flatten(1)


_FORMATS = {
    0: BlockFormat("F32", 1, 4, lambda blocks: blocks.view(torch.float32)),
    1: BlockFormat("F16", 1, 2, lambda blocks: blocks.view(torch.float16)),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, lambda blocks: blocks.view(torch.bfloat16)),
}
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of these, those whose blocks are numbers
