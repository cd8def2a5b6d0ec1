"""What a run says at its end."""

from pipeline.account import Account, Outcome, Totals
from pipeline.summary import RunSummary
from schemas.document import Assignment, SourcePosition
from schemas.inference import EngineStats


def make(delivered: int, num_in_flight: int = 0) -> RunSummary:
    totals = Totals(
        Account(delivered=delivered, indexed=7, already_done=1, superseded=1, failed=2, handed_back=3),
        prompt_tokens=1000,
        cached_tokens=250,
        completion_tokens=90,
        failures={"BAD_MESSAGE": 2},
    )
    parts = totals.time
    parts.first_delivered, parts.last_stored = 100.0, 102.0
    parts.num_answered = parts.num_stored = 10
    parts.waiting, parts.engine, parts.engine_queue, parts.engine_prefill = 1.0, 5.0, 1.0, 2.0
    parts.engine_decode, parts.storing = 2.0, 0.5
    return RunSummary(totals, EngineStats(step_seconds={"forward": 1.25}), num_in_flight)


def test_it_says_what_came_of_it_and_where_the_time_went() -> None:
    summary = make(delivered=14)
    assert summary.imbalance == 0
    assert summary.lines() == [
        "7 answered, 2 failed in 2.0 s: 5.5 documents/s",
        "tokens: 1000 of prompts (25% found in the prefix cache), 90 of answers",
        "account: delivered 14 = indexed 7 + already done 1 + superseded 1 + failed 2 + cancelled 0 + "
        "handed back 3 + in flight 0",
        "failures: BAD_MESSAGE 2",
        "a document's mean time: waiting 100 ms, engine 500 ms (queue 100 ms, prefill 200 ms, decode 200 ms), "
        "storing 50 ms",
        "the pipeline's thread: waiting for documents 0.00 s, tokenising 0.00 s, ordering 0.00 s, waiting for the "
        "engine 0.00 s, making rows 0.00 s, storing 0.00 s",
        "the engine's steps: forward 1.25 s",
    ]


def test_a_document_that_is_unaccounted_for_is_said() -> None:
    assert make(delivered=15, num_in_flight=1).imbalance == 0
    summary = make(delivered=15)
    assert summary.imbalance == 1
    assert summary.lines()[-1] == "the account does not balance: 1 documents are unaccounted for"


def test_who_is_unaccounted_for_is_named_by_book_and_by_example() -> None:
    totals = Totals()
    for offset in range(3):
        totals.ledger.deliver(SourcePosition("documents", 2, offset, epoch=7), "nightly")
    totals.ledger.end([SourcePosition("documents", 2, 1, epoch=7)], Outcome.INDEXED)
    totals.ledger.skip(Assignment("documents", 2, 7), 5)
    assert RunSummary(totals, EngineStats(), 0).lines()[-4:] == [
        "the account does not balance: 2 documents are unaccounted for",
        "  documents/2, epoch 7, job nightly: 2",
        "  such as documents/2/0",
        "  such as documents/2/2",
    ]


def test_documents_that_the_source_still_has_out_unbalance_a_run_too() -> None:
    totals = Totals(disagreement=4)
    assert RunSummary(totals, EngineStats(), 0).imbalance == 4
    assert RunSummary(totals, EngineStats(), 0).event()["imbalance"] == 4


def test_a_run_without_documents_says_so() -> None:
    summary = RunSummary(Totals(), EngineStats(), 0)
    assert (summary.imbalance, summary.seconds) == (0, 0.0)
    assert summary.lines()[0] == "0 answered, 0 failed in 0.0 s: 0.0 documents/s"
