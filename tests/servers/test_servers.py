"""The test servers themselves: they keep their data over kill -9, and what is missing is said in words."""

from collections.abc import Callable
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from tests.chaos.proxy import FaultProxy
from tests.servers import jdk
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker, Listener


def test_a_jdk_is_taken_by_what_its_release_file_says_not_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("jdk-25", "17.0.1"), ("old-name", "21.0.2")):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "javac").touch()
        (tmp_path / name / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    monkeypatch.setattr(jdk, "_JDK_FOLDERS", (f"{tmp_path}/*",))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk-25"))
    assert jdk.find_jdk() == tmp_path / "old-name"


def test_without_a_jdk_and_maven_both_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jdk, "_JDK_FOLDERS", ())
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = jdk.what_is_missing()
    assert missing is not None
    assert "JDK of version 21 or later" in missing
    assert "Maven" in missing
    with pytest.raises(jdk.ServersUnavailable, match="kafka test server needs a JDK"):
        jdk.build_server("kafka")


@pytest.mark.real_servers
def test_a_killed_broker_has_its_acknowledged_records_after_a_restart(tmp_path: Path) -> None:
    broker = KafkaBroker.start(tmp_path / "kafka", **{"auto.create.topics.enable": "true"})
    try:
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")
        producer.send("survivors", b"one").get(timeout=30)
        producer.close()
        broker.kill()
        broker.restart()
        consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
        consumer.assign([TopicPartition("survivors", 0)])
        assert [record.value for batch in consumer.poll(20_000).values() for record in batch] == [b"one"]
        consumer.close()
    finally:
        broker.stop()


@pytest.mark.real_servers
def test_a_killed_node_has_its_acknowledged_rows_after_a_restart(tmp_path: Path) -> None:
    node = ElasticsearchNode.start(tmp_path / "elasticsearch")
    try:
        with Elasticsearch(node.url) as client:
            client.index(index="survivors", id="1", document={"text": "one"})
            node.kill()
            node.restart()
            client.cluster.health(index="survivors", wait_for_status="yellow", timeout="20s")
            assert client.get(index="survivors", id="1")["_source"] == {"text": "one"}
    finally:
        node.stop()


@pytest.mark.real_servers
def test_fresh_topics_have_their_partitions_and_never_the_same_name(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    three, one = kafka_topic(num_partitions=3), kafka_topic()
    consumer = KafkaConsumer(bootstrap_servers=kafka_broker.bootstrap_servers)
    assert consumer.partitions_for_topic(three) == {0, 1, 2}
    assert consumer.partitions_for_topic(one) == {0}
    assert three != one
    consumer.close()


@pytest.mark.real_servers
def test_clients_of_the_proxied_listener_stay_behind_the_proxy(tmp_path: Path) -> None:
    with FaultProxy() as proxy:
        listeners = {"PROXIED": Listener(proxy_port=proxy.port)}
        broker = KafkaBroker.start(tmp_path / "kafka", None, listeners, **{"auto.create.topics.enable": "true"})
        proxy.server_port = broker.port("PROXIED")
        try:
            producer = KafkaProducer(bootstrap_servers=proxy.address, acks="all", retry_backoff_ms=10)
            producer.send("proxied", b"one").get(timeout=30)
            num_before = proxy.num_connections
            proxy.cut()
            producer.send("proxied", b"two").get(timeout=30)
            assert proxy.num_connections > num_before
            producer.close()
        finally:
            broker.stop()
