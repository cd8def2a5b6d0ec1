"""What the documentation says is what the code has."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.index import RESULTS_MAPPING
from schemas.document import DocumentMessage, SamplingOverrides
from schemas.errors import FailureCode
from schemas.inference import EngineSettings, ModelSettings
from schemas.settings import ElasticsearchSettings, KafkaSettings, Settings, WorkerSettings
from schemas.settings_reader import load_settings
from schemas.task import Task

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PARTS: dict[str, type] = {
    "kafka": KafkaSettings,
    "elasticsearch": ElasticsearchSettings,
    "model": ModelSettings,
    "engine": EngineSettings,
    "worker": WorkerSettings,
    "tasks.NAME": Task,
}


def names_in_first_column(text: str) -> list[str]:
    cells = [
        re.split(r"(?<!\\)\|", line)[1]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def fields(part: type) -> list[str]:
    if issubclass(part, BaseModel):
        return list(part.model_fields)
    assert dataclasses.is_dataclass(part)
    return [field.name for field in dataclasses.fields(part)]


@pytest.mark.parametrize("part", PARTS)
def test_every_setting_is_documented_and_nothing_else(part: str) -> None:
    section = (DOCS / "settings.md").read_text().split(f"## `[{part}]`")[1].split("\n## ")[0]
    assert sorted(names_in_first_column(section)) == sorted(fields(PARTS[part]))


def test_every_part_of_the_settings_has_a_section() -> None:
    assert {part.split(".")[0] for part in PARTS} == set(Settings.model_fields)


def test_the_readmes_settings_exist() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Settings")[1].split("\n## ")[0]
    for name in names_in_first_column(section):
        part, _, key = name.partition(".")
        known = {**{name: fields(kind) for name, kind in PARTS.items()}, "tasks": ["NAME"]}
        assert (key or part) in (known[part] if key else fields(ElasticsearchSettings)), name


def test_every_key_of_a_message_is_documented_and_nothing_else() -> None:
    text = (DOCS / "messages.md").read_text()
    assert sorted(names_in_first_column(text.split("\n## ")[0])) == sorted(DocumentMessage.model_fields)
    sampling = text.split("\n`sampling` may hold ")[1].split("\n\n")[0]
    assert set(SamplingOverrides.model_fields) <= set(re.findall(r"`([a-z_]+)`", sampling))


def test_every_field_of_a_row_is_documented() -> None:
    text = (DOCS / "results.md").read_text()
    named = {name.split(".")[0] for name in names_in_first_column(text.split("Failure codes")[0])} - {""}
    assert named == set(RESULTS_MAPPING["properties"]) - {"label_scores"}  # null for now
    codes = text.split("Failure codes: ")[1].split("\n\n")[0]
    assert re.findall(r"`([A-Z_]+)`", codes) == [code.value for code in FailureCode]


def test_the_readmes_first_task_is_accepted(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    assert len(example[1].strip().splitlines()) <= 10
    (tmp_path / "pagemill.toml").write_text(example[1])
    settings = load_settings(tmp_path / "pagemill.toml", {}, {})
    assert tomllib.loads(example[1])["tasks"].keys() == settings.tasks.keys() == {"sentiment"}


def test_the_readmes_document_is_one() -> None:
    text = (ROOT / "README.md").read_text().split("\n## A document")[1]
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    assert DocumentMessage.model_validate_json(example[1]).id == "r1"


def test_failure_codes_of_the_message_table_exist() -> None:
    table = (DOCS / "messages.md").read_text().split("\n## What becomes")[1].split("\n## ")[0]
    assert set(re.findall(r"`([A-Z_]{8,})`", table)) <= {code.value for code in FailureCode}
    assert get_args(Task.model_fields["overflow"].annotation) == ("fail", "truncate_middle")


@pytest.mark.parametrize("of", ["message", "row"])
def test_the_exported_schemas_are_what_the_command_prints(of: str) -> None:
    result = CliRunner().invoke(app, ["schema", of])
    assert result.exit_code == 0
    written = (DOCS / "schema" / f"{of}.json").read_text()
    assert written == result.output, f"run `pagemill schema {of} > docs/schema/{of}.json`"


def test_the_readmes_commands_are_the_programs() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Commands")[1].split("\n## ")[0]
    named = {name.split()[1] for name in names_in_first_column(section)}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert named == commands | {group.name for group in app.registered_groups}
