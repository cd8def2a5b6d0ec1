"""What the demo shows at its end: the answers as a table, and the figures behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Of the engine's step; "execute" is left out, since it is the sum of the three that the model runner counts.
ENGINE_PARTS = {
    "forward": "the model's layers",
    "sample": "choosing tokens",
    "prepare": "making tensors",
    "schedule": "scheduling",
    "wait": "waiting for the device",
    "update": "detokenising",
}


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The rows out of Elasticsearch, and seconds: until the worker started, until it was ready, until it was done."""

    rows: Sequence[Mapping[str, Any]]
    prepare_seconds: float
    load_seconds: float
    answer_seconds: float
    metrics: Mapping[str, float]  # the worker's last, by name with labels


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over the rows."""

    num_answered: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    documents_per_second: float
    hit_rate: float  # of the prompt tokens, those that were found in the prefix cache


def figures_of(run: DemoRun) -> Figures:
    usage = [row["usage"] for row in run.rows]
    prompt = sum(entry["prompt_tokens"] for entry in usage)
    cached = sum(entry["cached_tokens"] for entry in usage)
    return Figures(
        num_answered=sum(row["status"] == "answered" for row in run.rows),
        num_failed=sum(row["status"] == "failed" for row in run.rows),
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=sum(entry["completion_tokens"] for entry in usage),
        documents_per_second=len(run.rows) / run.answer_seconds if run.answer_seconds > 0 else 0.0,
        hit_rate=cached / prompt if prompt else 0.0,
    )


def print_report(run: DemoRun, console: Console) -> None:
    console.print(answers_table(run.rows))
    console.print(figures_table(run))


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a package: its label and its summary, or why there is none."""
    answers: dict[str, dict[str, str]] = {}
    for row in rows:
        failed = row["status"] == "failed"
        answer = f"failed: {row['failure']['message']}" if failed else row.get("label") or row.get("text") or ""
        answers.setdefault(row["id"], {})[row["task"]] = answer.strip()
    table = Table(title="Answers, from Elasticsearch", title_justify="left")
    table.add_column("package", no_wrap=True)
    table.add_column("label", no_wrap=True)
    table.add_column("summary", overflow="fold")
    for package, by_task in answers.items():
        # As Text: an answer's brackets are no markup.
        table.add_row(Text(package), Text(by_task.get("label", "")), Text(by_task.get("summary", "")))
    return table


def figures_table(run: DemoRun) -> Table:
    figures = figures_of(run)
    table = Table(show_header=False, title="Figures", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("documents answered / failed", f"{figures.num_answered} / {figures.num_failed}")
    table.add_row("throughput", f"{figures.documents_per_second:.2f} documents/s")
    table.add_row("prompt tokens", f"{figures.prompt_tokens:,}")
    table.add_row("found in the prefix cache", f"{figures.cached_tokens:,} ({figures.hit_rate:.0%})")
    table.add_row("output tokens", f"{figures.completion_tokens:,}")
    table.add_section()
    table.add_row("server, documents, model file", f"{run.prepare_seconds:.1f} s")
    table.add_row("worker start, model load", f"{run.load_seconds:.1f} s")
    table.add_row("answering", f"{run.answer_seconds:.1f} s")
    for part, seconds in step_seconds(run.metrics).items():
        table.add_row(f"  of that, engine: {ENGINE_PARTS[part]}", f"{seconds:.1f} s")
    return table


def step_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The parts of the engine's steps that took a tenth of a second or more, longest first."""
    parts = {part: metrics.get(f'pagemill_engine_step_seconds_total{{part="{part}"}}', 0.0) for part in ENGINE_PARTS}
    parts = {part: seconds for part, seconds in parts.items() if seconds >= 0.1}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))
