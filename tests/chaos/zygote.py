"""Forks workers from a process that has imported their code once: a start takes milliseconds in place of two seconds.

A forked worker is a process as every other: with a session, a folder, a log and an end of its own. Its arguments are
those of `python -m tests.chaos.worker`. Linux.
"""

import gc
import importlib
import json
import os
import queue
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# What a worker imports, be it when it starts or when it runs.
_IMPORTED = ("pipeline.cli", "pipeline.worker", "pipeline.logs")
_MESSAGE_BYTES = 1 << 16
_PATIENCE_SECONDS = 60.0


class ForkedProcess:
    """A worker that a zygote has forked, with the face of `subprocess.Popen`. Its end is heard of from the zygote."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def has_ended(self, returncode: int) -> None:
        self.returncode = returncode
        self._has_ended.set()


class Zygote:
    """`with Zygote(environment) as zygote: zygote.fork(["worker"], folder, log)`. From any thread.

    The workers have the zygote's environment, and are killed with it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._forking = threading.Lock()
        self._forked: queue.SimpleQueue[ForkedProcess] = queue.SimpleQueue()
        self._processes: dict[int, ForkedProcess] = {}  # those that run
        self._hearing = threading.Thread(target=self._hear, name="zygote", daemon=True)
        self._hearing.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._hearing.join()
        self._sock.close()

    def fork(self, arguments: Sequence[str], folder: Path, log: Path) -> ForkedProcess:
        """One more worker, in that folder, what it says going to the end of that file."""
        log.touch()  # so that it can be looked at from now on
        order = {"arguments": list(arguments), "folder": str(folder), "log": str(log)}
        with self._forking:
            self._sock.sendall(json.dumps(order).encode())
            return self._forked.get(timeout=_PATIENCE_SECONDS)

    def _hear(self) -> None:
        while message := self._sock.recv(_MESSAGE_BYTES):
            said: dict[str, int] = json.loads(message)
            if "code" in said:
                self._processes.pop(said["pid"]).has_ended(said["code"])
                continue
            process = self._processes[said["pid"]] = ForkedProcess(said["pid"])
            self._forked.put(process)


def serve(descriptor: int) -> list[str]:
    """The zygote's life. Returns in each forked worker, with its arguments; the zygote ends when its socket closes."""
    gc.collect()
    gc.freeze()  # what is imported stays shared between the workers
    connection = socket.socket(fileno=descriptor)
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # the descriptor of a worker's process, which has ended
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                connection.sendall(json.dumps({"pid": key.data, "code": code}).encode())
                continue
            message = connection.recv(_MESSAGE_BYTES)
            workers = {other.fd: other.data for other in selector.get_map().values() if other.data is not None}
            if not message:
                for pid in workers.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if (pid := os.fork()) == 0:
                selector.close()
                connection.close()
                for process in workers:
                    os.close(process)
                return _become(json.loads(message))
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            connection.sendall(json.dumps({"pid": pid}).encode())


def _become(order: Mapping[str, Any]) -> list[str]:
    gc.unfreeze()
    os.setsid()
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    arguments: list[str] = order["arguments"]
    return arguments


if __name__ == "__main__":
    for module in _IMPORTED:
        importlib.import_module(module)
    sys.argv[1:] = serve(int(sys.argv[1]))
    runpy.run_module("tests.chaos.worker", run_name="__main__", alter_sys=True)
