"""Kafka away while we run: said once, with the reason, and once that it is back."""

import gc
import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial

import pytest

from consumers.outage import OutageWatch
from schemas.document import RejectedDocument, SourcePosition
from schemas.errors import SourceError
from schemas.settings import KafkaSettings
from tests.consumers.harness import BrokerView, kafka_settings, produce, prompts, running, take, wait_until
from tests.servers.kafka_broker import KafkaBroker


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.partition(";")[0] for record in caplog.records if record.name == "consumers.outage"]


def test_an_outage_is_told_once_for_each_reason_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    now, reason, probes = [0.0], ["nobody listens"], [0]

    def probe(_: KafkaSettings) -> None:
        probes[0] += 1
        if reason[0]:
            raise SourceError(reason[0])

    watch = OutageWatch(KafkaSettings(), lambda: now[0], probe)

    def silent(seconds: float) -> None:
        now[0] += 5
        watch.look(seconds)

    for seconds in (0, 5, 9):
        silent(seconds)
    assert (told(caplog), probes[0]) == ([], 0)
    for seconds in (14, 19, 24, 29):
        silent(seconds)
    assert (told(caplog), probes[0], watch.is_away) == (["Kafka is away"], 2, True)  # asked every ten seconds
    reason[0] = "authentication failed"
    silent(34)
    assert told(caplog) == ["Kafka is away"] * 2
    silent(1)
    silent(1)
    assert told(caplog) == ["Kafka is away"] * 2 + ["Kafka is back"]
    assert not watch.is_away
    assert caplog.records[-1].__dict__["away_seconds"] == 45.0 - (20.0 - 14.0)


def test_a_silence_of_our_own_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    watch = OutageWatch(KafkaSettings(), lambda: 0.0, lambda _: None)  # a new connection is taken
    watch.look(60.0)
    assert (told(caplog), watch.is_away) == ([], False)


def test_the_sockets_of_failed_connections_are_closed_while_kafka_is_away() -> None:
    """Without waiting for a collection, which a worker that has nothing to do seldom makes."""
    logging.disable()  # pytest keeps every record, and with the client's errors their sockets
    now = [0.0]
    watch = OutageWatch(kafka_settings("127.0.0.1:1", "documents"), lambda: now[0])
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            now[0] += 20
            watch.look(now[0])
        assert watch.is_away
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@pytest.mark.real_servers
def test_a_broker_frozen_for_a_while_is_told_and_costs_nothing_but_time(
    kafka_broker: KafkaBroker,
    kafka_topic: Callable[..., str],
    broker_view: BrokerView,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), session_timeout_seconds=45.0)
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("a", "b"))
    with running(settings) as source:
        first = take(source, 2)
        frozen_at = time.monotonic()
        kafka_broker.freeze()
        try:
            source.complete([first[0].position])
            wait_until(lambda: told(caplog) == ["Kafka is away"], "the outage is told")
            wait_until(lambda: not source.has_assignment, "it is not ready")
            while time.monotonic() < frozen_at + 14.0:
                assert source.poll(10, 0.5) == []
        finally:
            kafka_broker.thaw()
        wait_until(lambda: told(caplog) == ["Kafka is away", "Kafka is back"], "that it is back")
        source.complete([first[1].position])
        produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("c"))
        (late,) = take(source, 1)
        assert late.position.offset == 2  # nothing was delivered again
        source.complete([late.position])
        wait_until(source.is_drained, "all is complete")
    assert broker_view.committed(settings) == 3
    [away] = [record for record in caplog.records if record.message.startswith("Kafka is away")]
    assert f"{kafka_broker.bootstrap_servers}: no answer within 3 s" in away.__dict__["reason"]


@pytest.mark.real_servers
def test_a_broker_that_is_silent_at_the_start_is_passed_over_for_one_that_answers(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its kernel takes connections, and nobody answers
        settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), connect_timeout_seconds=1.0)
        addresses = (f"127.0.0.1:{silent.getsockname()[1]}", kafka_broker.bootstrap_servers)
        produce(kafka_broker.bootstrap_servers, settings.topics[0], [*prompts("good"), b"no JSON"])
        with running(settings.model_copy(update={"bootstrap_servers": addresses})) as source:
            good, bad = take(source, 2)
            assert isinstance(bad, RejectedDocument)
            source.complete([good.position])
            source.dead_letter(bad.position, "job-1", bad.failure, partial(source.complete, [bad.position]))
            wait_until(source.is_drained, "all is complete")


