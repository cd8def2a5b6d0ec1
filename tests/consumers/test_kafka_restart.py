"""What a next owner makes of the last one's commit, on a real broker: passed over, ignored, counted as a crash."""

from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import pytest
from kafka import TopicPartition

from consumers.commit_metadata import OffsetBitmap, Progress, decode, encode
from consumers.group_commits import GroupCommits, LeftBehind
from consumers.kafka import KafkaSource
from schemas.document import Document, RejectedDocument, SourcePosition, Suspicion
from schemas.errors import Failure, FailureCode, SourceError, Stage
from schemas.settings import KafkaSettings
from tests.consumers.harness import (
    BrokerView,
    kafka_settings,
    offsets_of,
    poll_until_it_stops,
    produce,
    produce_in_transactions,
    prompts,
    running,
    take,
    wait_until,
)
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

ANOTHER_TOPIC = UUID("6f0c2b5e-7a51-4bd4-9a0e-0123456789ab")


@pytest.fixture
def settings(kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]) -> KafkaSettings:
    """Ten documents in a topic of one partition."""
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(10)))
    return settings


def progress_of(view: BrokerView, settings: KafkaSettings) -> Progress:
    found = decode(view.metadata(settings))
    assert found is not None
    assert found[0] == view.topic_id(settings.topics[0])
    return found[1]


def left(base: int, *completed: int, started: int = 10, crashes: int = 0, clean: bool = False) -> Progress:
    return Progress(base, started, 0, crashes, clean, OffsetBitmap.of(base, completed))


def assert_all_is_read(source: KafkaSource, *offsets: int) -> None:
    documents = take(source, len(offsets))
    assert offsets_of(documents) == list(offsets)
    source.complete([document.position for document in documents])
    wait_until(source.is_drained, "nothing else is read")


def test_that_work_has_begun_is_committed_at_once_and_a_clean_end_says_so(
    broker_view: BrokerView, settings: KafkaSettings
) -> None:
    patient = settings.model_copy(update={"commit_interval_seconds": 3600.0})
    with running(patient) as source:
        documents = take(source, 10)
        wait_until(lambda: broker_view.committed(settings) == 0, "the beginning is committed")
        assert progress_of(broker_view, settings) == left(0)
        source.complete([documents[number].position for number in (0, 2, 3)])
    assert progress_of(broker_view, settings) == left(1, 2, 3, clean=True)


def suspicions(documents: Sequence[Document | RejectedDocument]) -> dict[int, Suspicion | None]:
    return {document.position.offset: document.suspicion for document in documents if isinstance(document, Document)}


def test_a_crash_is_counted_for_what_was_in_work_and_forgotten_once_that_is_done(
    kafka_broker: KafkaBroker, broker_view: BrokerView, settings: KafkaSettings
) -> None:
    topic_id = broker_view.topic_id(settings.topics[0])
    broker_view.commit(settings, 3, encode(left(3, 5, started=8, crashes=1), topic_id))
    patient = settings.model_copy(update={"commit_interval_seconds": 3600.0})
    with running(patient) as source:
        documents = take(source, 6)
        twice = Suspicion(2)
        assert suspicions(documents) == {3: twice, 4: twice, 6: twice, 7: twice, 8: None, 9: None}
        assert [source.started_before(d.position) for d in documents] == [8] * 6
        wait_until(lambda: progress_of(broker_view, settings).crash_count == 2, "the crash is counted at once")
        source.complete([document.position for document in documents[:4]])
    assert progress_of(broker_view, settings) == left(8, started=10, clean=True)


def test_a_source_that_dies_of_its_work_ends_with_a_crash(broker_view: BrokerView, settings: KafkaSettings) -> None:
    with running(settings) as source:
        take(source, 10)
        source.expect_no_clean_end()
    with running(settings) as source:
        assert set(suspicions(take(source, 10)).values()) == {Suspicion(1)}
    with running(settings) as source:
        assert set(suspicions(take(source, 10)).values()) == {Suspicion(1)}, "that one ended in order"


