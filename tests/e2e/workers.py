"""Worker processes as an operator runs them, and what can be seen of them from outside."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.demo import free_port, parse_metrics, to_toml

COMMAND = (sys.executable, "-m", "pipeline.cli")
PATIENCE_SECONDS = 90.0  # of waits that end much sooner where all is well


def wait_until(what: str, holds: Callable[[], bool], patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Asks until it holds. It decides nothing by time but when to give up, with what did not come."""
    give_up_at = time.monotonic() + patience_seconds
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {patience_seconds:.0f} s: {what}"
        time.sleep(0.05)


class Process(Protocol):
    """As much of `subprocess.Popen` as a worker needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


def start_process(command: Sequence[str], folder: Path, log: Path) -> Process:
    """Starts a command in that folder, what it says going to that file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def worker_environment() -> dict[str, str]:
    """Ours without settings of Pagemill's, and one thread for each process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PAGEMILL_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


class WorkerProcess:
    """`pagemill worker` in a folder of its own, with its settings in pagemill.toml there.

    `command` is what takes the place of `pagemill`, `start` starts it with the arguments behind it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        *arguments: str,
        command: Sequence[str] = COMMAND,
        start: Callable[[Sequence[str], Path, Path], Process] = start_process,
    ) -> None:
        self.name = name
        self.port = free_port()
        self._log = folder / f"{name}.log"
        home = folder / name
        home.mkdir(parents=True)
        own = {"name": name, "http_port": self.port, **settings.get("worker", {})}
        (home / "pagemill.toml").write_text(to_toml({**settings, "worker": own}))
        self._process = start([*command, "worker", *arguments], home, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak_resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where one ended it."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def get(self, path: str) -> str | None:
        """The answer to a GET, or None where it does not answer or says no."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                content: bytes = response.read()
                return content.decode()
        except OSError:
            return None

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.get("/metrics") or "")

    def num_ended(self, outcome: str) -> float:
        """How many documents it says ended so."""
        return self.metrics()[f'pagemill_documents_ended_total{{outcome="{outcome}"}}']

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.is_running, f"{self.name} ended with {self.exit_code}:\n{self.log[-3000:]}"
            return self.get("/readyz") is not None

        wait_until(f"{self.name} is ready", ready)

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.log[-3000:]}") from None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, of the worker's process alone. Idempotent."""
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def engine_pids(self) -> list[int]:
        """The processes that it started and that run now."""
        return [pid for pid in _running_pids() if _parent(pid) == self.pid]


def is_alive(pid: int) -> bool:
    return pid in _running_pids()


def _running_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _state(entry) not in "ZX"]


def _state(process: Path) -> str:
    return (_stat(process) or ["X"])[0]


def _parent(pid: int) -> int | None:
    stat = _stat(Path("/proc") / str(pid))
    return int(stat[1]) if stat else None


def _stat(process: Path) -> list[str] | None:
    """The fields behind the program's name: state, parent, ... None where the process is gone."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
