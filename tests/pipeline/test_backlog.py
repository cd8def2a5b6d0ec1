"""The order of a known backlog."""

from array import array

from pipeline.backlog import order_backlog


def raw(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def test_groups_stay_together_and_the_one_with_the_longest_output_begins() -> None:
    documents = [(raw(2, 1), 8), (raw(1), 8), (raw(2, 3), 64), (raw(3), 16), (raw(2, 1), 8)]
    assert order_backlog(documents, block_bytes=4) == [0, 4, 2, 3, 1]


def test_prompts_shorter_than_a_block_are_a_group_of_their_own() -> None:
    assert order_backlog([(b"", 4), (raw(7, 7), 9), (raw(7), 2)], block_bytes=8) == [1, 0, 2]
