"""The worker's HTTP face: alive, ready, what it counted. Knows the worker by three callbacks only."""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST

from schemas.errors import SettingsError


class StatusServer:
    """Serves /livez, /readyz and /metrics on a thread of its own.

    `readiness` gives part -> what it still lacks, None where it is ready; `is_alive` whether the worker's own thread
    moves; `metrics` the text for Prometheus. All three are called from the server's threads.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_alive: Callable[[], bool],
        readiness: Callable[[], Mapping[str, str | None]],
        metrics: Callable[[], bytes],
    ) -> None:
        """Binds at once, port 0 to any free one. Raises SettingsError where that address cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            server_version = "pagemill"
            sys_version = ""
            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics(), CONTENT_TYPE_LATEST)
                elif path == "/livez":
                    alive = is_alive()
                    self._answer_json(200 if alive else 503, {"alive": alive})
                elif path == "/readyz":
                    parts = readiness()
                    ready = all(lack is None for lack in parts.values())
                    told = {part: "ready" if lack is None else lack for part, lack in parts.items()}
                    self._answer_json(200 if ready else 503, {"ready": ready, "parts": told})
                else:
                    self._answer_json(404, {"error": f"{path} is not here; /livez, /readyz and /metrics are"})

            def _answer_json(self, status: int, body: object) -> None:
                self._answer(status, json.dumps(body).encode() + b"\n", "application/json")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A probe every few seconds is no event."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def server_bind(self) -> None:
                # HTTPServer's own looks the host's name up, which takes seconds where DNS does not answer.
                # Reused: connections of the worker before, closed by it, hold the port for a minute.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that went away early is no event either."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise SettingsError(
                f"worker.http_host = {host!r}, worker.http_port = {port} cannot be listened on: {error.strerror}; "
                "give another worker.http_port, or 0 for any free one"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Called once, after start."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
