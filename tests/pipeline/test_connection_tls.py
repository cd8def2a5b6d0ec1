"""TLS and credentials on the way to a real node: what is trusted, what is refused by name, and that no secret shows."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.connection import check_reachable, connect
from pipeline.retry import Verdict
from schemas.errors import SinkError
from schemas.settings import ElasticsearchSettings
from tests.pipeline.rows import position, row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink, wait_until
from tests.servers.certificates import Authority, Certificate, needs_openssl
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.tls_front import TlsFront, basic

pytestmark = needs_openssl

NOBODY = "http://127.0.0.1:9"  # behind the front: for what never gets as far as the node
SECONDS = 5.0  # for a refusal at the start


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.issue()


def refusal(**settings: Any) -> str:
    """What the start says, within seconds."""
    started = time.monotonic()
    given = ElasticsearchSettings.model_validate({"connect_timeout_seconds": 30.0, **settings})
    with connect(given) as client, pytest.raises(SinkError) as caught:
        check_reachable(client, given)
    assert time.monotonic() - started < SECONDS
    return str(caught.value)


@pytest.mark.real_servers
@pytest.mark.parametrize("pinned", ["authority", "certificate", "both"])
def test_rows_reach_a_node_behind_tls_with_an_api_key(
    pinned: str, authority: Authority, certificate: Certificate, elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str], tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "key").write_text("VnVhQ2ZHY0JDZGJrUW\n")
    trust: dict[str, Any] = {}
    if pinned != "certificate":
        trust["ca_file"] = authority.certificate
    if pinned != "authority":
        trust["certificate_fingerprints"] = ("00" * 32, certificate.fingerprint.upper())  # another node's beside it
    with TlsFront(elasticsearch_node.url, certificate, ["ApiKey VnVhQ2ZHY0JDZGJrUW"]) as front:
        opened = open_sink(fresh_name("results"), url=front.url, api_key_file=tmp_path / "key", **trust)
        with opened as (sink, got):
            sink.put_many([(row(n), n, position(n), None) for n in range(20)])
            assert sink.drain(DRAIN_SECONDS)
    assert got.offsets(Verdict.STORED) == list(range(20))


@pytest.mark.real_servers
def test_a_user_and_password_do_as_well_and_an_api_key_may_be_given_in_its_two_parts(
    authority: Authority, certificate: Certificate, elasticsearch_node: ElasticsearchNode
) -> None:
    accepted = [basic("me", "pass:wörd"), "ApiKey aWQ6c2VjcmV0"]  # id:secret
    with TlsFront(elasticsearch_node.url, certificate, accepted) as front:
        for credentials in ({"username": "me", "password": "pass:wörd"}, {"api_key": "id:secret"}):
            given = {"urls": (front.url,), "ca_file": authority.certificate, **credentials}
            settings = ElasticsearchSettings.model_validate(given)
            with connect(settings) as client:
                check_reachable(client, settings)
    assert front.authorizations == accepted


def test_a_certificate_of_an_unknown_authority_is_named_and_the_credentials_are_not_sent(
    certificate: Certificate, tmp_path: Path
) -> None:
    other = Authority(tmp_path)  # of the same name
    with TlsFront(NOBODY, certificate) as front:
        told = refusal(urls=(front.url,), ca_file=other.certificate, api_key="secret")
        assert "the certificate of" in told
        assert "is not trusted" in told
        assert "elasticsearch.ca_file must hold the authority that signed it" in told
        assert "is not trusted" in refusal(urls=(front.url,), api_key="secret")  # nor by the machine's authorities
    assert front.authorizations == []


def test_a_certificate_for_another_host_is_not_trusted(authority: Authority) -> None:
    with TlsFront(NOBODY, authority.issue("search.example")) as front:
        told = refusal(urls=(front.url,), ca_file=authority.certificate)
    assert "IP address mismatch" in told
    assert "the name that it was made for" in told


def test_a_certificate_of_another_fingerprint_is_named_with_its_own(
    authority: Authority, certificate: Certificate
) -> None:
    other = authority.issue()
    with TlsFront(NOBODY, other) as front:
        for ca_file in (None, authority.certificate):  # trusted, and not the one that was meant
            pins = (certificate.fingerprint,)
            told = refusal(urls=(front.url,), ca_file=ca_file, certificate_fingerprints=pins, api_key="secret")
            assert "is not one of elasticsearch.certificate_fingerprints" in told
            assert other.fingerprint in told
    assert front.authorizations == []


def test_a_pinned_certificate_of_an_untrusted_authority_does_not_pass_where_an_authority_is_demanded(
    authority: Authority, tmp_path: Path
) -> None:
    impostor = Authority(tmp_path).issue()
    with TlsFront(NOBODY, impostor) as front:
        pins = (impostor.fingerprint,)
        told = refusal(urls=(front.url,), ca_file=authority.certificate, certificate_fingerprints=pins)
    assert "is not trusted" in told


def test_an_impostor_who_shows_the_pinned_certificate_behind_his_own_does_not_pass(
    authority: Authority, certificate: Certificate, tmp_path: Path
) -> None:
    """The client library's own check of fingerprints takes it: it looks for the pin anywhere in what is shown."""
    impostor = Authority(tmp_path)
    authoritys = Certificate(authority.certificate, authority.certificate)
    for shown, pin in ((authority.certificate, authoritys.fingerprint), (certificate.chain, certificate.fingerprint)):
        with TlsFront(NOBODY, impostor.issue(shows=shown)) as front:
            told = refusal(urls=(front.url,), certificate_fingerprints=(pin,), api_key="secret")
        assert "is not one of elasticsearch.certificate_fingerprints" in told
        assert front.authorizations == []


