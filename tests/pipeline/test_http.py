"""The worker's HTTP face, over a real socket."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from pipeline.http import StatusServer
from schemas.errors import SettingsError
from schemas.settings import WorkerSettings


class Face:
    def __init__(self) -> None:
        self.alive = True
        self.parts: dict[str, str | None] = {"engine": None, "kafka": None}
        self.server = StatusServer(
            "127.0.0.1", 0, is_alive=lambda: self.alive, readiness=lambda: self.parts, metrics=lambda: b"a 1\n"
        )
        self.server.start()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def face() -> Iterator[Face]:
    face = Face()
    yield face
    face.server.close()


def test_livez_says_whether_the_worker_moves(face: Face) -> None:
    assert face.get("/livez") == (200, '{"alive": true}\n')
    face.alive = False
    assert face.get("/livez") == (503, '{"alive": false}\n')


def test_readyz_says_which_part_is_not_ready(face: Face) -> None:
    assert face.get("/readyz")[0] == 200
    face.parts["kafka"] = "no assignment received"
    status, text = face.get("/readyz")
    assert status == 503
    assert json.loads(text) == {"ready": False, "parts": {"engine": "ready", "kafka": "no assignment received"}}


def test_metrics_are_prometheus_text_and_other_paths_are_not_there(face: Face) -> None:
    assert face.get("/metrics?name[]=a") == (200, "a 1\n")
    assert face.get("/")[0] == 404


def test_nothing_but_reading_is_served_so_that_no_request_changes_anything(face: Face) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        for path in ("/", "/livez", "/readyz", "/metrics", "/drain", "/-/reload"):
            with socket.create_connection(("127.0.0.1", face.server.port)) as client:
                client.sendall(f"{method} {path} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
                assert b" 501 " in client.makefile("rb").readline(), (method, path)
    assert face.get("/livez")[0] == 200


def test_it_is_served_on_loopback_alone_unless_the_settings_say_otherwise() -> None:
    assert WorkerSettings().http_host == "127.0.0.1"


def test_a_taken_port_is_told_with_its_setting(face: Face) -> None:
    never: Callable[[], bool] = lambda: True  # noqa: E731
    with pytest.raises(SettingsError) as caught:
        StatusServer("127.0.0.1", face.server.port, is_alive=never, readiness=dict, metrics=bytes)
    assert str(caught.value) == (
        f"worker.http_host = '127.0.0.1', worker.http_port = {face.server.port} cannot be listened on: Address already "
        "in use; give another worker.http_port, or 0 for any free one"
    )


def test_a_worker_started_at_once_has_the_port_that_the_one_before_answered_on() -> None:
    before = Face()
    port = before.server.port
    with socket.create_connection(("127.0.0.1", port)) as probe:
        probe.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        while probe.recv(4096):  # until the server has closed, which leaves the port to its side for a minute
            pass
    before.server.close()
    after = StatusServer("127.0.0.1", port, is_alive=lambda: True, readiness=dict, metrics=bytes)
    after.start()
    after.close()
