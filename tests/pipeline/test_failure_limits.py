"""When documents are to blame, and when it must be the deployment."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.failure_limits import FailureLimits, Gate
from pipeline.worker import Worker
from schemas.errors import Failure, FailureCode, FailureLimitError, Stage
from schemas.settings import Settings
from schemas.settings_reader import load_settings
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer
from tests.pipeline.test_cli import _own_folder, _own_logs, ends  # noqa: F401
from tests.pipeline.test_dlq import listed, rows, send_documents, settings, told  # noqa: F401

BAD = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "not JSON")
UNKNOWN = Failure(FailureCode.UNKNOWN_TASK, Stage.PROMPT, "task 'sum' is not in the settings; known: default")
LATE = Failure(FailureCode.DEADLINE_PASSED, Stage.PROMPT, "the deadline passed")
INVALID = Failure(FailureCode.INVALID_OUTPUT, Stage.RESULT, "no label was spelled")


def test_so_many_failures_in_a_row_are_too_many_and_the_most_frequent_cause_is_named() -> None:
    limits = FailureLimits(max_consecutive=3)
    for failure in (BAD, UNKNOWN):
        limits.failed(failure)
    assert limits.exceeded is None
    limits.failed(UNKNOWN)
    assert str(limits.exceeded) == (
        "the last 3 documents that arrived failed, all in a row (worker.max_consecutive_failures), 2 of them with "
        "UNKNOWN_TASK: task 'sum' is not in the settings; known: default. This looks like a wrong deployment: "
        "does this worker have the settings of the topic's jobs? What failed is in the dead-letter topic; once the "
        "cause is gone, `pagemill dlq replay --code UNKNOWN_TASK` sends it again. Where the documents are to blame, "
        "raise the limit"
    )


def test_one_that_passes_begins_the_row_anew() -> None:
    limits = FailureLimits(max_consecutive=3)
    for _ in range(5):
        limits.failed(BAD)
        limits.failed(BAD)
        limits.passed(Gate.PROMPT)
    assert limits.exceeded is None


def test_gates_are_counted_apart() -> None:
    limits = FailureLimits(max_consecutive=3)
    for _ in range(2):
        limits.failed(BAD)
        limits.failed(INVALID)
        limits.passed(Gate.ROW)
    assert limits.exceeded is None
    limits.failed(INVALID)
    assert str(limits.exceeded).startswith("the last 3 answers failed")


def test_more_than_its_part_of_a_window_is_too_much_as_soon_as_it_is_certain() -> None:
    limits = FailureLimits(max_ratio=0.5, window_documents=10)
    for _ in range(5):
        limits.failed(BAD)
    limits.passed(Gate.PROMPT)
    assert limits.exceeded is None
    limits.failed(BAD)
    assert str(limits.exceeded).startswith(
        "6 of the last 7 documents that arrived failed, more than the 50% of 10 that may (worker.max_failed_ratio)"
    )


def test_passed_deadlines_are_not_counted() -> None:
    limits = FailureLimits(0.1, 10, 3)
    for _ in range(100):
        limits.failed(LATE)
    assert limits.exceeded is None


def test_without_limits_everything_may_fail() -> None:
    limits = FailureLimits()
    for _ in range(5000):
        limits.failed(BAD)
    assert limits.exceeded is None


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 12), st.integers(0, 6), st.sampled_from([0.25, 0.5, 1.0]))
def test_the_limits_are_what_they_say(outcomes: list[bool], window: int, in_a_row: int, ratio: float) -> None:
    limits = FailureLimits(ratio, window, in_a_row)
    row, seen, failures, is_exceeded = 0, 0, 0, False
    for passed in outcomes:
        if passed:
            limits.passed(Gate.PROMPT)
        else:
            limits.failed(BAD)
        seen, failures, row = seen + 1, failures + (not passed), 0 if passed else row + 1
        is_exceeded = is_exceeded or (0 < in_a_row <= row) or failures > ratio * window
        if seen == window:
            seen, failures = 0, 0
        assert (limits.exceeded is not None) == is_exceeded
        if is_exceeded:
            return


@pytest.mark.real_servers
def test_a_worker_without_the_jobs_task_stops_early_and_one_that_has_it_answers_everything(
    settings: Settings,  # noqa: F811
) -> None:
    with Path("pagemill.toml").open("a") as file:
        file.write("max_consecutive_failures = 10\n")
    send_documents(settings, *({"id": f"d{n}", "task": "sum", "prompt": "x"} for n in range(60)))
    command = fake_engine_command()
    with pytest.raises(FailureLimitError, match="10 of them with UNKNOWN_TASK"):
        Worker(load_settings(None, {}, {}), engine_command=command, tokenizer=ByteTokenizer()).run(True)
    assert len(listed()) == 10
    assert ends("audit")[0] == 0  # up to there

    assert told("replay").startswith("10 replayed")
    mended = load_settings(None, {"tasks": {"sum": {}}}, {})
    Worker(mended, engine_command=command, tokenizer=ByteTokenizer()).run(True)
    assert len(rows()) == 60
    assert {row["status"] for row in rows().values()} == {"answered"}
    code, out, _ = ends("audit")
    assert (code, "messages 70 = stored 60 + superseded 10 + missing 0 + older 0" in out) == (0, True)