def test_https_where_only_http_is_spoken_and_http_where_only_https_is_are_told(certificate: Certificate) -> None:
    with TlsFront(NOBODY, None) as front:
        told = refusal(urls=(front.url.replace("http://", "https://"),))
        assert "no TLS connection" in told
        assert "is it https" in told
    with TlsFront(NOBODY, certificate) as front:
        told = refusal(urls=(front.url.replace("https://", "http://"),), connect_timeout_seconds=0.5)
        assert "correct elasticsearch.urls (is it https?)" in told


@pytest.mark.parametrize(
    ("credentials", "sentence"),
    [
        ({"api_key": "aWQ6d3Jvbmc"}, "refuses the API key: check elasticsearch.api_key_file"),
        ({"username": "me", "password": "wrong"}, "refuses the user 'me' or the password"),
        ({}, "refuses a request without credentials: give elasticsearch.api_key_file"),
    ],
)
def test_wrong_credentials_are_told_by_name_at_once(
    credentials: dict[str, str], sentence: str, authority: Authority, certificate: Certificate
) -> None:
    with TlsFront(NOBODY, certificate, ["ApiKey right"]) as front:
        told = refusal(urls=(front.url,), ca_file=authority.certificate, **credentials)
    assert sentence in told
    assert "(401)" in told
    assert "wrong" not in told
    assert "aWQ6" not in told
    assert len(front.authorizations) == 1  # no second try


@pytest.mark.real_servers
def test_a_key_that_is_withdrawn_stops_a_running_sink_with_a_sentence(
    authority: Authority, certificate: Certificate, elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str],
) -> None:  # fmt: skip
    with TlsFront(elasticsearch_node.url, certificate, ["ApiKey cmlnaHQ"]) as front:
        trust: dict[str, Any] = {"api_key": "cmlnaHQ", "ca_file": authority.certificate}
        with open_sink(fresh_name("results"), url=front.url, **trust) as (sink, deliveries):
            sink.put(row(0), 0, position(0))
            wait_until(lambda: deliveries.offsets(Verdict.STORED) == [0], "the first row")
            front.credentials = {"ApiKey another"}
            sink.put(row(1), 1, position(1))
            with pytest.raises(SinkError, match=r"no longer lets us write .*check the credentials") as caught:
                sink.drain(DRAIN_SECONDS)
    assert "cmlnaHQ" not in str(caught.value)
    assert deliveries.offsets(Verdict.STORED) == [0]


# Runs each command with its environment, in one process for the sake of time; says after each which it was.
COMMANDS = """
import json, os, sys
from pipeline.cli import app
for arguments, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    try:
        app(arguments)
    except SystemExit as end:
        code = end.code
    for name in environment:
        del os.environ[name]
    sys.stdout.flush()
    print(f"--- {arguments[0]}: {code}", file=sys.stderr, flush=True)
"""


def test_no_command_says_a_secret_whatever_goes_wrong(
    authority: Authority, certificate: Certificate, tmp_path: Path
) -> None:
    key, shapeless = tmp_path / "key", tmp_path / "shapeless"
    key.write_text("hunter2-key")
    shapeless.write_text("hunter2-one\nhunter2-two")
    given: list[tuple[str, dict[str, str]]] = [
        (f'api_key_file = "{key}"', {}),
        ("", {"PAGEMILL_ELASTICSEARCH__API_KEY": "hunter2-environment"}),
        ('username = "me"', {"PAGEMILL_ELASTICSEARCH__PASSWORD": "hunter2-password"}),
        (f'api_key_file = "{shapeless}"', {}),
    ]
    runs = []
    with TlsFront(NOBODY, certificate, ["ApiKey right"]) as front:
        for number, (line, environment) in enumerate(given):
            config = tmp_path / f"{number}.toml"
            config.write_text(
                f"[elasticsearch]\nurls = ['{front.url}']\nca_file = '{authority.certificate}'\n{line}\n"
                "[kafka]\nbootstrap_servers = ['127.0.0.1:9']\n[model]\npath = 'tests'\n"
                "[worker]\nlog_level = 'debug'\nhttp_port = 0\n"
            )
            runs += [([name, "--config", str(config)], environment) for name in ("check-config", "results")]
        ran = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(runs)], capture_output=True, text=True, timeout=120, check=False
        )
    said = ran.stdout + ran.stderr
    ends = [line for line in ran.stderr.splitlines() if line.startswith("---")]
    assert ends == ["--- check-config: 0", "--- results: 1"] * 3 + ["--- check-config: 0", "--- results: 2"]
    assert said.count("(401)") == 3
    assert said.count("elasticsearch.api_key holds spaces, line breaks") == 1
    assert 'password = "**********"' in ran.stdout
    assert "Traceback" not in said
    assert "hunter2" not in said
    for text in ("hunter2-key", "hunter2-environment", "me:hunter2-password"):
        assert base64.b64encode(text.encode()).decode() not in said
