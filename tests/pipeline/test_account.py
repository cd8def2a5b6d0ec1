"""The account: every document ends once, and two counts that differ for long are told from two that are out of step."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.account import MAX_BOOKS, Account, Agreement, Book, Ledger, Outcome
from schemas.document import Assignment, SourcePosition

FIRST, SECOND = Assignment("documents", 0, 1), Assignment("documents", 0, 2)


def at(offset: int, epoch: int = 1) -> SourcePosition:
    return SourcePosition("documents", 0, offset, epoch)


def test_an_account_is_kept_by_epoch_partition_and_job() -> None:
    ledger = Ledger(Account())
    for offset in range(4):
        ledger.deliver(at(offset), "a" if offset < 3 else "b")
    ledger.deliver(at(0, epoch=2), "a")
    ledger.end([at(0)], Outcome.INDEXED)
    ledger.end([at(1)], Outcome.FAILED)
    ledger.end([at(3)], Outcome.CANCELLED)
    assert ledger.books == {
        Book(*FIRST, "a"): Account(delivered=3, indexed=1, failed=1),
        Book(*FIRST, "b"): Account(delivered=1, cancelled=1),
        Book(*SECOND, "a"): Account(delivered=1),
    }
    assert ledger.total == Account(delivered=5, indexed=1, failed=1, cancelled=1)
    assert ledger.unbalanced() == {Book(*FIRST, "a"): 1, Book(*SECOND, "a"): 1}
    assert ledger.examples(9) == [at(2), at(0, epoch=2)]
    assert ledger.num_open_in(lambda assignment: assignment == SECOND) == 1


def test_a_document_that_ends_twice_unbalances_the_account() -> None:
    ledger = Ledger(Account())
    ledger.deliver(at(0), "a")
    ledger.end([at(0)], Outcome.INDEXED)
    ledger.end([at(0)], Outcome.HANDED_BACK)
    assert (ledger.total.imbalance(0), ledger.num_twice, ledger.num_open) == (-1, 1, 0)


def test_what_was_passed_over_was_delivered_and_is_done() -> None:
    ledger = Ledger(Account())
    ledger.skip(FIRST, 500)
    assert ledger.total == Account(delivered=500, already_done=500)
    assert str(next(iter(ledger.books))) == "documents/0, epoch 1, job (not decoded)"
    assert ledger.unbalanced() == {}


def test_books_that_balance_are_closed_before_they_fill_the_memory() -> None:
    ledger = Ledger(Account())
    ledger.deliver(at(10**6), "open")
    for number in range(2 * MAX_BOOKS):
        ledger.deliver(at(number), f"job-{number}")
        ledger.end([at(number)], Outcome.INDEXED)
        assert len(ledger.books) <= MAX_BOOKS
    assert ledger.unbalanced() == {Book(*FIRST, "open"): 1}
    assert ledger.total.delivered == 2 * MAX_BOOKS + 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["deliver", *Outcome]), st.integers(0, 5), st.sampled_from("ab"), st.integers(1, 2)),
        max_size=60,
    )
)
def test_over_any_history_open_is_delivered_less_ended(steps: list[tuple[str, int, str, int]]) -> None:
    ledger = Ledger(Account())
    open_now: Counter[SourcePosition] = Counter()
    for what, offset, job, epoch in steps:
        position = at(offset, epoch)
        if what == "deliver" and position not in open_now:
            ledger.deliver(position, job)
            open_now[position] = 1
        elif what != "deliver" and position in open_now:
            ledger.end([position], Outcome(what))
            del open_now[position]
        assert ledger.num_open == len(open_now) == ledger.total.delivered - ledger.total.ended
        assert ledger.num_open_in(lambda _: True) == len(open_now)
        assert sum(ledger.unbalanced().values()) == len(open_now)


def test_counts_that_agree_now_and_then_agree() -> None:
    agreement = Agreement(patience_seconds=10.0)
    assert [agreement.observe(difference, 6.0 * turn) for turn, difference in enumerate((3, 500, 0, 7, -2, 9))] == [
        0
    ] * 6


def test_a_difference_that_lasts_is_told_by_the_least_it_has_been() -> None:
    agreement = Agreement(patience_seconds=10.0)
    differences = (40, 1, *[700] * 8, 2)
    assert [agreement.observe(each, float(turn)) for turn, each in enumerate(differences)] == [0] * 10 + [1]
    assert agreement.observe(0, 21.0) == 0


def test_a_process_that_was_frozen_while_one_count_was_ahead_has_not_differed_all_that_time() -> None:
    agreement = Agreement(patience_seconds=10.0)
    assert [agreement.observe(7, now) for now in (0.0, 3600.0, 3601.0, 7200.0)] == [0] * 4
