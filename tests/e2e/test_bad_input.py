"""Each row of the table of bad input ends as it says, with a cause a person understands; the next one is answered."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.embedded import EmbeddedServer
from tests.e2e.documents import BAD, Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess

# What the sentence must name: the key, the value or the limit that is wrong.
NAMED = {
    "not JSON": "JSON",
    "too large": "20,000",
    "not UTF-8": "UTF-8",
    "no value": "no value",
    "empty value": "",
    "an array": "object",
    "wrong type": "priority",
    "out of range": "priority",
    "unknown key": "promt",
    "lone surrogate": "'prompt' holds a lone surrogate",
    "version of the future": "schema_version",
    "no content": "fields, messages, prompt, prompt_token_ids",
    "two contents": "prompt and prompt_token_ids",
    "field missing": "'text'",
    "sampling key": "max_token",
    "sampling range": "top_p",
    "id too long": "id",
    "job's name": "job",
    "deadline without zone": "deadline",
    "unknown task": "translate",
    "no tokens": "no tokens",
    "empty prompt": "no tokens",
    "longer than the context": "129 tokens",
    "deadline passed": "2020-01-01",
    "output against the schema": "JSON",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker made of the bad messages, each with a good one behind it in the same partition."""

    rows: dict[int, dict[str, Any]]  # by offset
    dead: dict[str, Any]  # by key
    topic: str
    exit_code: int


@pytest.fixture(scope="module")
def outcome(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    sent: list[Sent] = []
    for number, (name, (value, code)) in enumerate(BAD.items()):
        sent.append(Sent(name, 0, value, name.encode(), code))
        sent.append(Sent("next", 0, document(id=f"next-{number}", prompt=f"and then {number}"), b"next"))
    with EmbeddedServer() as server:
        servers = Servers(server.kafka_address, server.elasticsearch_url, "bad", server.kafka_settings())
        servers.create_topic(1)
        servers.produce(sent)
        folder = tmp_path_factory.mktemp("bad")
        worker = WorkerProcess(folder, "worker", servers.settings(str(tiny_model)), "--until-drained")
        try:
            exit_code = worker.wait()
            rows = {row["source"]["offset"]: row for row in servers.rows()}
            dead = {record.key.decode(): record for record in servers.dead_letters()}
        finally:
            worker.kill()
        yield Outcome(rows, dead, servers.topic, exit_code)


def test_the_worker_goes_on_to_the_end(outcome: Outcome) -> None:
    assert outcome.exit_code == 0
    assert sorted(outcome.rows) == list(range(2 * len(BAD)))
    assert len(outcome.dead) == len(BAD)


@pytest.mark.parametrize(("number", "name"), list(enumerate(BAD)), ids=list(BAD))
def test_a_bad_message_fails_by_name_and_the_next_one_is_answered(outcome: Outcome, number: int, name: str) -> None:
    value, code = BAD[name]
    row, following = outcome.rows[2 * number], outcome.rows[2 * number + 1]
    assert row["status"] == "failed"
    assert row["failure"]["code"] == code
    assert NAMED[name] in row["failure"]["message"]
    assert following["status"] == "answered"
    assert following["failure"] is None

    letter = outcome.dead[f"{outcome.topic}/0/{2 * number}"]
    headers = {key: header.decode() for key, header in letter.headers}
    assert letter.value == value
    assert headers["pagemill-code"] == code
    assert headers["pagemill-stage"] == row["failure"]["stage"]
    assert headers["pagemill-message"] == row["failure"]["message"]
    assert headers["pagemill-offset"] == str(2 * number)
    assert headers["pagemill-key"] == name
    assert headers["origin"] == name


def test_a_failed_output_keeps_its_text_and_an_unreadable_message_its_place(outcome: Outcome) -> None:
    names = list(BAD)
    assert outcome.rows[2 * names.index("output against the schema")]["text"] is not None
    unreadable = outcome.rows[2 * names.index("not JSON")]
    assert unreadable["id"] == f"{outcome.topic}/0/{2 * names.index('not JSON')}"
    assert (unreadable["job"], unreadable["task"]) == ("default", "default")
