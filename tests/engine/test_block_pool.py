import pytest

from engine.block_pool import ROOT_SERIAL, BlockPool


def published(pool: BlockPool, *names: str) -> list[int]:
    """A held chain of blocks, each published under its name as hash and tokens."""
    block_ids = pool.allocate(len(names))
    assert block_ids is not None
    serial: int | None = ROOT_SERIAL
    for block_id, name in zip(block_ids, names, strict=True):
        assert serial is not None
        serial = pool.publish(block_id, name.encode(), name.encode(), serial)
    return block_ids


def find(pool: BlockPool, *names: str) -> list[int]:
    """As far as the chain of these names is found."""
    serial, found = ROOT_SERIAL, []
    for name in names:
        block_id = pool.find(name.encode(), name.encode(), serial)
        if block_id is None:
            break
        found.append(block_id)
        serial = pool.serial(block_id)
    return found


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def test_blocks_are_given_from_zero_on_and_all_or_none() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [2]
    assert counts(pool) == (0, 3, 0)


def test_a_release_empties_the_table_so_a_second_one_releases_nothing() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    assert table is not None
    assert pool.release(table) == [2, 1, 0]
    assert table == []
    assert pool.release(table) == []
    assert counts(pool) == (3, 0, 0)


def test_releasing_what_one_does_not_hold_is_a_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is released by one who does not hold it"):
        pool.release([1])


def test_a_published_block_is_cached_after_its_last_holder_and_found() -> None:
    pool = BlockPool(4)
    table = published(pool, "a", "b")
    assert find(pool, "a", "b", "c") == [0, 1]
    shared = find(pool, "a")
    pool.share(shared)
    pool.release(table)
    assert counts(pool) == (2, 1, 1)
    pool.release(shared)
    assert counts(pool) == (2, 0, 2)
    pool.share(find(pool, "a", "b"))
    assert counts(pool) == (2, 2, 0)


def test_a_hit_needs_the_very_tokens_not_the_hash_alone() -> None:
    pool = BlockPool(2)
    published(pool, "a")
    assert pool.find(b"a", b"other", ROOT_SERIAL) is None
    (other,) = pool.allocate(1) or []
    assert pool.publish(other, b"a", b"other", ROOT_SERIAL) is None, "a collision is not published"
    assert find(pool, "a") == [0]


def test_the_same_content_twice_is_found_once_and_children_go_on_from_it() -> None:
    pool = BlockPool(4)
    published(pool, "a")
    twin, child = pool.allocate(2) or []
    serial = pool.publish(twin, b"a", b"a", ROOT_SERIAL)
    assert serial == pool.serial(0)
    assert serial is not None
    pool.publish(child, b"b", b"b", serial)
    assert find(pool, "a", "b") == [0, child]
    pool.release([twin])
    assert counts(pool) == (2, 2, 0)


def test_the_least_recently_used_block_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    first, second = published(pool, "a", "b"), published(pool, "x", "y")
    pool.release(second)
    pool.release(first)
    assert pool.allocate(1) == [3]  # y
    assert find(pool, "x", "y") == [2]
    again = find(pool, "x")
    pool.share(again)
    pool.release(again)  # used again: now the most recent
    assert pool.allocate(2) == [1, 0]
    assert find(pool, "x") == [2]


def test_blocks_that_a_waiting_request_wants_are_evicted_last() -> None:
    pool = BlockPool(4)
    wanted, other = published(pool, "a", "b"), published(pool, "x", "y")
    pool.release(wanted)
    pool.want([b"a", b"b", b"never seen"])
    pool.release(other)
    pool.check()
    assert pool.allocate(2) == [3, 2]
    assert find(pool, "a", "b") == [0, 1]
    assert pool.allocate(2) == [1, 0]


def test_a_block_is_wanted_until_the_last_who_wants_it_is_gone() -> None:
    pool = BlockPool(2)
    wanted = published(pool, "a")
    pool.want([b"a"])
    pool.want([b"a"])
    pool.release(wanted)
    other = published(pool, "x")
    pool.release(other)
    pool.unwant([b"a"])
    pool.check()
    assert pool.allocate(1) == [1], "still wanted by one: x goes"
    pool.unwant([b"a"])
    pool.check()
    assert pool.allocate(1) == [0]
    assert pool._num_wanting == {}


def test_withdrawing_takes_the_dependants_along() -> None:
    pool = BlockPool(4)
    table = published(pool, "a", "b", "c")
    pool.release(table)
    pool.withdraw(0)
    pool.withdraw(0)
    assert find(pool, "a", "b", "c") == []
    assert counts(pool) == (2, 0, 2)
    published(pool, "a")  # computed anew: what hung on the withdrawn one stays unfindable
    assert find(pool, "a", "b") == [0]
    pool.check()


def test_content_that_hangs_on_a_withdrawn_parent_makes_room_for_its_new_computation() -> None:
    pool = BlockPool(6)
    pool.release(published(pool, "a", "b"))
    pool.withdraw(0)
    table = published(pool, "a", "b")
    assert find(pool, "a", "b") == table
    assert counts(pool) == (4, 2, 0)


def test_a_withdrawn_block_in_use_is_free_after_its_release() -> None:
    pool = BlockPool(2)
    table = published(pool, "a")
    pool.withdraw(0)
    assert counts(pool) == (1, 1, 0)
    assert pool.release(table) == [0]
    assert counts(pool) == (2, 0, 0)
