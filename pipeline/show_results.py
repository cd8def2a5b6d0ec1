"""`pagemill results`: rows out of Elasticsearch, as a table for a person or as JSON lines for a program."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elasticsearch import Elasticsearch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.connection import check_reachable, connect
from pipeline.query import Status, count_by_status, count_failures, find_results
from schemas.errors import SettingsError
from schemas.settings import Settings

TABLE_ROWS = 50
MAX_CELL_CHARACTERS = 300
# Control characters of ASCII and of Latin-1, and those that turn the direction of writing.
_SYMBOLS = (
    {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
)


def print_jsonl(
    settings: Settings, job: str | None, task: str | None, status: Status | None, limit: int | None
) -> None:
    """One row a line on standard output, as it is stored."""
    with _client(settings) as client:
        for row in find_results(client, _alias(settings, task), job=job, task=task, status=status, limit=limit):
            sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


def print_table(
    settings: Settings,
    job: str | None,
    task: str | None,
    status: Status | None,
    limit: int | None,
    console: Console | None = None,
) -> None:
    """The rows, then how many there are and why some failed."""
    console = console if console is not None else Console()
    alias = _alias(settings, task)
    with _client(settings) as client:
        shown = find_results(
            client, alias, job=job, task=task, status=status, limit=limit if limit is not None else TABLE_ROWS
        )
        table = rows_table(shown)
        counts = count_by_status(client, alias, job=job, task=task)
        failures = count_failures(client, alias, job=job, task=task) if counts["failed"] else {}
    if table.row_count:
        console.print(table)
    total = sum(counts.values()) if status is None else counts[status]
    console.print(f"{table.row_count} of {total} rows shown; {counts['answered']} answered, {counts['failed']} failed")
    if failures:
        console.print("failures: " + ", ".join(f"{code.value} {number}" for code, number in sorted(failures.items())))


def rows_table(rows: Iterator[Mapping[str, Any]]) -> Table:
    """One line a row: its document, and its answer or why there is none."""
    table = Table()
    for column in ("job", "task", "document", "status"):
        table.add_column(column, overflow="fold")
    table.add_column("answer", overflow="fold", ratio=1)
    for row in rows:
        # As Text: an answer's brackets are no markup.
        cells = (row["job"], row["task"], row["id"], row["status"], answer_cell(row))
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def visible(text: str) -> str:
    """Text of strangers for a terminal: control characters, which would act there, as the symbols that stand for
    them; line breaks stay."""
    return text.translate(_SYMBOLS)


def answer_cell(row: Mapping[str, Any]) -> str:
    """The label, the text, or the failure, cut to what a table can show."""
    failure = row.get("failure")
    if failure:
        text = f"{failure['code']}: {failure['message']}"
    else:
        text = row.get("label") or (row.get("text") or "").strip()
    return text if len(text) <= MAX_CELL_CHARACTERS else text[: MAX_CELL_CHARACTERS - 1] + "…"


def _alias(settings: Settings, task: str | None) -> str:
    """Where the rows are: the default index and those that tasks name, or the one of the task that is asked for."""
    if task is not None:
        known = settings.tasks.get(task)
        return known.index if known is not None and known.index is not None else settings.elasticsearch.index
    indices = [one.index for one in settings.tasks.values() if one.index is not None]
    return ",".join(dict.fromkeys([settings.elasticsearch.index, *indices]))


@contextmanager
def _client(settings: Settings) -> Iterator[Elasticsearch]:
    if not settings.elasticsearch.urls:
        raise SettingsError(
            "elasticsearch.urls is not set; give --elasticsearch http://host:9200, or set it in pagemill.toml"
        )
    client = connect(settings.elasticsearch)
    try:
        check_reachable(client, settings.elasticsearch)
        yield client
    finally:
        client.close()
