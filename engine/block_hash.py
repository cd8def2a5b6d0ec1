"""Names for full blocks of tokens: equal names mean equal tokens from the first on, under the same weights."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

HASH_BYTES = 16


@lru_cache(maxsize=16)  # asked for with every prompt, and a process has one model
def root_hash(block_size: int, identity: bytes) -> bytes:
    """The parent of every first block. `identity` names weights and adapter; block size is part of the name."""
    return blake2b(b"%d:%b" % (block_size, identity), digest_size=HASH_BYTES).digest()


def next_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """A block's hash from its parent's and its tokens as raw int32."""
    return blake2b(parent + token_bytes, digest_size=HASH_BYTES).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, identity: bytes) -> tuple[bytes, ...]:
    """Chained hashes of the full blocks, 128 bits each; the tokens after the last full block have none."""
    raw = array("i", token_ids).tobytes()
    return _extend((), raw, block_size * 4, root_hash(block_size, identity))


class BlockHasher:
    """hash_blocks for prompts that come one after another and begin alike: what one shares with the last that had the
    same first block is compared and not hashed again. A prompt of 6,300 tokens, 6,000 of them shared, takes 0.13 ms
    instead of 0.34, most of it to see its tokens as bytes.
    """

    def __init__(self, block_size: int, identity: bytes, max_remembered: int = 256) -> None:
        """`max_remembered`: prompts, each with another first block; the latest are kept."""
        self._stride = block_size * 4
        self._root = root_hash(block_size, identity)
        self._max_remembered = max_remembered
        self._latest: OrderedDict[bytes, tuple[bytes, tuple[bytes, ...]]] = OrderedDict()  # first block -> raw, hashes

    def hash_blocks(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """As the function of this name."""
        raw = array("i", token_ids).tobytes()
        if len(raw) < 2 * self._stride:  # one block is hashed as soon as it is compared
            return _extend((), raw, self._stride, self._root)
        first = raw[: self._stride]
        known: tuple[bytes, ...] = ()
        if (latest := self._latest.pop(first, None)) is not None:
            known_raw, known_hashes = latest
            known = known_hashes[: _num_blocks_alike(raw, known_raw, self._stride)]
        hashes = _extend(known, raw, self._stride, self._root)
        self._latest[first] = raw, hashes
        if len(self._latest) > self._max_remembered:
            self._latest.popitem(last=False)
        return hashes


def _extend(hashes: tuple[bytes, ...], raw: bytes, stride: int, root: bytes) -> tuple[bytes, ...]:
    """The hashes of all full blocks of `raw`, of which the first are known."""
    parent = hashes[-1] if hashes else root
    more = []
    for end in range((len(hashes) + 1) * stride, len(raw) + 1, stride):
        # next_hash, written out: this runs once a block of every document, in the pipeline's thread.
        parent = blake2b(parent + raw[end - stride : end], digest_size=HASH_BYTES).digest()
        more.append(parent)
    return (*hashes, *more)


def _num_blocks_alike(a: bytes, b: bytes, stride: int) -> int:
    """How many full blocks both begin with."""
    low, high = 0, min(len(a), len(b)) // stride
    while low < high:
        middle = (low + high + 1) // 2
        # What lies before `low` is known to be equal.
        if a[low * stride : middle * stride] == b[low * stride : middle * stride]:
            low = middle
        else:
            high = middle - 1
    return low
