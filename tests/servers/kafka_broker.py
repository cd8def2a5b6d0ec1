"""A real Apache Kafka broker (one KRaft node, or more that make a cluster) on loopback, for tests and benchmarks."""

import base64
import socket
import struct
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.servers.certificates import Certificate
from tests.servers.jdk import ServersUnavailable, build_server, find_jdk
from tests.servers.server_process import Server, ServerProcess, free_ports

_NUM_START_ATTEMPTS = 3  # another process may take a free port before the broker does


SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, slots=True)
class Listener:
    """How one more listener of a broker is spoken to."""

    certificate: Certificate | None = None  # that it shows, over TLS; None: in clear
    client_authority: Path | None = None  # its clients must show a certificate that this one signed
    mechanisms: tuple[str, ...] = ()  # of SASL; with none it asks for no password
    proxy_port: int | None = None  # of loopback, where clients are told to come, and a proxy passes them on


class KafkaBroker(Server):
    """`KafkaBroker.start(directory)` -> a broker that answers at `bootstrap_servers`.

    `sasl_users` (name -> password) adds a second listener at `sasl_bootstrap_servers`, where those users authenticate
    with SASL PLAIN or SCRAM. `listeners` (name -> how it is spoken to) adds each at `address(name)`.
    `first` is another broker, whose cluster this one joins: that one is its controller, and must outlive it.
    Data stay in `directory` over `stop`, `kill` and `restart`.
    """

    def __init__(
        self,
        directory: Path,
        properties: Mapping[str, str],
        sasl_users: Mapping[str, str],
        listeners: Mapping[str, Listener],
        first: "KafkaBroker | None" = None,
    ) -> None:
        self.directory = directory
        self._first = first
        self.node_id: int = 1 if first is None else first.node_id + 1
        self._cluster_id: str = _new_cluster_id() if first is None else first._cluster_id
        self._properties = dict(properties)
        self._sasl_users = dict(sasl_users)
        self._listeners = dict(listeners)
        if self._sasl_users:
            self._listeners["SASL"] = Listener(mechanisms=SASL_MECHANISMS)
        self._port, self._controller_port, *ports = free_ports(2 + len(self._listeners))
        self._ports = dict(zip(self._listeners, ports, strict=True))
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
        listeners: Mapping[str, Listener] | None = None,
        first: "KafkaBroker | None" = None,
        /,
        **properties: str,
    ) -> Self:
        """Formats `directory` and starts the broker there; `properties` go over the defaults of server.properties."""
        directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_NUM_START_ATTEMPTS):
            home = directory / f"attempt-{attempt}" if attempt else directory
            broker = cls(home, properties, sasl_users or {}, listeners or {}, first)
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
        return self.address("SASL")

    def address(self, listener: str) -> str:
        """Where that one of `listeners` is."""
        return f"127.0.0.1:{self.port(listener)}"

    def port(self, listener: str) -> int:
        return self._ports[listener]

    def _format(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}={value}" for name, value in {**self._defaults(), **self._properties}.items()]
        self._properties_path.write_text("\n".join(lines) + "\n")
        command = [*self._java, "-cp", self._class_path, "kafka.tools.StorageTool"]
        command += ["format", "-t", self._cluster_id, "-c", str(self._properties_path)]
        for name, password in self._sasl_users.items():
            for mechanism in SASL_MECHANISMS[1:]:
                command += ["--add-scram", f"{mechanism}=[name={name},password={password}]"]
        formatted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if formatted.returncode != 0:
            raise ServersUnavailable(f"StorageTool could not format: {formatted.stdout}{formatted.stderr}")

    def _defaults(self) -> dict[str, str]:
        listeners = {"PLAINTEXT": f"PLAINTEXT://{self.bootstrap_servers}"}
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        spoken: dict[str, str] = {}
        advertised: dict[str, str] = {}
        for name, listener in self._listeners.items():
            listeners[name] = f"{name}://{self.address(name)}"
            if listener.proxy_port is not None:
                advertised[name] = f"{name}://127.0.0.1:{listener.proxy_port}"
            kind = "SSL" if listener.certificate is not None else "PLAINTEXT"
            protocols[name] = f"SASL_{kind}" if listener.mechanisms else kind
            properties = {**self._tls_properties(name, listener), **self._sasl_properties(listener)}
            spoken |= {f"listener.name.{name.lower()}.{key}": value for key, value in properties.items()}
        controller = self._first or self
        controllers = [f"CONTROLLER://127.0.0.1:{self._controller_port}"] if controller is self else []
        return {
            "process.roles": "broker,controller" if controller is self else "broker",
            "node.id": str(self.node_id),
            "controller.quorum.voters": f"{controller.node_id}@127.0.0.1:{controller._controller_port}",
            "listeners": ",".join([*listeners.values(), *controllers]),
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
            **spoken,
        }

    def _tls_properties(self, name: str, listener: Listener) -> dict[str, str]:
        if (certificate := listener.certificate) is None:
            return {}
        key_store = self.directory / f"{name}.pem"
        key_store.write_text(certificate.key.read_text() + certificate.chain.read_text())
        properties = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(key_store)}
        if listener.client_authority is not None:
            properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(listener.client_authority)}
            properties["ssl.client.auth"] = "required"
        return properties

    def _sasl_properties(self, listener: Listener) -> dict[str, str]:
        if not listener.mechanisms:
            return {}
        users = " ".join(f'user_{name}="{password}"' for name, password in self._sasl_users.items())
        package = "org.apache.kafka.common.security"
        properties = {"sasl.enabled.mechanisms": ",".join(listener.mechanisms)}
        for mechanism in listener.mechanisms:
            is_plain = mechanism == "PLAIN"
            module = f"plain.PlainLoginModule required {users}" if is_plain else "scram.ScramLoginModule required"
            properties[f"{mechanism.lower()}.sasl.jaas.config"] = f"{package}.{module};"
        return properties

    def _answers(self) -> bool:
        """Whether an ApiVersions request (version 0, no client id) is answered on the plain listener."""
        request = struct.pack(">hhih", 18, 0, 1, -1)
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
                connection.sendall(struct.pack(">i", len(request)) + request)
                return len(connection.recv(4)) == 4
        except OSError:
            return False


def _new_cluster_id() -> str:
    return base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
