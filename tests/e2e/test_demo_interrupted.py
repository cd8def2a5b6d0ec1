"""The demo that is interrupted takes its server, its worker and its folder with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.workers import PATIENCE_SECONDS, wait_until

NAMES = ("noida-db", "pipeline.cli worker", "engine.process")


def runs_in(folder: Path, name: str) -> bool:
    return any(name in command for command in processes_in(folder))


def processes_in(folder: Path) -> list[str]:
    """The command lines of what runs in the folder, or with a path in it as an argument."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command or Path(os.readlink(process / "cwd")).is_relative_to(folder):
                found.append(command)
        except OSError:  # no process, or gone meanwhile
            continue
    return found


@pytest.mark.real_model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_interrupted_demo(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("noida_db", reason="the demo needs `pip install 'pagemill[demo]'`")
    demo = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "demo", "--packages", "3"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until("server, worker and engine run", lambda: all(runs_in(tmp_path, name) for name in NAMES))
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    wait_until("nothing runs there", lambda: processes_in(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []
