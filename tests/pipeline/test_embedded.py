"""The embedded server's process: the real one is started in each test."""

import os
import socket
import sys
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch
from kafka import KafkaAdminClient

from pipeline import embedded
from pipeline.embedded import EmbeddedServer
from schemas.errors import DemoError

pytest.importorskip("noida_db", reason="the embedded server needs `pip install 'pagemill[demo]'`")


def test_it_speaks_both_protocols_between_start_and_stop() -> None:
    with EmbeddedServer() as server:
        assert server.is_running
        admin = KafkaAdminClient(bootstrap_servers=server.kafka_address)
        assert "__consumer_offsets" in admin.list_topics()
        admin.close()
        client = Elasticsearch(server.elasticsearch_url)
        assert client.count(index="*")["count"] == 0
        client.close()
    assert not server.is_running


def test_its_own_data_folder_goes_with_it_and_a_given_one_stays(tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        assert server._data_folder is not None
        own = server._data_folder
        assert own.is_dir()
    assert not own.exists()
    with EmbeddedServer(data_folder=tmp_path):
        pass
    assert (tmp_path / "kafka.json").is_file()


def test_stop_may_be_called_twice_and_before_start() -> None:
    server = EmbeddedServer()
    server.stop()
    server.start()
    server.stop()
    server.stop()
    assert not server.is_running


@pytest.mark.parametrize("service", ["kafka", "elasticsearch"])
def test_a_taken_port_is_named_with_what_to_do(service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = EmbeddedServer(**{f"{service}_port": port})
        with pytest.raises(DemoError, match=f"{service}: port {port} is already in use. Stop what listens there"):
            server.start()
    assert not server.is_running


def test_data_that_it_cannot_read_is_the_reason_given(tmp_path: Path) -> None:
    (tmp_path / "kafka.json").write_text("{cut sho")
    with pytest.raises(DemoError, match=r"ended at once: .*failed to parse kafka snapshot"):
        EmbeddedServer(data_folder=tmp_path).start()


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "noida_db", None)
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"pip install 'pagemill\[demo\]'"):
        EmbeddedServer().start()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = tmp_path / "stubborn"
    stubborn.write_text(
        "#!/bin/sh\ntrap '' TERM\necho 'kafka  127.0.0.1:1'\necho 'elasticsearch  http://127.0.0.1:2'\n"
        "echo 'press Ctrl-C to stop'\nexec sleep 600\n"
    )
    os.chmod(stubborn, 0o755)
    monkeypatch.setattr(embedded, "_find_binary", lambda: stubborn)
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_SECONDS", 0.2)
    server = EmbeddedServer()
    server.start()
    assert (server.kafka_address, server.elasticsearch_url) == ("127.0.0.1:1", "http://127.0.0.1:2")
    server.stop()
    assert not server.is_running


def test_the_loaders_remark_is_never_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho \"libc.so.6: weak version 'GLIBC_2.39' not found\" >&2\nexit 1\n")
    os.chmod(silent, 0o755)
    monkeypatch.setattr(embedded, "_find_binary", lambda: silent)
    with pytest.raises(DemoError, match="ended at once: it printed nothing"):
        EmbeddedServer().start()
