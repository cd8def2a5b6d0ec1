"""The worker on a real Kafka and a real Elasticsearch, with an engine process that has no model."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elasticsearch import Elasticsearch
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from structlog.testing import capture_logs

from consumers.kafka import KafkaSource
from pipeline.flow import Flow
from pipeline.prompts import PreparedDocument, PromptBuilder
from pipeline.query import find_results
from pipeline.sink import ElasticsearchSink
from pipeline.worker import StoppedAtOnce, Worker
from schemas.document import Document
from schemas.errors import EngineError, ModelError, PagemillError, SettingsError, SinkError, SourceError
from schemas.settings import Settings
from schemas.settings_reader import load_settings
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker

TASKS = {"echo": {"template": "{{ text }}"}}


class Place:
    """A topic, a dead-letter topic, a group and an index of this test's own."""

    def __init__(
        self,
        broker: KafkaBroker,
        node: ElasticsearchNode,
        topic: str,
        name: Callable[[str], str],
        client: Elasticsearch,
    ) -> None:
        self.topic, self.dead_letters, self.index = topic, name("dead-letters"), name("results")
        self.client = client
        self._addresses = {
            "kafka.bootstrap_servers": broker.bootstrap_servers,
            "elasticsearch.urls": node.url,
            "kafka.group": name("group"),
        }

    def settings(self, **overrides: Any) -> Settings:
        own = {
            **self._addresses,
            "kafka.topics": self.topic,
            "kafka.dead_letter_topic": self.dead_letters,
            "elasticsearch.index": self.index,
            "elasticsearch.number_of_replicas": 0,
            "elasticsearch.flush_seconds": 0.05,
            "worker.http_port": 0,
            "tasks": TASKS,
        }
        return load_settings(None, {**own, **{key.replace("__", "."): value for key, value in overrides.items()}}, {})

    def worker(self, on_turn: Callable[[Flow], None] | None = None, engine: Any = None, **overrides: Any) -> Worker:
        return Worker(
            self.settings(**overrides),
            engine_command=fake_engine_command(**(engine or {})),
            tokenizer=ByteTokenizer(),
            on_turn=on_turn,
        )

    def produce(self, values: Sequence[bytes]) -> None:
        producer = KafkaProducer(bootstrap_servers=self._addresses["kafka.bootstrap_servers"])
        for value in values:
            producer.send(self.topic, value=value)
        producer.flush()
        producer.close()

    def rows(self) -> list[dict[str, Any]]:
        return list(find_results(self.client, self.index))

    def committed(self) -> int:
        consumer = KafkaConsumer(
            bootstrap_servers=self._addresses["kafka.bootstrap_servers"], group_id=self._addresses["kafka.group"]
        )
        try:
            return sum(
                consumer.committed(TopicPartition(self.topic, partition)) or 0
                for partition in consumer.partitions_for_topic(self.topic)
            )
        finally:
            consumer.close()

    def dead_letter_keys(self) -> list[bytes]:
        consumer = KafkaConsumer(
            bootstrap_servers=self._addresses["kafka.bootstrap_servers"], auto_offset_reset="earliest"
        )
        try:
            partition = TopicPartition(self.dead_letters, 0)
            consumer.assign([partition])
            end = consumer.end_offsets([partition])[partition]
            keys: list[bytes] = []
            while consumer.position(partition) < end:
                keys += [record.key for records in consumer.poll(1000).values() for record in records]
            return keys
        finally:
            consumer.close()


@pytest.fixture
def place(
    kafka_broker: KafkaBroker,
    elasticsearch_node: ElasticsearchNode,
    kafka_topic: Callable[..., str],
    fresh_name: Callable[[str], str],
) -> Iterator[Place]:
    client = Elasticsearch(elasticsearch_node.url)
    yield Place(kafka_broker, elasticsearch_node, kafka_topic(num_partitions=2), fresh_name, client)
    client.close()


def document(number: int, **keys: Any) -> bytes:
    return json.dumps({"id": f"d{number}", "prompt": f"number {number}", **keys}).encode()


@pytest.mark.real_servers
def test_the_backlog_becomes_rows_and_the_account_balances(place: Place) -> None:
    good = [document(number) for number in range(150)]
    good += [json.dumps({"id": "e", "task": "echo", "fields": {"text": "hello"}}).encode()]
    bad = [b"not JSON", document(1000, promt="x"), document(1001, task="nobody")]
    place.produce([*bad[:1], *good, *bad[1:]])
    summary = place.worker().run(until_drained=True)
    account = summary.totals.account
    assert (account.delivered, account.indexed, account.failed, account.handed_back) == (154, 151, 3, 0)
    assert summary.imbalance == 0
    rows = place.rows()
    assert sorted(row["status"] for row in rows) == ["answered"] * 151 + ["failed"] * 3
    assert len(set(place.dead_letter_keys())) == 3
    assert place.committed() == 154


