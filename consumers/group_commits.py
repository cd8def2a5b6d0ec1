"""What a member tells the group's commits, and what it finds in them: offsets, and beside them what a next owner needs.

Every method belongs to the member's thread, but for `send`, which the client's own calls during a rebalance.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka import TopicPartition
from kafka.errors import KafkaError, OffsetMetadataTooLargeError, RebalanceInProgressError
from kafka.structs import OffsetAndMetadata

from consumers.commit_metadata import Progress, decode, encode
from consumers.offsets import Commit, OffsetTracker, Partition
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

_ANNOUNCE_SECONDS = 0.05  # between two tries to tell the broker what a next owner must know after a crash
_COMMIT_TIMEOUT_SECONDS = 60.0  # an outstanding commit older than that is given up, and the next one is sent
_LOOKUP_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A partition's commit: `offset` is None where there is none, or it is of a deleted topic (`is_foreign`)."""

    offset: int | None = None
    progress: Progress | None = None
    is_foreign: bool = False


class GroupCommits:
    """The commits of one membership."""

    def __init__(
        self,
        consumer: Any,
        settings: KafkaSettings,
        tracker: OffsetTracker,
        topic_ids: Mapping[str, UUID],
        clock: Callable[[], float],
    ) -> None:
        """`topic_ids` are the member's, which learns them as it reads."""
        self._consumer = consumer
        self._settings = settings
        self._tracker = tracker
        self._topic_ids = topic_ids
        self._clock = clock
        self._writes_metadata = True  # until the broker refuses it
        self._sent_at: float | None = None  # None: none is outstanding
        self._last_at = clock()
        self._num_refused = 0  # in a row

    def is_due(self) -> bool:
        """Whether it is time to send what is new; True once for each time."""
        now = self._clock()
        interval = self._settings.commit_interval_seconds
        if not self._tracker.is_announced or self._tracker.has_suspects:
            interval = min(interval, _ANNOUNCE_SECONDS)
        if now - self._last_at < interval:
            return False
        if self._sent_at is not None and now - self._sent_at < _COMMIT_TIMEOUT_SECONDS:
            return False
        self._last_at = now
        return True

    def send(self, commits: Mapping[Partition, Commit]) -> None:
        """What is refused stays in the tracker, and is sent again with the next. Also for the client's own thread."""
        if not commits:
            return
        self._sent_at = self._clock()

        def on_answer(_offsets: object, answer: object) -> None:
            self._sent_at = None
            if not isinstance(answer, BaseException):
                self._tracker.acknowledge(commits)
                self._num_refused = 0
                return
            if isinstance(answer, OffsetMetadataTooLargeError):
                self._stop_writing_metadata()
            self._num_refused += not isinstance(answer, RebalanceInProgressError)
            if self._num_refused in (1, 10, 100, 1000):
                extra = {"reason": repr(answer), "refusals": self._num_refused}
                logger.warning("a commit was refused and will be sent again", extra=extra)

        self._consumer.commit_async(self._offsets(commits), callback=on_answer)

    def send_and_wait(self, commits: Mapping[Partition, Commit], timeout_ms: int) -> None:
        """The last ones of this membership: what is refused then is only told, and done again by the next owner."""
        if not commits:
            return
        try:
            try:
                self._consumer.commit(self._offsets(commits), timeout_ms=timeout_ms)
            except OffsetMetadataTooLargeError:
                self._stop_writing_metadata()
                self._consumer.commit(self._offsets(commits), timeout_ms=timeout_ms)
        except (KafkaError, OSError) as error:
            logger.warning("the last commit was refused; the next owner repeats it", extra={"reason": repr(error)})

    def find(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, LeftBehind]:
        """What the commits of these say; without those that it cannot be known of yet."""
        if not partitions:
            return {}
        try:
            fetch = self._consumer._coordinator.fetch_committed_offsets  # all at once, and with their metadata
            committed = fetch(partitions, timeout_ms=_LOOKUP_TIMEOUT_MS)
        except (KafkaError, OSError) as error:
            logger.warning("what the group has committed will be asked again", extra={"reason": repr(error)})
            return {}
        left = {}
        for partition in partitions:
            if partition not in committed:
                left[partition] = LeftBehind()
                continue
            offset, found = committed[partition].offset, decode(committed[partition].metadata)
            topic_id = self._topic_ids.get(partition.topic)
            if found is None or found[1].base != offset:
                left[partition] = LeftBehind(offset)  # set by somebody else, or by us without metadata
            elif topic_id is None:
                continue  # it may be of a deleted topic of this name
            elif found[0] == topic_id:
                left[partition] = LeftBehind(offset, found[1])
            else:
                left[partition] = LeftBehind(is_foreign=True)
                extra = {"topic": partition.topic, "partition": partition.partition, "offset": offset}
                logger.warning("reading from the earliest: the offset is of a deleted topic of this name", extra=extra)
        return left

    def _offsets(self, commits: Mapping[Partition, Commit]) -> dict[TopicPartition, OffsetAndMetadata]:
        offsets = {}
        for (topic, partition), commit in commits.items():
            topic_id = self._topic_ids.get(topic)
            metadata = encode(commit.progress, topic_id) if self._writes_metadata and topic_id is not None else ""
            offsets[TopicPartition(topic, partition)] = OffsetAndMetadata(commit.offset, metadata)
        return offsets

    def _stop_writing_metadata(self) -> None:
        """The broker refuses the whole commit of a partition for it. Offsets are what must be known."""
        self._writes_metadata = False
        logger.warning(
            "commits go on without metadata, so that a restart looks more documents up, and a document that kills "
            "workers is not found: the broker's offset.metadata.max.bytes is lower than 4096"
        )
