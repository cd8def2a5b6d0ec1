"""Reading, pausing and committing on a real broker."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import OffsetOutOfRangeError

from consumers.connection import check_connection
from consumers.decode import decode_document
from consumers.topics import ensure_topics
from schemas.document import Document, RawMessage, RejectedDocument
from schemas.errors import Failure, FailureCode, SourceError, Stage
from tests.consumers.harness import (
    DEADLINE_SECONDS,
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


def test_a_late_document_holds_the_commit_and_a_restart_does_only_that_one(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(5)))
    with running(settings) as source:
        documents = take(source, 5)
        assert offsets_of(documents) == [0, 1, 2, 3, 4]
        late = documents[2].position
        source.complete([document.position for document in documents if document.position != late])
        wait_until(lambda: broker_view.committed(settings) == 2, "the commit stops before the late document")
        assert source.num_in_flight == 1
    assert broker_view.committed(settings) == 2
    with running(settings) as source:
        (again,) = take(source, 1)
        assert again.position.offset == 2
        assert source.take_skipped() == {again.position.assignment: 2}, "what was complete beyond it is passed over"
        source.complete([again.position])
        wait_until(source.is_drained, "all is complete")
    assert broker_view.committed(settings) == 5


def test_key_timestamp_and_bytes_of_a_record_are_kept(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    value = b'{"id": "a", "job": "j", "prompt": "x"}'
    produce(kafka_broker.bootstrap_servers, settings.topics[0], [value], key=b"\x00k", timestamp_ms=1234567890123)
    with running(settings) as source:
        (document,) = take(source, 1)
    assert isinstance(document, Document)
    assert (document.key, document.timestamp_ms, document.num_bytes) == (b"\x00k", 1234567890123, 2 + len(value))
    assert (document.identity.job, document.identity.document_id) == ("j", "a")


def test_a_poison_message_at_the_head_is_dead_lettered_whole_and_the_next_is_answered(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    topic = settings.topics[0]
    headers = [("trace", b"t-1"), ("pagemill-code", b"OLD"), ("pagemill-attempt", b"2")]
    produce(kafka_broker.bootstrap_servers, topic, [b"\xff{"], headers=headers, timestamp_ms=1234567890123)
    produce(kafka_broker.bootstrap_servers, topic, prompts("next"))
    acknowledged: list[bool] = []
    with running(settings) as source:
        poison, good = take(source, 2)
        assert isinstance(poison, RejectedDocument)
        assert isinstance(good, Document)
        source.complete([good.position])
        source.dead_letter(poison.position, "job-1", poison.failure, lambda: acknowledged.append(True))
        wait_until(lambda: acknowledged == [True], "the dead letter is acknowledged")
        assert not broker_view.committed(settings), "acknowledged is not complete: its row is not stored yet"
        source.complete([poison.position])
        wait_until(lambda: broker_view.committed(settings) == 2, "both are complete")
    (letter,) = broker_view.records(settings.dead_letter_topic, 1)
    assert (letter.key, letter.value) == (f"{topic}/0/0".encode(), b"\xff{")
    assert dict(letter.headers) == {
        "trace": b"t-1",
        "pagemill-key": b"key",
        "pagemill-code": b"BAD_MESSAGE",
        "pagemill-stage": b"decode",
        "pagemill-message": poison.failure.message.encode(),
        "pagemill-job": b"job-1",
        "pagemill-topic": topic.encode(),
        "pagemill-partition": b"0",
        "pagemill-offset": b"0",
        "pagemill-timestamp": b"1234567890123",
        "pagemill-attempt": b"2",
        "pagemill-worker": b"worker-1",
    }
    assert len(letter.headers) == 12, "no header twice"
    assert letter.timestamp != 1234567890123, "its own time, so that retention counts from the failure"


def test_the_largest_message_is_dead_lettered_with_its_value_cut_and_its_hash(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(**{"max.message.bytes": "4000000"}))
    value = b"x" * 3_900_000
    produce(kafka_broker.bootstrap_servers, settings.topics[0], [value, None])
    failure, acknowledged = Failure(FailureCode.DOCUMENT_TOO_LARGE, Stage.DECODE, "große"), []
    with running(settings) as source:
        for document in take(source, 2):
            source.dead_letter(document.position, "j", failure, lambda: acknowledged.append(True))
        wait_until(lambda: len(acknowledged) == 2, "both dead letters are acknowledged")
    large, tombstone = broker_view.records(settings.dead_letter_topic, 2)
    headers = dict(large.headers)
    assert 1_000_000 < len(large.value) < 1_048_588
    assert headers["pagemill-value-length"] == b"3900000"
    assert len(headers["pagemill-value-sha256"]) == 64
    assert headers["pagemill-message"].decode() == "große"
    assert tombstone.value is None


def test_a_topic_that_no_broker_would_make_is_told_in_one_sentence(
    kafka_broker: KafkaBroker, fresh_name: Callable[[str], str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, fresh_name("not a name"))
    with pytest.raises(SourceError) as caught:
        ensure_topics(settings, create_input=True)
    assert str(caught.value) == (
        f"Kafka takes no topic called {settings.topics[0]!r}: a name has 1 to 249 letters, digits, '.', '_' and '-'"
    )


def test_the_dead_letter_topic_is_made_to_keep_its_records(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], fresh_name: Callable[[str], str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, fresh_name("not-made"))
    with pytest.raises(SourceError, match=f"no such Kafka topic on 127.0.0.1:.*: {settings.topics[0]}. Create it"):
        ensure_topics(settings)
    ensure_topics(settings, create_input=True, num_partitions=3)
    ensure_topics(settings)
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    admin = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap_servers)
    topics = [settings.dead_letter_topic, settings.topics[0]]
    described = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics])
    (configs,) = described.values()
    dead_letters, documents = configs[topics[0]], configs[topics[1]]
    partitions = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics(topics)}
    admin.close()
    assert dead_letters["retention.ms"]["value"] == "-1"
    assert documents["message.timestamp.type"]["value"] == "LogAppendTime"
    assert partitions == {topics[0]: 1, topics[1]: 3}


def test_above_the_mark_reading_pauses_and_the_member_stays_past_its_poll_interval(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(
        kafka_broker.bootstrap_servers, kafka_topic(), max_in_flight_documents=12, max_poll_interval_seconds=2.0
    )
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(28)))
    with running(settings) as source:
        first = take(source, 12)
        wait_until(lambda: source.is_paused, "the mark is reached")
        epoch = first[0].position.epoch
        assert source.poll(10, 4.0) == [], "twice the poll interval, with nothing completed"
        assert source.num_in_flight == 12
        source.complete([first[0].position])
        assert source.poll(10, 0.5) == [], "11 of 12 is above the mark to resume at"
        source.complete([document.position for document in first[1:]])
        rest = take(source, 12)
        source.complete([document.position for document in rest])
        rest += take(source, 4)
        assert offsets_of(first + rest) == list(range(28))
        assert {document.position.epoch for document in rest} == {epoch}, "never left the group"
        source.complete([document.position for document in rest])
        wait_until(source.is_drained, "all is complete")
    assert broker_view.committed(settings) == 28


def test_what_is_being_decoded_is_not_handed_out(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a batch that takes a minute to decode would unbalance the account."""
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    is_decoding, may_decode = threading.Event(), threading.Event()

    def decode_once_allowed(raw: RawMessage, limit: int) -> Document | RejectedDocument:
        is_decoding.set()
        assert may_decode.wait(DEADLINE_SECONDS)
        return decode_document(raw, limit)

    monkeypatch.setattr("consumers.kafka.decode_document", decode_once_allowed)
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(7)))
    with running(settings) as source:
        assert is_decoding.wait(DEADLINE_SECONDS)
        assert source.num_in_flight > 0
        assert source.num_handed_out == 0
        may_decode.set()
        documents = take(source, 7)
        assert source.num_handed_out == 7
        source.complete([document.position for document in documents])
        wait_until(source.is_drained, "all is complete")


