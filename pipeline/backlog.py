"""The order of a whole backlog that is known beforehand: as the batcher's, and long outputs first. No dependencies.

Documents that share a prefix stay side by side. Among groups that share nothing (not even a first block) the order is
free, and those that hold the longest output begin, so that it does not run alone at the end.
"""

from collections.abc import Sequence


def order_backlog(documents: Sequence[tuple[Sequence[bytes], int]]) -> list[int]:
    """documents: (chained block hashes, tokens of output at most); returns their indices in order."""
    longest: dict[bytes, int] = {}

    def group_of(index: int) -> bytes:
        hashes = documents[index][0]
        return hashes[0] if hashes else b""

    for index, (_, num_outputs) in enumerate(documents):
        longest[group_of(index)] = max(longest.get(group_of(index), 0), num_outputs)
    return sorted(
        range(len(documents)),
        key=lambda index: (-longest[group_of(index)], group_of(index), tuple(documents[index][0]), index),
    )
