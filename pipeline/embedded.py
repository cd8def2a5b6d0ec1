"""The embedded server for a first look: one binary that speaks Kafka and Elasticsearch on loopback (noida-db).

It is for a demo's amount of data. Where it differs from the real ones, its clients are set up for it: the settings in
`kafka_settings` and `PRODUCER_OPTIONS` say how and why.
"""

import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import DemoError

HOST = "127.0.0.1"
READY = "press Ctrl-C"
HARMLESS = "weak version"  # the loader's remark on systems with an older C library
START_TIMEOUT_SECONDS = 20.0
STOP_TIMEOUT_SECONDS = 15.0  # it writes all its data at the end
KEPT_LINES = 20

# An idempotent producer fails for a while after the server was restarted.
PRODUCER_OPTIONS: dict[str, Any] = {"acks": "all", "enable_idempotence": False}


class EmbeddedServer:
    """The server's process, from `start` to `stop`.

    A port of 0 is a free one. Without a data folder it has one of its own, which goes with it.
    """

    def __init__(self, data_folder: Path | None = None, kafka_port: int = 0, elasticsearch_port: int = 0) -> None:
        self.kafka_address = ""  # host:port, known after start
        self.elasticsearch_url = ""
        self._ports = {"kafka": kafka_port, "elasticsearch": elasticsearch_port}
        self._data_folder = data_folder
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # of its output; None at the end
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Returns when both protocols are served. Raises DemoError with the reason and what to do."""
        assert self._process is None, "start is called once"
        binary = _find_binary()
        if self._data_folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="pagemill-embedded-")
            self._data_folder = Path(self._own_folder.name)
        command = [
            str(binary), "start", "--only", "kafka,elasticsearch", "--host", HOST, "--data-dir", str(self._data_folder),
            "--kafka-port", str(self._ports["kafka"]), "--elasticsearch-port", str(self._ports["elasticsearch"]),
        ]  # fmt: skip
        try:
            # Its own session: a Ctrl-C at the terminal is ours to act on, and the worker still drains into it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.stop()
            raise DemoError(f"the embedded server {binary} cannot be run: {error.strerror}. It is built for Linux and "
                            "macOS on x86-64 and arm64; on others use a Kafka and an Elasticsearch of your own with "
                            "`pagemill worker`.") from error  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="embedded-server", daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that takes too long; removes a data folder of its own. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(STOP_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._process.wait()
            if self._reader is not None:
                self._reader.join()
            if self._process.stdout is not None:
                self._process.stdout.close()
        if self._own_folder is not None:
            self._own_folder.cleanup()
            self._own_folder = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kafka_settings(self, slot: str = "1") -> dict[str, Any]:
        """The `[kafka]` settings of a worker on this server. `slot` tells workers of one group apart.

        A second member with cooperative-sticky assignment hangs there; and a member that died is never expired, so
        that each worker slot needs a name that its replacement takes over.
        """
        return {
            "bootstrap_servers": [self.kafka_address],
            "assignor": "range",
            "group_instance_id": f"pagemill-{slot}",
        }

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        """Reads the output to its end, so that the server never waits for room in the pipe."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if HARMLESS not in line:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _wait_until_ready(self) -> None:
        seen: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=START_TIMEOUT_SECONDS)
            except queue.Empty:
                raise DemoError(f"the embedded server did not say that it is ready within {START_TIMEOUT_SECONDS:.0f} s"
                                f"; its last line: {seen[-1] if seen else 'none'}") from None  # fmt: skip
            if line is None:
                raise DemoError(f"the embedded server ended at once: {_why_it_ended(seen)}")
            seen = [*seen, line][-KEPT_LINES:]
            if match := re.match(r"kafka\s+(\S+:\d+)", line):
                self.kafka_address = match[1]
            elif match := re.match(r"elasticsearch\s+(http://\S+)", line):
                self.elasticsearch_url = match[1]
            elif line.startswith(READY):
                assert self.kafka_address, f"ready without addresses: {seen}"
                assert self.elasticsearch_url, f"ready without addresses: {seen}"
                return


def _find_binary() -> Path:
    spec = find_spec("noida_db")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError("the embedded server is not installed. Run `pip install 'pagemill[demo]'`, or use a Kafka and "
                        "an Elasticsearch of your own with `pagemill worker`.")  # fmt: skip
    # Not the package's console script: that one leaves the server running when it is told to end.
    binary = Path(next(iter(spec.submodule_search_locations))) / "noida-db"
    if not os.access(binary, os.X_OK):
        raise DemoError(f"the embedded server's program {binary} is missing or not executable. Run "
                        "`pip install --force-reinstall noida-db==0.2.3`.")  # fmt: skip
    return binary


def _why_it_ended(lines: list[str]) -> str:
    """A sentence from the output of a server that ended instead of serving."""
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    reason = reason or (lines[-1] if lines else "it printed nothing")
    if "already in use" in reason:
        return f"{reason}. Stop what listens there, or leave the port at 0 for a free one."
    return reason
