"""A forked worker is a process as every other: its output, its exit code, its death."""

import signal
from pathlib import Path

from tests.chaos.zygote import Zygote
from tests.e2e.workers import is_alive, wait_until, worker_environment


def test_forked_workers_write_to_their_own_logs_end_with_their_own_codes_and_die_with_the_zygote(
    tmp_path: Path,
) -> None:
    with Zygote(worker_environment()) as zygote:
        no_settings = zygote.fork(["[]", "worker"], tmp_path, tmp_path / "no-settings.log")
        helped = zygote.fork(["[]", "--help"], tmp_path, tmp_path / "help.log")
        assert (no_settings.wait(60), helped.wait(60)) == (2, 0)
        assert "nothing runs without" in (tmp_path / "no-settings.log").read_text()
        assert "Usage" in (tmp_path / "help.log").read_text()
        # Nobody answers at that address, so that they wait.
        waiting = ["[]", "worker", "--set", "model.path=.", "--kafka", "127.0.0.1:9"]
        waiting += ["--elasticsearch", "http://127.0.0.1:9", "--set", "worker.http_port=0"]
        killed, left = [zygote.fork(waiting, tmp_path, tmp_path / f"{name}.log") for name in ("killed", "left")]
        killed.kill()
        assert killed.wait(60) == -signal.SIGKILL
        assert left.poll() is None
    wait_until("the last one is gone", lambda: not is_alive(left.pid))
