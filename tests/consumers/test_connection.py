"""Brokers that cannot be reached or refuse us: said at start, soon, with what to do."""

import socket
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
    settings = kafka_settings(f"127.0.0.1:{port}", "documents", connect_timeout_seconds=5.0)
    begun = time.monotonic()
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{port}: nobody listens there") as raised:
        KafkaSource(settings).start()
    assert "Check kafka.bootstrap_servers" in str(raised.value)
    assert time.monotonic() - begun < 5.0


def test_a_name_that_does_not_resolve_is_told_apart() -> None:
    with pytest.raises(SourceError, match=r"broker\.invalid:9092: the name does not resolve"):
        check_connection(kafka_settings("broker.invalid:9092", "documents", connect_timeout_seconds=5.0))


def test_a_listener_that_never_answers_is_a_timeout(silent_port: int) -> None:
    with pytest.raises(SourceError, match=rf"127\.0\.0\.1:{silent_port}: no answer within 1 s"):
        check_connection(kafka_settings(f"127.0.0.1:{silent_port}", "documents", connect_timeout_seconds=1.0))


def test_without_addresses_the_settings_to_give_are_named() -> None:
    with pytest.raises(SettingsError, match=r"set kafka\.bootstrap_servers or PAGEMILL_KAFKA__BOOTSTRAP_SERVERS"):
        check_connection(KafkaSettings())


def test_a_sasl_user_needs_mechanism_and_password(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"set kafka\.sasl_mechanism and kafka\.sasl_username too"):
        client_options(kafka_settings("a:1", "t", security_protocol="SASL_SSL"))
    sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "u"}
    with pytest.raises(SettingsError, match=r"set kafka\.sasl_password_file"):
        client_options(kafka_settings("a:1", "t", **sasl))
    with pytest.raises(SettingsError, match=r"sasl_password_file .*: No such file"):
        client_options(kafka_settings("a:1", "t", **sasl, sasl_password_file=tmp_path / "none"))
    (tmp_path / "password").write_text("from a file\n")
    options = client_options(kafka_settings("a:1", "t", **sasl, sasl_password_file=tmp_path / "password"))
    assert options["sasl_plain_password"] == "from a file"


def test_tls_files_are_passed_on_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    options = client_options(kafka_settings("a:1", "t", security_protocol="SSL", ssl_ca_file=tmp_path / "ca.pem"))
    assert (options["security_protocol"], options["ssl_cafile"]) == ("SSL", str(tmp_path / "ca.pem"))
    with pytest.raises(SettingsError, match=r"kafka\.ssl_key_file .*no\.pem: no such file"):
        client_options(kafka_settings("a:1", "t", security_protocol="SSL", ssl_key_file=tmp_path / "no.pem"))


@pytest.mark.real_servers
def test_a_wrong_password_is_said_at_once_and_the_right_one_reads(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    topic = kafka_topic()
    produce(kafka_broker.bootstrap_servers, topic, prompts("a"))
    sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": SASL_USER}
    address = kafka_broker.sasl_bootstrap_servers
    begun = time.monotonic()
    with pytest.raises(SourceError, match=rf"{address} refuses the Kafka user 'pagemill': authentication failed"):
        KafkaSource(kafka_settings(address, topic, **sasl, sasl_password="wrong")).start()
    assert time.monotonic() - begun < 15.0
    with running(kafka_settings(address, topic, **sasl, sasl_password=SASL_PASSWORD)) as source:
        take(source, 1)


@pytest.mark.real_servers
def test_another_protocol_than_the_listeners_is_said(kafka_broker: KafkaBroker) -> None:
    plain_to_sasl = kafka_settings(kafka_broker.sasl_bootstrap_servers, "documents", connect_timeout_seconds=3.0)
    with pytest.raises(SourceError, match=r"is kafka.security_protocol = 'PLAINTEXT' what this listener speaks"):
        check_connection(plain_to_sasl)
    tls_to_plain = kafka_settings(
        kafka_broker.bootstrap_servers, "documents", connect_timeout_seconds=3.0, security_protocol="SSL"
    )
    with pytest.raises(SourceError, match=r"no TLS connection|no answer within"):
        check_connection(tls_to_plain)
