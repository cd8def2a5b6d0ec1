"""The command: what it says and how it ends."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from elasticsearch import Elasticsearch
from kafka.errors import KafkaConnectionError
from typer.testing import CliRunner

from pipeline.account import Account, Totals
from pipeline.cli import app
from pipeline.letter_sender import open_producer
from pipeline.submit import Submission, guess_format, messages, plan_submission
from pipeline.summary import RunSummary
from pipeline.worker import Worker
from schemas.errors import SettingsError, SourceError
from schemas.inference import EngineStats
from schemas.settings import Settings
from schemas.settings_reader import load_settings
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

runner = CliRunner()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """A command sets the process's logs up for good; a test is not a process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def ends(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_mistake_in_the_settings_is_one_sentence_and_exit_code_2() -> None:
    assert ends("worker", "--set", "kafka.topcs=a") == (
        2, "", "pagemill: unknown setting kafka.topcs (flag); did you mean kafka.topics?\n",
    )  # fmt: skip
    assert ends("worker", "--set", "kafka.topics") == (
        2,
        "",
        "pagemill: --set 'kafka.topics': write it as key=value, such as kafka.topics=pagemill.documents\n",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_output_on_a_full_disk_is_one_sentence_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "pipeline.cli", "check-config", "--set", "kafka.bootstrap_servers=a:1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.stderr == "pagemill: the disk is full: make room and run the command again\n"
    assert ended.returncode == 1


def test_a_worker_without_addresses_says_what_to_set() -> None:
    code, out, err = ends("worker")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(key in err for key in ("kafka.bootstrap_servers", "elasticsearch.urls", "model.path"))


def test_addresses_have_flags_of_their_own() -> None:
    _, _, err = ends("worker", "--kafka", "a:1,b:2", "--elasticsearch", "http://c:3")
    assert "kafka.bootstrap_servers = " not in err
    assert "elasticsearch.urls = " not in err


@pytest.mark.parametrize(("num_in_flight", "exit_code"), [(0, 0), (1, 1)])
def test_a_run_whose_account_does_not_balance_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, num_in_flight: int, exit_code: int
) -> None:
    summary = RunSummary(Totals(Account(delivered=1, indexed=1)), EngineStats(), num_in_flight)
    monkeypatch.setattr(Worker, "run", lambda *_: summary)
    code, out, _ = ends("worker")
    assert code == exit_code
    assert ("the account does not balance" in out) == bool(exit_code)


def test_check_config_prints_what_it_would_use_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pagemill.toml").write_text('[kafka]\ngroup = "mine"\n[tasks.a]\ntemplate = "{{ text }}"\n')
    monkeypatch.setenv("PAGEMILL_KAFKA__SASL_PASSWORD", "hush")
    code, out, _ = ends("check-config", "--set", "kafka.topics=a,b")
    assert code == 0
    assert 'group = "mine"' in out
    assert 'topics = ["a", "b"]' in out
    assert 'template = "{{ text }}"' in out
    assert "hush" not in out
    assert 'sasl_password = "**********"' in out


def test_a_password_in_an_address_is_refused_when_settings_are_loaded_and_not_repeated() -> None:
    address = "http://me:hush#hush@search:9200"
    said = "elasticsearch.urls (flag) holds credentials in 'http://***@search:9200'; give them as "
    for arguments in (
        ("check-config", "--set", f"elasticsearch.urls={address}"),
        ("worker", "--elasticsearch", address),
        ("results", "--elasticsearch", address),
    ):
        code, out, err = ends(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"pagemill: {said}")
    _, _, err = ends("check-config", "--set", address)
    assert "hush" not in err


def test_check_config_finds_a_template_that_does_not_compile() -> None:
    Path("pagemill.toml").write_text('[tasks.a]\ntemplate = "{{ text"\n')
    code, _, err = ends("check-config")
    assert code == 2
    assert err.startswith("pagemill: tasks.a.template, line 1: ")


def test_check_config_finds_an_output_schema_that_is_none() -> None:
    Path("pagemill.toml").write_text("[tasks.a]\noutput_schema = {type = 3}\n")
    code, _, err = ends("check-config")
    assert code == 2
    assert err.startswith("pagemill: tasks.a.output_schema is not a JSON Schema, at $.type: ")


@pytest.mark.parametrize(("of", "key"), [("message", "prompt_token_ids"), ("row", "finish_reason")])
def test_schema_prints_a_json_schema(of: str, key: str) -> None:
    code, out, _ = ends("schema", of)
    schema = json.loads(out)
    assert code == 0
    assert key in schema["properties"]
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def submission(**changes: Any) -> Submission:
    plain = {"task": "t", "job": "j", "name": "f", "input_format": "jsonl", "text_is_field": True}
    return Submission(**{**plain, **changes})


def made(lines: list[str], **changes: Any) -> list[dict[str, Any]]:
    return [json.loads(value) for _, _, value in messages(lines, submission(**changes), 1000)]


