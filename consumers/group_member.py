"""One member of the consumer group: joins, reads and pauses through kafka-python's consumer, and commits when it must.

Every method belongs to one thread. The rebalance listener runs on the client's own thread, but only while that one
thread is inside `read` or `close`, so the tracker has one owner at any time.
"""

import contextlib
import gzip
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import (
    FencedInstanceIdError,
    KafkaError,
    NoOffsetForPartitionError,
    RetriableError,
)
from kafka.structs import MemberState

from consumers.connection import address_of, check_connection, client_options, keep_refreshing, refresh
from consumers.group_commits import GroupCommits
from consumers.offsets import OffsetTracker, Partition
from consumers.stall import STALL_SECONDS, StallWatch
from consumers.unreadable import why_unreadable
from schemas.document import RawMessage, SourcePosition
from schemas.errors import SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

_FETCH_MAX_BYTES = 16 * 2**20  # buffered by the client beside what is in flight
_METADATA_MAX_AGE_SECONDS = 5.0  # how soon a topic that was made again is noticed
_JOIN_SECONDS = 0.5
_CLOSE_SECONDS = 5.0  # of a client that another one is to take the place of
_LOOKUP_TIMEOUT_MS = 5_000


class GroupMember:
    """Joins the group and reads what it is assigned, each partition under a new epoch of the tracker."""

    def __init__(
        self,
        settings: KafkaSettings,
        tracker: OffsetTracker,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._tracker = tracker
        self._settle = settle  # brings completions that have arrived into the tracker
        self._clock = clock
        self._consumer: Any = None  # from `connect` on, and so are the next
        self._commits: GroupCommits
        self._stall: StallWatch
        self._holds = False
        self._revoking: set[Partition] = set()  # range: given up for the length of a rebalance; some come back
        self._topic_ids: dict[str, UUID] = {}
        self.ends_cleanly = True  # False: whoever gets our partitions is to know that their work killed us
        self._member_id = ""  # under which the group knows us, at the last look
        self._begun: set[TopicPartition] = set()  # the client has a read position there, maybe not at the commit
        self._failed = False

    def connect(self, reachable: KafkaSettings) -> None:
        """Joins at the first `read`. `reachable` are the settings with a broker that is there.

        Raises SourceError where the client cannot be made.
        """
        settings = self._settings
        self._member_id, self._revoking = "", set()
        self._stall = StallWatch(self._clock, STALL_SECONDS)
        is_cooperative = settings.assignor == "cooperative-sticky"
        try:
            self._consumer = KafkaConsumer(
                **client_options(reachable),
                group_id=settings.group,
                group_instance_id=settings.group_instance_id,
                partition_assignment_strategy=[CooperativeStickyAssignor if is_cooperative else RangePartitionAssignor],
                enable_auto_commit=False,
                auto_offset_reset="none",  # "latest" would skip what is there, "earliest" hide what retention took
                isolation_level="read_committed",
                allow_auto_create_topics=False,
                session_timeout_ms=round(settings.session_timeout_seconds * 1000),
                heartbeat_interval_ms=max(1, min(3000, round(settings.session_timeout_seconds * 1000 / 3))),
                max_poll_interval_ms=round(settings.max_poll_interval_seconds * 1000),
                metadata_max_age_ms=round(_METADATA_MAX_AGE_SECONDS * 1000),
                fetch_max_bytes=_FETCH_MAX_BYTES,
                receive_message_max_bytes=2**31 - 1,  # a broker may answer with more than was asked for
            )
        except (KafkaError, OSError) as error:
            raise SourceError(f"Kafka at {', '.join(settings.bootstrap_servers)} does not answer: {error}") from error
        self._commits = GroupCommits(self._consumer, settings, self._tracker, self._topic_ids, self._clock)
        self._consumer.subscribe(topics=list(settings.topics), listener=_Listener(self))

    @property
    def is_stable(self) -> bool:
        """Whether the group has settled with us in it."""
        return bool(self._consumer.group_metadata().state == MemberState.STABLE)

    @property
    def silent_seconds(self) -> float:
        """Since a broker last told the topics' state, which the client asks for every five seconds."""
        last_answer_ms = self._consumer._cluster._last_successful_refresh_ms
        return max(0.0, time.monotonic() - last_answer_ms / 1000) if last_answer_ms else 0.0

    def hold(self, holds: bool) -> None:
        """Pauses everything, what a rebalance brings included, or resumes it. `read` must go on being called."""
        if holds != self._holds:
            self._holds = holds
            change = self._consumer.pause if holds else self._consumer.resume
            change(*self._consumer.assignment())

    def read(self, max_records: int, timeout_seconds: float) -> list[RawMessage]:
        """Records of any assigned partitions, stamped with their epochs. Raises SourceError for what cannot be mended.

        After a SourceError this member must not read again: a second poll past a broken batch never returns.
        """
        assert not self._failed, "read after a failure"
        if not self.is_stable:
            timeout_seconds = max(timeout_seconds, _JOIN_SECONDS)  # a join that ends between two reads is begun anew
        try:
            batches = self._consumer.poll(timeout_ms=round(timeout_seconds * 1000), max_records=max_records)
        except NoOffsetForPartitionError as error:
            self._begin_at_the_earliest(error.args[0])
            return []
        except gzip.BadGzipFile as error:  # an OSError that trying again does not mend
            raise self._unreadable(error) from error
        except (RetriableError, OSError) as error:  # that of a connection comes as it is where TLS or SASL begins
            logger.warning("reading from Kafka will be tried again", extra={"reason": repr(error)})
            time.sleep(timeout_seconds)  # poll failed at once: the wait that it was asked for is ours, at most 0.5 s
            return []
        except Exception as error:
            raise self._unreadable(error) from error
        if self._forget_if_expelled():
            return []  # of partitions that are no longer ours
        self._check_fenced()
        self._keep_alive()
        self._check_topic_ids()
        reads = self.is_stable and not self._holds and bool(self._consumer.assignment())
        if stuck := self._stall.look(self._consumer, reads, bool(batches)):
            self._join_anew(stuck)
            return []
        elsewhere = self._track_assignment()
        raws: list[RawMessage] = []
        for (topic, partition), records in batches.items():
            if (topic, partition) in elsewhere or (topic, partition) not in self._tracker.partitions:
                continue
            epoch = self._tracker.partitions[topic, partition].epoch
            raws += [
                RawMessage(
                    SourcePosition(topic, partition, record.offset, epoch),
                    record.timestamp,
                    record.key,
                    record.value,
                    tuple([(name, value or b"") for name, value in record.headers]) if record.headers else (),
                )
                for record in records
            ]
        return raws

    def commit_if_due(self) -> None:
        """Sends what is new once a `commit_interval_seconds`; what is refused is sent again with the next.

        That work has begun at all is told at once, and so is what runs alone: a worker that dies before it has told so
        would be forgotten. Where earlier ones died, all is told at once.
        """
        self._forget_if_expelled()
        if self._commits.is_due():
            self._pass_transaction_ends()
            self._commits.send(self._tracker.commits())

    def is_at_end(self) -> bool:
        """Whether every assigned partition is read to its end, which is looked up now.

        A member without partitions is at the end once the group has committed all of the topics: it may only be
        waiting for its share.
        """
        assigned = list(self._consumer.assignment())
        try:
            if not assigned:
                return self._group_is_at_end()
            ends = self._consumer.end_offsets(assigned, timeout_ms=_LOOKUP_TIMEOUT_MS)
            return all(
                partition in self._tracker.partitions and self._position(partition) >= end
                for partition, end in ends.items()
            )
        except NoOffsetForPartitionError as error:
            self._begin_at_the_earliest(error.args[0])
        except (RetriableError, OSError):
            pass
        except KafkaError as error:  # as of `read`, for it looks up positions too
            raise self._unreadable(error) from error
        return False

    def close(self, timeout_seconds: float) -> None:
        """Commits what is complete, leaves the group, and forgets its partitions."""
        timeout_ms = max(1, round(timeout_seconds * 1000))
        self._settle()
        self._commits.send_and_wait(self._tracker.commits(is_clean=self.ends_cleanly), timeout_ms)
        try:
            self._consumer.close(timeout_ms=timeout_ms)
        except (KafkaError, RuntimeError, OSError) as error:
            logger.warning("the consumer did not close cleanly", extra={"reason": repr(error)})
        self.forget(list(self._tracker.partitions), "closed")

    # --- the listener's part ---

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Commits what is complete and fences the rest."""
        given_up = set(partitions)
        self._forget_if_expelled()
        self._settle()
        self._commits.send(self._tracker.commits(given_up, is_clean=self.ends_cleanly))
        if self._settings.assignor == "cooperative-sticky":
            self.forget(given_up, "revoked")
        else:
            # An eager rebalance revokes everything and gives most of it back with its read position kept, so
            # what is in flight must be kept too: `on_assigned` forgets what does not come back.
            self._revoking |= given_up

    def on_assigned(self, partitions: Iterable[Partition]) -> None:
        assigned = set(partitions)
        self._forget_if_expelled()
        self.forget(self._revoking - assigned, "revoked")
        self._revoking = set()
        if self._holds:
            self._consumer.pause(*(TopicPartition(*partition) for partition in assigned))

    def on_lost(self, partitions: Iterable[Partition]) -> None:
        """The session is over: others may own these already, so nothing is committed."""
        for assignor in self._consumer._coordinator._assignors.values():
            assignor.member_assignment = None  # or kafka-python 3.0.12 still claims them when it joins again
        self.forget(set(partitions) | self._revoking, "lost")
        self._revoking = set()

    def forget(self, partitions: Iterable[Partition], cause: str) -> None:
        for topic, partition in partitions:
            num_in_flight = self._tracker.drop((topic, partition))
            extra = {"topic": topic, "partition": partition, "in_flight": num_in_flight, "cause": cause}
            logger.info("partition given up", extra=extra)

    # --- ours ---

    def _unreadable(self, error: Exception) -> SourceError:
        """Why we cannot read on. Raises another SourceError where the topic was made again: that has many symptoms."""
        self._failed = True
        with contextlib.suppress(KafkaError, OSError):  # the symptom may come before the client has heard of the cause
            refresh(self._consumer, _LOOKUP_TIMEOUT_MS)
        self._check_topic_ids()
        return SourceError(why_unreadable(error, self._settings, self._consumer))

    def _track_assignment(self) -> set[Partition]:
        """Epochs are stamped here, once the client has returned: a partition may go and come back within one poll.

        Returns partitions that are read from another place than the client began at: what it has read is void. So is
        what it reads of those that are not tracked yet, since what their commits say cannot be known now.
        """
        new = [p for p in self._consumer.assignment() if (p.topic, p.partition) not in self._tracker.partitions]
        self._check_topic_ids()  # the commit may be of a deleted topic of the same name
        elsewhere: set[Partition] = set()
        left_behind = self._commits.find(new)
        self._begun.update(partition for partition in new if partition not in left_behind)
        for partition, left in left_behind.items():
            if partition not in self._consumer.assignment():
                continue  # it went while we asked
            if left.is_foreign or partition in self._begun:
                # The client may read on where an earlier epoch of ours did, past what was in flight then.
                if left.offset is None:
                    self._consumer.seek_to_beginning(partition)
                else:
                    self._consumer.seek(partition, left.offset)
                elsewhere.add(partition)
            self._begun.add(partition)
            begin = 0 if left.offset is None else left.offset
            epoch = self._tracker.assign((partition.topic, partition.partition), begin, left.progress)
            extra = {"topic": partition.topic, "partition": partition.partition, "epoch": epoch, "offset": left.offset}
            if left.progress is not None:
                extra |= {"started_before": left.progress.started, "was_clean": left.progress.is_clean}
                extra |= {"crashes": self._tracker.partitions[partition].num_crashes}
            logger.info("partition assigned", extra=extra)
        return elsewhere

    def _forget_if_expelled(self) -> bool:
        """Gives everything up where the group knows us under another name than before: others may own it already.
        kafka-python 3.0.12 calls `on_lost` for that, but not where it happens in the middle of a rebalance.

        Whether there was something to give up.
        """
        member_id = self._consumer._coordinator._generation.member_id
        if member_id == self._member_id:
            return False
        self._member_id = member_id
        given_up = {*self._tracker.partitions, *self._revoking}
        self.forget(given_up, "expelled")
        self._revoking = set()
        return bool(given_up)

    def _keep_alive(self) -> None:
        """A join that outlasts one poll is forgotten by kafka-python 3.0.12 where new metadata had caused it: the
        member then heartbeats for ever and reads nothing. Asking again is harmless; a join under way is kept. And its
        heartbeats end for good with an error of a connection that comes as it is."""
        keep_refreshing(self._consumer._cluster)
        if self.is_stable:
            self._consumer._coordinator._maybe_start_heartbeat_loop()
        else:
            self._consumer._coordinator.request_rejoin()

    def _join_anew(self, stuck: Mapping[TopicPartition, int]) -> None:
        """With another client. What is in flight is fenced off, as after any other loss of the partitions.

        Where no broker can be reached we stay as we are until they are found stuck once more. Any that the client
        knows will do: those that the settings name may all have gone for good.
        """
        where = {f"{one.topic}/{one.partition}": offset for one, offset in sorted(stuck.items())}
        extra: dict[str, Any] = {"stuck": where}
        known = (*self._settings.bootstrap_servers, *map(address_of, self._consumer._cluster.brokers()))
        try:
            reachable = check_connection(
                self._settings.model_copy(update={"bootstrap_servers": tuple(dict.fromkeys(known))})
            )
        except SourceError as error:
            extra["reason"] = str(error)
            logger.warning("the Kafka client has stopped reading, and another one would find no broker", extra=extra)
            return
        logger.warning("the Kafka client has stopped reading: joining the group anew with another one", extra=extra)
        self.close(_CLOSE_SECONDS)
        self.connect(reachable)

    def _check_fenced(self) -> None:
        """Raises SourceError where another worker has our group_instance_id. kafka-python 3.0.12 then ends its
        heartbeats and says nothing: without a commit to be refused the member would go on as if it were one."""
        if self._settings.group_instance_id is None:
            return
        coordinator = self._consumer._coordinator
        with coordinator._lock:
            is_joined = self.is_stable and not coordinator.rejoining and not coordinator.rejoin_needed
            is_fenced = is_joined and not coordinator._heartbeat_enabled
        if is_fenced:
            self._failed = True
            error = FencedInstanceIdError(self._settings.group_instance_id)
            raise SourceError(why_unreadable(error, self._settings, self._consumer))

    def _check_topic_ids(self) -> None:
        """Raises SourceError where a topic was deleted and made again: our offsets mean other records now."""
        for topic in self._settings.topics:
            topic_id = self._consumer._cluster.topic_id(topic)
            known = self._topic_ids.setdefault(topic, topic_id) if topic_id is not None else None
            if known is not None and known != topic_id:
                self._failed = True
                self.forget([p for p in self._tracker.partitions if p[0] == topic], "topic made again")
                raise SourceError(
                    f"the topic {topic} was deleted and made again while we were reading it: the offsets that we "
                    "hold belong to the old one. Start the worker again; it reads the new topic from its beginning."
                )

    def _begin_at_the_earliest(self, partitions: Iterable[TopicPartition]) -> None:
        """The group has never committed these: a new group, or a new partition."""
        self._track_assignment()
        new = [partition for partition in partitions if partition in self._consumer.assignment()]
        if new:
            logger.info("no committed offset: reading from the earliest", extra={"partitions": sorted(map(str, new))})
            self._consumer.seek_to_beginning(*new)

    def _pass_transaction_ends(self) -> None:
        """A transaction's end takes an offset and is no record; with nothing in flight the read position is past it."""
        for (topic, partition), tracker in self._tracker.partitions.items():
            if tracker.num_in_flight == 0:
                try:
                    tracker.advance(self._position(TopicPartition(topic, partition)))
                except (KafkaError, OSError):
                    continue

    def _group_is_at_end(self) -> bool:
        consumer, topics = self._consumer, self._settings.topics
        partitions = [TopicPartition(topic, p) for topic in topics for p in consumer.partitions_for_topic(topic)]
        starts = consumer.beginning_offsets(partitions, timeout_ms=_LOOKUP_TIMEOUT_MS)
        ends = consumer.end_offsets(partitions, timeout_ms=_LOOKUP_TIMEOUT_MS)
        for partition in partitions:
            committed = consumer.committed(partition, timeout_ms=_LOOKUP_TIMEOUT_MS)
            if (starts[partition] if committed is None else committed) < ends[partition]:
                return False
        return bool(partitions)

    def _position(self, partition: TopicPartition) -> int:
        """Where reading goes on; -1 where that is not known yet."""
        if partition not in self._consumer.assignment():
            return -1
        position = self._consumer.position(partition, timeout_ms=_LOOKUP_TIMEOUT_MS)
        return -1 if position is None else int(position)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # kafka-python has no types
    """Tells the member; an exception here would leave the client between two assignments."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._member.on_revoked((p.topic, p.partition) for p in revoked)

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._member.on_assigned((p.topic, p.partition) for p in assigned)

    def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        self._member.on_lost((p.topic, p.partition) for p in lost)
