"""The real servers that all lanes of rounds share, and each lane's own ways to them.

A server that a lane breaks is broken for all. Nobody breaks it while a lane needs it whole: to fill a topic, and to
look at what a round came to.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.proxy import FaultProxy
from tests.chaos.rounds import MAX_BODY_BYTES
from tests.servers.certificates import Authority, Certificate
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker, Listener
from tests.servers.server_process import Server

PATIENCE_SECONDS = 120.0
USER, PASSWORD = "chaos", "correct horse"
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

# A node that refuses early, for real: 413 past MAX_BODY_BYTES, 429 for a whole bulk while so much is being indexed,
# 429 for single rows of a bulk for many shards. Its room grows with the lanes, more slowly than what they ask of it.
CRAMPED = {"http.max_content_length": f"{MAX_BODY_BYTES}b", "thread_pool.write.size": "1"}
LIMIT_KB, LIMIT_KB_PER_LANE = 300, 100
QUEUE, QUEUE_PER_LANE = 2, 1
# Disks stay as empty as they are: what a round leaves is deleted after it, and soon. And where partitions begin is
# written down at once, not once a minute: a broker that is killed before has the deleted records again.
TIDY = {
    "log.segment.delete.delay.ms": "1000",
    "log.index.size.max.bytes": "65536",
    "num.network.threads": "1",
    "log.flush.start.offset.checkpoint.interval.ms": "100",
}


class SharedServer:
    """A server and whether it is there: for one breaker at a time, and for any number that need it whole."""

    def __init__(self, server: Server, keeper: ThreadPoolExecutor) -> None:
        self._server = server
        self._keeper = keeper  # its thread outlives the lanes: a server dies with the thread that started it
        self._changed = threading.Condition()
        self._num_needing = 0
        self._is_there = True
        self._failure: BaseException | None = None

    @property
    def is_there(self) -> bool:
        """Nobody may wait for it meanwhile: the wait would make the fault longer."""
        return self._is_there

    @property
    def failure(self) -> BaseException | None:
        """What its restart failed with: then nothing more can be done."""
        return self._failure

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Waits until it is there, and keeps it so. Raises what its restart failed with."""
        with self._changed:
            came_back = self._changed.wait_for(lambda: self._is_there or self._failure, PATIENCE_SECONDS)
            if self._failure is not None:
                raise self._failure
            assert came_back, f"{type(self._server).__name__} has been away for {PATIENCE_SECONDS:.0f} s"
            self._num_needing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_needing -= 1

    def kill(self) -> bool:
        """False where it cannot be now. The one that has killed it restarts it."""
        if self._take_away():
            self._server.kill()
            return True
        return False

    def freeze(self) -> bool:
        """False where it cannot be now. The one that has frozen it thaws it."""
        if self._take_away():
            self._server.freeze()
            return True
        return False

    def thaw(self) -> None:
        self._server.thaw()
        self._is_back(None)

    def restart(self) -> None:
        """Begins it; it is there once it answers."""

        def is_done(restart: Future[None]) -> None:
            self._is_back(restart.exception())

        self._keeper.submit(self._server.restart).add_done_callback(is_done)

    def _take_away(self) -> bool:
        with self._changed:
            if self._num_needing or not self._is_there:
                return False
            self._is_there = False
            return True

    def _is_back(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._is_there = failure is None
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Servers:
    """The real servers, where they are without a proxy, and what of theirs is trusted."""

    broker: SharedServer
    node: SharedServer
    bootstrap_servers: str
    node_url: str
    node_port: int
    broker_log: Path
    authority: Path
    certificate: Certificate
    password_file: Path


class Ways:
    """A lane's own proxies, and the listeners behind the one to the broker."""

    def __init__(self, lane: int, kafka: FaultProxy, node: FaultProxy) -> None:
        self.kafka = kafka
        self.node = node
        self._lane = lane
        self._ports: dict[str, int] = {}  # security protocol -> the listener's

    def listeners(self, certificate: Certificate) -> dict[str, Listener]:
        listeners = {}
        for protocol in SECURITY_PROTOCOLS:
            mechanisms = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512") if protocol.startswith("SASL") else ()
            shown = certificate if protocol.endswith("SSL") else None
            listeners[self._name(protocol)] = Listener(shown, None, mechanisms, self.kafka.port)
        return listeners

    def lead_to(self, broker: KafkaBroker) -> None:
        self._ports = {protocol: broker.port(self._name(protocol)) for protocol in SECURITY_PROTOCOLS}

    def switch(self, security_protocol: str, node_port: int) -> None:
        """What is behind the proxies from now on, while nobody is connected."""
        self.kafka.server_port = self._ports[security_protocol]
        self.node.server_port = node_port

    def _name(self, protocol: str) -> str:
        return f"{protocol}{self._lane}"


@contextmanager
def open_servers(directory: Path, num_lanes: int) -> Iterator[tuple[Servers, Sequence[Ways]]]:
    """The servers, and for each lane the ways to them."""
    with ExitStack() as stack:
        keepers = [stack.enter_context(ThreadPoolExecutor(1, f"keeper-{i}")) for i in range(2)]
        authority = Authority(directory / "authority")
        certificate = authority.issue()
        password_file = directory / "password"
        password_file.write_text(PASSWORD)
        ways = [
            Ways(lane, stack.enter_context(FaultProxy()), stack.enter_context(FaultProxy()))
            for lane in range(num_lanes)
        ]
        listeners = {name: one for way in ways for name, one in way.listeners(certificate).items()}
        starting = keepers[0].submit(
            lambda: KafkaBroker.start(directory / "kafka", {USER: PASSWORD}, listeners, **TIDY)
        )
        room = {
            **CRAMPED,
            "indexing_pressure.memory.limit": f"{LIMIT_KB + LIMIT_KB_PER_LANE * num_lanes}kb",
            "thread_pool.write.queue_size": f"{QUEUE + QUEUE_PER_LANE * num_lanes}",
        }
        node = keepers[1].submit(lambda: ElasticsearchNode.start(directory / "elasticsearch", **room)).result()
        stack.callback(node.stop)
        broker = starting.result()
        stack.callback(broker.stop)
        for way in ways:
            way.lead_to(broker)
        yield (
            Servers(
                SharedServer(broker, keepers[0]),
                SharedServer(node, keepers[1]),
                broker.bootstrap_servers,
                node.url,
                node.port,
                broker.directory / "log",
                authority.certificate,
                certificate,
                password_file,
            ),
            ways,
        )
