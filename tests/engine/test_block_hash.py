from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import BlockHasher, hash_blocks, next_hash, root_hash


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hash_blocks(range(n), 4, b"m")) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_is_chained_over_parent_and_tokens() -> None:
    first, second = hash_blocks([1, 2, 3, 4], 2, b"m")
    root = blake2b(b"2:m", digest_size=16).digest()
    assert first == blake2b(root + array("i", [1, 2]).tobytes(), digest_size=16).digest()
    assert second == blake2b(first + array("i", [3, 4]).tobytes(), digest_size=16).digest()
    assert second == next_hash(first, array("i", [3, 4]).tobytes())


def test_hashes_agree_exactly_as_long_as_the_tokens_do() -> None:
    ours, theirs = hash_blocks([1, 2, 3, 4, 5, 6], 2, b"m"), hash_blocks([1, 2, 3, 9, 5, 6], 2, b"m")
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, False]


def test_other_weights_another_adapter_or_another_block_size_have_other_hashes() -> None:
    roots = {root_hash(16, b"m"), root_hash(16, b"m+adapter"), root_hash(32, b"m"), root_hash(1, b"6:m")}
    assert len(roots) == 4
    assert set(hash_blocks(range(32), 16, b"m")).isdisjoint(hash_blocks(range(32), 16, b"n"))


def test_hashes_hold_128_bits() -> None:
    assert {len(h) for h in hash_blocks(range(64), 16, b"m")} == {16}


def test_what_the_last_prompt_with_the_same_first_block_had_is_not_hashed_again() -> None:
    hasher = BlockHasher(2, b"m")
    first = hasher.hash_blocks([1, 2, 3, 4, 5, 6])
    hasher.hash_blocks([9, 9])
    second = hasher.hash_blocks([1, 2, 3, 4, 7, 8, 9])
    assert second == hash_blocks([1, 2, 3, 4, 7, 8, 9], 2, b"m")
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True, False]


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=12), st.integers(1, 3), st.integers(1, 3))
def test_hashes_are_the_same_whatever_came_before(prompts: list[list[int]], block_size: int, remembered: int) -> None:
    hasher = BlockHasher(block_size, b"m", remembered)
    for prompt in prompts:
        assert hasher.hash_blocks(prompt) == hash_blocks(prompt, block_size, b"m")
        assert len(hasher._latest) <= remembered
