"""What a commit says beside its offset, as text: what is complete beyond it, how far work went, how often it died.

    "pagemill:1:" + base64(topic id 16 | base 8 | started 8 | suspect until 8 | crashes 2 | flags 1 | crc32 4 | bitmap)
    "pagemill:2:" + base64(the same until flags | lost 8 + 4 | losses alone 1 | isolated 8 + 4 | crc32 4 | bitmap)

The second form is written only while there is something lost or isolated, so that workers that know the first alone
understand all but that. The checksum covers everything else. Bit i of the bitmap, lowest first, is offset base + i; it
is compressed where that makes it shorter. A broker takes 4,096 UTF-16 units (offset.metadata.max.bytes) and refuses the
whole commit for more.
"""

import base64
import binascii
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self
from uuid import UUID

MAX_UNITS = 4096  # of UTF-16, as the broker counts; ours are ASCII, one each
MAX_OFFSETS = 24_000  # their bitmap fits into MAX_UNITS however little it can be compressed
MAX_CRASHES = 2**16 - 1
MAX_LOSSES = 2**8 - 1

_PREFIX, _PREFIX_OF_SEARCH = "pagemill:1:", "pagemill:2:"
_HEADER = struct.Struct(">16sqqqHB")
_SEARCH = struct.Struct(">qIBqI")
_CHECKSUM = struct.Struct(">I")
_CLEAN, _COMPRESSED = 1, 2


@dataclass(frozen=True, slots=True)
class OffsetBitmap:
    """A set of offsets in [base, base + MAX_OFFSETS)."""

    base: int
    bits: bytes = b""

    @classmethod
    def of(cls, base: int, offsets: Iterable[int]) -> Self:
        """Those outside the range are left out."""
        bits = bytearray()
        for offset in offsets:
            index = offset - base
            if 0 <= index < MAX_OFFSETS:
                if index // 8 >= len(bits):
                    bits.extend(bytes(index // 8 + 1 - len(bits)))
                bits[index // 8] |= 1 << index % 8
        return cls(base, bytes(bits))

    def __contains__(self, offset: int) -> bool:
        index = offset - self.base
        return 0 <= index < 8 * len(self.bits) and bool(self.bits[index // 8] >> index % 8 & 1)

    def __iter__(self) -> Iterator[int]:
        return (
            self.base + 8 * place + bit for place, byte in enumerate(self.bits) if byte for bit in range(8)
            if byte >> bit & 1
        )  # fmt: skip

    @property
    def end(self) -> int:
        """One past the last offset that it could hold."""
        return self.base + 8 * len(self.bits)


@dataclass(frozen=True, slots=True)
class Progress:
    """One partition's progress beyond its committed offset, `base`.

    [base, started)         redelivered after a crash; `completed` says which of them need not be computed again
    [base, suspect_until)   was in work when a worker died, and is not yet all complete; base or less: none is suspect
    `lost`                  of those, what the last worker that died over them had in its engine alone
    `isolated`              what of this partition is in the engine now, with nothing else; empty: anything may be
    """

    base: int
    started: int
    suspect_until: int
    crash_count: int  # workers that died in a row over the suspects
    is_clean: bool  # handed over or ended in order; False: whoever finds it so knows that its writer died
    completed: OffsetBitmap
    lost: range = range(0)
    losses_alone: int = 0  # workers that died with `lost` alone in the engine, where that is a single offset
    isolated: range = range(0)


def encode(progress: Progress, topic_id: UUID, max_units: int = MAX_UNITS) -> str:
    """At most `max_units` long: the bitmap is cut where it must be; "" where not even the rest fits."""
    bits = progress.completed.bits.rstrip(b"\0")[: MAX_OFFSETS // 8]
    while True:
        text = _encode(progress, topic_id, bits)
        if len(text) <= max_units:
            return text
        if not bits:
            return ""
        bits = bits[: len(bits) // 2]


def _encode(progress: Progress, topic_id: UUID, bits: bytes) -> str:
    packed = zlib.compress(bits, 6)
    flags = _CLEAN if progress.is_clean else 0
    if len(packed) < len(bits):
        flags |= _COMPRESSED
    else:
        packed = bits
    header = _HEADER.pack(
        topic_id.bytes,
        progress.base,
        progress.started,
        progress.suspect_until,
        min(progress.crash_count, MAX_CRASHES),
        flags,
    )
    prefix, lost, isolated = _PREFIX, progress.lost, progress.isolated
    if lost or isolated:
        prefix = _PREFIX_OF_SEARCH
        losses_alone = min(progress.losses_alone, MAX_LOSSES)
        header += _SEARCH.pack(lost.start, _length(lost), losses_alone, isolated.start, _length(isolated))
    checksum = _CHECKSUM.pack(zlib.crc32(header + packed))
    return prefix + base64.b64encode(header + checksum + packed).decode()


def decode(text: str | None) -> tuple[UUID, Progress] | None:
    """The topic's id and the progress; None for what is not ours, is damaged, or could not have been written by us."""
    if not text or not text.startswith((_PREFIX, _PREFIX_OF_SEARCH)) or len(text) > 2 * MAX_UNITS:
        return None
    has_search = text.startswith(_PREFIX_OF_SEARCH)
    header_bytes = _HEADER.size + has_search * _SEARCH.size
    lost, losses_alone, isolated = range(0), 0, range(0)
    try:
        content = base64.b64decode(text[len(_PREFIX) :], validate=True)
        header, rest = content[:header_bytes], content[header_bytes:]
        topic_id, base, started, suspect_until, crash_count, flags = _HEADER.unpack(header[: _HEADER.size])
        if has_search:
            lost_at, num_lost, losses_alone, isolated_at, num_isolated = _SEARCH.unpack(header[_HEADER.size :])
            lost, isolated = range(lost_at, lost_at + num_lost), range(isolated_at, isolated_at + num_isolated)
        (checksum,) = _CHECKSUM.unpack(rest[: _CHECKSUM.size])
    except (binascii.Error, ValueError, struct.error):
        return None
    packed = rest[_CHECKSUM.size :]
    if checksum != zlib.crc32(header + packed) or flags & ~(_CLEAN | _COMPRESSED):
        return None
    bits = _unpack(packed) if flags & _COMPRESSED else packed
    if bits is None or len(bits) > MAX_OFFSETS // 8 or base < 0 or started < base:
        return None
    completed = OffsetBitmap(base, bits)
    is_clean = bool(flags & _CLEAN)
    progress = Progress(base, started, suspect_until, crash_count, is_clean, completed, lost, losses_alone, isolated)
    return UUID(bytes=topic_id), progress


def _length(offsets: range) -> int:
    return min(len(offsets), 2**32 - 1)


def _unpack(packed: bytes) -> bytes | None:
    """Never more than a bitmap's size, whatever the bytes promise to become."""
    inflater = zlib.decompressobj()
    try:
        bits = inflater.decompress(packed, MAX_OFFSETS // 8 + 1)
    except zlib.error:
        return None
    return bits if inflater.eof and not inflater.unused_data else None
