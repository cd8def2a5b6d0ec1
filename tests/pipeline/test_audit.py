"""The audit's verdicts: exact on tiny cases, against the rules of versions on random ones, and on the real servers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from elasticsearch import Elasticsearch
from hypothesis import given
from hypothesis import strategies as st
from kafka import KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from consumers.decode import decode_document
from pipeline.audit import AuditReport, audit, compare
from pipeline.results import row_id, row_version
from schemas.document import RawMessage, SourcePosition
from schemas.errors import SourceError
from schemas.settings import Settings
from tests.consumers.harness import produce
from tests.fake_elasticsearch import FakeElasticsearch
from tests.pipeline.rows import row
from tests.pipeline.sinks import DRAIN_SECONDS, open_sink
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

SETTINGS = Settings()


def message(offset: int, document_id: str, timestamp_ms: int, partition: int = 0, job: str = "job") -> RawMessage:
    value = f'{{"id": "{document_id}", "job": "{job}", "prompt": "x"}}'.encode()
    return RawMessage(SourcePosition("documents", partition, offset), timestamp_ms, None, value)


def store(server: FakeElasticsearch, raw: RawMessage) -> None:
    """As the sink does: a higher version stays."""
    document = decode_document(raw, 1000)
    version = row_version(document.timestamp_ms, document.position.offset, document.attempt)
    place = document.position
    source = {"topic": place.topic, "partition": place.partition, "offset": place.offset}
    stored_id = row_id(document.identity)
    if server.stored.get(stored_id, (-1, {}))[0] < version:
        server.stored[stored_id] = version, {"source": source}


def compared(server: FakeElasticsearch, raws: Sequence[RawMessage], **options: Any) -> AuditReport:
    report = AuditReport()
    compare(SETTINGS, server.as_client(), raws, report, **options)
    return report


def counts(report: AuditReport) -> tuple[int, int, int, int, int]:
    return report.messages, report.stored, report.superseded, report.missing, report.older


def test_every_message_with_its_row_is_complete() -> None:
    server = FakeElasticsearch()
    raws = [message(0, "a", 10), message(1, "b", 10)]
    for raw in raws:
        store(server, raw)
    report = compared(server, raws)
    assert counts(report) == (2, 2, 0, 0, 0)
    assert report.is_complete
    assert list(report.lines())[-1] == "everything is there"


def test_a_message_without_a_row_is_missing_and_named_by_place_and_id() -> None:
    server = FakeElasticsearch()
    raws = [message(0, "a", 10), message(7, "b", 10)]
    store(server, raws[0])
    report = compared(server, raws)
    assert counts(report) == (2, 1, 0, 1, 0)
    assert not report.is_complete
    assert list(map(str, report.findings)) == ["missing    documents/0/7: document 'b', _id 'job:default:b': no row"]


def test_of_several_messages_with_one_id_the_newest_counts() -> None:
    server = FakeElasticsearch()
    older, newer = message(0, "a", 10), message(1, "a", 11)
    store(server, older)
    report = compared(server, [older, newer])
    assert counts(report) == (2, 1, 0, 0, 1)
    assert not report.is_complete
    assert [(one.kind, one.position.offset) for one in report.findings] == [("older", 1)]
    store(server, newer)
    report = compared(server, [older, newer])
    assert counts(report) == (2, 1, 1, 0, 0)
    assert report.is_complete


def test_a_row_of_an_older_offset_with_a_later_timestamp_is_told_and_is_not_a_loss() -> None:
    server = FakeElasticsearch()
    first, second = message(0, "a", 99), message(1, "a", 11)
    store(server, first)
    store(server, second)
    report = compared(server, [first, second])
    assert counts(report) == (2, 1, 1, 0, 0)
    assert report.overtaken == 1
    assert report.is_complete
    assert "overtaken  documents/0/1: document 'a'" in str(report.findings[0])
    assert "the row is of documents/0/0" in str(report.findings[0])


def test_a_job_is_audited_alone() -> None:
    server = FakeElasticsearch()
    raws = [message(0, "a", 10, job="one"), message(1, "b", 10, job="two")]
    store(server, raws[0])
    report = compared(server, raws, job="one")
    assert (counts(report), report.of_other_jobs) == ((1, 1, 0, 0, 0), 1)
    assert compared(server, raws, job="two").missing == 1


def test_no_more_is_named_than_asked_for() -> None:
    report = compared(FakeElasticsearch(), [message(n, f"d{n}", 10) for n in range(5)], num_named=2)
    assert report.missing == 5
    assert [one.document_id for one in report.findings] == ["d0", "d1"]
    assert "and 3 more" in list(report.lines())


def test_a_message_that_is_no_document_is_wanted_too() -> None:
    server = FakeElasticsearch()
    raw = RawMessage(SourcePosition("documents", 2, 5), 10, None, b"not JSON")
    assert compared(server, [raw]).findings[0].row_id == "default:default:documents/2/5"
    store(server, raw)
    assert compared(server, [raw]).is_complete


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12),
    st.sets(st.integers(0, 11)),
    st.randoms(use_true_random=False),
)
def test_the_audit_passes_exactly_where_each_ids_highest_version_is_stored(
    deliveries: list[tuple[str, int]], lost: set[int], random: Any
) -> None:
    raws = [message(offset, document_id, time) for offset, (document_id, time) in enumerate(deliveries)]
    kept = [raw for raw in raws if raw.position.offset not in lost]
    random.shuffle(kept)
    server = FakeElasticsearch()
    for raw in kept:
        store(server, raw)
    report = compared(server, raws)
    newest = {raw.value: max(raws, key=lambda one: (one.value == raw.value, one.timestamp_ms, one.position.offset))
              for raw in raws}  # fmt: skip
    assert report.is_complete == all(one in kept for one in newest.values())
    assert report.messages == len(raws) == sum(counts(report)[1:])


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


@pytest.mark.real_servers
def test_topic_and_index_are_compared_on_the_real_servers(
    kafka_broker: KafkaBroker,
    kafka_topic: Callable[..., str],
    elasticsearch_node: ElasticsearchNode,
    client: Elasticsearch,
    fresh_name: Callable[[str], str],
) -> None:
    topic, index, group = kafka_topic(num_partitions=2), fresh_name("results"), fresh_name("group")
    values = [b'{"id": "d%d", "prompt": "x"}' % n for n in range(1500)]
    sent_at = 1_700_000_000_000
    produce(kafka_broker.bootstrap_servers, topic, values[:1200], partition=0, timestamp_ms=sent_at)
    produce(kafka_broker.bootstrap_servers, topic, values[1200:], partition=1, timestamp_ms=sent_at)
    settings = Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": [kafka_broker.bootstrap_servers], "topics": [topic], "group": group},
            "elasticsearch": {"urls": [elasticsearch_node.url], "index": index},
        }
    )
    places = [SourcePosition(topic, int(n >= 1200), n - 1200 * (n >= 1200)) for n in range(1500)]
    with open_sink(index, url=elasticsearch_node.url) as (sink, _):
        for n, place in enumerate(places):
            one = row(place.offset, document_id=f"d{n}", partition=place.partition, job="default", task="default")
            sink.put(one, row_version(sent_at, place.offset, 0), place)
        assert sink.drain(DRAIN_SECONDS)

    seen: list[tuple[int, int]] = []
    report = audit(settings, until="end", on_progress=lambda done, total: seen.append((done, total)))
    assert (counts(report), report.is_complete) == ((1500, 1500, 0, 0, 0), True)
    assert seen == [(1000, 1500), (1500, 1500)]

    with pytest.raises(SourceError, match="has committed nothing"):
        audit(settings)
    client.delete(index=index, id="default:default:d1300")
    commit(kafka_broker, group, topic, {0: 1200, 1: 100})
    report = audit(settings)
    assert (counts(report), report.is_complete) == ((1300, 1300, 0, 0, 0), True)
    commit(kafka_broker, group, topic, {0: 1200, 1: 101})
    report = audit(settings)
    assert (counts(report), report.is_complete) == ((1301, 1300, 0, 1, 0), False)
    assert str(report.findings[0].position) == f"{topic}/1/100"


def commit(broker: KafkaBroker, group: str, topic: str, offsets: dict[int, int]) -> None:
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id=group, enable_auto_commit=False)
    try:
        partitions = {TopicPartition(topic, number): offset for number, offset in offsets.items()}
        consumer.assign(list(partitions))
        consumer.commit({one: OffsetAndMetadata(offset, "", -1) for one, offset in partitions.items()})
    finally:
        consumer.close()
