"""Kafka over TLS and with passwords, before the real broker: what is taken, and what is said of what is not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consumers.connection import check_connection, client_options
from consumers.topics import ensure_topics
from schemas.errors import SettingsError, SourceError
from tests.consumers.harness import kafka_settings, produce, prompts, running, take
from tests.servers.certificates import Authority, Certificate, needs_openssl
from tests.servers.fixtures import SASL_PASSWORD, SASL_USER
from tests.servers.kafka_broker import KafkaBroker

pytestmark = [needs_openssl, pytest.mark.real_servers]

SECONDS = 5.0  # for a refusal at the start


@pytest.fixture
def authority(kafka_authority: Authority | None) -> Authority:
    assert kafka_authority is not None
    return kafka_authority


@pytest.fixture(scope="module")
def ours(kafka_authority: Authority | None) -> Certificate:
    assert kafka_authority is not None
    return kafka_authority.issue("worker")


def as_user(mechanism: str, **changes: Any) -> dict[str, Any]:
    return {"sasl_mechanism": mechanism, "sasl_username": SASL_USER, "sasl_password": SASL_PASSWORD, **changes}


def shown(certificate: Certificate) -> dict[str, Path]:
    return {"ssl_certificate_file": certificate.chain, "ssl_key_file": certificate.key}


def refusal(address: str, **settings: Any) -> str:
    """What the start says, within seconds."""
    begun = time.monotonic()
    with pytest.raises(SourceError) as caught:
        ensure_topics(kafka_settings(address, "documents", connect_timeout_seconds=30.0, **settings), wait_seconds=30.0)
    assert time.monotonic() - begun < SECONDS
    told = str(caught.value)
    assert told.startswith(f"no Kafka broker takes us. {address}: ")
    return told


def test_documents_and_dead_letters_go_over_mutual_tls(
    authority: Authority, ours: Certificate, kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    topic = kafka_topic()
    produce(kafka_broker.bootstrap_servers, topic, prompts("a", "b"))
    tls = {"security_protocol": "SSL", "ssl_ca_file": authority.certificate, **shown(ours)}
    with running(kafka_settings(kafka_broker.address("MUTUAL"), topic, **tls)) as source:
        take(source, 2)


@pytest.mark.parametrize(
    ("listener", "mechanism"), [("SASL", "PLAIN"), ("SASL", "SCRAM-SHA-256"), ("SASL_TLS", "SCRAM-SHA-512")]
)
def test_a_password_is_taken_or_named_as_wrong_at_once(
    listener: str, mechanism: str, authority: Authority, kafka_broker: KafkaBroker
) -> None:
    secured: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT"}
    if listener == "SASL_TLS":
        secured = {"security_protocol": "SASL_SSL", "ssl_ca_file": authority.certificate}
    address = kafka_broker.address(listener)
    right = as_user(mechanism)
    check_connection(kafka_settings(address, "documents", **secured, **right))
    for wrong in ({"sasl_password": "hunter2"}, {"sasl_username": "hunter2"}):
        told = refusal(address, **secured, **right | wrong)
        user = (right | wrong)["sasl_username"]
        assert f"authentication failed for the Kafka user '{user}' with {mechanism}" in told
        assert SASL_PASSWORD not in told
        assert ("hunter2" in told) == (user == "hunter2")  # the name may be told, the password not


def test_a_mechanism_that_the_listener_does_not_take_is_named_with_those_that_it_does(
    authority: Authority, kafka_broker: KafkaBroker
) -> None:
    secured = {"security_protocol": "SASL_SSL", "ssl_ca_file": authority.certificate}
    told = refusal(kafka_broker.address("SASL_TLS"), **secured, **as_user("PLAIN"))
    assert "kafka.sasl_mechanism is 'PLAIN', and this listener takes SCRAM-SHA-256 and SCRAM-SHA-512" in told


@pytest.mark.parametrize(
    ("listener", "sentence"),
    [
        ("EXPIRED", "its certificate is out of date (certificate has expired)"),
        ("ELSEWHERE", "its certificate was made for another name (IP address mismatch, certificate is not valid for"),
    ],
)
def test_a_certificate_that_does_not_hold_is_named(
    listener: str, sentence: str, authority: Authority, kafka_broker: KafkaBroker
) -> None:
    address = kafka_broker.address(listener)
    assert sentence in refusal(address, security_protocol="SSL", ssl_ca_file=authority.certificate)


def test_a_certificate_of_an_unknown_authority_is_named_and_no_password_is_sent(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    other = Authority(tmp_path)  # of the same name
    told = refusal(kafka_broker.address("TLS"), security_protocol="SSL", ssl_ca_file=other.certificate)
    assert "its certificate is not trusted (" in told
    assert "kafka.ssl_ca_file must hold the authority that signed it" in told
    user = as_user("SCRAM-SHA-256", sasl_password="hunter2")
    told = refusal(kafka_broker.address("SASL_TLS"), security_protocol="SASL_SSL", **user)
    assert "its certificate is not trusted (" in told  # nor by the machine's authorities: the password is never judged
    assert "give that one's certificate as kafka.ssl_ca_file" in told


def test_a_listener_that_asks_for_our_certificate_says_so_and_refuses_a_strangers(
    authority: Authority, kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    address, tls = kafka_broker.address("MUTUAL"), {"security_protocol": "SSL", "ssl_ca_file": authority.certificate}
    told = refusal(address, **tls)
    assert "it asks for a certificate of ours: give kafka.ssl_certificate_file and kafka.ssl_key_file" in told
    assert "it refuses our certificate" in refusal(address, **tls, **shown(Authority(tmp_path).issue("worker")))


SECURED = {
    "PLAINTEXT": {},
    "SSL": {},
    "SASL_PLAINTEXT": as_user("SCRAM-SHA-512"),
    "SASL_SSL": as_user("SCRAM-SHA-512"),
}
SPOKEN = {"SSL": "TLS", "SASL_PLAINTEXT": "SASL", "SASL_SSL": "SASL_TLS"}


@pytest.mark.parametrize("spoken", SECURED)
@pytest.mark.parametrize("configured", SECURED)
def test_another_protocol_than_the_listeners_is_said_with_the_right_one(
    configured: str, spoken: str, authority: Authority, kafka_broker: KafkaBroker
) -> None:
    address = kafka_broker.bootstrap_servers if spoken == "PLAINTEXT" else kafka_broker.address(SPOKEN[spoken])
    settings = {"security_protocol": configured, **SECURED[configured]}
    if configured.endswith("SSL"):
        settings["ssl_ca_file"] = authority.certificate
    if configured == spoken:
        check_connection(kafka_settings(address, "documents", **settings))
        return
    told = refusal(address, **settings)
    assert told.endswith(f"kafka.security_protocol is '{configured}', and this listener speaks {spoken}.")


def test_a_certificate_or_key_that_cannot_be_used_is_a_mistake_in_the_settings(
    authority: Authority, ours: Certificate, tmp_path: Path
) -> None:
    def mistake(**settings: Any) -> str:
        with pytest.raises(SettingsError) as caught:
            client_options(kafka_settings("a:1", "t", **{"security_protocol": "SSL", **settings}))
        return str(caught.value)

    assert "no such file" in mistake(ssl_ca_file=tmp_path / "none")
    (tmp_path / "empty").touch()
    assert "holds no certificate" in mistake(ssl_ca_file=tmp_path / "empty")
    assert "the key is not that of the certificate" in mistake(**{**shown(ours), "ssl_key_file": authority.issue().key})
    assert "not a certificate and its key in PEM" in mistake(**{**shown(ours), "ssl_key_file": tmp_path / "empty"})
    assert "without kafka.ssl_certificate_file" in mistake(ssl_key_file=ours.key)
    assert "which is not encrypted" in mistake(security_protocol="PLAINTEXT", ssl_ca_file=authority.certificate)
    assert "which sends no password" in mistake(**as_user("PLAIN"))


def test_an_encrypted_key_is_opened_with_its_password_and_never_asked_for_at_the_terminal(
    authority: Authority, kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    certificate = authority.issue("worker")
    encrypted = certificate.encrypted("hunter2 of the key")
    tls = {"security_protocol": "SSL", "ssl_ca_file": authority.certificate, **shown(encrypted)}
    (tmp_path / "password").write_text("hunter2 of the key\n")
    address = kafka_broker.address("MUTUAL")
    check_connection(kafka_settings(address, "t", **tls, ssl_key_password_file=tmp_path / "password"))
    with pytest.raises(SettingsError, match=r"its password is not given: set kafka\.ssl_key_password_file"):
        check_connection(kafka_settings(address, "t", **tls))
    with pytest.raises(SettingsError, match="its password is wrong") as caught:
        check_connection(kafka_settings(address, "t", **tls, ssl_key_password="hunter2"))
    assert "hunter2" not in str(caught.value)
