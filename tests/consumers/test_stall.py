"""A client that reads nothing though there is something to read is noticed, and another one takes its place."""

from collections.abc import Callable

import pytest
from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from consumers.stall import StallWatch
from schemas.errors import Failure, FailureCode, Stage
from tests.chaos.proxy import FaultProxy
from tests.consumers.harness import BrokerView, kafka_settings, offsets_of, produce, prompts, running, take, wait_until
from tests.fakes import FakeClock
from tests.servers.kafka_broker import KafkaBroker

P0, P1 = TopicPartition("documents", 0), TopicPartition("documents", 1)


class FakeConsumer:
    """Two partitions: where they are read, and where they end."""

    def __init__(self) -> None:
        self.positions = {P0: 5, P1: 9}
        self.ends = {P0: 5, P1: 9}
        self.is_away = False

    def assignment(self) -> set[TopicPartition]:
        return set(self.positions)

    def position(self, partition: TopicPartition, timeout_ms: int) -> int:
        return self.positions[partition]

    def end_offsets(self, partitions: list[TopicPartition], timeout_ms: int) -> dict[TopicPartition, int]:
        if self.is_away:
            raise KafkaTimeoutError
        return {partition: self.ends[partition] for partition in partitions}


def test_what_stands_still_before_an_end_for_all_of_the_patience_is_stuck() -> None:
    clock, consumer = FakeClock(), FakeConsumer()
    watch = StallWatch(clock, patience_seconds=30.0)

    def look(seconds: float, reads: bool = True, has_read: bool = False) -> dict[TopicPartition, int]:
        clock.advance(seconds)
        return watch.look(consumer, reads, has_read)

    assert [look(15.0), look(15.0)] == [{}, {}], "all is read"
    consumer.ends = {P0: 5, P1: 20}
    assert [look(15.0), look(10.0), look(5.0)] == [{}, {}, {P1: 9}]
    consumer.positions[P1] = 12
    assert [look(15.0), look(15.0)] == [{}, {P1: 12}], "it has moved on, and stands again"
    assert [look(15.0), look(1.0, has_read=True), look(14.0), look(1.0), look(15.0)] == [{P1: 12}, {}, {}, {}, {P1: 12}]
    assert [look(100.0, reads=False), look(15.0)] == [{}, {}], "it was not to read"
    consumer.is_away = True
    assert [look(15.0), look(15.0)] == [{}, {}], "nothing is known"


@pytest.mark.real_servers
def test_a_member_whose_client_has_stopped_fetching_joins_anew_and_reads_on_though_its_first_address_has_gone(
    kafka_broker: KafkaBroker,
    kafka_topic: Callable[..., str],
    broker_view: BrokerView,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("consumers.group_member.STALL_SECONDS", 2.0)
    topic = kafka_topic()
    produce(kafka_broker.bootstrap_servers, topic, prompts(*range(5)))
    read: set[int] = set()
    port = int(kafka_broker.bootstrap_servers.rpartition(":")[2])
    with FaultProxy(port) as way_in, running(settings := kafka_settings(way_in.address, topic)) as source:

        def has_read(number: int) -> bool:
            documents = source.poll(100, 0.05)
            source.complete([document.position for document in documents])
            read.update(offsets_of(documents))
            return len(read) == number

        wait_until(lambda: has_read(5), "the first are read")
        monkeypatch.setattr(source._member._consumer._fetcher, "_create_fetch_requests", dict)  # none, from now on
        way_in.refuse()
        for number in (10, 15):  # what is under way brings some still
            produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(number - 5, number)))
            wait_until(lambda number=number: has_read(number), "more are read")  # type: ignore[misc]
        wait_until(lambda: has_read(15) and source.is_drained(), "all is read")
    assert read == set(range(15))
    assert "has stopped reading" in caplog.text
    assert broker_view.committed(settings) == 15


@pytest.mark.real_servers
def test_a_member_that_lost_its_partitions_does_not_claim_them_when_it_joins_again(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    with running(settings) as source:
        wait_until(lambda: source.has_assignment and bool(source._tracker.partitions), "it has joined")
        assignor = source._member._consumer._coordinator._assignors["cooperative-sticky"]
        claimed = [assignor.metadata(settings.topics).owned_partitions]
        source._member.on_lost([])
        claimed.append(assignor.metadata(settings.topics).owned_partitions)
    assert [len(claims) for claims in claimed] == [1, 0]


@pytest.mark.real_servers
def test_clients_whose_asking_for_the_topics_state_has_ended_ask_again(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(1))

    async def fail(node_id: object = None) -> None:
        raise ConnectionResetError("as it comes")  # no KafkaError, which is all that kafka-python expects there

    with running(settings) as source:
        (document,) = take(source, 1)
        clusters = (source._member._consumer._cluster, source._dead_letters._producer._metadata)
        asked_at = [cluster._last_successful_refresh_ms for cluster in clusters]
        with monkeypatch.context() as patched:
            for cluster in clusters:
                asking = cluster._refresh_loop_future
                patched.setattr(cluster, "refresh_metadata", fail)
                cluster.request_update()
                wait_until(lambda asking=asking: asking.is_done, "it has ended")  # type: ignore[misc]
        for cluster, at in zip(clusters, asked_at, strict=True):
            cluster.request_update()
            wait_until(
                lambda cluster=cluster, at=at: cluster._last_successful_refresh_ms > at,  # type: ignore[misc]
                "it has asked again",
            )
        acknowledged: list[bool] = []
        failure = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "bad")
        source.dead_letter(document.position, "job", failure, lambda: acknowledged.append(True))
        wait_until(lambda: bool(acknowledged), "the dead letter is written")
