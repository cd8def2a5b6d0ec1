"""TLS and authentication before a test node that has neither: the security module is not among what Maven gives.

It answers wrong credentials as Elasticsearch does, and passes everything else to the node as it came.
"""

import base64
import http.client
import http.server
import json
import ssl
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tests.servers.certificates import Certificate

_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class TlsFront:
    """`with TlsFront(node.url, certificate, [basic("me", "secret")]) as front:` -> `front.url`, https.

    `credentials` are the Authorization headers that are accepted; with none, everybody is. `certificate=None` speaks
    plain HTTP. It keeps every request's Authorization header.
    """

    def __init__(self, node_url: str, certificate: Certificate | None, credentials: Iterable[str] = ()) -> None:
        self.credentials = set(credentials)
        self.authorizations: list[str | None] = []
        self._node = urlsplit(node_url).netloc
        front = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def setup(self) -> None:
                if isinstance(self.request, ssl.SSLSocket):
                    self.request.settimeout(10)
                    self.request.do_handshake()  # in this connection's own thread
                super().setup()

            def log_message(self, *_: Any) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                front._answer(self, body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # a client that does not trust us ends the handshake

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.chain, certificate.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def _answer(self, request: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        authorization = request.headers.get("Authorization")
        self.authorizations.append(authorization)
        if self.credentials and authorization not in self.credentials:
            reason = "unable to authenticate with provided credentials and anonymous access is not allowed"
            error = {"error": {"type": "security_exception", "reason": reason}, "status": 401}
            headers = [("X-Elastic-Product", "Elasticsearch"), ("Content-Type", "application/json")]
            _send(request, 401, headers, json.dumps(error).encode())
            return
        node = http.client.HTTPConnection(self._node, timeout=60)
        try:
            kept = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
            node.request(request.command, request.path, body or None, kept)
            reply = node.getresponse()
            content = reply.read()
        finally:
            node.close()
        _send(request, reply.status, reply.getheaders(), content)


def basic(username: str, password: str) -> str:
    """The Authorization header of a user."""
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()


def _send(
    request: http.server.BaseHTTPRequestHandler, status: int, headers: Iterable[tuple[str, str]], content: bytes
) -> None:
    request.send_response(status)
    for name, value in headers:
        if name.lower() not in _HOP_HEADERS:
            request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
