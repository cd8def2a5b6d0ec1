"""A real Apache Kafka broker (one KRaft node) on loopback, for tests and benchmarks."""

import base64
import socket
import struct
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.servers.jdk import ServersUnavailable, build_server, find_jdk
from tests.servers.server_process import Server, ServerProcess, free_ports

_NUM_START_ATTEMPTS = 3  # another process may take a free port before the broker does


class KafkaBroker(Server):
    """`KafkaBroker.start(directory)` -> a broker that answers at `bootstrap_servers`.

    `sasl_users` adds a second listener at `sasl_bootstrap_servers`, where those users (name -> password)
    authenticate with SASL PLAIN. `proxy_port` adds one at `proxied_port` that tells its clients to come to that port
    of loopback, where a proxy passes them on. Data stay in `directory` over `stop`, `kill` and `restart`.
    """

    def __init__(
        self, directory: Path, properties: Mapping[str, str], sasl_users: Mapping[str, str], proxy_port: int | None
    ) -> None:
        self.directory = directory
        self._proxy_port = proxy_port
        self._properties = dict(properties)
        self._sasl_users = dict(sasl_users)
        self._port, self._controller_port, self._sasl_port, self.proxied_port = free_ports(4)
        java_home, target = find_jdk(), build_server("kafka")
        self._java = [str(java_home / "bin" / "java") if java_home else "java", "-XX:TieredStopAtLevel=1"]
        self._class_path = str(target / "lib" / "*")
        self._properties_path = directory / "server.properties"
        command = [*self._java, "-Xmx512m", "-XX:+UseSerialGC", "-cp", self._class_path]
        command += ["-Dorg.apache.logging.log4j.level=WARN", "kafka.Kafka", str(self._properties_path)]
        super().__init__(ServerProcess(command, directory / "kafka.log"))

    @classmethod
    def start(
        cls,
        directory: Path,
        sasl_users: Mapping[str, str] | None = None,
        proxy_port: int | None = None,
        /,
        **properties: str,
    ) -> Self:
        """Formats `directory` and starts the broker there; `properties` go over the defaults of server.properties."""
        directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_NUM_START_ATTEMPTS):
            home = directory / f"attempt-{attempt}" if attempt else directory
            broker = cls(home, properties, sasl_users or {}, proxy_port)
            try:
                broker._format()
                broker._start()
            except ServersUnavailable as failure:
                if "already in use" not in str(failure) or attempt == _NUM_START_ATTEMPTS - 1:
                    raise
            else:
                return broker
        raise AssertionError("the loop returns or raises")

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def sasl_bootstrap_servers(self) -> str:
        assert self._sasl_users, "start it with sasl_users"
        return f"127.0.0.1:{self._sasl_port}"

    def _format(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}={value}" for name, value in {**self._defaults(), **self._properties}.items()]
        self._properties_path.write_text("\n".join(lines) + "\n")
        cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        command = [*self._java, "-cp", self._class_path, "kafka.tools.StorageTool"]
        command += ["format", "-t", cluster_id, "-c", str(self._properties_path)]
        formatted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if formatted.returncode != 0:
            raise ServersUnavailable(f"StorageTool could not format: {formatted.stdout}{formatted.stderr}")

    def _defaults(self) -> dict[str, str]:
        listeners = {"PLAINTEXT": f"PLAINTEXT://{self.bootstrap_servers}"}
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        sasl: dict[str, str] = {}
        advertised: dict[str, str] = {}
        if self._proxy_port is not None:
            listeners["PROXIED"] = f"PROXIED://127.0.0.1:{self.proxied_port}"
            advertised["PROXIED"] = f"PROXIED://127.0.0.1:{self._proxy_port}"
            protocols["PROXIED"] = "PLAINTEXT"
        if self._sasl_users:
            listeners["SASL"] = f"SASL://{self.sasl_bootstrap_servers}"
            protocols["SASL"] = "SASL_PLAINTEXT"
            users = " ".join(f'user_{name}="{password}"' for name, password in self._sasl_users.items())
            module = "org.apache.kafka.common.security.plain.PlainLoginModule"
            sasl = {
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.sasl.plain.sasl.jaas.config": f"{module} required {users};",
            }
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": ",".join([*listeners.values(), f"CONTROLLER://127.0.0.1:{self._controller_port}"]),
            "advertised.listeners": ",".join({**listeners, **advertised}.values()),
            "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in protocols.items()),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self.directory / "log"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "auto.create.topics.enable": "false",
            **sasl,
        }

    def _answers(self) -> bool:
        """Whether an ApiVersions request (version 0, no client id) is answered on the plain listener."""
        request = struct.pack(">hhih", 18, 0, 1, -1)
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
                connection.sendall(struct.pack(">i", len(request)) + request)
                return len(connection.recv(4)) == 4
        except OSError:
            return False
