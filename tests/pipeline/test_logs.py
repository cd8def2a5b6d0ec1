"""Logs: one JSON object a line on standard error, from our loggers and the libraries' alike."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.logs import LibraryRepeats
from tests.fakes import FakeClock

PROGRAM = """
import logging, structlog
from pipeline.logs import configure_logs
configure_logs({level!r}, "json")
structlog.get_logger().info("partition revoked", partition=3)
structlog.get_logger().debug("too much")
logging.getLogger("consumers.kafka").warning("offset lost", extra={{"offset": 7}})
logging.getLogger("kafka.client").info("their own business")
logging.getLogger("kafka.client").warning("not theirs alone")
logging.getLogger("kafka.net.selector").warning("a busy processor")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("a bug")
"""


def lines(level: str) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(level=level)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == ""
    return [json.loads(line) for line in ended.stderr.splitlines()]


def test_each_event_is_a_line_with_its_ids() -> None:
    revoked, lost, theirs, bug = lines("info")
    assert (revoked["event"], revoked["partition"], revoked["level"]) == ("partition revoked", 3, "info")
    assert (lost["event"], lost["offset"], lost["logger"]) == ("offset lost", 7, "consumers.kafka")
    assert (theirs["event"], theirs["level"]) == ("not theirs alone", "warning")
    assert "ZeroDivisionError" in bug["exception"]
    assert all("timestamp" in line for line in (revoked, lost, theirs, bug))


def test_a_traceback_shows_no_local_variable_in_either_format() -> None:
    program = """
import logging, sys
from pipeline.logs import configure_logs
configure_logs("debug", sys.argv[1])
def connect(options):
    secret = "hunter" + "2"
    raise ValueError(len(options))
try:
    connect({"password": "hunter" + str(2)})
except ValueError:
    logging.getLogger("consumers.kafka").exception("a bug")
"""
    for log_format in ("json", "console"):
        ended = subprocess.run([sys.executable, "-c", program, log_format], capture_output=True, text=True, check=True)
        assert "in connect" in ended.stderr
        assert "hunter2" not in ended.stderr


def test_the_level_leaves_out_what_is_below_it() -> None:
    assert [line["event"] for line in lines("error")] == ["a bug"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_under_the_log_costs_its_lines_and_stops_nobody() -> None:
    program = PROGRAM.format(level="info") + "print('went on', flush=True)\nimport os; os._exit(0)"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, check=True
        )
    assert ended.stdout == "went on\n"


def test_of_what_a_library_repeats_a_line_every_ten_seconds_stays_and_says_how_many_it_stands_for() -> None:
    clock = FakeClock()
    repeats = LibraryRepeats(clock)

    def says(name: str, message: str, *arguments: object) -> int | None:
        """The number left out before this line; None where the line itself is."""
        record = logging.LogRecord(name, logging.ERROR, "", 0, message, arguments, None)
        return getattr(record, "left_out", 0) if repeats.filter(record) else None

    lost = "connection to %s lost"
    assert [says("kafka.net", lost, "a"), says("kafka.net", lost, "b"), says("kafka.net", lost, "a")] == [0, None, None]
    assert [says("kafka.cluster", lost, "a"), says("kafka.net", "another")] == [0, 0]
    assert [says("consumers.kafka", lost, "a"), says("consumers.kafka", lost, "a")] == [0, 0], "ours are all told"
    clock.advance(9.9)
    assert says("kafka.net", lost, "a") is None
    clock.advance(0.2)
    assert [says("kafka.net", lost, "a"), says("kafka.net", lost, "a")] == [3, None]
    for number in range(2000):
        says("kafka.net", f"written out: {number}")
    assert len(repeats._told) <= 1000