def test_what_runs_alone_is_with_the_broker_before_it_runs_and_convicts_over_the_deaths_of_its_owners(
    broker_view: BrokerView, settings: KafkaSettings
) -> None:
    topic_id = broker_view.topic_id(settings.topics[0])
    broker_view.commit(settings, 3, encode(left(3, 5, started=8, crashes=2), topic_id))
    patient = settings.model_copy(update={"commit_interval_seconds": 3600.0})
    with running(patient) as source:
        documents = take(source, 6)
        first, second = Suspicion(3, range(3, 6)), Suspicion(3, range(6, 8))
        assert suspicions(documents) == {3: first, 4: first, 6: second, 7: second, 8: None, 9: None}
        source.isolate([documents[0].position, documents[1].position])
        assert progress_of(broker_view, settings).isolated == range(3, 5)
        source.complete([document.position for document in documents[:2]])
        source.isolate([documents[3].position])
        assert progress_of(broker_view, settings).isolated == range(7, 8)
        source.expect_no_clean_end()
    with running(patient) as source:
        documents = take(source, 4)
        assert suspicions(documents)[7] == Suspicion(4, range(7, 8), losses_alone=1)
        source.isolate([documents[1].position])
    with running(patient) as source:
        documents = take(source, 4)
        assert suspicions(documents)[7] == Suspicion(4, range(7, 8), losses_alone=1), "that one ended in order"
        source.isolate([documents[1].position])
        source.isolate(())
        assert not progress_of(broker_view, settings).isolated
        source.isolate([documents[1].position])
        source.expect_no_clean_end()
    with running(patient) as source:
        documents = take(source, 4)
        assert suspicions(documents) == {
            6: Suspicion(5, range(6, 7)), 7: Suspicion(5, range(7, 8), losses_alone=2), 8: None, 9: None,
        }  # fmt: skip
        source.complete([document.position for document in documents])
    assert progress_of(broker_view, settings) == left(10, started=10, clean=True)


def test_a_note_that_no_broker_takes_is_waited_for_a_while_and_not_for_ever(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("consumers.kafka._NOTE_SECONDS", 0.05)
    KafkaSource(settings).isolate([SourcePosition(settings.topics[0], 0, 3, 1)])  # it never joins the group
    assert "what runs alone is not noted in Kafka yet" in caplog.text


@pytest.mark.parametrize(
    "metadata",
    ["", "of another tool", "pagemill:9:AAAA", encode(left(2, 5), UUID(int=0))[:-1], "pagemill:1:AAAA"],
    ids=["none", "of others", "of a later version", "damaged", "short"],
)
def test_metadata_that_is_not_ours_is_ignored(broker_view: BrokerView, settings: KafkaSettings, metadata: str) -> None:
    broker_view.commit(settings, 2, metadata)
    with running(settings) as source:
        assert_all_is_read(source, *range(2, 10))
        assert not source.take_skipped()


def test_metadata_of_another_offset_is_ignored(broker_view: BrokerView, settings: KafkaSettings) -> None:
    topic_id = broker_view.topic_id(settings.topics[0])
    broker_view.commit(settings, 2, encode(left(3, 5), topic_id))
    with running(settings) as source:
        assert_all_is_read(source, *range(2, 10))


def test_an_offset_of_a_deleted_topic_of_the_same_name_is_not_believed(
    broker_view: BrokerView, settings: KafkaSettings
) -> None:
    broker_view.commit(settings, 4, encode(left(4, 5), ANOTHER_TOPIC))
    with running(settings) as source:
        assert_all_is_read(source, *range(10))
    assert broker_view.committed(settings) == 10


def test_a_deleted_topics_offset_is_not_believed_either_where_another_partition_has_none(
    kafka_broker: KafkaBroker, broker_view: BrokerView, kafka_topic: Callable[..., str]
) -> None:
    """The client then names the one without an offset before it has read anything."""
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(num_partitions=2))
    for partition in (0, 1):
        produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(10)), partition=partition)
    broker_view.commit(settings, 10, encode(left(10), ANOTHER_TOPIC), partition=1)
    with running(settings) as source:
        documents = take(source, 20)
        source.complete([document.position for document in documents])
        wait_until(source.is_drained, "nothing else is read")
    assert sorted((one.position.partition, one.position.offset) for one in documents) == [
        (partition, offset) for partition in (0, 1) for offset in range(10)
    ]
    assert [broker_view.committed(settings, partition) for partition in (0, 1)] == [10, 10]


