"""The order of a known backlog."""

from pipeline.backlog import order_backlog


def test_groups_stay_together_and_the_one_with_the_longest_output_begins() -> None:
    a, b, c = b"a", b"b", b"c"
    documents = [((b, a), 8), ((a,), 8), ((b, c), 64), ((c,), 16), ((b, a), 8)]
    assert order_backlog(documents) == [0, 4, 2, 3, 1]


def test_prompts_shorter_than_a_block_are_a_group_of_their_own() -> None:
    assert order_backlog([((), 4), ((b"x",), 9), ((), 2)]) == [1, 0, 2]
