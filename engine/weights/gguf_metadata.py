"""Reads a GGUF file's header: the key-value section and the table of tensors, without touching tensor data.

A direct parser, since gguf.GGUFReader makes one numpy view per string, which takes seconds for a vocabulary of 150,000.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ModelError

GGUF_MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
# value type -> struct code (little-endian)
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_SCALAR_READERS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is as the file has it: the fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the file's start


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """The header: key -> value (int, float, bool, str, or a list of these), and the tensors in file order."""

    path: Path
    version: int
    fields: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    alignment: int
    data_start: int  # bytes from the file's start
    file_bytes: int


def is_gguf(path: Path) -> bool:
    """Whether it is a file that starts as GGUF files do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == GGUF_MAGIC


def read_gguf_metadata(path: Path | str) -> GGUFMetadata:
    """The header of a GGUF file. Raises ModelError where it is absent, cut short or not GGUF."""
    path = Path(path)
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file_bytes < 24 or file.read(4) != GGUF_MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it does not start with {GGUF_MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _parse(path, view, file_bytes)
    except OSError as error:
        raise ModelError(f"cannot read the GGUF file {path}: {error.strerror or error}") from error
    except (struct.error, IndexError, EOFError) as error:
        raise ModelError(
            f"{path} is cut short: its header ends early ({file_bytes:,} bytes); fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is damaged: a name in its header is not UTF-8; fetch it again") from error


class _Cursor:
    """Reads forward over the mapped file; a read past the end raises EOFError."""

    __slots__ = ("position", "view")

    def __init__(self, view: mmap.mmap, position: int) -> None:
        self.view = view
        self.position = position

    def scalar(self, kind: int) -> Any:
        reader = _SCALAR_READERS[kind]
        value = reader.unpack_from(self.view, self.position)[0]
        self.position += reader.size
        return value

    def string(self) -> str:
        return self._bytes(self.scalar(10)).decode("utf-8")

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.view):
            raise EOFError
        piece = self.view[self.position : end]
        self.position = end
        return piece

    def scalars(self, kind: int, count: int) -> list[Any]:
        size = _SCALAR_READERS[kind].size
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._bytes(count * size)))

    def strings(self, count: int) -> list[str]:
        # The hot loop of a large vocabulary: locals only.
        view, position, end = self.view, self.position, len(self.view)
        unpack: Callable[..., tuple[Any, ...]] = _SCALAR_READERS[10].unpack_from
        out: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(view, position)[0]
            if position > end:
                raise EOFError
            out.append(view[start:position].decode("utf-8", errors="surrogateescape"))
        self.position = position
        return out


def _parse(path: Path, view: mmap.mmap, file_bytes: int) -> GGUFMetadata:
    cursor = _Cursor(view, 4)
    version = cursor.scalar(4)
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version} (or is big-endian); versions 2 and 3 are read")
    num_tensors, num_fields = cursor.scalar(10), cursor.scalar(10)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        fields[key] = _value(path, cursor, key, cursor.scalar(4))
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path} is damaged: general.alignment is {alignment!r}")

    table = [_tensor(path, cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(GGUFTensor(t.name, t.shape, t.ggml_type, data_start + t.offset) for t in table)
    return GGUFMetadata(path, version, fields, tensors, alignment, data_start, file_bytes)


def _tensor(path: Path, cursor: _Cursor) -> GGUFTensor:
    name = cursor.string()
    num_dimensions = cursor.scalar(4)
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelError(f"{path} is damaged: tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalars(10, num_dimensions))
    return GGUFTensor(name, shape, cursor.scalar(4), cursor.scalar(10))


def _value(path: Path, cursor: _Cursor, key: str, kind: int, depth: int = 0) -> Any:
    if kind == _STRING:
        return cursor.strings(1)[0]
    if kind in _SCALAR_READERS:
        return cursor.scalar(kind)
    if kind != _ARRAY or depth >= MAX_ARRAY_DEPTH:
        raise ModelError(f"{path} is damaged: key {key!r} has value type {kind}")
    element_kind, count = cursor.scalar(4), cursor.scalar(10)
    if element_kind == _STRING:
        return cursor.strings(count)
    if element_kind in _SCALAR_READERS:
        return cursor.scalars(element_kind, count)
    return [_value(path, cursor, key, element_kind, depth + 1) for _ in range(count)]