def test_bytes_in_flight_are_bounded_too(kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]) -> None:
    settings = kafka_settings(
        kafka_broker.bootstrap_servers, kafka_topic(), max_in_flight_bytes=100_000, max_document_bytes=20_000
    )
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*["x" * 10_000] * 30))
    with running(settings) as source:
        wait_until(lambda: source.is_paused, "the mark is reached")
        highest, num_documents = source.num_bytes_in_flight, 0
        while num_documents < 30:
            documents = take(source, 1)
            source.complete([document.position for document in documents])
            num_documents += 1
            highest = max(highest, source.num_bytes_in_flight)
    assert 100_000 <= highest < 100_000 + 10_017, "over the mark by less than one record"


def test_a_draining_source_hands_back_what_nobody_took(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(10)))
    with running(settings) as source:
        taken = take(source, 3)
        wait_until(lambda: source.num_in_flight == 10, "all were read")
        source.drain()
        wait_until(lambda: source.num_in_flight == 3, "the others are handed back")
        assert source.poll(10, 0.0) == []
        source.complete([document.position for document in taken])
    assert broker_view.committed(settings) == 3


def test_with_nothing_to_read_a_source_is_drained_and_new_documents_end_that(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(num_partitions=2))
    with running(settings) as source:
        wait_until(source.is_drained, "two empty partitions")
        assert source.has_assignment
        produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("late"), partition=1)
        (document,) = take(source, 1)
        assert not source.is_drained()
        source.complete([document.position])
        wait_until(source.is_drained, "the late document is complete")


