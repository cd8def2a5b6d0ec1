"""Sends the raw messages of failed documents to the dead-letter topic, for as long as it takes.

A thread of its own, since the producer's `send` may block; what is not acknowledged holds its offset's commit.
"""

import hashlib
import heapq
import itertools
import logging
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError

from consumers.connection import client_options, keep_refreshing
from consumers.replay import CODE_HEADER, HEADER_PREFIX, first_delivery, replay_headers
from consumers.topics import max_message_bytes
from schemas.document import RawMessage, SourcePosition
from schemas.errors import Failure, SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 4096  # of a failure's message in its header
_BATCH_OVERHEAD_BYTES = 61 + 40  # a batch's header; a record's own lengths, deltas and attributes
_HEADER_OVERHEAD_BYTES = 10
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.2, 30.0


@dataclass(slots=True)
class DeadLetter:
    """One failed document on its way out. `then` is called once, after the broker's acknowledgement."""

    raw: RawMessage
    job: str
    failure: Failure
    then: Callable[[], None]
    num_refusals: int = 0
    max_bytes: int = sys.maxsize  # smaller than the topic's where the broker refused even that
    sent_for: int = 0  # the limit that its record was last made for
    is_too_large: bool = False  # so the broker said of that record


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """What is sent: key, value (None for a message that had none) and headers."""

    key: bytes
    value: bytes | None
    headers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """An upper bound of its batch's size, if it is alone in it."""
        headers = sum(len(name.encode()) + len(value) + _HEADER_OVERHEAD_BYTES for name, value in self.headers)
        return _BATCH_OVERHEAD_BYTES + len(self.key) + len(self.value or b"") + headers


def build_record(letter: DeadLetter, worker: str, max_bytes: int) -> DeadLetterRecord:
    """The record for a dead letter, at most `max_bytes` large.

    The original's headers come first, without those of an earlier failure, then ours; a replay's letter tells of the
    first delivery, so that all letters of one message have one key. Where it would be too large,
    the value is cut, and its length and sha256 are told in headers; then the original's headers are left out, and at
    last its key.
    """
    raw = letter.raw
    position, timestamp_ms, attempt = first_delivery(raw)
    original = [(name, value) for name, value in raw.headers if not name.startswith(HEADER_PREFIX)]
    text = letter.failure.message.encode("utf-8", "backslashreplace")[:MAX_TEXT_BYTES]
    ours = [
        (CODE_HEADER, letter.failure.code.value.encode()),
        (f"{HEADER_PREFIX}stage", letter.failure.stage.value.encode()),
        (f"{HEADER_PREFIX}message", text.decode("utf-8", "ignore").encode()),
        (f"{HEADER_PREFIX}worker", worker.encode()),
        *replay_headers(position, timestamp_ms, attempt, letter.job),
    ]
    if raw.key is not None:
        ours.append((f"{HEADER_PREFIX}key", raw.key))
    key = str(position).encode()
    whole = DeadLetterRecord(key, raw.value, original + ours)
    if whole.num_bytes <= max_bytes:
        return whole
    if raw.value is not None:
        ours.append((f"{HEADER_PREFIX}value-length", str(len(raw.value)).encode()))
        ours.append((f"{HEADER_PREFIX}value-sha256", hashlib.sha256(raw.value).hexdigest().encode()))
    for headers in (original + ours, [*ours, (f"{HEADER_PREFIX}headers-left-out", str(len(original)).encode())]):
        room = max_bytes - DeadLetterRecord(key, b"", headers).num_bytes
        if room >= 0:
            return DeadLetterRecord(key, None if raw.value is None else raw.value[:room], headers)
    headers = [(name, value) for name, value in headers if name != f"{HEADER_PREFIX}key"]
    return DeadLetterRecord(key, None if raw.value is None else b"", headers)


