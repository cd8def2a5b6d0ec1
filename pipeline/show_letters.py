"""`pagemill dlq list` and `show`: dead letters as a table or in full for a person, as JSON lines for a program."""

import json
import sys
from collections import Counter
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.dlq import LetterFilter, LetterState, ListedLetter, open_letters
from pipeline.show_results import MAX_CELL_CHARACTERS, visible
from schemas.settings import Settings

TABLE_ROWS = 50


def print_letters_jsonl(
    settings: Settings, wanted: LetterFilter, states: frozenset[LetterState], limit: int | None
) -> None:
    """One letter a line on standard output, without its message."""
    with open_letters(settings) as box:
        num_shown = 0
        for one in box.find(wanted):
            if one.state in states and (limit is None or num_shown < limit):
                num_shown += 1
                sys.stdout.write(json.dumps(one.as_json(), ensure_ascii=False) + "\n")


def print_letters_table(
    settings: Settings,
    wanted: LetterFilter,
    states: frozenset[LetterState],
    limit: int | None,
    console: Console | None = None,
) -> None:
    """The first letters, then how many there are by cause and state."""
    console = console if console is not None else Console()
    table = Table()
    for column in ("letter", "failed at", "state", "code", "job:task:document"):
        table.add_column(column, overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    by_state: Counter[LetterState] = Counter()
    by_code: Counter[str] = Counter()
    with open_letters(settings) as box:
        for one in box.find(wanted):
            by_state[one.state] += 1
            if one.state not in states:
                continue
            by_code[one.letter.code] += 1
            if table.row_count < (TABLE_ROWS if limit is None else limit):
                table.add_row(*(Text(visible(cell)) for cell in _cells(one)))
        foreign = box.num_foreign
    if table.row_count:
        console.print(table)
    counts = ", ".join(f"{by_state[state]} {state.value}" for state in LetterState)
    console.print(f"{table.row_count} of {by_code.total()} letters shown; {counts}")
    if by_code:
        console.print("causes: " + ", ".join(f"{visible(code)} {number}" for code, number in sorted(by_code.items())))
    if foreign:
        console.print(f"{foreign} records of {settings.kafka.dead_letter_topic} are no dead letters")


def print_letter(settings: Settings, name: str) -> None:
    """One letter in full, its message included, as JSON."""
    with open_letters(settings) as box:
        shown = box.one(name).as_json(with_value=True)
    sys.stdout.write(json.dumps(shown, ensure_ascii=False, indent=2) + "\n")


def _cells(one: ListedLetter) -> tuple[str, ...]:
    letter, why = one.letter, one.letter.message
    failed_at = datetime.fromtimestamp(letter.failed_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        letter.name,
        failed_at,
        one.state.value,
        letter.code,
        f"{letter.job}:{one.identity.task}:{one.identity.document_id}",
        why if len(why) <= MAX_CELL_CHARACTERS else why[: MAX_CELL_CHARACTERS - 1] + "…",
    )