def test_a_json_line_with_content_is_a_document_and_another_one_is_its_fields() -> None:
    lines = ['{"id": "a", "prompt": "x", "job": "own"}\n', "\n", '{"id": 7, "text": "y"}\n', '{"text": "z"}']
    assert made(lines) == [
        {"id": "a", "prompt": "x", "job": "own", "task": "t"},
        {"fields": {"id": 7, "text": "y"}, "id": "7", "job": "j", "task": "t"},
        {"fields": {"text": "z"}, "id": "f-4", "job": "j", "task": "t"},
    ]


def test_a_text_line_is_the_field_text_or_the_prompt() -> None:
    assert made(["hello\n"], input_format="text") == [
        {"fields": {"text": "hello"}, "id": "f-1", "job": "j", "task": "t"},
    ]
    assert made(["hello"], input_format="text", text_is_field=False)[0]["prompt"] == "hello"


def test_the_key_is_the_id() -> None:
    assert [key for _, key, _ in messages(['{"id": "ä", "prompt": "x"}'], submission(), 1000)] == ["ä".encode()]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"id":', "line 2 is not JSON: Expecting value at character 7"),
        ("[1]", "line 2 is list, not a JSON object"),
        ('{"prompt": "x", "priority": 11}', "line 2: 'priority'"),
        ('{"prompt": "x", "promtp": "y"}', "line 2: "),
        (json.dumps({"prompt": "x" * 1000}), "max_document_bytes"),
    ],
)
def test_a_line_that_a_worker_would_refuse_is_refused_with_its_number(line: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        made(['{"prompt": "fine"}', line])
    assert sentence in str(caught.value)


def test_the_format_is_guessed_by_ending_then_by_the_first_character() -> None:
    assert guess_format("a.jsonl", "text") == "jsonl"
    assert guess_format("a.txt", "{") == "text"
    assert guess_format("a", '  {"a": 1}') == "jsonl"
    assert guess_format("", "hello") == "text"


BLANK_START = [b"", b"\xef\xbb\xbf", b"\n \r\n", b"\xef\xbb\xbf\n\n"]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a submission hands to Kafka."""
    documents: list[dict[str, Any]] = []

    def take(_settings: Settings, _topic: str, records: Iterator[tuple[int, bytes, bytes]], *_: Any) -> int:
        documents.extend(json.loads(value) for _, _, value in records)
        return len(documents)

    monkeypatch.setattr("pipeline.submit.send", take)
    return documents


def submits(file: str, content: bytes) -> tuple[int, str]:
    result = runner.invoke(app, ["submit", file, "--kafka", "a:1"], input=content)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize("start", BLANK_START)
@pytest.mark.parametrize("file", ["-", "lines"])
def test_the_format_is_guessed_behind_a_byte_order_mark_and_blank_lines(
    sent: list[dict[str, Any]], file: str, start: bytes
) -> None:
    for content, prompt in ((b'{"prompt": "x"}\n', "x"), (b"x\n", "x"), (b'x {"prompt"\n', 'x {"prompt"')):
        Path("lines").write_bytes(start + content)
        sent.clear()
        assert submits(file, start + content) == (0, "")
        assert [document["prompt"] for document in sent] == [prompt]
        number = start.count(b"\n") + 1
        assert sent[0]["id"] == f"{'stdin' if file == '-' else 'lines'}-{number}"


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize(("file", "name"), [("-", "standard input"), ("lines", "lines")])
def test_what_is_not_utf_8_is_told_with_its_line(file: str, name: str) -> None:
    for start in (b"", b"fine\n"):
        Path("lines").write_bytes(start + b"\xff\n")
        number = start.count(b"\n") + 1
        assert submits(file, start + b"\xff\n") == (
            2, f"pagemill: {name}, line {number} is not UTF-8: invalid start byte\n",
        )  # fmt: skip


def raising(error: Exception) -> Callable[..., None]:
    def fail(**_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("gone", [KafkaConnectionError("gone"), ConnectionRefusedError("gone")])
def test_a_broker_that_goes_away_before_the_first_document_is_told(
    monkeypatch: pytest.MonkeyPatch, gone: Exception
) -> None:
    monkeypatch.setattr("pipeline.submit.ensure_topics", lambda settings, **_: settings)
    monkeypatch.setattr("pipeline.submit.KafkaProducer", raising(gone))
    assert submits("-", b"x\n") == (1, f"pagemill: Kafka at a:1 does not answer: {gone}; nothing was sent\n")


@pytest.mark.parametrize("gone", [KafkaConnectionError("gone"), ConnectionRefusedError("gone")])
def test_a_broker_that_goes_away_before_the_first_letter_is_told(
    monkeypatch: pytest.MonkeyPatch, gone: Exception
) -> None:
    monkeypatch.setattr("pipeline.letter_sender.check_connection", lambda settings: settings)
    monkeypatch.setattr("pipeline.letter_sender.KafkaProducer", raising(gone))
    with (
        pytest.raises(SourceError, match=r"Kafka at a:1 does not answer: .*gone"),
        open_producer(load_settings(None, {"kafka.bootstrap_servers": "a:1"}, {})),
    ):
        pass


def test_text_is_a_prompt_where_the_task_has_no_template() -> None:
    settings = load_settings(None, {"tasks": {"with": {"template": "{{ text }}"}, "without": {}}}, {})
    plans = {task: plan_submission(settings, "f", task, "j", "text") for task in ("with", "without", "default", "new")}
    assert {task: plan.text_is_field for task, plan in plans.items()} == {
        "with": True, "without": False, "default": False, "new": True,
    }  # fmt: skip


def test_a_demo_of_no_packages_is_refused() -> None:
    code, out, err = ends("demo", "--packages", "0")
    assert (code, out) == (2, "")
    assert "greater than or equal to 1" in err


def test_a_file_that_is_not_there_is_told() -> None:
    assert ends("submit", "nowhere.txt", "--kafka", "127.0.0.1:1")[2].endswith(
        "pagemill: 'nowhere.txt' cannot be read: No such file or directory\n"
    )
    assert ends("submit", "nowhere.txt")[0] == 2
    assert ends("results")[2].startswith("pagemill: elasticsearch.urls is not set")


@pytest.fixture
def settings_file(
    kafka_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str]
) -> None:
    Path("pagemill.toml").write_text(
        f"""
        [kafka]
        bootstrap_servers = ["{kafka_broker.bootstrap_servers}"]
        topics = ["{fresh_name("submitted")}"]
        dead_letter_topic = "{fresh_name("dead-letters")}"
        group = "{fresh_name("group")}"
        [elasticsearch]
        urls = ["{elasticsearch_node.url}"]
        index = "{fresh_name("results")}"
        number_of_replicas = 0
        [worker]
        http_port = 0
        [tasks.echo]
        template = "{{{{ text }}}}"
        """
    )


@pytest.mark.real_servers
@pytest.mark.usefixtures("settings_file")
def test_submitted_lines_come_out_of_results() -> None:
    Path("lines.txt").write_text("one\ntwo\n\nthree\n")
    code, out, err = ends("submit", "lines.txt", "--task", "echo", "--job", "mine")
    assert (code, err.strip()) == (0, "")
    assert out.startswith("3 documents sent to submitted-")
    line = '{"id": "x", "task": "nobody", "prompt": "y"}\n'
    result = runner.invoke(app, ["submit", "-", "--job", "mine"], input=line)
    assert result.exit_code == 0, result.stderr
    Worker(load_settings(None, {}, {}), engine_command=fake_engine_command(), tokenizer=ByteTokenizer()).run(True)
    code, out, _ = ends("results", "--job", "mine", "--status", "answered", "--format", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sorted(row["id"] for row in rows) == ["lines-1", "lines-2", "lines-4"]
    code, out, _ = ends("results", "--job", "mine")
    assert code == 0
    assert "UNKNOWN_TASK" in out
    assert "4 of 4 rows shown; 3 answered, 1 failed" in out
    assert ends("results", "--job", "other")[1].splitlines()[-1].startswith("0 of 0 rows shown")

    code, out, err = ends("audit")
    assert (code, err) == (0, "")
    assert "messages 4 = stored 4 + superseded 0 + missing 0 + older 0" in out
    settings = load_settings(None, {}, {})
    with Elasticsearch(list(settings.elasticsearch.urls)) as client:
        client.delete(index=settings.elasticsearch.index, id="mine:echo:lines-2")
    code, out, err = ends("audit", "--until", "end", "--job", "mine")
    assert (code, err) == (1, "")
    assert "missing " in out
    assert "document 'lines-2', _id 'mine:echo:lines-2': no row" in out
    assert out.endswith("NOT everything is there\n")


@pytest.mark.real_servers
@pytest.mark.usefixtures("settings_file")
def test_a_bad_line_stops_the_submission_before_anything_is_sent() -> None:
    Path("lines.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    code, out, err = ends("submit", "lines.jsonl")
    assert (code, out) == (2, "")
    assert "pagemill: line 2: 'prompt'" in err
    worker = Worker(load_settings(None, {}, {}), engine_command=fake_engine_command(), tokenizer=ByteTokenizer())
    with pytest.raises(Exception, match="no such Kafka topic"):
        worker.run(True)


@pytest.mark.real_servers
@pytest.mark.usefixtures("settings_file")
def test_a_submission_that_will_come_to_nothing_is_told() -> None:
    Path("line.txt").write_text("one\n")
    code, out, err = ends("submit", "line.txt", "--task", "ecko", "--job", "mine")
    assert code == 0
    assert out.startswith("1 document sent to submitted-")
    assert err.startswith("note: the settings here have no task 'ecko', only echo. ")
    Path("empty.txt").write_text("\n\n")
    assert ends("submit", "empty.txt", "--task", "echo") == (0, "empty.txt holds no documents: nothing was sent\n", "")
