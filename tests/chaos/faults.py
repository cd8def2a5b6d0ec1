"""Carries faults out: on workers and engines, on the servers, on the ways between them."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch

from tests.chaos.crew import Crew
from tests.chaos.engine import STEP_FAILS_SIGNAL
from tests.chaos.rounds import Fault, FaultKind
from tests.chaos.servers import Servers, SharedServer, Ways
from tests.e2e.workers import PATIENCE_SECONDS, WorkerProcess

SLOW_DELAY_SECONDS, SLOW_BYTES_PER_SECOND = 0.05, 200_000.0
CALL_SECONDS = 2.0  # a call that waits longer would make other faults longer
PRESSURE_THREADS, PRESSURE_BYTES = 4, 60_000


class Faults:
    """`apply` begins a fault and returns soon; `tick` ends those whose time is over; `end_all` all of them."""

    def __init__(self, servers: Servers, ways: Ways, crew: Crew, client: Elasticsearch, index: str) -> None:
        self._servers = servers
        self._ways = ways
        self._crew = crew
        self._client = client.options(request_timeout=CALL_SECONDS)  # straight to the node
        self._index = index
        self.without_whole_log: set[WorkerProcess] = set()
        self._ends: list[tuple[float, Callable[[], None]]] = []  # monotonic time -> what ends the fault

    def apply(self, fault: Fault) -> bool:
        """False where it cannot be now, as with a server that another lane needs whole: it is to be tried again."""
        broker, node = self._servers.broker, self._servers.node
        match fault.kind:
            case FaultKind.KILL_BROKER:
                return self._break(broker, broker.kill, broker.restart, fault.seconds)
            case FaultKind.FREEZE_BROKER:
                return self._break(broker, broker.freeze, broker.thaw, fault.seconds)
            case FaultKind.KILL_NODE:
                return self._break(node, node.kill, node.restart, fault.seconds)
            case FaultKind.FREEZE_NODE:
                return self._break(node, node.freeze, node.thaw, fault.seconds)
            case FaultKind.BLOCK_DISK:
                self._block_index("index.blocks.read_only_allow_delete", fault.seconds)
            case FaultKind.BLOCK_WRITES:
                self._block_index("index.blocks.write", fault.seconds)
            case FaultKind.PRESSURE:
                self._press(fault.seconds)
            case FaultKind.JOIN:
                self._crew.start_one()
            case _ if fault.kind.name.endswith(("_KAFKA", "_NODE", "_REQUEST", "_ANSWER")):
                self._hit_connections(fault)
            case _:
                if (worker := self._crew.pick(fault.victim)) is None:
                    return False
                if fault.kind.name.endswith("_ENGINE"):
                    self._hit_engine(fault, worker)
                else:
                    self._hit_worker(fault, worker)
        return True

    def tick(self) -> None:
        now = time.monotonic()
        self._end([entry for entry in self._ends if entry[0] <= now])

    def end_all(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while self._ends:
            assert time.monotonic() < give_up_at, "a fault cannot be ended"
            self._end(list(self._ends))
        for proxy in (self._ways.kafka, self._ways.node):
            proxy.pass_on()  # a cut that is still to come would hit the next round

    def _end(self, due: list[tuple[float, Callable[[], None]]]) -> None:
        for entry in due:
            with suppress(ApiError, TransportError):  # the node is away: a block is lifted when it is back
                entry[1]()
                self._ends.remove(entry)

    def _after(self, seconds: float, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, end))

    def _hit_worker(self, fault: Fault, worker: WorkerProcess) -> None:
        crew = self._crew
        match fault.kind:
            case FaultKind.KILL_WORKER:
                crew.kill(worker)
                crew.start_one()
            case FaultKind.STOP_WORKER:
                crew.stop(worker)
                crew.start_one()
            case FaultKind.LEAVE:
                crew.stop(worker)
                if not crew.running:
                    crew.start_one()
            case FaultKind.FREEZE_WORKER | FaultKind.OUST_WORKER:
                self._freeze(worker.pid, fault.seconds, lambda: worker.is_running)
            case FaultKind.FULL_DISK:
                self._fill_disk(worker, fault.seconds)
            case _:
                raise AssertionError(fault)

    def _hit_engine(self, fault: Fault, worker: WorkerProcess) -> None:
        for pid in worker.engine_pids():
            match fault.kind:
                case FaultKind.KILL_ENGINE:
                    _signal(pid, signal.SIGKILL)
                case FaultKind.FAIL_ENGINE:
                    _signal(pid, STEP_FAILS_SIGNAL)
                case FaultKind.FREEZE_ENGINE | FaultKind.HANG_ENGINE:
                    self._freeze(pid, fault.seconds, lambda pid=pid: pid in worker.engine_pids())  # type: ignore[misc]
                case _:
                    raise AssertionError(fault)

    def _fill_disk(self, worker: WorkerProcess, seconds: float) -> None:
        """No file that it writes may grow: its log's lines fail as on a full disk (with EFBIG for ENOSPC)."""

        def limit(num_bytes: int) -> None:
            with suppress(ProcessLookupError):
                if worker.is_running:
                    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

        self.without_whole_log.add(worker)
        limit(0)
        self._after(seconds, lambda: limit(resource.RLIM_INFINITY))

    def _freeze(self, pid: int, seconds: float, is_there: Callable[[], bool]) -> None:
        if not is_there():
            return

        def thaw() -> None:
            if is_there():  # its number may be another's by now
                _signal(pid, signal.SIGCONT)

        _signal(pid, signal.SIGSTOP)
        self._after(seconds, thaw)

    def _break(
        self, server: SharedServer, breaks: Callable[[], bool], mends: Callable[[], None], seconds: float
    ) -> bool:
        """One that is away already is not broken again: this fault and that one are one."""
        if not server.is_there:
            return True
        if not breaks():
            return False
        self._after(seconds, mends)
        return True

    def _hit_connections(self, fault: Fault) -> None:
        action, _, where = fault.kind.name.partition("_")
        proxy = self._ways.kafka if where.startswith("KAFKA") else self._ways.node
        match action, where.partition("_")[2]:
            case "CUT", "":
                proxy.cut()
            case "CUT", "REQUEST":
                proxy.cut_requests_after(fault.num_bytes)
            case "CUT", "ANSWER":
                proxy.cut_answers_after(fault.num_bytes)
            case "REFUSE", "":
                proxy.refuse()
            case "SLOW", "":
                proxy.slow(SLOW_DELAY_SECONDS, SLOW_BYTES_PER_SECOND)
            case "SWALLOW", "":
                proxy.swallow_answers()
            case _:
                raise AssertionError(fault)
        if action != "CUT":
            self._after(fault.seconds, proxy.pass_on)

    def _block_index(self, block: str, seconds: float) -> None:
        def switch(value: bool | None) -> None:
            self._client.indices.put_settings(index=self._index, settings={block: value}, ignore_unavailable=True)

        # Lifted whatever came back: a node that is frozen now will carry it out later.
        self._after(seconds, lambda: switch(None))
        with suppress(ApiError, TransportError):
            switch(True)

    def _press(self, seconds: float) -> None:
        """Bulks of other clients, until the fault ends, as many as the node takes."""
        over = threading.Event()
        index = f"{self._index}-pressure"

        def write() -> None:
            operations: list[dict[str, Any]] = [
                {"index": {"_index": index}},
                {"text": "x" * PRESSURE_BYTES},
            ] * 2
            with Elasticsearch(self._servers.node_url, max_retries=0, request_timeout=5) as client:
                while not over.is_set():
                    try:
                        client.bulk(operations=operations)
                    except (ApiError, TransportError):
                        over.wait(0.02)

        writers = [threading.Thread(target=write, daemon=True) for _ in range(PRESSURE_THREADS)]
        for writer in writers:
            writer.start()

        def end() -> None:
            over.set()
            for writer in writers:
                writer.join()
            self._client.indices.delete(index=index, ignore_unavailable=True)

        self._after(seconds, end)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
