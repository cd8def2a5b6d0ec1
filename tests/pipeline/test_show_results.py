"""The table of results: what an answer or an id may do to a terminal."""

import pytest
from rich.console import Console

from pipeline.show_results import rows_table, visible

ROW = {"job": "j", "task": "t", "status": "answered", "label": None, "failure": None}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\x00b\x7f\r", "a␀b␡␍"),
        ("\x9b31m\u202e", "\ufffd31m\ufffd"),
        ("two\nlines\t日本 🦊", "two\nlines\t日本 🦊"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_brackets_and_escapes_of_a_document_reach_the_terminal_as_text() -> None:
    console = Console(force_terminal=True, color_system=None, width=120)
    with console.capture() as captured:
        console.print(rows_table(iter([{**ROW, "id": "[bold]x", "text": "\x1b[31mred"}])))
    assert "[bold]x" in captured.get()
    assert "␛[31mred" in captured.get()
    assert "\x1b[31m" not in captured.get()
