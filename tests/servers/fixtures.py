"""Fixtures for tests on the real servers, and what happens to those tests where the servers cannot run."""

import itertools
import os
from collections.abc import Callable, Generator, Iterator

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from tests.servers.certificates import Authority, openssl_is_there
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.jdk import what_is_missing
from tests.servers.kafka_broker import KafkaBroker, Listener

REQUIRE_VARIABLE = "PAGEMILL_REQUIRE_REAL_SERVERS"
SASL_USER, SASL_PASSWORD = "pagemill", "correct horse"

_num_not_run: pytest.StashKey[int] = pytest.StashKey()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = what_is_missing()
    if missing is None:
        return
    marked = [item for item in items if item.get_closest_marker("real_servers")]
    config.stash[_num_not_run] = len(marked)
    if os.environ.get(REQUIRE_VARIABLE) != "1":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("real_servers") and (missing := what_is_missing()) is not None:
        pytest.fail(f"{REQUIRE_VARIABLE}=1, and the real servers need {missing}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if num_not_run := config.stash.get(_num_not_run, 0):
        terminalreporter.write_line(
            f"NOT RUN: {num_not_run} tests on a real Apache Kafka and Elasticsearch (marked real_servers). "
            f"Install {what_is_missing()}.",
            yellow=True,
        )


@pytest.fixture(scope="session")
def kafka_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority | None:
    """Signs the certificates of `kafka_broker`; None where there is no openssl."""
    return Authority(tmp_path_factory.mktemp("authority")) if openssl_is_there() else None


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory, kafka_authority: Authority | None) -> Iterator[KafkaBroker]:
    """One broker for the whole run, with a SASL listener for SASL_USER, and with openssl those over TLS.

    Tests share it: use fresh topics and groups.
    """
    listeners: dict[str, Listener] = {}
    if (authority := kafka_authority) is not None:
        certificate = authority.issue()
        listeners = {
            "TLS": Listener(certificate),
            "MUTUAL": Listener(certificate, authority.certificate),
            "EXPIRED": Listener(authority.issue(days=-1)),
            "ELSEWHERE": Listener(authority.issue("kafka.example")),
            "SASL_TLS": Listener(certificate, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512")),
        }
    broker = KafkaBroker.start(tmp_path_factory.mktemp("kafka"), {SASL_USER: SASL_PASSWORD}, listeners)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def elasticsearch_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticsearchNode]:
    """One node for the whole run. Tests share it: use fresh index names."""
    node = ElasticsearchNode.start(tmp_path_factory.mktemp("elasticsearch"))
    yield node
    node.stop()


@pytest.fixture(scope="session")
def _numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def fresh_name(_numbers: Iterator[int]) -> Callable[[str], str]:
    """`fresh_name("group")` -> a lower-case name that no other test of this run uses; fits topics, groups, indices."""
    return lambda prefix: f"{prefix}-{next(_numbers)}"


@pytest.fixture
def kafka_topic(kafka_broker: KafkaBroker, fresh_name: Callable[[str], str]) -> Callable[..., str]:
    """`kafka_topic(num_partitions=1, **configs)` -> the name of a topic that it made on the broker."""

    def make(num_partitions: int = 1, prefix: str = "documents", **configs: str) -> str:
        name = fresh_name(prefix)
        admin = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap_servers)
        try:
            admin.create_topics([NewTopic(name, num_partitions, 1, topic_configs=configs)])
        finally:
            admin.close()
        return name

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of the logs of the session's servers that it used."""
    report = yield
    if report.failed and report.when == "call":
        for name in ("kafka_broker", "elasticsearch_node"):
            server = getattr(item, "funcargs", {}).get(name)
            if isinstance(server, KafkaBroker | ElasticsearchNode) and (log := server.log_end()):
                report.sections.append((f"log of {name}", log))
    return report
