"""Leaks are seen in noise, noise is not called a leak, and books that do not close fail by the rule that says so."""

import dataclasses
from random import Random
from typing import Any

import pytest

from tests.soak.rules import (
    HEADINGS,
    MIB,
    Books,
    ProcessSample,
    Sample,
    heading,
    judge_books,
    judge_growth,
    judge_ratio,
    judge_trends,
    minute_medians,
    robust_line,
    row,
    without_warm_up,
)

PROCESS = ProcessSample(200 * MIB, 150 * MIB, 120 * MIB, num_descriptors=20, num_threads=10, cpu_seconds=0.0)
BOOKS = Books(
    num_produced=1000,
    num_failing=2,
    num_ids=400,
    num_committed=1000,
    num_rows=400,
    audit_is_complete=True,
    audit_stored=400,
    audit_said="messages 500 = stored 400 + superseded 100",
    exit_code=0,
    account={
        "indexed": 990, "already_done": 7, "superseded": 1, "failed": 2, "handed_back": 0, "in_flight": 0,
        "imbalance": 0, "engine_restarts": 0,
    },
)  # fmt: skip


def sample_at(seconds: float, **changes: Any) -> Sample:
    """Of a steady run: 1,000 documents a second, 2 s from source to row, 0.2 ms of CPU time a document."""
    documents = int(1000 * seconds)
    worker = dataclasses.replace(PROCESS, cpu_seconds=0.0002 * documents)
    steady = Sample(
        seconds=seconds,
        worker=worker,
        engine=PROCESS,
        num_blocks=900_000,
        num_ended=documents,
        waiting_seconds=0.5 * documents,
        engine_seconds=0.5 * documents,
        storing_seconds=1.0 * documents,
        num_steps=10 * int(seconds),
        step_seconds=0.02 * int(seconds),
        num_in_flight=2000,
        num_outbox=1000,
        lag=30_000,
        other_cores=0.5,
        load_average=2.0,
        disk_bytes=500 * MIB,
    )
    return dataclasses.replace(steady, **changes)


HOUR = [sample_at(5.0 * number) for number in range(721)]


def holds(mebibytes: list[tuple[float, float]]) -> bool:
    return judge_growth("memory", mebibytes, 2.0, "MiB").holds


def broken_rules(samples: list[Sample]) -> list[str]:
    return [finding.rule for finding in judge_trends(samples, 10_000) if not finding.holds]


def test_a_steady_hour_holds_every_rule() -> None:
    assert broken_rules(HOUR) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_of_a_mebibyte_a_minute_is_seen_in_noise_and_noise_alone_is_not(seed: int) -> None:
    draw = Random(seed)
    noisy = [(5.0 * number, 200 + draw.uniform(-5, 5)) for number in range(540)]
    leaking = [(seconds, size + seconds / 60) for seconds, size in noisy]
    assert holds(noisy)
    assert not holds(leaking)


def test_a_leak_of_four_mebibytes_an_hour_is_seen_where_memory_is_quiet() -> None:
    def grown(an_hour: float) -> list[tuple[float, float]]:
        return [(5.0 * number, 200 + an_hour * 5 * number / 3600 + number % 3 / 8) for number in range(540)]

    assert holds(grown(1.9))
    assert not holds(grown(4.0))


def test_memory_that_jumps_once_near_the_end_is_seen_by_its_tenths() -> None:
    points = [(float(number), 200.0 if number < 480 else 212.0) for number in range(540)]
    assert robust_line(points)[0] == 0.0
    assert not holds(points)


def test_objects_that_grow_are_seen_where_memory_does_not() -> None:
    """As where a leak fills what fragmentation has left free."""
    samples = [dataclasses.replace(one, num_blocks=900_000 + 25 * int(one.seconds)) for one in HOUR]
    assert broken_rules(samples) == ["worker objects"]


def test_a_robust_line_is_exact_on_a_line_and_does_not_follow_outliers() -> None:
    line = [(float(x), 3.0 * x + 7.0) for x in range(20)]
    assert robust_line(line) == (3.0, 0.0)
    line[3] = (3.0, 1e9)
    assert robust_line(line) == (3.0, 0.0)


