"""The workers of one round, as an orchestrator keeps them."""

import signal
import time
from collections.abc import Callable

from tests.e2e.workers import PATIENCE_SECONDS, WorkerProcess


class Crew:
    """One that ends by itself is replaced. While it is not open, nobody starts."""

    def __init__(self, start: Callable[[str], WorkerProcess]) -> None:
        self._start = start
        self._num_started = 0
        self.is_open = True
        self.running: list[WorkerProcess] = []
        self.stopped: list[WorkerProcess] = []  # by our SIGTERM; they may still be at it
        self.ended: list[WorkerProcess] = []  # by themselves

    def start_one(self) -> None:
        if not self.is_open:
            return
        self._num_started += 1
        self.running.append(self._start(f"worker-{self._num_started}"))

    def pick(self, number: int) -> WorkerProcess | None:
        """None where nobody runs now."""
        return self.running[number % len(self.running)] if self.running else None

    def kill(self, worker: WorkerProcess) -> None:
        self.running.remove(worker)
        worker.kill()

    def stop(self, worker: WorkerProcess) -> None:
        self.running.remove(worker)
        worker.send(signal.SIGTERM)
        self.stopped.append(worker)

    def tick(self) -> None:
        """Sees who has ended by itself."""
        for worker in [worker for worker in self.running if not worker.is_running]:
            self.running.remove(worker)
            self.ended.append(worker)
            self.start_one()

    @property
    def is_at_rest(self) -> bool:
        """Whether no worker's process is left."""
        return not self.running and not any(worker.is_running for worker in self.stopped)

    def stop_all(self) -> list[WorkerProcess]:
        """SIGTERM to all that run, and a wait for all that got one; returns those that did not end, killed."""
        for worker in list(self.running):
            self.stop(worker)
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while any(worker.is_running for worker in self.stopped) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        stuck = [worker for worker in self.stopped if worker.is_running]
        for worker in stuck:
            worker.kill()
        return stuck

    def kill_all(self) -> None:
        for worker in [*self.running, *self.stopped]:
            worker.kill()
