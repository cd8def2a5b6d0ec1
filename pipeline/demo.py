"""`pagemill demo`: the whole way of a document on one machine, with real documents and a small real model.

The documents are the descriptions of the Python packages installed beside this one. Kafka and Elasticsearch are the
embedded server; the worker is the real one, in a process of its own.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from elasticsearch import ApiError, ConnectionError, Elasticsearch
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.tokenizer import Tokenizer
from pipeline.connection import connect
from pipeline.demo_report import DemoRun, print_report
from pipeline.embedded import PRODUCER_OPTIONS, EmbeddedServer
from pipeline.model_download import fetch_model
from schemas.errors import DemoError
from schemas.settings import ElasticsearchSettings

JOB = "demo"
TOPIC = "pagemill.documents"
INDEX = "pagemill-results"
DESCRIPTION_TOKENS = 400
SUMMARY_TOKENS = 32
# Nouns of one kind and none that fits everything: a small model that is unsure says whatever fits always.
LABELS = ("typing", "testing", "networking", "numerics", "compression", "terminal", "GPU", "parsing", "search")

# The tasks begin alike, so that a package's second question finds everything before it in the prefix cache.
_SYSTEM = "You read the description of a Python package and answer one question about it."
_DOCUMENT = "Package: {{ name }}\nSummary: {{ summary }}\nDescription:\n{{ description }}\n\nQuestion: "
_LABEL_QUESTION = f"To which category does {{{{ name }}}} belong? Answer with one of: {', '.join(LABELS)}."
_SUMMARY_QUESTION = "What does the package do? Answer in one short sentence."

POLL_SECONDS = 0.5
WORKER_STOP_SECONDS = 15.0
# What a core computes in about two of the demo's four minutes, by dtype; a CUDA device takes them all.
PACKAGES_PER_CORE = {"bfloat16": 40, "float32": 15}
LOG_LINES = 12
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class Cutter(Protocol):
    """What cutting a text to a number of tokens asks of engine.tokenizer.Tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution, as the templates see it."""

    name: str
    summary: str
    description: str


def run_demo(
    num_packages: int | None = None,
    kafka_port: int = 0,
    elasticsearch_port: int = 0,
    console: Console | None = None,
) -> DemoRun:
    """Runs it and prints answers and figures. Ports of 0 are free ones. Raises PagemillError with what to do.

    Nothing outlives it but the model in its cache folder: not after an error, Ctrl-C or SIGTERM either.
    """
    console = console or Console()
    started = time.monotonic()
    model = fetch_model(console=console)
    dtype = "bfloat16" if has_cuda() or has_fast_bfloat16() else "float32"
    packages = installed_packages(Tokenizer.from_path(model))
    affordable = len(packages) if has_cuda() else PACKAGES_PER_CORE[dtype] * (os.cpu_count() or 1)
    packages = packages[: num_packages or affordable]
    with (
        _sigterm_as_interrupt(),
        _work_folder() as folder,
        EmbeddedServer(folder / "server", kafka_port, elasticsearch_port) as server,
    ):
        console.print(
            f"Kafka at {server.kafka_address} and Elasticsearch at {server.elasticsearch_url}, both embedded; "
            f"model {model.name} in {dtype}"
        )
        num_documents = produce(server.kafka_address, packages)
        console.print(f"{len(packages)} installed packages, two questions on each: {num_documents} documents")
        port = free_port()
        settings = demo_settings(server, model, dtype, port)
        (folder / "pagemill.toml").write_text(to_toml(settings), encoding="utf-8")
        elasticsearch = connect(ElasticsearchSettings(urls=(server.elasticsearch_url,)))
        try:
            prepare_seconds = time.monotonic() - started
            run = _run_worker(folder, port, elasticsearch, num_documents, prepare_seconds, console)
        finally:
            elasticsearch.close()
    print_report(run, console)
    return run


def has_cuda(driver: Path = Path("/proc/driver/nvidia/version")) -> bool:
    return driver.exists()


def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for products in bf16."""
    try:
        flags = cpuinfo.read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def installed_packages(tokenizer: Cutter) -> list[Package]:
    """The distributions installed here, by name, with the first tokens of their descriptions."""
    found: dict[str, Package] = {}
    for distribution in distributions():
        metadata = distribution.metadata.json
        name = str(metadata.get("name") or "")
        if not name or name in found:
            continue
        summary, description = (str(metadata.get(key) or "").strip() for key in ("summary", "description"))
        found[name] = Package(name, summary, first_tokens(tokenizer, description, DESCRIPTION_TOKENS))
    return [found[name] for name in sorted(found, key=str.lower)]


