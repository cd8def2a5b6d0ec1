"""When to try again: the verdict on each reply of Elasticsearch, and the waiting between attempts.

The one place that retries (tenacity) and the one table of what a status means. It sends nothing itself.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, TypeVar

import tenacity
from elastic_transport import TlsError, TransportError
from elasticsearch import ApiError, UnsupportedProductError
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from schemas.errors import SinkError

T = TypeVar("T")

BASE_BACKOFF_SECONDS = 0.1
START_BACKOFF_SECONDS = 1.0  # at most, between tries while a person waits for the start
MAX_RETRY_AFTER_SECONDS = 300.0  # a longer wish of the server is asked again then


class Verdict(Enum):
    """What a reply says about a row, or about a whole call."""

    STORED = "stored"
    CONFLICT = "conflict"  # 409: an equal or higher version is there; a look at it tells which of the next two
    ALREADY_DONE = "already_done"  # by this very record, in an earlier attempt or by another worker
    SUPERSEDED = "superseded"  # by a later record of the same document
    RETRY = "retry"
    SPLIT = "split"  # a call that is refused for one of its rows or for its size: halves, then alone
    REJECTED = "rejected"  # this row will never be accepted
    MISFIT = "misfit"  # it does not fit the index: rejected, unless a look at the index shows that it is not ours
    STOP = "stop"  # a wrong deployment, not a wrong row


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its cause, for the sentence that a person reads."""

    verdict: Verdict
    status: int = 0  # 0: there was no reply
    error_type: str = ""
    reason: str = ""
    retry_after_seconds: float = 0.0

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.status or ""), self.error_type, self.reason) if part)


# By error.type first, since Elasticsearch uses a status for several causes; then by status; then 5xx.
_BY_TYPE: dict[str, Verdict] = {
    "version_conflict_engine_exception": Verdict.CONFLICT,
    "cluster_block_exception": Verdict.RETRY,  # 403 write and read_only, 429 read_only_allow_delete, 503 no master
    "es_rejected_execution_exception": Verdict.RETRY,
    "circuit_breaking_exception": Verdict.RETRY,
    "unavailable_shards_exception": Verdict.RETRY,
    "document_parsing_exception": Verdict.MISFIT,
    "mapper_parsing_exception": Verdict.MISFIT,
    "illegal_argument_exception": Verdict.MISFIT,
    "security_exception": Verdict.STOP,
    "strict_dynamic_mapping_exception": Verdict.STOP,
    "index_not_found_exception": Verdict.STOP,
    "index_closed_exception": Verdict.STOP,
}
_BY_STATUS: dict[int, Verdict] = {
    200: Verdict.STORED,
    201: Verdict.STORED,
    400: Verdict.REJECTED,
    401: Verdict.STOP,
    403: Verdict.STOP,
    404: Verdict.STOP,
    408: Verdict.RETRY,
    409: Verdict.CONFLICT,
    413: Verdict.REJECTED,
    429: Verdict.RETRY,
}
# In what the TLS library says. Other TLS errors come with a node that restarts.
UNKNOWN_FINGERPRINT = "the certificate's fingerprint is"
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", UNKNOWN_FINGERPRINT)
_CALL_BY_STATUS: dict[int, Verdict] = {400: Verdict.SPLIT, 408: Verdict.RETRY, 413: Verdict.SPLIT, 429: Verdict.RETRY}


def judge_row(status: int, error_type: str = "", reason: str = "") -> Judgement:
    """The verdict on one row of a bulk reply."""
    verdict = _BY_TYPE.get(error_type) or _BY_STATUS.get(status)
    if error_type == "illegal_argument_exception" and "no write index" in reason:
        verdict = Verdict.STOP  # the alias lost its index: every row would be refused
    if verdict is None:
        verdict = Verdict.RETRY if status >= 500 else Verdict.REJECTED
    return Judgement(verdict, status, error_type, reason)