class DeadLetterWriter:
    """Takes dead letters from any thread. One that is refused is sent again, with growing pauses, until `close`.

    A letter whose assignment is gone is dropped without a call: its next owner does all of it again.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        worker: str,
        is_current: Callable[[SourcePosition], bool],
        on_failure: Callable[[SourceError], None],
    ) -> None:
        """`on_failure` hears of what must end the source: an acknowledged letter that nothing follows."""
        self._settings = settings
        self._worker = worker
        self._is_current = is_current
        self._on_failure = on_failure
        # At most one letter for each document in flight; twice that, as those of lost partitions may be among them.
        self._queue: queue.Queue[DeadLetter] = queue.Queue(2 * settings.max_in_flight_documents)
        self._refused: queue.SimpleQueue[DeadLetter] = queue.SimpleQueue()
        self._waiting: list[tuple[float, int, DeadLetter]] = []  # heap by when it is due
        self._tie_breaker = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-dead-letters", daemon=True)
        self._producer: Any = None
        self._max_bytes = 0

    def start(self, reachable: KafkaSettings) -> None:
        """`reachable` are the settings with a broker that is there. Raises SourceError where it is not any more."""
        settings = self._settings
        self._max_bytes = max_message_bytes(reachable, settings.dead_letter_topic)
        try:
            self._producer = KafkaProducer(
                **client_options(reachable),
                acks="all",
                enable_idempotence=False,  # after one record that is too large, an idempotent producer fails the next
                allow_auto_create_topics=False,
                linger_ms=5,
                max_block_ms=10_000,
                max_request_size=self._max_bytes + 2**20,
            )
        except (KafkaError, OSError) as error:
            raise SourceError(f"Kafka at {', '.join(settings.bootstrap_servers)} does not answer: {error}") from error
        # The option above does not reach the producer's metadata requests (kafka-python 3.0.12), and a topic made in
        # passing would lose its dead letters to the default retention.
        self._producer._metadata.config["allow_auto_create_topics"] = False
        self._thread.start()

    def put(self, letter: DeadLetter) -> None:
        """Waits for room where the broker has refused so many that the queue is full."""
        while not self._closing.is_set():
            try:
                self._queue.put(letter, timeout=0.5)
            except queue.Full:
                continue
            return

    def close(self, timeout_seconds: float) -> None:
        """Sends what it can within the time-out; the rest stays uncommitted and is done again. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._producer is not None:
            self._producer.close(timeout=timeout_seconds)

    def _run(self) -> None:
        while True:
            keep_refreshing(self._producer._metadata)
            while not self._refused.empty():
                self._wait_for_its_turn(self._refused.get())
            if self._waiting and self._waiting[0][0] <= time.monotonic() and not self._closing.is_set():
                self._send(heapq.heappop(self._waiting)[2])
                continue
            try:
                self._send(self._queue.get(timeout=0.1))
            except queue.Empty:
                if self._closing.is_set():
                    return

    def _send(self, letter: DeadLetter) -> None:
        if not self._is_current(letter.raw.position):
            return
        try:
            if letter.is_too_large:
                self._find_limit(letter)
            letter.sent_for = min(letter.max_bytes, self._max_bytes)
            record = build_record(letter, self._worker, letter.sent_for)
            sent = self._producer.send(
                self._settings.dead_letter_topic, key=record.key, value=record.value, headers=record.headers
            )
        except Exception as error:  # of any kind: this thread must live, or no dead letter would ever be acknowledged
            self._on_refusal(letter, error)
            return
        sent.add_callback(lambda _metadata: self._on_acknowledged(letter))
        sent.add_errback(lambda error: self._on_refusal(letter, error))

    def _find_limit(self, letter: DeadLetter) -> None:
        """After the broker found its record too large: the topic's limit as it is now, whole again where it has grown.

        Where the limit is not to be had, or not what the broker goes by, the letter is tried at half its size.
        """
        letter.is_too_large = False
        if self._max_bytes < letter.sent_for:
            return  # another letter has found it
        limit = max_message_bytes(self._settings, self._settings.dead_letter_topic)
        if limit == self._max_bytes:
            letter.max_bytes = letter.sent_for // 2
            return
        extra = {"topic": self._settings.dead_letter_topic, "bytes": limit, "bytes_before": self._max_bytes}
        logger.warning("the dead-letter topic's limit has changed; larger letters are cut", extra=extra)
        self._max_bytes, letter.max_bytes = limit, sys.maxsize

    def _on_acknowledged(self, letter: DeadLetter) -> None:
        try:
            letter.then()
        except Exception as error:  # of any kind: its document would stay in flight for ever, and nobody would know
            logger.exception("a dead letter's continuation failed", extra={"position": str(letter.raw.position)})
            self._on_failure(
                SourceError(
                    f"the dead letter of {letter.raw.position} is written, but its failed row cannot follow: "
                    f"{error!r}. Start the worker again; the document comes again, its dead letter a second time"
                )
            )

    def _on_refusal(self, letter: DeadLetter, error: BaseException) -> None:
        """On the producer's thread or ours: the letter waits, and is sent again."""
        letter.num_refusals += 1
        letter.is_too_large = isinstance(error, MessageSizeTooLargeError)
        if letter.num_refusals in (1, 10, 100, 1000):
            extra = {"position": str(letter.raw.position), "refusals": letter.num_refusals, "reason": repr(error)}
            logger.warning("a dead letter was refused and will be sent again", extra=extra)
        self._refused.put(letter)

    def _wait_for_its_turn(self, letter: DeadLetter) -> None:
        ceiling = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** min(letter.num_refusals, 12))
        due = time.monotonic() + ceiling * random.uniform(0.5, 1.0)
        heapq.heappush(self._waiting, (due, next(self._tie_breaker), letter))