@pytest.mark.real_servers
def test_a_second_run_finds_nothing_left_to_do(place: Place) -> None:
    place.produce([document(number) for number in range(10)])
    assert place.worker().run(until_drained=True).totals.account.indexed == 10
    assert place.worker().run(until_drained=True).totals.account.delivered == 0


@pytest.mark.real_servers
def test_sigterm_ends_what_is_computed_commits_it_and_leaves_the_rest_to_the_next(place: Place) -> None:
    place.produce([document(number) for number in range(400)])
    signalled: list[int] = []

    def stop_early(flow: Flow) -> None:
        if flow.totals.account.indexed and not signalled:
            signalled.append(flow.totals.account.indexed)
            os.kill(os.getpid(), signal.SIGTERM)

    slow = {"step_seconds": 0.2, "requests_per_step": 20}
    few = {"engine__max_running": 8, "engine__max_tokens_per_step": 64}
    first = place.worker(stop_early, slow, **few).run().totals.account
    assert signalled
    assert 0 < first.indexed < 400
    assert first.delivered == first.indexed + first.handed_back
    assert 0 < place.committed() <= first.indexed
    second = place.worker().run(until_drained=True).totals.account
    assert first.indexed + second.indexed + second.already_done == 400 + second.already_done
    assert len(place.rows()) == 400
    assert place.committed() == 400