@pytest.mark.parametrize("topic_id", [None, ANOTHER_TOPIC], ids=["of this topic", "of a deleted topic"])
def test_what_is_read_before_a_commits_metadata_is_known_is_dropped_and_read_again(
    broker_view: BrokerView, settings: KafkaSettings, topic_id: UUID | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, asked = GroupCommits.find, 0

    def find_late(commits: GroupCommits, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, LeftBehind]:
        nonlocal asked
        asked += bool(partitions)
        return find(commits, partitions) if asked > 3 else {}

    monkeypatch.setattr(GroupCommits, "find", find_late)
    broker_view.commit(settings, 4, encode(left(4, 5), topic_id or broker_view.topic_id(settings.topics[0])))
    with running(settings) as source:
        assert_all_is_read(source, *(range(10) if topic_id else (4, 6, 7, 8, 9)))
    assert asked == 4
    assert broker_view.committed(settings) == 10


def test_a_topic_made_again_is_read_from_its_start_by_the_next_worker_though_the_old_ones_offset_was_committed(
    kafka_broker: KafkaBroker, broker_view: BrokerView, settings: KafkaSettings
) -> None:
    topic = settings.topics[0]
    with running(settings) as source:
        old = take(source, 10)
        broker_view.delete_topic(topic)
        broker_view.create_topic(topic)
        produce(kafka_broker.bootstrap_servers, topic, prompts(*range(5)))
        source.complete([document.position for document in old])
        with pytest.raises(SourceError, match=f"the topic {topic} was deleted and made again"):
            poll_until_it_stops(source, [])
    with running(settings) as source:
        assert_all_is_read(source, *range(5))
    assert broker_view.committed(settings) == 5


def test_a_broker_that_takes_no_metadata_gets_the_offset_without(tmp_path: Path) -> None:
    broker = KafkaBroker.start(tmp_path / "kafka", **{"offset.metadata.max.bytes": "20"})
    view = BrokerView(broker.bootstrap_servers)
    try:
        view.create_topic("documents")
        produce(broker.bootstrap_servers, "documents", prompts(*range(10)))
        settings = kafka_settings(broker.bootstrap_servers, "documents")
        with running(settings) as source:
            documents = take(source, 10)
            source.complete([document.position for document in documents[:4]])
            wait_until(lambda: view.committed(settings) == 4, "the offset is committed")
            assert view.metadata(settings) == ""
            source.isolate([documents[4].position])  # returns, though nothing can be noted
            source.complete([document.position for document in documents[5:]])
        assert (view.committed(settings), view.metadata(settings)) == (4, "")
    finally:
        view.close()
        broker.stop()


def test_a_partition_of_nothing_but_aborted_records_is_committed_to_its_end(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce_in_transactions(kafka_broker.bootstrap_servers, settings.topics[0], prompts("aborted"), aborted=[0])
    with running(settings) as source:
        wait_until(lambda: broker_view.committed(settings) == 2, "a record and its transaction's end")
        assert source.poll(1, 0.0) == []


def test_a_dead_letter_that_nothing_follows_fails_the_source(settings: KafkaSettings) -> None:
    failure = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "not JSON")

    def break_down() -> None:
        raise ValueError("a bug")

    with running(settings) as source:
        documents: list[Document | RejectedDocument] = take(source, 10)
        source.dead_letter(documents[0].position, "j", failure, break_down)
        with pytest.raises(SourceError, match=r"the dead letter of .*/0/0 is written, but .*ValueError\('a bug'\)"):
            poll_until_it_stops(source, [])