def test_aborted_transactions_are_not_read_and_their_ends_are_committed_past(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    values = prompts("kept", "aborted", "kept too")
    produce_in_transactions(kafka_broker.bootstrap_servers, settings.topics[0], values, aborted=[1])
    with running(settings) as source:
        documents = take(source, 2)
        assert [d.message.prompt for d in documents if isinstance(d, Document)] == ["kept", "kept too"]
        source.complete([document.position for document in documents])
        wait_until(source.is_drained, "read to the end")
        wait_until(lambda: broker_view.committed(settings) == 6, "three records and three transaction ends")


def test_a_topic_made_again_under_the_same_name_stops_the_source(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    topic = settings.topics[0]
    produce(kafka_broker.bootstrap_servers, topic, prompts(*range(3)))
    with running(settings) as source:
        old = take(source, 3)
        broker_view.delete_topic(topic)
        broker_view.create_topic(topic)
        produce(kafka_broker.bootstrap_servers, topic, prompts(*range(5)))
        new: list[Document | RejectedDocument] = []
        with pytest.raises(SourceError, match=f"the topic {topic} was deleted and made again"):
            poll_until_it_stops(source, new)
    # Where the group noticed first, the new topic is read from its start, as another epoch.
    assert offsets_of(new) == list(range(len(new)))
    assert all(document.position.epoch > old[0].position.epoch for document in new)


def test_an_offset_that_a_topic_made_again_does_not_have_yet_is_not_told_as_a_loss(
    kafka_broker: KafkaBroker,
    kafka_topic: Callable[..., str],
    broker_view: BrokerView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker refuses our offset before the client has heard of the new topic, which is full again by then."""
    monkeypatch.setattr("consumers.group_member._METADATA_MAX_AGE_SECONDS", 300.0)
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    topic = settings.topics[0]
    produce(kafka_broker.bootstrap_servers, topic, prompts(*range(3)))

    def refused(**_: object) -> None:
        raise OffsetOutOfRangeError({TopicPartition(topic, 0): 3})

    with running(settings) as source:
        take(source, 3)
        fetcher = source._member._consumer._fetcher
        monkeypatch.setattr(fetcher, "_create_fetch_requests", dict)  # none, whose answer could tell the client
        wait_until(lambda: not fetcher._nodes_with_pending_fetch_requests, "no fetch is under way")
        broker_view.delete_topic(topic)
        broker_view.create_topic(topic)
        produce(kafka_broker.bootstrap_servers, topic, prompts(*range(3)))
        monkeypatch.setattr(source._member._consumer, "poll", refused)
        with pytest.raises(SourceError, match=f"the topic {topic} was deleted and made again"):
            poll_until_it_stops(source, [])


def test_what_retention_deleted_before_it_was_read_is_named_and_stops_the_source(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    topic = settings.topics[0]
    produce(kafka_broker.bootstrap_servers, topic, prompts(*range(9)))
    with running(settings) as source:
        source.complete([document.position for document in take(source, 9)[:2]])
        wait_until(lambda: broker_view.committed(settings) == 2, "two are committed")
    broker_view.delete_records_before(topic, 6)
    with running(settings) as source, pytest.raises(SourceError, match="offsets 2 to 5 were deleted before they"):
        take(source, 1)


def test_a_missing_codec_stops_the_source_naming_the_partition_and_it_never_reads_again(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    topic = settings.topics[0]
    produce(kafka_broker.bootstrap_servers, topic, prompts("plain"))
    producer = KafkaProducer(bootstrap_servers=kafka_broker.bootstrap_servers, compression_type="zstd")
    producer.send(topic, *prompts("compress" * 500), partition=0).get(timeout=30)
    producer.close()
    monkeypatch.setattr("kafka.codec.has_zstd", lambda: False)
    taken: list[Document | RejectedDocument] = []
    with running(settings) as source:
        with pytest.raises(SourceError, match=f"zstd compression codec not found. .*{topic}/0 from offset") as raised:
            poll_until_it_stops(source, taken)
        assert "must be installed" in str(raised.value)
        with pytest.raises(SourceError, match="zstd compression codec"):
            source.poll(1, 0.0)
    assert offsets_of(taken) in ([], [0]), "what came before it may have been handed out"


def test_a_broker_that_dies_and_comes_back_costs_nothing_but_time(tmp_path: Path) -> None:
    broker = KafkaBroker.start(tmp_path / "kafka", **{"auto.create.topics.enable": "true"})
    try:
        settings = kafka_settings(broker.bootstrap_servers, "documents")
        produce(broker.bootstrap_servers, "documents", [*prompts(0), b"{", *prompts(2)])
        seen: set[int] = set()
        with running(settings) as source:

            def work(documents: list[Document | RejectedDocument]) -> set[int]:
                for document in documents:
                    seen.add(document.position.offset)
                    then = partial(source.complete, [document.position])
                    if isinstance(document, RejectedDocument):
                        source.dead_letter(document.position, "j", document.failure, then)
                    else:
                        then()
                return seen

            documents = take(source, 3)
            broker.kill()
            work(documents)
            assert source.poll(1, 2.0) == [], "nothing arrives, and nothing is raised"
            assert source.num_in_flight == 1, "the dead letter cannot be acknowledged"
            with ThreadPoolExecutor(1) as threads:
                another = threads.submit(check_connection, settings, DEADLINE_SECONDS)  # as a worker's start does
                broker.restart()
                another.result()  # it has waited, and raised nothing
            produce(broker.bootstrap_servers, "documents", prompts(3))
            # A restart that outlasts the session begins another epoch, and what was not committed comes again.
            wait_until(lambda: work(source.poll(10, 0.1)) == {0, 1, 2, 3} and source.is_drained(), "all is complete")
        view = BrokerView(broker.bootstrap_servers)
        assert view.committed(settings) == 4
        assert {record.key for record in view.records(settings.dead_letter_topic, 1)} == {b"documents/0/1"}
        view.close()
    finally:
        broker.stop()
