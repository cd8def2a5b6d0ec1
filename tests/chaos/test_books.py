"""What many rounds are judged by together."""

from tests.chaos.books import ROUNDS_TO_JUDGE, Books


def test_more_than_a_fiftieth_computed_again_fails_a_run_that_is_long_enough_to_say_so() -> None:
    for num_rounds, num_again, is_costly in (
        (ROUNDS_TO_JUDGE, 201, True),
        (ROUNDS_TO_JUDGE, 200, False),
        (ROUNDS_TO_JUDGE - 1, 9_000, False),
    ):
        books = Books(num_rounds=num_rounds, num_documents=10_000, num_again=num_again)
        assert books.is_costly is is_costly
        assert ("more than 2% of the documents were computed again" in books.summary()) is is_costly