@pytest.mark.real_servers
@pytest.mark.parametrize("part", ["prepare", "start"])
def test_a_signal_that_a_library_swallows_while_the_source_starts_ends_it_all_the_same(
    place: Place, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """kafka-python did that in 2 of some 2,000 starts with a signal in them."""
    of_source: Any = {"prepare": KafkaSource.__init__, "start": KafkaSource.start}[part]

    def swallow(source: KafkaSource, *args: Any, **kwargs: Any) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        of_source(source, *args, **kwargs)

    monkeypatch.setattr(KafkaSource, of_source.__name__, swallow)
    place.produce([document(1)])
    with pytest.raises(StoppedAtOnce, match="stopped by SIGTERM while starting"):
        place.worker().run(until_drained=True)
    assert place.rows() == []


@pytest.mark.real_servers
def test_an_engine_that_is_given_up_leaves_what_it_had_answered_stored_and_committed(place: Place) -> None:
    place.produce([document(number) for number in range(60)])
    with pytest.raises(EngineError, match=r"lost once.*died of SIGKILL"):
        place.worker(engine={"die_after": 20, "requests_per_step": 1}, worker__engine_restarts=0).run()
    assert len(place.rows()) == 19  # the first answer was the proof that the engine computes
    account = place.worker().run(until_drained=True).totals.account
    assert account.indexed == 41
    assert account.delivered <= 60
    assert len(place.rows()) == 60
    assert place.committed() == 60


@pytest.mark.real_servers
def test_a_document_that_ends_every_worker_by_an_error_of_ours_is_convicted_and_its_neighbours_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PromptBuilder.prepare

    def fail_at_7(prompts: PromptBuilder, document: Document) -> PreparedDocument:
        if document.identity.document_id == "d7":
            raise MemoryError("no room for d7")
        return prepare(prompts, document)

    monkeypatch.setattr(PromptBuilder, "prepare", fail_at_7)
    place.produce([document(number) for number in range(12)])
    num_ended = 0
    while num_ended < 20:
        with capture_logs() as lines:
            try:
                place.worker().run(until_drained=True)
                break
            except MemoryError:
                num_ended += 1
        (last,) = [line for line in lines if line["event"] == "worker ended"]  # however it ended
        assert last["in_flight"] == 0
    assert 3 <= num_ended < 20
    assert {row["id"]: row["status"] for row in place.rows()} == {
        f"d{number}": "failed" if number == 7 else "answered" for number in range(12)
    }
    assert len(place.dead_letter_keys()) == 1
    assert place.committed() == 12


@pytest.mark.real_servers
def test_what_stopped_a_worker_is_told_though_the_sink_fails_while_it_stops(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sink: ElasticsearchSink, timeout_seconds: float) -> bool:
        raise SinkError("the alias has gone")

    monkeypatch.setattr(ElasticsearchSink, "drain", fail)
    place.produce([document(number) for number in range(60)])
    with capture_logs() as lines, pytest.raises(EngineError, match="lost once"):
        place.worker(engine={"die_after": 20, "requests_per_step": 1}, worker__engine_restarts=0).run()
    told = {line["event"]: line for line in lines}
    assert told["stopping met another failure"]["reason"] == "SinkError: the alias has gone"
    assert told["worker ended"]["imbalance"] == 0


@pytest.mark.real_servers
def test_documents_that_kill_the_engine_are_dead_letters_and_the_others_rows(place: Place) -> None:
    place.produce([document(number, prompt=f"{'#' if number in (7, 8) else '.'} {number}") for number in range(30)])
    summary = place.worker(engine={"die_on_token": ord("#")}).run(until_drained=True)
    failed = {row["id"]: row["failure"]["code"] for row in place.rows() if row["status"] == "failed"}
    assert failed == {"d7": "ENGINE_LOST", "d8": "ENGINE_LOST"}
    assert (summary.totals.account.indexed, summary.totals.account.failed, summary.imbalance) == (28, 2, 0)
    assert len(set(place.dead_letter_keys())) == 2
    assert place.committed() == 30


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.real_servers
def test_a_running_worker_tells_that_it_is_ready_and_what_it_counted(place: Place) -> None:
    place.produce([document(number) for number in range(30)])
    seen: dict[str, tuple[int, str]] = {}
    workers: list[Worker] = []

    def look(flow: Flow) -> None:
        if flow.totals.account.indexed == 30 and not seen:
            seen.update({path: get(workers[0].http_port, path) for path in ("/livez", "/readyz", "/metrics", "/x")})

    workers.append(place.worker(look))
    workers[0].run(until_drained=True)
    assert seen["/livez"][0] == 200
    assert seen["/x"][0] == 404
    status, text = seen["/readyz"]
    assert (status, json.loads(text)) == (
        200, {"ready": True, "parts": {"engine": "ready", "kafka": "ready", "elasticsearch": "ready"}},
    )  # fmt: skip
    metrics = dict(
        line.rsplit(" ", 1) for line in seen["/metrics"][1].splitlines() if line and not line.startswith("#")
    )
    assert metrics["pagemill_documents_delivered_total"] == "30.0"
    assert metrics['pagemill_documents_ended_total{outcome="indexed"}'] == "30.0"
    assert metrics['pagemill_account_imbalance{count="queues"}'] == "0.0"
    assert metrics['pagemill_account_imbalance{count="source"}'] == "0.0"
    assert not any("d1" in name or place.topic in name for name in metrics)


@pytest.mark.real_servers
def test_every_start_up_mistake_is_told_before_anything_is_consumed(place: Place, tmp_path: Path) -> None:
    place.produce([document(0)])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken_port = taken.getsockname()[1]
        mistakes: list[tuple[type[PagemillError], str, dict[str, Any], dict[str, Any]]] = [
            (SettingsError, f"worker.http_port = {taken_port}", {"worker__http_port": taken_port}, {}),
            (SettingsError, "tasks.echo.template, line 1", {"tasks.echo.template": "{{"}, {}),
            (SettingsError, "tasks.echo.output_schema", {"tasks.echo.output_schema": '{"type": 1}'}, {}),
            (SettingsError, "elasticsearch.urls", {"elasticsearch__urls": ""}, {}),
            (SinkError, "does not answer", nobody("elasticsearch__urls", "http://127.0.0.1:1"), {}),
            (SourceError, "nobody listens there", nobody("kafka__bootstrap_servers", "127.0.0.1:1"), {}),
            (SourceError, "no such Kafka topic", {"kafka__topics": "absent"}, {}),
            (ModelError, "missing a shard", {}, {"model_error": "missing a shard"}),
            (EngineError, "told to fail after 0 answers", {}, {"fail_after": 0}),
        ]
        for kind, sentence, overrides, engine in mistakes:
            with pytest.raises(kind) as caught:
                place.worker(engine=engine, **overrides).run(until_drained=True)
            assert sentence in str(caught.value), f"{overrides or engine}: {caught.value}"
    with pytest.raises(SettingsError, match=r"model\.path = 'nowhere' does not exist"):
        Worker(place.settings(model__path="nowhere")).run()
    assert place.committed() == 0
    assert place.worker().run(until_drained=True).totals.account.indexed == 1


def nobody(key: str, address: str) -> dict[str, Any]:
    return {key: address, f"{key.partition('__')[0]}__connect_timeout_seconds": 1.0}


def test_a_worker_without_addresses_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"kafka\.bootstrap_servers.*elasticsearch\.urls.*model\.path"):
        Worker(load_settings(None, {}, {})).run()


def test_a_worker_with_nothing_to_do_tells_its_progress_once() -> None:
    worker = Worker(load_settings(None, {}, {}))
    held = {"engine": 0}
    flow = SimpleNamespace(
        last_turn=0.0, totals=SimpleNamespace(account=SimpleNamespace(indexed=3, failed=1)), held=held.copy
    )

    def told() -> int:
        flow.last_turn += 1e9
        with capture_logs() as lines:
            worker._tell_turn(cast(Flow, flow))
        return len(lines)

    assert [told(), told(), told()] == [1, 0, 0]
    flow.held = {"engine": 2}.copy
    assert [told(), told()] == [1, 1]  # a document that does not move is no idleness
    flow.held = held.copy
    flow.totals.account.indexed = 5
    assert [told(), told()] == [1, 0]
