"""Samples of a running worker and its engine: /proc for the processes, /metrics for what the worker counts."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.workers import WorkerProcess
from tests.soak.rules import ProcessSample, Sample

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Sampler:
    """`take(lag)` -> a Sample. `pids` are the processes that are ours beside the worker and its engine; `blocks` is the
    file where the worker writes the number of its blocks."""

    def __init__(self, worker: WorkerProcess, blocks: Path, pids: Iterable[int], folders: Iterable[Path]) -> None:
        self._worker = worker
        self._blocks = blocks
        self._pids = list(pids)
        self._folders = list(folders)
        (self.engine_pid,) = worker.engine_pids()
        self._started = self._last = time.monotonic()
        self._other_seconds = self._read_other_seconds()

    def take(self, lag: int) -> Sample:
        """Raises OSError where one of the processes is gone."""
        # Before /metrics is asked, which costs the worker a descriptor and a thread for a moment.
        worker, engine = read_process(self._worker.pid), read_process(self.engine_pid)
        counted = self._worker.metrics()
        if not counted:
            raise OSError(f"the worker does not answer:\n{self._worker.log[-3000:]}")
        now, other_seconds = time.monotonic(), self._read_other_seconds()
        other_cores = (other_seconds - self._other_seconds) / max(now - self._last, 1e-9)
        self._last, self._other_seconds = now, other_seconds

        def summed(name: str) -> float:
            return sum(value for key, value in counted.items() if key.startswith(name + "{"))

        def of_part(part: str) -> float:
            return counted[f'pagemill_document_seconds_total{{part="{part}"}}']

        return Sample(
            seconds=now - self._started,
            worker=worker,
            engine=engine,
            num_blocks=int(self._blocks.read_text()),
            num_ended=int(summed("pagemill_documents_ended_total")),
            waiting_seconds=of_part("waiting"),
            engine_seconds=of_part("engine"),
            storing_seconds=of_part("storing"),
            num_steps=int(counted["pagemill_engine_steps_total"]),
            step_seconds=summed("pagemill_engine_step_seconds_total"),
            num_in_flight=int(summed("pagemill_documents_in_flight")),
            num_outbox=int(counted["pagemill_sink_pending"]),
            lag=lag,
            other_cores=max(0.0, other_cores),
            load_average=os.getloadavg()[0],
            disk_bytes=sum(_size(folder) for folder in self._folders),
        )

    def _read_other_seconds(self) -> float:
        """CPU seconds of everything on the machine that is not ours."""
        user, nice, system, _idle, _iowait, *rest = map(int, _lines("/proc/stat")[0].split()[1:9])
        busy = (user + nice + system + sum(rest)) / _TICKS_A_SECOND
        return busy - sum(_cpu_seconds(pid) for pid in [*self._pids, self._worker.pid, self.engine_pid])


def read_process(pid: int) -> ProcessSample:
    """Raises OSError where there is no such process."""
    kib = {
        line.split(":")[0]: int(line.split()[1]) for line in _lines(f"/proc/{pid}/smaps_rollup")[1:]
    }  # the first line is an address range
    status = dict(line.split(":", 1) for line in _lines(f"/proc/{pid}/status"))
    return ProcessSample(
        rss=1024 * kib["Rss"],
        pss=1024 * kib["Pss"],
        anonymous=1024 * kib["Anonymous"],
        num_descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        num_threads=int(status["Threads"]),
        cpu_seconds=_cpu_seconds(pid),
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND  # utime and stime, 14 and 15 of all


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _size(folder: Path) -> int:
    """Bytes of its files; those that go meanwhile count nothing."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
    return total
