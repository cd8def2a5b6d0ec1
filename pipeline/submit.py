"""Sends a file of documents to the input topic: JSON lines, or plain text, one document a line."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from kafka import KafkaProducer
from kafka.errors import KafkaError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from consumers.connection import client_options
from consumers.decode import decode_document
from consumers.topics import ensure_topics
from schemas.document import DEFAULT_TASK, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import SettingsError, SourceError
from schemas.settings import Settings

CONTENT_KEYS = ("fields", "messages", "prompt", "prompt_token_ids")
MAX_UNACKNOWLEDGED = 10_000  # sent records whose fate is not known yet

InputFormat = Literal["jsonl", "text"]


@dataclass(frozen=True, slots=True)
class Submission:
    """How lines become messages: their task and job, and whether a text line is a field or a prompt."""

    task: str
    job: str
    name: str  # of the file: ids of lines without one are `{name}-{number}`, so a second submission replaces the first
    input_format: InputFormat
    text_is_field: bool


def submit_file(
    settings: Settings, file: str, task: str, job: str, input_format: InputFormat | None, topic: str | None
) -> int:
    """Sends a file's documents (`-`: standard input) and returns how many. A file is checked whole before any is sent;
    standard input as it comes.

    Raises SettingsError for what cannot be read or would be refused, SourceError where Kafka does not take it.
    """
    if not settings.kafka.bootstrap_servers:
        raise SettingsError("kafka.bootstrap_servers is not set; give --kafka host:9092, or set it in pagemill.toml")
    limit = settings.kafka.max_document_bytes
    goes_to = topic if topic is not None else settings.kafka.topics[0]
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        if file == "-":
            first, lines = _peek(_decoded(sys.stdin.buffer, "standard input"))
            plan = plan_submission(settings, "stdin", task, job, input_format or guess_format("", first))
            sending = progress.add_task("Sending", total=None)
            return send(
                settings,
                goes_to,
                messages(lines, plan, limit),
                lambda _, num_bytes: progress.advance(sending, num_bytes),
            )
        path = Path(file)
        first, _ = _peek(_lines(path, None))
        plan = plan_submission(settings, path.stem, task, job, input_format or guess_format(path.name, first))
        total = path.stat().st_size
        checking = progress.add_task("Checking", total=total)
        for _ in messages(_lines(path, lambda n: progress.advance(checking, n)), plan, limit):
            pass
        sending = progress.add_task("Sending", total=total)
        records = messages(_lines(path, lambda n: progress.advance(sending, n)), plan, limit)
        return send(settings, goes_to, records)


def _lines(path: Path, on_read: Callable[[int], None] | None) -> Iterator[str]:
    try:
        with path.open("rb") as opened:
            yield from _decoded(opened, str(path), on_read)
    except OSError as error:
        raise SettingsError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def _decoded(opened: Iterable[bytes], name: str, on_read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Its lines as text, without a byte order mark before the first."""
    for number, line in enumerate(opened, start=1):
        if on_read is not None:
            on_read(len(line))
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise SettingsError(f"{name}, line {number} is not UTF-8: {error.reason}") from None


def _peek(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """The first line that is not blank, and all the lines from the very first on."""
    read: list[str] = []
    for line in lines:
        read.append(line)
        if line.strip():
            break
    return (read[-1] if read else ""), chain(read, lines)


def plan_submission(settings: Settings, name: str, task: str, job: str, input_format: InputFormat) -> Submission:
    """Text becomes the field `text` where the task has a template, else the prompt."""
    known = settings.tasks.get(task)
    has_template = known.template is not None if known is not None else task != DEFAULT_TASK
    return Submission(task, job, name, input_format, has_template)


def guess_format(name: str, first_line: str) -> InputFormat:
    """By the file's ending, else by the first character of its first line that is not blank."""
    suffix = Path(name).suffix.lower()
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl"
    if suffix in (".txt", ".text"):
        return "text"
    return "jsonl" if first_line.lstrip().startswith("{") else "text"


def messages(
    lines: Iterable[str], submission: Submission, max_document_bytes: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """(line number, key, value) of every document; blank lines are none. A JSON line with one of fields, messages,
    prompt, prompt_token_ids is a document; any other object is the fields of one, and its `id` the document's.

    Raises SettingsError at the first line that a worker would refuse, with its number and the worker's own sentence.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        document = _document(number, line.rstrip("\r\n"), submission)
        document.setdefault("id", f"{submission.name}-{number}")
        document.setdefault("job", submission.job)
        document.setdefault("task", submission.task)
        value = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
        raw = RawMessage(SourcePosition("line", 0, number), 0, None, value)
        decoded = decode_document(raw, max_document_bytes)
        if isinstance(decoded, RejectedDocument):
            raise SettingsError(f"line {number}: {decoded.failure.message}")
        yield number, decoded.identity.document_id.encode(), value


def _document(number: int, line: str, submission: Submission) -> dict[str, Any]:
    if submission.input_format == "text":
        return {"fields": {"text": line}} if submission.text_is_field else {"prompt": line}
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        raise SettingsError(f"line {number} is not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise SettingsError(f"line {number} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise SettingsError(f"line {number} is {type(parsed).__name__}, not a JSON object")
    if any(key in parsed for key in CONTENT_KEYS):
        return parsed
    document: dict[str, Any] = {"fields": parsed}
    if isinstance(parsed.get("id"), str | int) and not isinstance(parsed["id"], bool):
        document["id"] = str(parsed["id"])
    return document


def send(
    settings: Settings,
    topic: str,
    records: Iterable[tuple[int, bytes, bytes]],
    on_sent: Callable[[int, int], None] | None = None,
) -> int:
    """Sends (line number, key, value) records and waits for every acknowledgement; returns how many there were.

    `on_sent` gets the line number and bytes of each. Missing topics are made. Raises SourceError, which says how many
    documents are safely there.
    """
    kafka = settings.kafka
    reachable = ensure_topics(kafka.model_copy(update={"topics": (topic,)}), create_input=True)
    try:
        producer = KafkaProducer(
            **client_options(reachable),
            acks="all",
            enable_idempotence=False,
            linger_ms=20,
            max_request_size=2 * kafka.max_document_bytes + 2**16,
        )
    except (KafkaError, OSError) as error:  # since it answered just now it has gone away
        servers = ", ".join(kafka.bootstrap_servers)
        raise SourceError(f"Kafka at {servers} does not answer: {error}; nothing was sent") from None
    num_acknowledged = 0
    waiting: list[Any] = []
    try:
        for number, key, value in records:
            waiting.append(producer.send(topic, key=key, value=value))
            if on_sent is not None:
                on_sent(number, len(value))
            if len(waiting) >= MAX_UNACKNOWLEDGED:
                num_acknowledged += _acknowledged(waiting)
        producer.flush()
        return num_acknowledged + _acknowledged(waiting)
    except KafkaError as error:
        raise SourceError(
            f"Kafka did not take all of it: {error}; {num_acknowledged} documents are surely there. Submit again: the "
            "ids are the same, so nothing is answered twice in the results"
        ) from None
    finally:
        producer.close(timeout=10)


def _acknowledged(waiting: list[Any]) -> int:
    """Waits for each record's acknowledgement, empties the list, returns how many there were."""
    count = len(waiting)
    for future in waiting:
        future.get(timeout=60)
    waiting.clear()
    return count
