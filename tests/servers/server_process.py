"""One server process in a test: start, stop, kill, freeze, and its log. Knows nothing of what the server is."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers.jdk import ServersUnavailable

_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """A process whose output goes to `log_path`.

    On Linux it dies with the thread that starts it, so that a killed test run leaves no server behind: start it from
    a thread that outlives it.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        self.log_path = log_path
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, answers: Callable[[], bool], timeout_seconds: float = 180.0) -> None:
        """Starts it and waits until `answers()`. Raises ServersUnavailable with the log's end where it does not."""
        assert not self.is_running, f"already running as {self.pid}"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the test run's; the fixture then stops the server
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + timeout_seconds
        while not answers():
            if (status := self._process.poll()) is not None:
                raise ServersUnavailable(f"{self._command[0]} ended with {status}\n{self.log_end()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServersUnavailable(f"no answer within {timeout_seconds:.0f} s\n{self.log_end()}")
            time.sleep(0.05)

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """SIGTERM, and SIGKILL after the time-out."""
        if self._process is None or self._process.poll() is not None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer does it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)

    def log_end(self, num_bytes: int = 6000) -> str:
        """The end of the log, headed by where all of it is."""
        text = self.log_path.read_bytes()[-num_bytes:].decode(errors="replace") if self.log_path.exists() else ""
        return f"--- {self.log_path} ---\n{text}"


class Server(ABC):
    """What every test server does with its process; a subclass knows the command and when it answers."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    @property
    def log_path(self) -> Path:
        return self._process.log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def restart(self) -> None:
        """Stops it where it runs, and starts it again on the same ports and data."""
        self._process.stop()
        self._start()

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()

    def log_end(self) -> str:
        return self._process.log_end()

    def _start(self) -> None:
        self._process.start(self._answers)

    @abstractmethod
    def _answers(self) -> bool: ...


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now; all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
