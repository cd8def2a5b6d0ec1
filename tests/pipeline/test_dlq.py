"""The dead-letter commands, on the real servers with a worker of its own for every change."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from consumers.decode import decode_document
from pipeline.dlq import LetterFilter, parse_time
from pipeline.submit import send
from pipeline.worker import Worker
from schemas.errors import SettingsError
from schemas.settings import Settings
from schemas.settings_reader import load_settings
from tests.consumers.harness import produce
from tests.consumers.test_letter_log import failed, letter_of, message
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer
from tests.pipeline.test_cli import _own_folder, _own_logs, ends  # noqa: F401
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", datetime(2026, 5, 4, 11, 58, 30, tzinfo=UTC)),
        ("3d", datetime(2026, 5, 1, 12, 0, tzinfo=UTC)),
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    ],
)
def test_a_time_is_a_moment_or_how_long_ago(text: str, moment: datetime) -> None:
    assert parse_time(text, NOW) == moment.timestamp() * 1000


@pytest.mark.parametrize("text", ["", "yesterday", "3w", "-1h", "12:00"])
def test_another_time_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(SettingsError, match="2026-01-31T12:00:00Z, or how long ago"):
        parse_time(text, NOW)


def test_a_filter_wants_what_fits_all_of_it() -> None:
    letter = letter_of(failed(message(value=b'{"task": "sum", "prompt": "x"}')))
    identity = decode_document(letter.raw, 1000).identity
    fitting: dict[str, Any] = {"codes": frozenset({"UNKNOWN_TASK"}), "job": "monday", "task": "sum", "since_ms": 12_000}
    other: dict[str, Any] = {"codes": frozenset({"BAD_MESSAGE"}), "job": "x", "task": "default", "since_ms": 12_001}
    assert LetterFilter(**fitting, until_ms=12_001).wants(letter, identity)
    assert not LetterFilter(until_ms=12_000).wants(letter, identity)
    assert [LetterFilter(**{name: value}).wants(letter, identity) for name, value in other.items()] == [False] * 4


@pytest.fixture
def settings(
    kafka_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str]
) -> Settings:
    Path("pagemill.toml").write_text(
        f"""
        [kafka]
        bootstrap_servers = ["{kafka_broker.bootstrap_servers}"]
        topics = ["{fresh_name("documents")}"]
        dead_letter_topic = "{fresh_name("dead-letters")}"
        group = "{fresh_name("group")}"
        [elasticsearch]
        urls = ["{elasticsearch_node.url}"]
        index = "{fresh_name("results")}"
        number_of_replicas = 0
        flush_seconds = 0.05
        [worker]
        http_port = 0
        """
    )
    return load_settings(None, {}, {})


def send_documents(settings: Settings, *documents: dict[str, Any]) -> None:
    records = [(n, b"k", json.dumps({"job": "monday", **each}).encode()) for n, each in enumerate(documents)]
    send(settings, settings.kafka.topics[0], records)


def run_worker(**tasks: Any) -> None:
    settings = load_settings(None, {"tasks": tasks} if tasks else {}, {})
    Worker(settings, engine_command=fake_engine_command(), tokenizer=ByteTokenizer()).run(True)


def listed(*arguments: str) -> list[dict[str, Any]]:
    code, out, err = ends("dlq", "list", "--format", "jsonl", *arguments)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def told(*arguments: str, code: int = 0) -> str:
    found, out, err = ends("dlq", *arguments)
    assert (found, err) == (code, "")
    return out


def rows() -> dict[str, Any]:
    _, out, _ = ends("results", "--format", "jsonl")
    return {row["id"]: row for row in map(json.loads, out.splitlines())}


@pytest.mark.real_servers
def test_what_failed_for_want_of_a_task_is_found_sent_again_answered_and_deleted(settings: Settings) -> None:
    send_documents(
        settings, {"id": "a", "task": "sum", "prompt": "x"}, {"id": "b", "prompt": 5}, {"id": "c", "prompt": "y"}
    )
    run_worker()
    assert [(one["id"], one["code"], one["task"], one["attempt"], one["state"]) for one in listed()] == [
        ("a", "UNKNOWN_TASK", "sum", 0, "open"), ("b", "BAD_MESSAGE", "default", 0, "open"),
    ]  # fmt: skip
    for chosen in (["--code", "UNKNOWN_TASK"], ["--task", "sum"], ["--limit", "1", "--task", "sum", "--since", "1h"]):
        assert [one["id"] for one in listed(*chosen)] == ["a"]
    for none in (["--job", "other"], ["--until", "1h"], ["--state", "cut"]):
        assert listed(*none) == []
    out = told("list")
    assert "2 of 2 letters shown; 2 open, 0 replayed, 0 cut, 0 purged" in out
    assert "causes: BAD_MESSAGE 1, UNKNOWN_TASK 1" in out
    shown = json.loads(told("show", listed("--task", "sum")[0]["letter"]))
    assert json.loads(shown["value"]) == {"id": "a", "job": "monday", "task": "sum", "prompt": "x"}

    assert told("replay", "--dry-run").startswith("2 would be replayed;")
    assert told("replay", "--code", "UNKNOWN_TASK").startswith("1 replayed; 0 were before")
    assert told("replay", "--code", "UNKNOWN_TASK").startswith("0 replayed; 1 were before")
    assert [one["state"] for one in listed()] == ["replayed", "open"]
    run_worker(sum={})
    first, second = rows()["a"], rows()["c"]
    assert (first["status"], first["attempts"], first["source"]["offset"]) == ("answered", 2, 0)
    assert (second["status"], second["attempts"], second["source"]["offset"]) == ("answered", 1, 2)
    code, out, _ = ends("audit")
    assert (code, "messages 4 = stored 3 + superseded 1 + missing 0 + older 0" in out) == (0, True)

    assert told("replay").startswith("1 replayed; 1 were before")
    run_worker()
    assert [(one["id"], one["attempt"], one["state"]) for one in listed()] == [
        ("a", 0, "replayed"), ("b", 0, "replayed"), ("b", 1, "open"),
    ]  # fmt: skip
    assert rows()["b"]["attempts"] == 2

    assert told("purge", "--before", "0/1", code=1).endswith(
        "nothing was deleted: give --yes to delete them for good\n"
    )
    assert told("purge", "--until", "1h", "--yes").startswith("0 letters, 0 of them never replayed nor purged")
    assert len(listed()) == 3
    out = told("purge", "--before", "0/2", "--yes")
    assert "offsets 0 to 2\n2 letters, 0 of them never replayed nor purged\ndeleted" in out
    assert [one["attempt"] for one in listed()] == [1]
    assert "1 letters, 1 of them never replayed nor purged\ndeleted" in told("purge", "--all", "--yes")
    assert listed() == []


@pytest.mark.real_servers
def test_letters_are_purged_by_cause_task_and_job_one_by_one_and_are_shown_and_sent_no_more(settings: Settings) -> None:
    send_documents(
        settings, {"id": "a", "task": "sum", "prompt": "x"}, {"id": "b", "prompt": 5}, {"id": "c", "prompt": 6},
        {"id": "d", "job": "tuesday", "prompt": 7},
    )  # fmt: skip
    run_worker()
    assert [one["id"] for one in listed()] == ["a", "b", "c", "d"]
    assert told("replay", "--task", "sum").startswith("1 replayed")
    chosen = ("--code", "BAD_MESSAGE", "--job", "monday")
    assert told("purge", *chosen, code=1) == "2 letters fit; nothing was marked: give --yes to put them away for good\n"
    assert len(listed()) == 4
    assert told("purge", *chosen, "--yes") == (
        f"2 letters are shown and replayed no more; their bytes stay in {settings.kafka.dead_letter_topic} until its "
        "beginning is deleted (--before, --until, --all)\n"
    )
    assert told("purge", *chosen, "--yes").startswith("0 letters are shown")
    assert [(one["id"], one["state"]) for one in listed()] == [("a", "replayed"), ("d", "open")]
    assert [one["id"] for one in listed("--state", "purged")] == ["b", "c"]
    assert json.loads(told("show", "0/1"))["state"] == "purged"
    assert "2 of 2 letters shown; 1 open, 1 replayed, 0 cut, 2 purged" in told("list")
    assert told("replay", "--dry-run") == (
        "1 would be replayed; 1 were before, 0 are answered since, 0 have a newer row, 0 cannot be\n"
    )
    assert told("purge", "--task", "sum", "--since", "1h", "--yes").startswith("1 letters are")  # a replayed one too
    assert [one["id"] for one in listed()] == ["d"]
    assert "4 letters, 1 of them never replayed nor purged\n" in told("purge", "--all", code=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of --before PARTITION/OFFSET, --until TIME and --all, or choose by --code"),
        (["--until", "1h", "--all"], "give one of --before"),
        (["--job", "monday", "--all"], "--before and --all delete the beginning of the topic, whatever stands there"),
        (["--before", "0/3", "--code", "BAD_MESSAGE"], "--before and --all delete the beginning"),
    ],
)
def test_a_purge_either_chooses_letters_or_deletes_the_beginning(arguments: list[str], says: str) -> None:
    code, out, err = ends("dlq", "purge", *arguments, "--yes")
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.real_servers
def test_what_was_answered_since_or_is_not_whole_is_not_sent_again(
    settings: Settings, kafka_broker: KafkaBroker
) -> None:
    send_documents(settings, {"id": "a", "task": "sum", "prompt": "x"}, {"id": "b", "task": "sum", "prompt": "x"})
    run_worker()
    send_documents(settings, {"id": "a", "task": "sum", "prompt": "x"}, {"id": "b", "task": "sum", "prompt": 5})
    run_worker(sum={})
    letters = settings.kafka.dead_letter_topic
    record = failed(message(value=b"v" * 5000), max_bytes=2000)
    produce(kafka_broker.bootstrap_servers, letters, [record.value], key=record.key, headers=list(record.headers))
    produce(kafka_broker.bootstrap_servers, letters, [b"of somebody else"])
    out = told("replay", code=1)
    assert "letter 0/3 cannot be replayed: the dead-letter topic had no room for the last" in out
    assert "(documents/3/17): send the document again from where it came" in out
    assert out.endswith("1 replayed; 0 were before, 1 are answered since, 1 have a newer row, 1 cannot be\n")
    assert "1 records of" in told("list")
    assert "is no dead letter" in ends("dlq", "show", "0/4")[2]
    assert ends("dlq", "show", "7/4")[2].endswith("has partitions 0 to 0\n")
    assert "there is no letter 0/99" in ends("dlq", "show", "0/99")[2]
