"""Carries faults out: on worker processes as an orchestrator keeps them, on the servers, on the ways between them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch

from tests.chaos.proxy import FaultProxy
from tests.chaos.rounds import Fault, FaultKind
from tests.e2e.workers import PATIENCE_SECONDS, WorkerProcess
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.server_process import Server

SLOW_DELAY_SECONDS, SLOW_BYTES_PER_SECOND = 0.05, 200_000.0
CALL_SECONDS = 2.0  # a call that waits longer would make other faults longer
PRESSURE_INDEX, PRESSURE_THREADS, PRESSURE_BYTES = "pressure", 4, 60_000


class Crew:
    """The workers of one round. One that ends by itself is replaced, as an orchestrator does it."""

    def __init__(self, start: Callable[[str], WorkerProcess]) -> None:
        self._start = start
        self._num_started = 0
        self.running: list[WorkerProcess] = []
        self.stopped: list[WorkerProcess] = []  # by our SIGTERM; they may still be at it
        self.ended: list[WorkerProcess] = []  # by themselves

    def start_one(self) -> None:
        self._num_started += 1
        self.running.append(self._start(f"worker-{self._num_started}"))

    def pick(self, number: int) -> WorkerProcess:
        return self.running[number % len(self.running)]

    def kill(self, worker: WorkerProcess) -> None:
        self.running.remove(worker)
        worker.kill()

    def stop(self, worker: WorkerProcess) -> None:
        self.running.remove(worker)
        worker.send(signal.SIGTERM)
        self.stopped.append(worker)

    def replace_ended(self) -> None:
        for worker in [worker for worker in self.running if not worker.is_running]:
            self.running.remove(worker)
            self.ended.append(worker)
            self.start_one()

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


@dataclass(frozen=True, slots=True)
class Servers:
    """The real servers and the proxies in front of them, for all rounds."""

    broker: KafkaBroker
    node: ElasticsearchNode
    kafka_proxy: FaultProxy
    node_proxy: FaultProxy


class Faults:
    """`apply` begins a fault and returns soon; `tick` ends those whose time is over; `end_all` all of them."""

    def __init__(self, servers: Servers, crew: Crew, client: Elasticsearch, index: str) -> None:
        self._servers = servers
        self._crew = crew
        self._client = client.options(request_timeout=CALL_SECONDS)  # straight to the node
        self._index = index
        self._ends: list[tuple[float, Callable[[], None]]] = []  # monotonic time -> what ends the fault
        self._away: set[Server] = set()  # killed or frozen

    @property
    def broker_answers(self) -> bool:
        """Nobody may wait for it meanwhile: the wait would make the fault longer."""
        return self._servers.broker not in self._away

    def apply(self, fault: Fault) -> None:
        broker, node = self._servers.broker, self._servers.node
        match fault.kind:
            case FaultKind.KILL_BROKER:
                self._kill_server(broker, fault.seconds)
            case FaultKind.FREEZE_BROKER:
                self._freeze_server(broker, fault.seconds)
            case FaultKind.KILL_NODE:
                self._kill_server(node, fault.seconds)
            case FaultKind.FREEZE_NODE:
                self._freeze_server(node, fault.seconds)
            case FaultKind.BLOCK_DISK:
                self._block_index("index.blocks.read_only_allow_delete", fault.seconds)
            case FaultKind.BLOCK_WRITES:
                self._block_index("index.blocks.write", fault.seconds)
            case FaultKind.PRESSURE:
                self._press(fault.seconds)
            case _ if fault.kind.name.endswith("_WORKER") or fault.kind in (FaultKind.JOIN, FaultKind.LEAVE):
                self._hit_worker(fault)
            case _ if fault.kind.name.endswith("_ENGINE"):
                self._hit_engine(fault)
            case _:
                self._hit_connections(fault)

    def tick(self) -> None:
        now = time.monotonic()
        self._end([entry for entry in self._ends if entry[0] <= now])

    def end_all(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while self._ends:
            assert time.monotonic() < give_up_at, "a fault cannot be ended"
            self._end(list(self._ends))
        for proxy in (self._servers.kafka_proxy, self._servers.node_proxy):
            proxy.pass_on()  # a cut that is still to come would hit the next round

    def _end(self, due: list[tuple[float, Callable[[], None]]]) -> None:
        for entry in due:
            with suppress(ApiError, TransportError):  # the node is away: a block is lifted when it is back
                entry[1]()
                self._ends.remove(entry)

    def _after(self, seconds: float, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, end))

    def _hit_worker(self, fault: Fault) -> None:
        crew, worker = self._crew, self._crew.pick(fault.victim)
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
            case FaultKind.JOIN:
                crew.start_one()
            case FaultKind.FREEZE_WORKER | FaultKind.OUST_WORKER:
                self._freeze(worker.pid, fault.seconds, lambda: worker.is_running)
            case _:
                raise AssertionError(fault)

    def _hit_engine(self, fault: Fault) -> None:
        worker = self._crew.pick(fault.victim)
        for pid in worker.engine_pids():
            if fault.kind is FaultKind.KILL_ENGINE:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            else:
                self._freeze(pid, fault.seconds, lambda pid=pid: pid in worker.engine_pids())  # type: ignore[misc]

    def _freeze(self, pid: int, seconds: float, is_there: Callable[[], bool]) -> None:
        if not is_there():
            return

        def thaw() -> None:
            if is_there():  # its number may be another's by now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        self._after(seconds, thaw)

    def _kill_server(self, server: Server, seconds: float) -> None:
        if server in self._away:
            return

        def restart() -> None:
            server.restart()
            self._away.remove(server)

        self._away.add(server)
        server.kill()
        self._after(seconds, restart)

    def _freeze_server(self, server: Server, seconds: float) -> None:
        if server in self._away:
            return

        def thaw() -> None:
            server.thaw()
            self._away.remove(server)

        self._away.add(server)
        server.freeze()
        self._after(seconds, thaw)

    def _hit_connections(self, fault: Fault) -> None:
        action, _, where = fault.kind.name.partition("_")
        proxy = self._servers.kafka_proxy if where.startswith("KAFKA") else self._servers.node_proxy
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

        def write() -> None:
            operations: list[dict[str, Any]] = [
                {"index": {"_index": PRESSURE_INDEX}},
                {"text": "x" * PRESSURE_BYTES},
            ] * 2
            with Elasticsearch(self._servers.node.url, max_retries=0, request_timeout=5) as client:
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
            self._client.indices.delete(index=PRESSURE_INDEX, ignore_unavailable=True)

        self._after(seconds, end)
