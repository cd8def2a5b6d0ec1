"""The demo's parts by themselves, and all of it on three packages."""

import tempfile
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.demo import (
    DESCRIPTION_TOKENS,
    LABELS,
    Package,
    demo_settings,
    documents_of,
    first_tokens,
    has_fast_bfloat16,
    installed_packages,
    parse_metrics,
    run_demo,
    to_toml,
)
from pipeline.demo_report import DemoRun, answers_table, figures_of, print_report, step_seconds
from pipeline.embedded import EmbeddedServer
from schemas.document import DocumentMessage
from schemas.settings import Settings


class Utf8Cutter:
    """A tokenizer whose tokens are the bytes of the text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode(errors="replace")


def row(package: str, task: str, **keys: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 2}
    return {"id": package, "task": task, "status": "answered", "usage": usage, **keys}


ROWS = [
    row("attrs", "label", label="typing"),
    row("attrs", "summary", text=" Classes [bold]without[/bold] boilerplate.\n")
    | {"usage": {"prompt_tokens": 100, "cached_tokens": 80, "completion_tokens": 8}},
    row("rich", "label", status="failed", failure={"message": "no label was spelled"}),
]


def test_a_text_is_cut_to_its_first_tokens_and_never_inside_a_character() -> None:
    assert first_tokens(Utf8Cutter(), "abc", 3) == "abc"
    assert first_tokens(Utf8Cutter(), "abcd", 3) == "abc"
    assert first_tokens(Utf8Cutter(), "abü", 3) == "ab"


def test_the_packages_are_those_installed_here_by_name_with_bounded_descriptions() -> None:
    packages = installed_packages(Utf8Cutter())
    names = [package.name for package in packages]
    assert names == sorted(set(names), key=str.lower)
    assert {"pydantic", "rich", "torch"} <= set(names)
    assert max(len(package.description.encode()) for package in packages) <= DESCRIPTION_TOKENS
    rich = packages[names.index("rich")]
    assert rich.summary.startswith("Render rich text")
    assert rich.description


def test_each_package_becomes_two_documents_that_follow_each_other() -> None:
    packages = [Package("a", "does a", "It does a."), Package("b", "", "")]
    documents = [DocumentMessage.model_validate_json(message) for _, message in documents_of(packages)]
    assert [(document.id, document.task) for document in documents] == [
        ("a", "label"), ("a", "summary"), ("b", "label"), ("b", "summary"),
    ]  # fmt: skip
    assert documents[0].fields == {"name": "a", "summary": "does a", "description": "It does a."}


def test_the_settings_file_says_what_it_was_made_from_and_is_valid(tmp_path: Path) -> None:
    settings = demo_settings(EmbeddedServer(), tmp_path / "model.gguf", "float32", 9999)
    read = tomllib.loads(to_toml(settings))
    assert read == settings
    tasks = Settings.model_validate(read).tasks
    assert tasks["label"].labels == LABELS
    beginning = tasks["label"].template, tasks["summary"].template
    assert all(template is not None and "Question: " in template for template in beginning)
    assert len({str(template).split("Question: ")[0] for template in beginning}) == 1
    assert tasks["label"].system == tasks["summary"].system


def test_toml_holds_quotes_newlines_characters_beyond_the_basic_plane_and_nested_tables() -> None:
    settings = {"a": {"text": 'a "b"\n\\ü🙂', "n": 1, "on": True, "x": 0.5, "list": ["a", "b"], "in ner": {"c.d": "e"}}}
    assert tomllib.loads(to_toml(settings)) == settings


def test_a_cpu_is_asked_whether_it_has_bf16(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not has_fast_bfloat16(cpuinfo)
    cpuinfo.write_text("flags : fpu avx512f\n")
    assert not has_fast_bfloat16(cpuinfo)
    for instructions in ("avx512_bf16", "amx_bf16"):
        cpuinfo.write_text(f"flags : fpu avx512f {instructions}\n")
        assert has_fast_bfloat16(cpuinfo)


def test_figures_are_sums_over_the_rows() -> None:
    figures = figures_of(DemoRun(ROWS, 1.0, 2.0, 6.0, {}))
    assert (figures.num_answered, figures.num_failed) == (2, 1)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (300, 80, 12)
    assert figures.documents_per_second == 0.5
    assert figures.hit_rate == pytest.approx(80 / 300)


def test_an_answers_brackets_are_shown_as_they_are_and_a_failure_with_its_reason() -> None:
    out = StringIO()
    Console(file=out, width=120).print(answers_table(ROWS))
    assert "Classes [bold]without[/bold] boilerplate." in out.getvalue()
    assert "failed: no label was spelled" in out.getvalue()


def test_the_engines_parts_come_out_of_the_workers_metrics_longest_first() -> None:
    text = (
        "# HELP pagemill_engine_step_seconds_total Seconds\n"
        'pagemill_engine_step_seconds_total{part="sample"} 0.5\n'
        'pagemill_engine_step_seconds_total{part="forward"} 1.25e+01\n'
        'pagemill_engine_step_seconds_total{part="execute"} 13.0\n'
        'pagemill_engine_step_seconds_total{part="update"} 0.01\n'
        "pagemill_other 3.0\n"
    )
    assert step_seconds(parse_metrics(text)) == {"forward": 12.5, "sample": 0.5}
    assert list(step_seconds(parse_metrics(text))) == ["forward", "sample"]


@pytest.mark.real_model
def test_the_demo_answers_every_document_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("noida_db", reason="the demo needs `pip install 'pagemill[demo]'`")
    before = set(Path(tempfile.gettempdir()).glob("pagemill-demo-*"))
    monkeypatch.setenv("PAGEMILL_KAFKA__GROUP", "ours")  # the user's own settings are not the demo's
    out = StringIO()
    run = run_demo(num_packages=3, console=Console(file=out, width=160))
    assert [(entry["task"], entry["status"]) for entry in run.rows] == [
        ("label", "answered"),
        ("summary", "answered"),
    ] * 3
    assert all(entry["label"] in LABELS for entry in run.rows if entry["task"] == "label")
    found_nothing = [entry["id"] for entry in run.rows if entry["usage"]["cached_tokens"] == 0]
    assert len(found_nothing) <= 1  # the first one; all begin alike
    for label, summary in zip(run.rows[::2], run.rows[1::2], strict=True):  # whichever of the two came second
        cached = max(label["usage"]["cached_tokens"], summary["usage"]["cached_tokens"])
        assert cached > 0.5 * label["usage"]["prompt_tokens"]
    assert "Answers, from Elasticsearch" in out.getvalue()
    assert "of that, engine: the model's layers" in out.getvalue()
    assert set(Path(tempfile.gettempdir()).glob("pagemill-demo-*")) == before


def test_the_report_prints_without_a_worker_metric() -> None:
    out = StringIO()
    print_report(DemoRun(ROWS, 1.0, 2.0, 6.0, {}), Console(file=out, width=120))
    assert "0.50 documents/s" in out.getvalue()
    assert "80 (27%)" in out.getvalue()