def first_tokens(tokenizer: Cutter, text: str, num_tokens: int) -> str:
    """The text's beginning of at most that many tokens; a character that the cut goes through is left out."""
    token_ids = tokenizer.encode(text)
    if len(token_ids) <= num_tokens:
        return text
    return tokenizer.decode(token_ids[:num_tokens]).rstrip("\N{REPLACEMENT CHARACTER}")


def demo_tasks() -> dict[str, Any]:
    """The `[tasks]` of the demo's settings."""
    return {
        "label": {
            "kind": "classify",
            "labels": list(LABELS),
            "system": _SYSTEM,
            "template": _DOCUMENT + _LABEL_QUESTION,
        },
        "summary": {
            "system": _SYSTEM,
            "template": _DOCUMENT + _SUMMARY_QUESTION,
            "sampling": {"max_tokens": SUMMARY_TOKENS, "stop": ["\n"]},
        },
    }


def demo_settings(server: EmbeddedServer, model: Path, dtype: str, http_port: int) -> dict[str, Any]:
    """The worker's settings, as they stand in its pagemill.toml."""
    return {
        "kafka": {**server.kafka_settings(), "topics": [TOPIC]},
        "elasticsearch": {"urls": [server.elasticsearch_url], "number_of_replicas": 0, "flush_seconds": 0.5},
        "model": {"path": str(model), "dtype": dtype, "max_model_len": 1024},
        "engine": {"kv_cache_tokens": 32_768, "max_tokens_per_step": 1024, "max_running": 64},
        "worker": {"http_port": http_port, "log_format": "console"},
        "tasks": demo_tasks(),
    }


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as a TOML file. Values are strings, numbers, booleans, lists of these, and objects, which are tables."""
    lines: list[str] = []

    def write_table(path: tuple[str, ...], table: Mapping[str, Any]) -> None:
        values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
        if path:
            lines.append(f"\n[{'.'.join(json.dumps(key) for key in path)}]")
        # JSON's strings, numbers, booleans and lists are TOML's, as long as what is not ASCII stands as it is.
        lines.extend(f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
        for key, value in table.items():
            if isinstance(value, Mapping):
                write_table((*path, key), value)

    write_table((), settings)
    return "\n".join(lines).lstrip() + "\n"


def documents_of(packages: Sequence[Package]) -> Iterator[tuple[str, bytes]]:
    """(key, message) of every document: each package under each task."""
    for package in packages:
        fields = {"name": package.name, "summary": package.summary, "description": package.description}
        for task in demo_tasks():
            message = {"schema_version": 1, "id": package.name, "job": JOB, "task": task, "fields": fields}
            yield package.name, json.dumps(message).encode()


def produce(kafka_address: str, packages: Sequence[Package]) -> int:
    """Creates the topic and sends every document; returns how many."""
    admin = KafkaAdminClient(bootstrap_servers=kafka_address)
    try:
        admin.create_topics([NewTopic(TOPIC, num_partitions=1, replication_factor=1)])
    finally:
        admin.close()
    producer = KafkaProducer(bootstrap_servers=kafka_address, **PRODUCER_OPTIONS)
    try:
        sent = [producer.send(TOPIC, key=key.encode(), value=value) for key, value in documents_of(packages)]
        producer.flush()
        for record in sent:
            record.get(timeout=30)
    finally:
        producer.close()
    return len(sent)


def free_port() -> int:
    """A port of loopback that nobody has now. Another process may take it before we do; the worker then says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_worker(
    folder: Path, port: int, elasticsearch: Elasticsearch, num_documents: int, prepare_seconds: float, console: Console
) -> DemoRun:
    """The real worker, until the backlog is done; then all rows, out of one Elasticsearch query."""
    started = time.monotonic()
    log = folder / "worker.log"
    metrics: dict[str, float] = {}
    ready_at: float | None = None
    with _worker(folder, log) as worker, _progress(console) as progress:
        loading = progress.add_task("Loading the model", total=None, count="")
        answering = progress.add_task("Answering", total=num_documents, start=False, count=f"0/{num_documents}")
        while worker.poll() is None:
            if ready_at is None and _get(port, "/readyz") is not None:
                ready_at = time.monotonic()
                progress.update(loading, total=1, completed=1)
                progress.start_task(answering)
            if ready_at is not None:
                metrics = parse_metrics(_get(port, "/metrics") or "") or metrics
                num_rows = _count_rows(elasticsearch)
                progress.update(answering, completed=num_rows, count=f"{num_rows}/{num_documents}")
            time.sleep(POLL_SECONDS)
        if worker.returncode == 0:  # it may have been ready and done between two looks
            progress.update(loading, total=1, completed=1)
            num_rows = _count_rows(elasticsearch)
            progress.update(answering, completed=num_rows, count=f"{num_rows}/{num_documents}")
    ended = time.monotonic()
    if worker.returncode != 0:
        raise DemoError(f"the worker ended with {worker.returncode}; its last lines:\n{_last_lines(log)}")
    rows = fetch_rows(elasticsearch)
    if len(rows) != num_documents:
        raise DemoError(f"{num_documents} documents went in and {len(rows)} rows came out; the worker's last lines:\n"
                        f"{_last_lines(log)}")  # fmt: skip
    ready_at = ended if ready_at is None else ready_at
    return DemoRun(rows, prepare_seconds, ready_at - started, ended - ready_at, metrics)


