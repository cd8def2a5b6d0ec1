"""The order of a whole backlog that is known beforehand: as the batcher's, and long outputs first. No dependencies.

Documents that share a prefix stay side by side. Among groups that share nothing (not even a first block) the order is
free, and those that hold the longest output begin, so that it does not run alone at the end.
"""

from collections.abc import Sequence


def order_backlog(documents: Sequence[tuple[bytes, int]], block_bytes: int) -> list[int]:
    """documents: (a prompt's tokens as raw int32, tokens of output at most); returns their indices in order.

    Tokens themselves rather than hashes of their blocks: comparing bytes costs less than hashing them, and hashing can
    then be left until a document is fed. `block_bytes`: of a block of tokens.
    """
    longest: dict[bytes, int] = {}

    def group_of(index: int) -> bytes:
        raw = documents[index][0]
        return raw[:block_bytes] if len(raw) >= block_bytes else b""

    for index, (_, num_outputs) in enumerate(documents):
        longest[group_of(index)] = max(longest.get(group_of(index), 0), num_outputs)
    return sorted(
        range(len(documents)),
        key=lambda index: (-longest[group_of(index)], group_of(index), documents[index][0], index),
    )
