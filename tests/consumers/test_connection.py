"""Brokers that cannot be reached or refuse us: said at start, soon, with what to do."""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consumers.connection import check_connection, client_options
from consumers.kafka import KafkaSource
from schemas.errors import SettingsError, SourceError
from schemas.settings import KafkaSettings
from tests.consumers.harness import kafka_settings, produce, prompts, running, take
from tests.servers.fixtures import SASL_PASSWORD, SASL_USER
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.server_process import free_ports


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_address_nobody_listens_on_is_named_within_the_timeout() -> None:
    (port,) = free_ports(1)
    settings = kafka_settings(f"127.0.0.1:{port}", "documents", connect_timeout_seconds=1.0)
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{port}: nobody listens there") as raised:
        KafkaSource(settings).start()
    assert "Check kafka.bootstrap_servers" in str(raised.value)


def test_nobody_is_waited_for_so_long_as_is_asked_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    passed: list[float] = []
    with pytest.raises(SourceError, match="nobody listens there"):
        check_connection(kafka_settings(f"127.0.0.1:{port}", "documents"), 3.0, lambda: sum(passed), passed.append)
    assert passed == [1.0, 1.0, 1.0]
    assert [record.message for record in caplog.records if record.name == "consumers.connection"] == [
        "no Kafka broker is there yet; waiting for one"
    ]


def test_what_closes_the_connection_without_a_word_is_no_broker() -> None:
    """As a port that is passed on to a broker that has not started yet: it is waited for."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"127.0.0.1:{server.server_address[1]}"
        passed: list[float] = []
        try:
            with pytest.raises(SourceError, match=rf"{address}: what answers there is no Kafka broker"):
                check_connection(kafka_settings(address, "documents"), 2.0, lambda: sum(passed), passed.append)
        finally:
            server.shutdown()
            thread.join()
    assert passed == [1.0, 1.0]


def test_a_name_that_does_not_resolve_is_told_apart() -> None:
    with pytest.raises(SourceError, match=r"broker\.invalid:9092: the name does not resolve"):
        check_connection(kafka_settings("broker.invalid:9092", "documents", connect_timeout_seconds=5.0))


def test_a_listener_that_never_answers_is_a_timeout(silent_port: int) -> None:
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{silent_port}: no answer within 1 s"):
        check_connection(kafka_settings(f"127.0.0.1:{silent_port}", "documents", connect_timeout_seconds=1.0))


def test_without_addresses_the_settings_to_give_are_named() -> None:
    with pytest.raises(SettingsError, match=r"set kafka\.bootstrap_servers or PAGEMILL_KAFKA__BOOTSTRAP_SERVERS"):
        check_connection(KafkaSettings())


@pytest.mark.parametrize(
    "address",
    ["host:abc", "host:0", "host:70000", "host:-1", "host:", ":9092", "", " ", "[::1:9092", "http://host:9092/"],
)
def test_an_address_that_is_none_is_named_with_what_to_write(address: str) -> None:
    with pytest.raises(SettingsError) as raised:
        check_connection(kafka_settings(address, "documents"))
    assert str(raised.value) == (
        f"kafka.bootstrap_servers holds {address!r}; write it with host and port, such as broker-1:9092 or [::1]:9092"
    )


def test_an_address_with_credentials_is_refused_and_they_are_not_shown() -> None:
    with pytest.raises(
        SettingsError, match=r"bootstrap_servers holds credentials in '\*\*\*@a:1'; .*sasl_password_file"
    ):
        check_connection(kafka_settings("SASL_SSL://me:hush@a:1", "documents"))


@pytest.mark.parametrize("address", ["[::1]:9092", "::1", "host", "PLAINTEXT://host:65535"])
def test_addresses_are_read_as_the_clients_read_them(address: str) -> None:
    assert client_options(kafka_settings(address, "documents"))["bootstrap_servers"] == [address]


def test_an_ipv6_address_is_tried_and_named_as_it_is_written() -> None:
    (port,) = free_ports(1)
    with pytest.raises(SourceError, match=rf"\[::1\]:{port}: "):
        check_connection(kafka_settings(f"[::1]:{port}", "documents", connect_timeout_seconds=1.0))


def test_a_sasl_user_needs_mechanism_and_password(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"set kafka\.sasl_mechanism and kafka\.sasl_username too"):
        client_options(kafka_settings("a:1", "t", security_protocol="SASL_SSL"))
    sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "u"}
    with pytest.raises(SettingsError, match=r"set kafka\.sasl_password_file"):
        client_options(kafka_settings("a:1", "t", **sasl))
    with pytest.raises(SettingsError, match=r"sasl_password_file .* cannot be read: No such file"):
        client_options(kafka_settings("a:1", "t", **sasl, sasl_password_file=tmp_path / "none"))
    (tmp_path / "password").write_text("from a file\n")
    options = client_options(kafka_settings("a:1", "t", **sasl, sasl_password_file=tmp_path / "password"))
    assert options["sasl_plain_password"] == "from a file"


@pytest.mark.real_servers
def test_a_wrong_password_is_said_at_once_and_the_right_one_reads(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    topic = kafka_topic()
    produce(kafka_broker.bootstrap_servers, topic, prompts("a"))
    sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": SASL_USER}
    address = kafka_broker.sasl_bootstrap_servers
    begun = time.monotonic()
    with pytest.raises(SourceError, match=f"{address}: authentication failed for the Kafka user 'pagemill' with"):
        KafkaSource(kafka_settings(address, topic, **sasl, sasl_password="wrong")).start()
    assert time.monotonic() - begun < 15.0
    with running(kafka_settings(address, topic, **sasl, sasl_password=SASL_PASSWORD)) as source:
        take(source, 1)
