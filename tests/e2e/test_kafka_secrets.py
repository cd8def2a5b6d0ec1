"""A worker on Kafka over TLS with a password, at its most talkative: it answers, and never says the password."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import StartWorker
from tests.e2e.documents import Sent, document
from tests.e2e.servers import Servers
from tests.e2e.workers import wait_until
from tests.pipeline.test_connection_tls import COMMANDS
from tests.servers.certificates import Authority, needs_openssl
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.fixtures import SASL_PASSWORD, SASL_USER
from tests.servers.kafka_broker import KafkaBroker

pytestmark = [needs_openssl, pytest.mark.real_servers]


def test_a_worker_on_sasl_ssl_answers_and_dead_letters_without_a_word_of_its_password(
    kafka_broker: KafkaBroker, kafka_authority: Authority | None,
    elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str], start_worker: StartWorker,
    tiny_model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    assert kafka_authority is not None
    (tmp_path / "password").write_text(f"{SASL_PASSWORD}\n")
    secured = {
        "bootstrap_servers": [kafka_broker.address("SASL_TLS")],
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": SASL_USER,
        "sasl_password_file": str(tmp_path / "password"),
        "ssl_ca_file": str(kafka_authority.certificate),
    }
    servers = Servers(kafka_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("secured"), secured)
    servers.create_topic(1)
    servers.produce([Sent("bad", 0, b"no JSON"), Sent("good", 0, document(id="d1", prompt="document 1"))])
    talkative = {"log_level": "debug", "log_format": "console"}  # whose tracebacks would show local variables
    worker = start_worker("worker", servers.settings(str(tiny_model), worker=talkative))
    worker.wait_until_ready()
    wait_until("both are stored", lambda: servers.count_rows() == 2)
    metrics = worker.get("/metrics") or ""
    assert "pagemill_documents_delivered_total 2.0" in metrics
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.log[-3000:]
    assert servers.committed() == {0: 2}
    assert [letter.value for letter in servers.dead_letters()] == [b"no JSON"]
    assert "worker ended" in worker.log
    assert SASL_PASSWORD not in worker.log + metrics


def test_no_command_says_the_password_whatever_goes_wrong(
    kafka_broker: KafkaBroker, kafka_authority: Authority | None, tmp_path: Path
) -> None:
    assert kafka_authority is not None
    (tmp_path / "password").write_text("hunter2-file")
    secured = (
        f"[kafka]\nbootstrap_servers = ['{kafka_broker.address('SASL_TLS')}']\nsecurity_protocol = 'SASL_SSL'\n"
        f"sasl_mechanism = 'SCRAM-SHA-512'\nsasl_username = '{SASL_USER}'\n"
        f"ssl_ca_file = '{kafka_authority.certificate}'\n"
    )
    others = "[elasticsearch]\nurls = ['http://127.0.0.1:9']\n[worker]\nlog_level = 'debug'\nlog_format = 'console'\n"
    from_file = f"sasl_password_file = '{tmp_path / 'password'}'\n"
    from_environment = {"PAGEMILL_KAFKA__SASL_PASSWORD": "hunter2-environment"}
    given: dict[str, tuple[str, dict[str, str]]] = {
        "file": (from_file, {}),
        "environment": ("", from_environment),
        "both": (from_file, from_environment),
    }
    runs = []
    for name, (line, environment) in given.items():
        config = tmp_path / f"{name}.toml"
        config.write_text(secured + line + others)
        for command in (["check-config"], ["dlq", "list"], ["submit", "none.jsonl"]):
            runs.append(([*command, "--config", str(config)], environment))
    runs.append((["check-config", "--set", "kafka.sasl_password=hunter2-flag"], {}))
    (tmp_path / "none.jsonl").write_text('{"prompt": "a"}\n')
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(runs)],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    said = ran.stdout + ran.stderr
    ends = [line for line in ran.stderr.splitlines() if line.startswith("---")]
    told = "authentication failed for the Kafka user 'pagemill' with SCRAM-SHA-512"
    once = ["--- check-config: 0", "--- dlq: 1", "--- submit: 1"]
    assert ends == [*once, *once, "--- check-config: 0", "--- dlq: 2", "--- submit: 2", "--- check-config: 2"], said
    assert said.count(told) == 4
    assert "kafka.sasl_password and kafka.sasl_password_file are both given" in said
    assert "kafka.sasl_password is a secret, and the machine's other users can read flags" in said
    assert 'sasl_password = "**********"' in ran.stdout
    assert "Traceback" not in said
    assert "hunter2" not in said