@contextmanager
def _worker(folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The worker's process, which reads `pagemill.toml` where it is started. Ended on the way out, if it still runs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    with log.open("wb") as out:
        # Its own session: a Ctrl-C at the terminal comes to us, and we tell the worker.
        worker = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "worker", "--until-drained"],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            yield worker
        finally:
            for _ in range(2):  # the first asks it to finish what it has begun, the second to stop at once
                if worker.poll() is None:
                    worker.send_signal(signal.SIGTERM)
                    time.sleep(0.1)
            try:
                worker.wait(WORKER_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=console,
    )  # fmt: skip


def _get(port: int, path: str) -> str | None:
    """The worker's answer to a GET, or None where it does not answer or says no."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            content: bytes = response.read()
            return content.decode()
    except OSError:
        return None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format: the name with its labels -> value."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def _count_rows(elasticsearch: Elasticsearch) -> int:
    try:
        return int(elasticsearch.count(index=INDEX, query={"term": {"job": JOB}})["count"])
    except (ApiError, ConnectionError):  # the worker has not made the index yet
        return 0


def fetch_rows(elasticsearch: Elasticsearch) -> list[dict[str, Any]]:
    """All rows of the demo's job, by document and task."""
    elasticsearch.indices.refresh(index=INDEX)
    found = elasticsearch.search(index=INDEX, query={"term": {"job": JOB}}, size=10_000)
    rows = [hit["_source"] for hit in found["hits"]["hits"]]
    return sorted(rows, key=lambda row: (row["id"].lower(), row["task"]))


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]) or "(none)"


@contextmanager
def _work_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="pagemill-demo-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise DemoError(f"cannot write into the temporary folder {tempfile.gettempdir()}: {error.strerror or error}. "
                        "Free some space there, or set TMPDIR to another folder.") from error  # fmt: skip


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that server, worker and folder go."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
