"""Which blocks of a request are found in the pool, and which of its own others may find. No torch.

Knows each request's chain of block hashes; the pool knows blocks.
"""

from array import array
from dataclasses import dataclass

from engine.block_hash import hash_blocks, next_hash, root_hash
from engine.block_pool import ROOT_SERIAL, BlockPool
from engine.request import Request


@dataclass(slots=True)
class _Chain:
    hashes: list[bytes]  # of the full blocks known so far; grows with sampled tokens
    raw: bytes  # the tokens under these hashes, as int32
    # Of this holding of blocks; back to the start when they are released.
    num_published: int = 0
    parent_serial: int | None = ROOT_SERIAL  # None: a hash collided, so nothing further can be found
    wanted: tuple[bytes, ...] = ()  # what the pool was told that we want while we wait


class PrefixCache:
    """The prefix cache of one model. A request is opened once, closed once, and may wait and run several times."""

    def __init__(self, pool: BlockPool, block_size: int, identity: bytes) -> None:
        self._pool = pool
        self._block_size = block_size
        self._stride = block_size * 4
        self._identity = identity
        self._root = root_hash(block_size, identity)
        self._chains: dict[int, _Chain] = {}

    def open(self, request: Request) -> None:
        """Take in a new request, which waits."""
        prompt = request.inference.token_ids
        num_blocks = len(prompt) // self._block_size
        hashes = request.inference.block_hashes
        if len(hashes) != num_blocks:
            hashes = hash_blocks(prompt, self._block_size, self._identity)
        raw = array("i", prompt[: num_blocks * self._block_size]).tobytes()
        self._chains[request.request_id] = _Chain(list(hashes), raw)
        self.waits(request)

    def waits(self, request: Request) -> None:
        """The request waits, holding nothing: its blocks are wanted."""
        chain = self._chains[request.request_id]
        chain.num_published, chain.parent_serial = 0, ROOT_SERIAL
        chain.wanted = tuple(chain.hashes)
        self._pool.want(chain.wanted)

    def close(self, request: Request) -> None:
        """The request has ended, or was never opened. Idempotent."""
        chain = self._chains.pop(request.request_id, None)
        if chain is not None and chain.wanted:
            self._pool.unwant(chain.wanted)

    def match(self, request: Request) -> list[int]:
        """The blocks that hold the request's first tokens; never its last token, which must be computed to sample."""
        chain = self._chains[request.request_id]
        block_ids: list[int] = []
        serial = ROOT_SERIAL
        for index in range(min(len(chain.hashes), (len(request.token_ids) - 1) // self._block_size)):
            tokens = chain.raw[index * self._stride : (index + 1) * self._stride]
            block_id = self._pool.find(chain.hashes[index], tokens, serial)
            if block_id is None:
                break
            serial = self._pool.serial(block_id)
            block_ids.append(block_id)
        return block_ids

    def runs(self, request: Request) -> None:
        """The request waits no longer; its block table begins with what `match` found."""
        chain = self._chains[request.request_id]
        self._pool.unwant(chain.wanted)
        chain.wanted = ()
        chain.num_published = len(request.block_ids)
        if request.block_ids:
            chain.parent_serial = self._pool.serial(request.block_ids[-1])

    def publish(self, request: Request) -> list[int]:
        """Let others find the full blocks up to num_computed_tokens, tokens known; returns those that can be now."""
        chain = self._chains[request.request_id]
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self._block_size
        if num_full > len(chain.hashes):
            self._extend(chain, request, num_full)
        block_ids = []
        while chain.num_published < num_full and chain.parent_serial is not None:
            index = chain.num_published
            block_id = request.block_ids[index]
            tokens = chain.raw[index * self._stride : (index + 1) * self._stride]
            chain.parent_serial = self._pool.publish(block_id, chain.hashes[index], tokens, chain.parent_serial)
            chain.num_published += 1
            block_ids.append(block_id)
        return block_ids

    def _extend(self, chain: _Chain, request: Request, num_full: int) -> None:
        size = self._block_size
        parent = chain.hashes[-1] if chain.hashes else self._root
        for index in range(len(chain.hashes), num_full):
            tokens = array("i", request.token_ids[index * size : (index + 1) * size]).tobytes()
            parent = next_hash(parent, tokens)
            chain.hashes.append(parent)
            chain.raw += tokens
