"""Several members of one group on a real broker: hand-overs, a death, and what the broker holds afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consumers.kafka import KafkaSource
from schemas.document import Document, RejectedDocument
from schemas.errors import SourceError
from tests.consumers.harness import (
    BrokerView,
    kafka_settings,
    offsets_of,
    poll_until_it_stops,
    produce,
    prompts,
    running,
    take,
    wait_until,
)
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.real_servers

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def member_process(
    bootstrap_servers: str, topic: str, assignor: str, log: Path, max_poll_interval_seconds: str = "300"
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.consumers.member"]
    command += [bootstrap_servers, topic, assignor, max_poll_interval_seconds]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def partitions_of(documents: list[Document | RejectedDocument]) -> set[int]:
    return {document.position.partition for document in documents}


@pytest.mark.parametrize("assignor", ["cooperative-sticky", "range"])
def test_a_killed_members_partitions_go_to_the_survivor_and_nothing_is_lost(
    kafka_broker: KafkaBroker,
    kafka_topic: Callable[..., str],
    broker_view: BrokerView,
    tmp_path: Path,
    assignor: str,
) -> None:
    bootstrap_servers, topic = kafka_broker.bootstrap_servers, kafka_topic(num_partitions=4)
    settings = kafka_settings(bootstrap_servers, topic, assignor=assignor, session_timeout_seconds=3.0)
    log = tmp_path / "member.log"
    ours: set[str] = set()

    def read(source: KafkaSource) -> int:
        """The number of documents that one of the two has read so far."""
        documents = source.poll(100, 0.05)
        ours.update(str(document.position) for document in documents)
        source.complete([document.position for document in documents])
        return len(ours | theirs())

    def theirs() -> set[str]:
        return set(log.read_text().split())

    def send(num_documents: int) -> None:
        for partition in range(4):
            produce(bootstrap_servers, topic, prompts(*range(num_documents)), partition=partition)

    with running(settings) as source:
        with member_process(bootstrap_servers, topic, assignor, log) as member:
            num_sent = 0
            while not (ours and theirs()):  # until the rebalance has given the other member its part
                send(5)
                num_sent += 20
                wait_until(lambda: read(source) == num_sent, f"one of the two has read each of {num_sent}")  # noqa: B023
            member.kill()  # -9: it says nothing to the group
            send(30)
            wait_until(lambda: read(source) == num_sent + 120, "the survivor reads the rest")
        wait_until(source.is_drained, "all is complete")
    assert [broker_view.committed(settings, partition) for partition in range(4)] == [num_sent // 4 + 30] * 4


@pytest.mark.parametrize("assignor", ["cooperative-sticky", "range"])
def test_a_rebalance_keeps_what_is_in_flight_in_kept_partitions_and_fences_the_rest(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView, assignor: str
) -> None:
    bootstrap_servers, topic = kafka_broker.bootstrap_servers, kafka_topic(num_partitions=2)
    settings = kafka_settings(bootstrap_servers, topic, assignor=assignor)
    for partition in range(2):
        produce(bootstrap_servers, topic, prompts(*range(5)), partition=partition)
    with running(settings) as first:
        held = take(first, 10)
        with running(settings, "worker-2") as second:
            redone = take(second, 5)  # the partition that moved begins again where it was committed: at 0
            (moved,) = partitions_of(redone)
            kept = [document.position for document in held if document.position.partition != moved]
            fenced = [document.position for document in held if document.position.partition == moved]
            wait_until(lambda: first.num_in_flight == 5, "only the kept partition is in flight here")
            assert all(first.is_current(position) for position in kept)
            assert not any(first.is_current(position) for position in fenced)
            first.complete(fenced)  # too late: they belong to the other member
            first.complete(kept)
            wait_until(lambda: broker_view.committed(settings, 1 - moved) == 5, "the kept partition is committed")
            assert broker_view.committed(settings, moved) in (None, 0)
            produce(bootstrap_servers, topic, prompts("more"), partition=1 - moved)
            (more,) = take(first, 1)
            assert more.position.offset == 5, "a kept partition goes on, it does not start over"
            first.complete([more.position])
            second.complete([document.position for document in redone])
            wait_until(lambda: broker_view.committed(settings, moved) == 5, "the other member commits the moved one")
        wait_until(first.is_drained, "both partitions are back and read")
    assert [broker_view.committed(settings, partition) for partition in (moved, 1 - moved)] == [5, 6]


def test_commits_never_go_backwards_while_members_come_and_go(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    bootstrap_servers, topic = kafka_broker.bootstrap_servers, kafka_topic(num_partitions=2)
    settings = kafka_settings(bootstrap_servers, topic, commit_interval_seconds=0.05)
    seen: dict[int, list[int]] = {0: [], 1: []}
    done: set[str] = set()

    def step(*sources: KafkaSource) -> int:
        for source in sources:
            documents = source.poll(7, 0.02)
            source.complete([document.position for document in reversed(documents)])
            done.update(str(document.position) for document in documents)
        for partition in seen:
            seen[partition].append(broker_view.committed(settings, partition) or 0)
        return len(done)

    for partition in range(2):
        produce(bootstrap_servers, topic, prompts(*range(300)), partition=partition)
    with running(settings) as first:
        for _ in range(10):
            step(first)
        with running(settings, "worker-2") as second:
            for _ in range(60):
                step(first, second)
        wait_until(lambda: step(first) == 600, "all are done")
        wait_until(first.is_drained, "and complete")
    assert [broker_view.committed(settings, partition) for partition in range(2)] == [300, 300]
    assert all(offsets == sorted(offsets) for offsets in seen.values())


def test_a_member_without_partitions_is_drained_only_when_the_group_is(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("only"))
    with running(settings) as first, running(settings, "worker-2") as second:
        wait_until(lambda: first.num_in_flight + second.num_in_flight == 1, "one of the two has the document")
        owner, idle = (first, second) if first.num_in_flight else (second, first)
        (document,) = take(owner, 1)
        wait_until(lambda: idle.has_assignment, "the other one is a member too")
        for _ in range(10):
            assert idle.poll(1, 0.1) == []
            assert not idle.is_drained()
        owner.complete([document.position])
        wait_until(idle.is_drained, "the group has committed all")


def test_a_partition_that_is_added_while_reading_is_read_from_its_start(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic())
    with running(settings) as source:
        wait_until(source.is_drained, "the first partition is read")
        broker_view.add_partition(settings.topics[0], 2)
        produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("new"), partition=1)
        (document,) = take(source, 1)
    assert (document.position.partition, document.position.offset) == (1, 0)


def test_a_second_worker_with_the_same_instance_id_stops_the_first_with_the_reason(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), group_instance_id="slot-1")
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts("a"))
    with running(settings) as first:
        (document,) = take(first, 1)
        with running(settings, "worker-2") as second:
            take(second, 1)
            first.complete([document.position])  # its commit is what tells
            with pytest.raises(SourceError, match="group_instance_id 'slot-1'"):
                poll_until_it_stops(first, [])


def test_a_second_worker_with_the_same_instance_id_stops_a_first_that_has_nothing_to_commit(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str]
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), group_instance_id="slot-1")
    with running(settings) as first:
        wait_until(first.is_drained, "the first is a member and has nothing to do")
        with running(settings, "worker-2") as second:
            wait_until(second.is_drained, "the second has taken its place")
            with pytest.raises(SourceError, match="group_instance_id 'slot-1'"):
                poll_until_it_stops(first, [])  # its next heartbeat is what tells
            assert second.poll(1, 0.0) == []


def work_off(source: KafkaSource, seen: Counter[int]) -> None:
    documents = source.poll(50, 0.02)
    seen.update(document.position.offset for document in documents)
    source.complete([document.position for document in documents])


def test_a_partition_that_moves_back_and_forth_is_read_on_where_each_owner_left_it(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(num_partitions=2))
    for partition in range(2):
        produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(12)), partition=partition)
    with running(settings) as first:
        held = take(first, 24)  # of which, in each partition, every third stays in flight
        late = [document.position for document in held if document.position.offset % 3 == 0]
        first.complete([document.position for document in held if document.position not in late])
        for _ in range(2):
            epochs = {position.partition: position.epoch for position in late}
            with running(settings, "worker-2") as second:
                moved = take(second, 4)  # what was complete beyond the commit is passed over
                (partition,) = partitions_of(moved)
                assert [document.position.offset for document in moved] == [0, 3, 6, 9]
                assert second.take_skipped() == {moved[0].position.assignment: 8}
                wait_until(lambda: first.num_in_flight == 4, "the first one's work there is fenced")
                first.complete([position for position in late if position.partition == partition])
            back = take(first, 4)
            assert [document.position.offset for document in back] == [0, 3, 6, 9], "the second one completed none"
            assert partitions_of(back) == {partition}
            assert all(document.position.epoch > epochs[partition] for document in back)
            late = [position for position in late if position.partition != partition]
            late += [document.position for document in back]
        assert not any(document.suspicion for document in back if isinstance(document, Document)), "nobody died"
        first.complete(late)
        wait_until(first.is_drained, "all is complete")
    assert [broker_view.committed(settings, partition) for partition in range(2)] == [12, 12]


def test_a_member_frozen_for_longer_than_its_session_commits_nothing_of_what_went_elsewhere(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView, tmp_path: Path
) -> None:
    bootstrap_servers, topic = kafka_broker.bootstrap_servers, kafka_topic()
    settings = kafka_settings(bootstrap_servers, topic, session_timeout_seconds=3.0)
    log = tmp_path / "member.log"
    produce(bootstrap_servers, topic, prompts(*range(100)))
    seen: Counter[int] = Counter()
    with member_process(bootstrap_servers, topic, "cooperative-sticky", log, "2.0") as member:
        wait_until(lambda: len(log.read_text().split()) == 100, "the member has answered all")
        wait_until(lambda: broker_view.committed(settings) == 100, "and committed")
        os.kill(member.pid, signal.SIGSTOP)
        with running(settings) as source:
            produce(bootstrap_servers, topic, prompts(*range(100)))
            documents = take(source, 100)  # once its session, and its poll interval with it, are over
            os.kill(member.pid, signal.SIGCONT)
            source.complete([document.position for document in documents[50:]])
            for _ in range(100):  # the thawed one joins again, and gives up what is no longer its own
                work_off(source, seen)
                assert broker_view.committed(settings) == 100, "and commits nothing past what is in flight here"
            source.complete([document.position for document in documents[:50]])
            wait_until(lambda: broker_view.committed(settings) == 200, "all is complete")
    assert not seen


@pytest.mark.parametrize("assignor", ["cooperative-sticky", "range"])
def test_a_member_that_is_expelled_in_the_middle_of_a_rebalance_begins_anew_at_the_commit(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView, assignor: str
) -> None:
    """kafka-python tells no listener of it, claims the partitions for its new member, and would go on from 20."""
    settings = kafka_settings(kafka_broker.bootstrap_servers, kafka_topic(), assignor=assignor)
    produce(kafka_broker.bootstrap_servers, settings.topics[0], prompts(*range(20)))
    with running(settings) as source:
        before = take(source, 20)
        source.complete([document.position for document in before[:10]])
        wait_until(lambda: broker_view.committed(settings) == 10, "the first ten are committed")
        coordinator = source._member._consumer._coordinator
        coordinator.rejoining = True  # as between the revocation and the answer to our joining
        coordinator.reset_generation()
        again = take(source, 10)
        assert offsets_of(again) == list(range(10, 20))
        assert not any(source.is_current(document.position) for document in before)
        source.complete([document.position for document in before[10:]])
        source.complete([document.position for document in again])
        wait_until(source.is_drained, "all is complete")
    assert broker_view.committed(settings) == 20


@pytest.mark.slow
def test_twenty_joins_and_leaves_in_a_minute_lose_nothing_and_repeat_little(
    kafka_broker: KafkaBroker, kafka_topic: Callable[..., str], broker_view: BrokerView
) -> None:
    bootstrap_servers, topic = kafka_broker.bootstrap_servers, kafka_topic(num_partitions=4)
    settings = kafka_settings(bootstrap_servers, topic)
    seen: Counter[tuple[int, int]] = Counter()
    num_sent, num_changes, started = 0, 0, time.monotonic()

    def work(*sources: KafkaSource) -> int:
        for source in sources:
            documents = source.poll(50, 0.01)
            seen.update((document.position.partition, document.position.offset) for document in documents)
            source.complete([document.position for document in reversed(documents)])
        return len(seen)

    with running(settings) as stays:
        while num_changes < 20:
            with running(settings, f"worker-{num_changes}") as comes:
                until = time.monotonic() + 2.0
                while time.monotonic() < until:
                    for partition in range(4):
                        produce(bootstrap_servers, topic, prompts(*range(25)), partition=partition)
                    num_sent += 100
                    work(stays, comes)
            num_changes += 2
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                work(stays)
        seconds = time.monotonic() - started
        wait_until(lambda: work(stays) == num_sent, "every document was read")
        wait_until(stays.is_drained, "and is complete")
    again = seen.total() - num_sent
    print(f"{num_changes} joins and leaves in {seconds:.0f} s: {num_sent} documents, {again} read again")
    assert [broker_view.committed(settings, partition) for partition in range(4)] == [num_sent // 4] * 4
    assert again <= 0.02 * num_sent