def judge_call(error: ApiError | TransportError) -> Judgement:
    """The verdict on a call that failed as a whole: RETRY, SPLIT or STOP."""
    if isinstance(error, ApiError):
        return _judge_api_error(error)
    if isinstance(error, TlsError) and any(cause in str(error.message) for cause in _UNTRUSTED):
        return Judgement(Verdict.STOP, 0, "TLS", str(error.message))
    # No reply, or one cut short. Whether it was applied is unknown; sending it again is harmless, by _id and version.
    return Judgement(Verdict.RETRY, 0, type(error).__name__, str(error.message))


def _judge_api_error(error: ApiError) -> Judgement:
    status = error.meta.status
    if isinstance(error, UnsupportedProductError):
        return Judgement(Verdict.STOP, status, "not Elasticsearch", str(error))
    error_type, reason = _cause(error.body)
    verdict = _BY_TYPE.get(error_type)
    if verdict not in (Verdict.RETRY, Verdict.STOP):  # the others are about rows
        verdict = _CALL_BY_STATUS.get(status)
    if verdict is None:
        verdict = Verdict.RETRY if status >= 500 else Verdict.STOP
    return Judgement(verdict, status, error_type, reason, _retry_after(error.meta.headers.get("retry-after")))


def _cause(body: Any) -> tuple[str, str]:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("type", "")), str(error.get("reason", ""))
    return "", str(error if error is not None else body or "")[:300]


def _retry_after(header: str | None) -> float:
    """Seconds, from a number or an HTTP date; 0 where there is none that can be read."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    if math.isnan(seconds):  # which no comparison bounds
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


class TemporaryRefusal(Exception):
    """Elasticsearch did not take something now and may later. Never leaves the sink: it is waited out."""

    def __init__(self, reason: str, retry_after_seconds: float = 0.0, progressed: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds
        self.progressed = progressed  # a part was taken: the next wait is a first one again


class NodeUnreachable(TemporaryRefusal):
    """No reply: refused, reset, timed out, or cut short."""


class NodeBusy(TemporaryRefusal):
    """429: a queue or the memory for indexing is full."""


class NodeUnavailable(TemporaryRefusal):
    """5xx: no master, shards that are not there yet, a proxy without a node behind it."""


class WritesBlocked(TemporaryRefusal):
    """A block on the index or the cluster, such as that of a full disk."""


class BreakerOpen(TemporaryRefusal):
    """Nothing was sent: the breaker is open for `retry_after_seconds` more."""


def refusal(judgement: Judgement) -> TemporaryRefusal:
    """The named exception of a RETRY."""
    assert judgement.verdict is Verdict.RETRY, f"{judgement} is no reason to try again"
    kind: type[TemporaryRefusal]
    if judgement.error_type == "cluster_block_exception" and judgement.status != 503:
        kind = WritesBlocked
    elif judgement.status == 429:
        kind = NodeBusy
    elif judgement.status == 0:
        kind = NodeUnreachable
    else:
        kind = NodeUnavailable
    return kind(str(judgement), judgement.retry_after_seconds)


def why_stop(judgement: Judgement, index: str) -> str:
    """The sentence of a STOP: what is wrong with the deployment, and what to do."""
    said = shortened(str(judgement))
    match judgement.error_type:
        case "strict_dynamic_mapping_exception":
            return f"the index behind {index!r} lacks a field of our rows ({said}): it was made for another version"
        case "index_not_found_exception":
            return f"the alias {index!r} is gone ({said}): somebody deleted it or its index; restart to make it again"
        case "index_closed_exception":
            return f"the index behind {index!r} is closed ({said}): open it and start again"
        case "TLS":
            return (
                f"the TLS connection to Elasticsearch failed ({said}): check elasticsearch.ca_file and "
                f"certificate_fingerprints"
            )
    if judgement.status in (401, 403) or judgement.error_type == "security_exception":
        return (
            f"Elasticsearch no longer lets us write to {index!r} ({said}): check the credentials and their privileges"
        )
    return f"Elasticsearch refuses to write to {index!r} ({said})"


def shortened(text: str) -> str:
    """Its two ends: a reason quotes values of any length, and says what is wrong with them before or after."""
    return text if len(text) <= 500 else f"{text[:300]} … {text[-200:]}"


@contextmanager
def errors_judged(explain: Callable[[Judgement], str]) -> Iterator[None]:
    """The client's errors as ours: TemporaryRefusal for what may pass, SinkError(explain(...)) for the rest."""
    try:
        yield
    except (ApiError, TransportError) as error:
        judgement = judge_call(error)
        if judgement.verdict is Verdict.RETRY:
            raise refusal(judgement) from None
        raise SinkError(explain(judgement)) from None


