"""Names for full blocks of tokens: equal names mean equal tokens from the first on, under the same weights."""

from array import array
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
    stride = block_size * 4
    parent = root_hash(block_size, identity)
    hashes = []
    for end in range(stride, len(raw) + 1, stride):
        # next_hash, written out: this runs once a block of every document, in the pipeline's thread.
        parent = blake2b(parent + raw[end - stride : end], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)
