"""Workers and the model that they serve in end-to-end tests."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.e2e.workers import COMMAND, WorkerProcess
from tests.tiny_models import write_tiny_gguf, write_tiny_model


class StartWorker(Protocol):
    """Starts a worker process with these settings and arguments of `pagemill worker`, or of another `command`."""

    def __call__(
        self, name: str, settings: Mapping[str, Any], *arguments: str, command: Sequence[str] = COMMAND
    ) -> WorkerProcess: ...


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """What it started and still runs at the test's end is killed."""
    started: list[WorkerProcess] = []

    def start(
        name: str, settings: Mapping[str, Any], *arguments: str, command: Sequence[str] = COMMAND
    ) -> WorkerProcess:
        worker = WorkerProcess(tmp_path, name, settings, *arguments, command=command)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in several shards."""
    return write_tiny_model(tmp_path_factory.mktemp("sharded-model"), max_shard_size="200KB")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a GGUF file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny-gguf") / "tiny.gguf")
