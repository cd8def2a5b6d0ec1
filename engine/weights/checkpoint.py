"""Streams a checkpoint into the decoder's parameters, one tensor at a time, whatever the checkpoint's format.

Peak memory is the parameters so far and one tensor more: each part is read straight into its rows of the parameter, on
a GPU by way of pinned buffers (engine.weights.upload).
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Protocol

import torch

from engine.model_config import ModelConfig
from engine.weights.names import Naming, Parameter, check_names, expected_parameters, tied_head_name
from engine.weights.upload import FileRange, Upload
from schemas.errors import ModelError

_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 8


class Checkpoint(Protocol):
    """Named tensors on disk."""

    naming: Naming
    where: str  # for messages: the file or folder

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fills `out`, of the tensor's shape and any float dtype and device. Raises ModelError where it cannot."""

    def stored_at(self, name: str) -> FileRange | None:
        """Where its numbers lie as they are; None where `read_into` must decode them. Raises ModelError as that."""

    def fingerprint(self) -> str:
        """What the weights are known by, as 32 hexadecimal digits (`sampled_digest` says what goes in)."""


def stream_parameters(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter, tensor) in the order of use; every checkpoint tensor is read exactly once.

    Names and shapes are checked before the first read. Raises ModelError with the names that are missing or not used.
    `progress` is told the share of the elements read, 0 to 1.
    """
    parameters = expected_parameters(config, checkpoint.naming)
    tied_head = tied_head_name(config, checkpoint.naming)
    check_names(parameters, checkpoint.names(), checkpoint.where, tied_head)
    for parameter in parameters:
        _check_shapes(parameter, checkpoint)

    num_elements = sum(_num_elements(parameter.shape) for parameter in parameters)
    num_read = 0
    stored = {part: checkpoint.stored_at(part) for parameter in parameters for part in parameter.parts}
    to_upload = [each for each in stored.values() if each is not None] if device.type == "cuda" else []
    with Upload(to_upload, device) if to_upload else nullcontext() as upload:
        for parameter in parameters:
            # The rope's factors make float32 tables; in bf16 they would turn far positions by whole radians.
            tensor = torch.empty(
                parameter.shape, dtype=torch.float32 if parameter.name == "rope.factors" else dtype, device=device
            )
            first = 0
            for part, rows, heads in zip(parameter.parts, parameter.part_rows, parameter.permuted_heads, strict=True):
                out = tensor[first : first + rows]
                if upload is not None and stored[part] is not None:
                    upload.next_into(out)
                else:
                    checkpoint.read_into(part, out)
                if heads:
                    out.copy_(halves_from_interleaved(out, heads))
                first += rows
            if parameter.name == "embedding.weight" and tied_head in checkpoint.names():
                _check_tied_head(checkpoint, str(tied_head), tensor)
            num_read += tensor.numel()
            progress(num_read / num_elements)
            yield parameter.name, tensor


def halves_from_interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes the order in which GGUF files of Llama's kind hold q and k.

    There row 2i and 2i + 1 of a head turn together; here, as in Hugging Face checkpoints, row i and i + head_size / 2.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def sampled_digest(headers: Iterable[bytes], tensors: Iterable[tuple[str, memoryview]]) -> str:
    """A fingerprint that costs milliseconds: blake2b-128 over headers, and of each tensor its name, its length in bytes
    and 8 pages of 4 KiB spread from its first byte to its last.

    Sure against another model, quantisation, merge or fine-tune, which change every page; blind to an edit of single
    numbers between the pages.
    """
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(len(header).to_bytes(8, "little"))
        digest.update(header)
    for name, content in tensors:
        digest.update(f"{name}\0{len(content)}\0".encode())
        last = max(0, len(content) - _SAMPLE_BYTES)
        for sample in range(_SAMPLES_PER_TENSOR):
            start = last * sample // (_SAMPLES_PER_TENSOR - 1)
            digest.update(content[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()


def _check_shapes(parameter: Parameter, checkpoint: Checkpoint) -> None:
    for part, rows in zip(parameter.parts, parameter.part_rows, strict=True):
        expected, found = (rows, *parameter.shape[1:]), checkpoint.shape(part)
        if expected != found:
            raise ModelError(f"{part} in {checkpoint.where} has shape {found}; the model's config says {expected}")


def _check_tied_head(checkpoint: Checkpoint, name: str, embedding: torch.Tensor) -> None:
    head = torch.empty_like(embedding)
    checkpoint.read_into(name, head)
    if not torch.equal(head, embedding):
        raise ModelError(f"{checkpoint.where} declares its head tied to the embedding, and holds another {name}")


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