@pytest.mark.real_servers
def test_a_dead_letter_that_cannot_be_delivered_holds_the_commit_until_it_is_and_arrives_whole(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    letters = kafka_topic(prefix="dead-letters", **{"message.timestamp.before.max.ms": "0"})  # too old on arrival
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), dead_letter_topic=letters)
    produce(kafka_broker.bootstrap_servers, settings.topics[0], [*prompts("first"), b"no JSON", *prompts("last")])
    acknowledged: list[SourcePosition] = []
    with running(settings) as source:
        first, bad, last = take(source, 3)
        assert isinstance(bad, RejectedDocument)
        refused = bad

        def acknowledge() -> None:
            acknowledged.append(refused.position)
            source.complete([refused.position])

        source.dead_letter(bad.position, "job-1", bad.failure, acknowledge)
        source.complete([first.position, last.position])
        wait_until(lambda: broker_view.committed(settings) == 1, "what is before it is committed")
        assert source.poll(1, 2.0) == []  # ten intervals between commits
        assert (broker_view.committed(settings), acknowledged) == (1, [])
        broker_view.set_topic(letters, {"message.timestamp.before.max.ms": "3600000"})
        wait_until(lambda: broker_view.committed(settings) == 3, "it is delivered, and all is committed")
    (letter,) = broker_view.records(letters, 1)
    assert letter.value == b"no JSON"


@pytest.mark.real_servers
def test_a_letter_that_fits_no_more_since_its_topics_limit_was_lowered_is_cut_to_the_new_one_and_says_so(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    letters = kafka_topic(prefix="dead-letters")
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), dead_letter_topic=letters)
    values = [b"not JSON " * 50_000, b"nor this", b"nor that " * 40_000]
    produce(kafka_broker.bootstrap_servers, settings.topics[0], values)
    with running(settings) as source:
        documents = take(source, 3)
        broker_view.set_topic(letters, {"max.message.bytes": "300000"})  # the running worker knows the old one
        for document in documents:
            assert isinstance(document, RejectedDocument)
            complete = partial(source.complete, [document.position])
            source.dead_letter(document.position, "job-1", document.failure, complete)
        wait_until(lambda: broker_view.committed(settings) == 3, "all are delivered, and committed")
    stored = {record.key: record for record in broker_view.records(letters, 3)}
    assert len(stored) == 3
    for document, value in zip(documents, values, strict=True):
        record = stored[str(document.position).encode()]
        if len(value) < 300_000:
            assert record.value == value
            continue
        assert value.startswith(record.value)
        assert 298_000 < len(record.value) < 300_000  # no more is cut than must be
        headers = dict(record.headers)
        assert headers["pagemill-value-length"] == str(len(value)).encode()
        assert headers["pagemill-value-sha256"] == hashlib.sha256(value).hexdigest().encode()


@pytest.mark.real_servers
def test_a_letter_that_no_cutting_makes_fit_holds_the_commit_until_the_topic_takes_it(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    letters = kafka_topic(prefix="dead-letters", **{"max.message.bytes": "100"})  # less than the headers alone
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), dead_letter_topic=letters)
    produce(kafka_broker.bootstrap_servers, settings.topics[0], [b"no JSON", *prompts("good")])
    with running(settings) as source:
        bad, good = take(source, 2)
        assert isinstance(bad, RejectedDocument)
        source.dead_letter(bad.position, "job-1", bad.failure, partial(source.complete, [bad.position]))
        source.complete([good.position])
        assert source.poll(1, 1.0) == []  # five intervals between commits
        assert not broker_view.committed(settings)
        broker_view.set_topic(letters, {"max.message.bytes": "1000000"})
        wait_until(lambda: broker_view.committed(settings) == 2, "it is delivered, and all is committed")
    (letter,) = broker_view.records(letters, 1)
    assert letter.value == b"no JSON"
