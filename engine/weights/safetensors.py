"""Tensors out of a Hugging Face folder: one model.safetensors, or shards behind model.safetensors.index.json."""

import json
import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.weights.checkpoint import sampled_digest
from engine.weights.names import Naming
from engine.weights.upload import FileRange
from schemas.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    view: memoryview  # its bytes, in the mapped file
    path: Path
    offset: int  # of its bytes in the file
    dtype: str
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """A folder's shards as named tensors. The files stay mapped as long as the object lives."""

    naming: Naming = "huggingface"

    def __init__(self, folder: Path) -> None:
        """Raises ModelError where a shard is missing or cut short, or where the index and the shards disagree."""
        self.where = str(folder)
        self._tensors: dict[str, _StoredTensor] = {}
        self._headers: list[bytes] = []
        index = _read_index(folder)
        shards = sorted(set(index.values())) if index else [SINGLE_FILE]
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            what = f", of {len(shards)} shards that {INDEX_FILE} names; fetch it again" if index else "; is it a model?"
            raise ModelError(f"{folder} lacks {', '.join(missing)}{what}")
        for shard in shards:
            header, tensors = _open_shard(folder / shard)
            if twice := sorted(self._tensors.keys() & tensors.keys()):
                raise ModelError(f"{folder} holds {', '.join(twice[:3])} in more than one shard")
            self._tensors |= tensors
            self._headers.append(header)
        if lost := sorted(index.keys() - self._tensors.keys()):
            raise ModelError(f"{folder / INDEX_FILE} names {', '.join(lost[:3])}, which no shard holds")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fills `out`, of the tensor's shape and any float dtype and device. Raises ModelError for integer tensors."""
        stored = self._tensors[name]
        assert tuple(out.shape) == stored.shape, f"{name}: {tuple(out.shape)} for {stored.shape}"
        out.copy_(torch.frombuffer(stored.view, dtype=self._dtype(name)).view(stored.shape))

    def stored_at(self, name: str) -> FileRange:
        """Its place in its shard. Raises ModelError for integer tensors."""
        stored = self._tensors[name]
        return FileRange(stored.path, stored.offset, len(stored.view), self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        stored = self._tensors[name].dtype
        if (dtype := _DTYPES.get(stored)) is None:
            raise ModelError(f"{name} in {self.where} is {stored}; {', '.join(_DTYPES)} are supported")
        return dtype

    def fingerprint(self) -> str:
        """Over the shards' headers and pages of every tensor, in the order of names."""
        return sampled_digest(self._headers, ((name, self._tensors[name].view) for name in sorted(self._tensors)))


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard; empty where the folder has a single file."""
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: {error!r}; fetch it again") from error


def _open_shard(path: Path) -> tuple[bytes, dict[str, _StoredTensor]]:
    """The header's bytes and the tensors: 8 bytes of header length, the header in JSON, the tensors' bytes."""
    num_bytes = path.stat().st_size
    if num_bytes < 8:
        raise ModelError(f"{path} is cut short: a header of 8 bytes is needed, it has {num_bytes:,}; fetch it again")
    with path.open("rb") as file:
        # Copy on write: torch wants writable memory, and nothing here writes.
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (header_bytes,) = struct.unpack_from("<Q", view)
    start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES:
        raise ModelError(f"{path} is not a safetensors file: its header would have {header_bytes:,} bytes")
    if start > num_bytes:
        raise ModelError(f"{path} is cut short: its header has {start:,} bytes, it has {num_bytes:,}; fetch it again")
    header = bytes(view[8:start])
    try:
        table: dict[str, Any] = json.loads(header)
        table.pop("__metadata__", None)
        ends = [start + entry["data_offsets"][1] for entry in table.values()]
        if num_bytes < max(ends, default=start):
            raise ModelError(
                f"{path} is cut short: its header promises {max(ends):,} bytes, it has {num_bytes:,}; fetch it again"
            )
        return header, {name: _stored(path, view, start, entry) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: its header cannot be read ({error!r}); fetch it again") from error


def _stored(path: Path, view: memoryview, start: int, entry: dict[str, Any]) -> _StoredTensor:
    first, end = entry["data_offsets"]
    return _StoredTensor(
        view[start + first : start + end], path, start + first, str(entry["dtype"]), tuple(entry["shape"])
    )
