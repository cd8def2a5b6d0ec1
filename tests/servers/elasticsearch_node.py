"""A real Elasticsearch node on loopback, for tests and benchmarks."""

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.servers.jdk import ServersUnavailable, build_server, find_jdk
from tests.servers.server_process import Server, ServerProcess, free_ports

_NUM_START_ATTEMPTS = 3  # another process may take a free port before the node does


class ElasticsearchNode(Server):
    """`ElasticsearchNode.start(directory)` -> a node that answers at `url`.

    It is the plain server with its HTTP transport: no security, scripts, ingest, data streams, ILM, and no `GET /`.
    Data stay in `directory` over `stop`, `kill` and `restart`.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self.directory = directory
        self.port, transport_port = free_ports(2)
        java_home, target = find_jdk(), build_server("elasticsearch")
        defaults = {
            "discovery.type": "single-node",
            "path.data": str(directory / "data"),
            "http.port": str(self.port),
            "transport.port": str(transport_port),
            "cluster.name": "pagemill-test",
            "cluster.routing.allocation.disk.threshold_enabled": "false",  # a test machine's disk may be nearly full
        }
        command = [str(java_home / "bin" / "java") if java_home else "java", "-Xmx1g", "-XX:+UseSerialGC"]
        command += ["--enable-native-access=ALL-UNNAMED", "-cp", f"{target}/lib/*:{target}/classes"]
        command += ["ElasticsearchNode", str(target / "home")]
        command += [f"{name}={value}" for name, value in {**defaults, **settings}.items()]
        super().__init__(ServerProcess(command, directory / "elasticsearch.log"))

    @classmethod
    def start(cls, directory: Path, /, **settings: str) -> Self:
        """Starts a node with its data in `directory`; `settings` (elasticsearch.yml's) go over the defaults."""
        directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_NUM_START_ATTEMPTS):
            node = cls(directory, settings)
            try:
                node._start()
            except ServersUnavailable as failure:
                if "BindException" not in str(failure) or attempt == _NUM_START_ATTEMPTS - 1:
                    raise
            else:
                return node
        raise AssertionError("the loop returns or raises")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/_cluster/health", timeout=5) as response:
                return json.load(response)["status"] in ("green", "yellow")
        except (OSError, ValueError, KeyError):
            return False
