import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.connection import check_reachable, connect
from pipeline.sink import ElasticsearchSink
from schemas.errors import SettingsError, SinkError
from schemas.settings import ElasticsearchSettings
from tests.servers.server_process import free_ports


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's status, and keeps the authorization header."""

    server: "ScriptedServer"

    def do_GET(self) -> None:
        self.server.authorizations.append(self.headers.get("Authorization", ""))
        body = b'{"error": {"type": "security_exception"}}' if self.server.status in (401, 403) else b"{}"
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class ScriptedServer(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Scripted)
        self.status = 200
        self.headers: dict[str, str] = {"X-Elastic-Product": "Elasticsearch"}
        self.authorizations: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(settings: ElasticsearchSettings) -> None:
    with connect(settings) as client:
        check_reachable(client, settings)


def test_an_address_nobody_listens_on_is_named_and_nothing_is_started() -> None:
    [port] = free_ports(1)
    settings = ElasticsearchSettings(urls=(f"http://127.0.0.1:{port}",), connect_timeout_seconds=0.05)
    sink = ElasticsearchSink(settings, on_acknowledged=lambda *_: None, on_rejected=lambda _: None)
    with pytest.raises(SinkError, match=rf"does not answer at http://127\.0\.0\.1:{port} within 0\.05 s .*refused"):
        sink.start()
    assert sink.stats().num_bulks == 0
    sink.close()


def test_a_wrong_password_is_said_and_not_shown(server: ScriptedServer, tmp_path: Path) -> None:
    server.status = 401
    (tmp_path / "password").write_text("hunter2\n")
    settings = ElasticsearchSettings(urls=(server.url,), username="me", password_file=tmp_path / "password")
    with pytest.raises(SinkError, match=r"refuses the user 'me' or the password.* \(401\)") as caught:
        check(settings)
    assert "hunter2" not in str(caught.value)
    assert server.authorizations == ["Basic bWU6aHVudGVyMg=="]  # me:hunter2, without the file's newline


def test_an_api_key_is_read_from_its_file(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("c2VjcmV0\n")
    check(ElasticsearchSettings(urls=(server.url,), api_key_file=tmp_path / "key"))
    assert server.authorizations == ["ApiKey c2VjcmV0"]


def test_credentials_that_may_not_see_the_clusters_health_are_good_enough(server: ScriptedServer) -> None:
    server.status = 403
    check(ElasticsearchSettings(urls=(server.url,)))


def test_another_server_than_elasticsearch_is_refused(server: ScriptedServer) -> None:
    server.headers = {}
    with pytest.raises(SinkError, match="is not an Elasticsearch that we can use"):
        check(ElasticsearchSettings(urls=(server.url,)))


def test_a_cluster_without_a_master_is_waited_for_and_then_named(server: ScriptedServer) -> None:
    server.status = 503
    with pytest.raises(SinkError, match=r"does not answer at .* within 0\.3 s \(503"):
        check(ElasticsearchSettings(urls=(server.url,), connect_timeout_seconds=0.3))
    assert len(server.authorizations) >= 2


def test_plain_http_behind_an_https_address_is_said_as_tls(server: ScriptedServer) -> None:
    url = server.url.replace("http://", "https://")
    with pytest.raises(SinkError, match=r"no TLS connection to .*ca_file"):
        check(ElasticsearchSettings(urls=(url,), connect_timeout_seconds=2.0))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"urls": ()}, "elasticsearch.urls is empty"),
        ({"urls": ("search:9200",)}, "write it with scheme, host and port"),
        ({"urls": ("http://search",)}, "write it with scheme, host and port"),
        ({"urls": ("http://search:port",)}, "write it with scheme, host and port"),
        ({"urls": ("http://search:9200", "http://[search:9200")}, "write it with scheme, host and port"),
        (
            {"urls": ("http://me:hunter2@search:9200",)},
            r"holds credentials in 'http://\*\*\*@search:9200'; give them as",
        ),
        ({"urls": ("http://me:hunter2#@search:9200",)}, r"holds credentials in 'http://\*\*\*@search:9200'"),
        ({"urls": ("http://me:/hunter2@search:9200",)}, r"holds credentials in 'http://\*\*\*@search:9200'"),
        ({"urls": ("http://me:1?hunter2@search:9200",)}, r"holds credentials in 'http://\*\*\*@search:9200'"),
        ({"urls": ("me:hunter2@search:9200",)}, r"holds credentials in '\*\*\*@search:9200'"),
        ({"username": "me"}, "elasticsearch.password_file is missing"),
        ({"password": "hunter2"}, "elasticsearch.username is missing"),
        ({"username": "me", "password": "hunter2", "api_key": "hunter2"}, "both an api_key and a username"),
        ({"password": "hunter2", "password_file": "pw"}, "password and elasticsearch.password_file are both given"),
        ({"api_key_file": "nowhere"}, "api_key_file 'nowhere' cannot be read: No such file"),
        ({"ca_file": "nowhere"}, "ca_file is given, and http://search:9200 is not encrypted"),
        ({"certificate_fingerprints": ("ab" * 32,)}, "certificate_fingerprints is given, and http://search:9200 is"),
        (
            {"urls": ("https://search:9200",), "certificate_fingerprints": ("ab:cd",)},
            "certificate_fingerprints holds 'ab:cd'; a SHA-256 fingerprint is 64 hexadecimal digits",
        ),
        ({"api_key": "hunter2\nhunter2"}, "api_key holds spaces, line breaks"),
        ({"urls": ("https://search:9200",), "ca_file": "nowhere"}, "ca_file 'nowhere' is not a file"),
    ],
)
def test_settings_that_cannot_be_used_are_named_and_no_secret_is_shown(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        connect(ElasticsearchSettings.model_validate({"urls": ("http://search:9200",), **given}))
    assert "hunter2" not in str(caught.value)


def test_an_empty_secret_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(SettingsError, match=r"api_key_file .* is empty"):
        connect(ElasticsearchSettings(urls=("http://search:9200",), api_key_file=tmp_path / "key"))


def test_a_ca_file_without_a_certificate_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(SettingsError, match=r"ca_file .* holds no certificate"):
        connect(ElasticsearchSettings(urls=("https://search:9200",), ca_file=tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [("http://search:9200", True), ("https://search:9200", False), ("http://127.0.0.1:9200", False)],
)
def test_credentials_that_would_go_in_clear_text_to_another_machine_are_warned_of(url: str, is_warned: bool) -> None:
    with capture_logs() as lines:
        connect(ElasticsearchSettings.model_validate({"urls": (url,), "api_key": "hunter2"})).close()
        connect(ElasticsearchSettings(urls=(url,))).close()
    assert [line["event"] for line in lines] == ["credentials go over the network in clear text"] * is_warned
    assert "hunter2" not in str(lines)