class Backoff(wait_base):
    """Exponential with jitter: half to the whole of 0.1 s, 0.2 s, ... up to the maximum; Retry-After if longer.

    Progress starts it anew. An open breaker is waited for as long as it says, and counts for nothing.
    """

    def __init__(self, max_backoff_seconds: float, uniform: Callable[[float, float], float]) -> None:
        self._max_backoff_seconds = max_backoff_seconds
        self._uniform = uniform
        self._num_fruitless = 0

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        assert isinstance(error, TemporaryRefusal), f"asked to wait after {error!r}"
        if isinstance(error, BreakerOpen):
            return error.retry_after_seconds + self._uniform(0.0, BASE_BACKOFF_SECONDS)
        self._num_fruitless = 0 if error.progressed else self._num_fruitless + 1
        exponent = min(max(self._num_fruitless - 1, 0), 32)  # 2^32 x 0.1 s is past any maximum
        whole = min(BASE_BACKOFF_SECONDS * 2**exponent, self._max_backoff_seconds)
        return max(error.retry_after_seconds, self._uniform(whole / 2, whole))


class _StopAtDeadline(stop_base):
    def __init__(self, clock: Callable[[], float], deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        return self._clock() >= self._deadline


def call_until_taken(
    attempt: Callable[[], T],
    *,
    stop: threading.Event,
    max_backoff_seconds: float,
    deadline: float | None = None,
    on_retry: Callable[[BaseException, float], None] | None = None,
    sleep: Callable[[float], object] | None = None,
    uniform: Callable[[float, float], float] = random.uniform,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Calls `attempt` until it raises no TemporaryRefusal. Every other exception passes at once.

    `stop` cuts a wait short and ends it, as does `deadline` (by `clock`): the last TemporaryRefusal is raised then.
    """

    last: list[TemporaryRefusal] = []

    def attempt_unless_stopped() -> T:
        if last and stop.is_set():  # during the wait
            raise last[-1]
        try:
            return attempt()
        except TemporaryRefusal as error:
            last[:] = [error]
            raise

    def before_sleep(state: tenacity.RetryCallState) -> None:
        if on_retry is not None and state.outcome is not None and state.next_action is not None:
            error = state.outcome.exception()
            assert error is not None
            on_retry(error, state.next_action.sleep)

    def cut_short(seconds: float) -> None:
        (sleep or stop.wait)(seconds)

    stops: stop_base = tenacity.stop_when_event_set(stop)
    if deadline is not None:
        stops = tenacity.stop_any(stops, _StopAtDeadline(clock, deadline))
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TemporaryRefusal),
        wait=Backoff(max_backoff_seconds, uniform),
        stop=stops,
        sleep=cut_short,
        before_sleep=before_sleep,
        reraise=True,
    )
    return retrying(attempt_unless_stopped)


def call_within(
    timeout_seconds: float,
    attempt: Callable[[], T],
    *,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """`call_until_taken` for what somebody waits for: at most so long, and a second between two tries at most."""
    return call_until_taken(
        attempt,
        stop=stop if stop is not None else threading.Event(),
        max_backoff_seconds=START_BACKOFF_SECONDS,
        deadline=clock() + timeout_seconds,
        clock=clock,
    )