def test_what_grows_during_the_warm_up_alone_is_not_judged() -> None:
    warming = dataclasses.replace(PROCESS, rss=50 * MIB, num_descriptors=4, num_threads=1)
    samples = [dataclasses.replace(one, engine=warming) if one.seconds < 899 else one for one in HOUR]
    assert without_warm_up(samples)[0].seconds == 900.0
    assert broken_rules(samples) == []


def test_descriptors_and_threads_may_differ_by_three_and_no_more() -> None:
    def ending(**changes: int) -> list[Sample]:
        more = dataclasses.replace(PROCESS, **changes)
        return [dataclasses.replace(one, engine=more) if one.seconds > 3000 else one for one in HOUR]

    assert broken_rules(ending(num_descriptors=23, num_threads=13)) == []
    assert broken_rules(ending(num_descriptors=24)) == ["engine descriptors"]
    assert broken_rules(ending(num_threads=14)) == ["engine threads"]


def test_latency_that_doubles_is_seen_and_is_counted_a_document() -> None:
    slower = [
        dataclasses.replace(one, storing_seconds=one.storing_seconds + 2 * max(0, one.num_ended - 2_400_000))
        for one in HOUR
    ]
    assert minute_medians(HOUR, lambda interval: interval.latency_ms) == pytest.approx([2000.0] * 60)
    assert minute_medians(slower, lambda interval: interval.latency_ms)[-1] == pytest.approx(4000.0)
    assert broken_rules(slower) == ["latency"]


def test_the_ratio_is_of_the_last_ten_minutes_to_the_first_ten_and_of_thirds_where_there_are_few() -> None:
    assert judge_ratio("latency", [1.0] * 10 + [9.0] * 20 + [1.5] * 10, 1.5, "ms").holds
    assert not judge_ratio("latency", [1.0] * 10 + [9.0] * 20 + [1.6] * 10, 1.5, "ms").holds
    assert judge_ratio("latency", [1.0, 9.0, 1.0], 1.5, "ms").holds


def test_a_backlog_that_was_nearly_empty_once_fails_since_the_worker_was_not_at_full_speed() -> None:
    samples = list(HOUR)
    samples[400] = dataclasses.replace(samples[400], lag=9_999)
    assert broken_rules(samples) == ["the backlog is never empty"]


def test_an_interval_without_documents_counts_in_no_median() -> None:
    still = [dataclasses.replace(sample_at(float(n)), num_ended=0, num_steps=0) for n in range(10)]
    assert minute_medians(still, lambda interval: interval.latency_ms) == []
    assert "nan" in row(still)


def test_a_row_of_the_table_has_the_heading_s_columns() -> None:
    cells = row(HOUR[:61]).split()
    assert len(cells) == len(HEADINGS)
    assert len(row(HOUR[:61])) == len(heading())
    assert cells[:6] == ["0.0-5.0", "1000", "2000", "1000", "2.000", "0.200"]


def test_closed_books_hold() -> None:
    assert all(finding.holds for finding in judge_books(BOOKS))


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"exit_code": 1}, ["the worker ends well"]),
        ({"num_produced": 1001, "num_committed": 1001}, ["the account balances"]),
        ({"num_committed": 999}, ["everything is committed"]),
        ({"num_rows": 399}, ["every document has its one row"]),
        ({"num_rows": 401}, ["every document has its one row"]),
        ({"audit_stored": 399}, ["the audit finds each one's last delivery"]),
        ({"audit_is_complete": False}, ["the audit finds each one's last delivery"]),
        ({"account": None, "exit_code": -9}, ["the worker ends well", "the account balances", "one engine all along"]),
        ({"account": {**(BOOKS.account or {}), "imbalance": 1}}, ["the account balances"]),
        ({"account": {**(BOOKS.account or {}), "failed": 3}}, ["the account balances"]),
        ({"account": {**(BOOKS.account or {}), "engine_restarts": 1}}, ["one engine all along"]),
    ],
)
def test_books_that_do_not_close_fail_by_their_rule(changes: dict[str, Any], broken: list[str]) -> None:
    books = dataclasses.replace(BOOKS, **changes)
    assert [finding.rule for finding in judge_books(books) if not finding.holds] == broken
