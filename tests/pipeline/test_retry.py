import threading

import pytest
from elastic_transport import ConnectionError as NodeConnectionError
from elastic_transport import ConnectionTimeout, SerializationError, TlsError, TransportError
from elasticsearch import ApiError

from pipeline.retry import (
    UNKNOWN_FINGERPRINT,
    BreakerOpen,
    Judgement,
    NodeBusy,
    NodeUnavailable,
    NodeUnreachable,
    TemporaryRefusal,
    Verdict,
    WritesBlocked,
    call_until_taken,
    judge_call,
    judge_row,
    refusal,
)
from tests.fake_elasticsearch import api_error
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("status", "error_type", "verdict"),
    [
        (200, "", Verdict.STORED),
        (201, "", Verdict.STORED),
        (409, "version_conflict_engine_exception", Verdict.CONFLICT),
        (429, "es_rejected_execution_exception", Verdict.RETRY),
        (429, "circuit_breaking_exception", Verdict.RETRY),
        (429, "cluster_block_exception", Verdict.RETRY),
        (403, "cluster_block_exception", Verdict.RETRY),
        (408, "", Verdict.RETRY),
        (500, "", Verdict.RETRY),
        (503, "unavailable_shards_exception", Verdict.RETRY),
        (504, "", Verdict.RETRY),
        (400, "document_parsing_exception", Verdict.MISFIT),
        (400, "mapper_parsing_exception", Verdict.MISFIT),
        (400, "illegal_argument_exception", Verdict.MISFIT),
        (400, "", Verdict.REJECTED),
        (413, "", Verdict.REJECTED),
        (400, "strict_dynamic_mapping_exception", Verdict.STOP),
        (400, "index_closed_exception", Verdict.STOP),
        (401, "security_exception", Verdict.STOP),
        (403, "security_exception", Verdict.STOP),
        (404, "index_not_found_exception", Verdict.STOP),
    ],
)
def test_a_rows_verdict_follows_the_table(status: int, error_type: str, verdict: Verdict) -> None:
    assert judge_row(status, error_type).verdict is verdict


def test_an_alias_without_its_index_stops_and_is_no_rows_fault() -> None:
    reason = "no write index is defined for alias [pagemill-results]"
    assert judge_row(400, "illegal_argument_exception", reason).verdict is Verdict.STOP


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (api_error(429, "es_rejected_execution_exception"), Verdict.RETRY),
        (api_error(429), Verdict.RETRY),
        (api_error(403, "cluster_block_exception"), Verdict.RETRY),
        (api_error(502), Verdict.RETRY),
        (api_error(503, "cluster_block_exception"), Verdict.RETRY),
        (api_error(400, "action_request_validation_exception"), Verdict.SPLIT),
        (api_error(400, "illegal_argument_exception"), Verdict.SPLIT),
        (api_error(413), Verdict.SPLIT),
        (api_error(401, "security_exception"), Verdict.STOP),
        (api_error(403, "security_exception"), Verdict.STOP),
        (api_error(404, "index_not_found_exception"), Verdict.STOP),
        (api_error(406), Verdict.STOP),
        (NodeConnectionError("refused"), Verdict.RETRY),
        (ConnectionTimeout("timed out"), Verdict.RETRY),
        (SerializationError("half a reply"), Verdict.RETRY),
        (TlsError("[SSL: CERTIFICATE_VERIFY_FAILED] not trusted"), Verdict.STOP),
        (TlsError(f"{UNKNOWN_FINGERPRINT} abcd"), Verdict.STOP),
        (TlsError("EOF occurred in violation of protocol"), Verdict.RETRY),
    ],
)
def test_a_calls_verdict_follows_the_table(error: ApiError | TransportError, verdict: Verdict) -> None:
    assert judge_call(error).verdict is verdict


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (api_error(429), NodeBusy),
        (api_error(503), NodeUnavailable),
        (api_error(503, "cluster_block_exception"), NodeUnavailable),
        (api_error(403, "cluster_block_exception"), WritesBlocked),
        (api_error(429, "cluster_block_exception"), WritesBlocked),
        (NodeConnectionError("refused"), NodeUnreachable),
    ],
)
def test_what_is_waited_out_has_a_name(error: ApiError | TransportError, name: type[TemporaryRefusal]) -> None:
    assert type(refusal(judge_call(error))) is name


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", 0.0),
        ("99999", 300.0),
        ("1e999", 300.0),
        ("inf", 300.0),
        ("-inf", 0.0),
        ("nan", 0.0),
        ("Fri, 01 Jan 9999 00:00:00 GMT", 300.0),
        (f"Fri, 01 Jan {10**20} 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_a_date_and_has_a_limit(header: str, seconds: float) -> None:
    assert judge_call(api_error(429, retry_after=header)).retry_after_seconds == seconds


class Refusing:
    """Raises each of the errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "taken"


def waits_of(attempt: Refusing, max_backoff_seconds: float = 30.0) -> list[float]:
    waits: list[float] = []
    answer = call_until_taken(
        attempt,
        stop=threading.Event(),
        max_backoff_seconds=max_backoff_seconds,
        sleep=waits.append,
        uniform=lambda low, high: high,
    )
    assert answer == "taken"
    return waits


def test_backoff_doubles_up_to_the_maximum() -> None:
    attempt = Refusing(*[NodeBusy("busy") for _ in range(6)])
    assert waits_of(attempt, max_backoff_seconds=1.0) == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_takes_between_half_and_all_of_it() -> None:
    asked: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    waits: list[float] = []
    call_until_taken(
        Refusing(NodeBusy("busy"), NodeBusy("busy")),
        stop=threading.Event(), max_backoff_seconds=30.0, sleep=waits.append, uniform=lowest,
    )  # fmt: skip
    assert asked == [(0.05, 0.1), (0.1, 0.2)]
    assert waits == [0.05, 0.1]


def test_progress_starts_the_backoff_anew() -> None:
    busy = [NodeBusy("busy"), NodeBusy("busy"), NodeBusy("busy", progressed=True), NodeBusy("busy"), NodeBusy("busy")]
    assert waits_of(Refusing(*busy)) == [0.1, 0.2, 0.1, 0.1, 0.2]


def test_a_longer_retry_after_is_honoured_and_a_shorter_one_does_not_shorten_the_backoff() -> None:
    assert waits_of(Refusing(NodeBusy("busy", 5.0), NodeBusy("busy", 0.01))) == [5.0, 0.2]


def test_an_open_breaker_is_waited_for_as_long_as_it_says_and_does_not_lengthen_the_backoff() -> None:
    assert waits_of(Refusing(NodeBusy("busy"), BreakerOpen("open", 4.0), NodeBusy("busy"))) == [0.1, 4.1, 0.2]


def test_another_exception_passes_at_once() -> None:
    with pytest.raises(KeyError):
        waits_of(Refusing(KeyError("a bug")))


def test_a_stop_ends_the_wait_with_the_last_refusal() -> None:
    stop = threading.Event()
    with pytest.raises(NodeBusy, match="first"):
        call_until_taken(
            Refusing(NodeBusy("first"), NodeBusy("second"), NodeBusy("third")),
            stop=stop, max_backoff_seconds=30.0, sleep=lambda _: stop.set(),
        )  # fmt: skip


def test_a_deadline_ends_the_attempts_with_the_last_refusal() -> None:
    clock = FakeClock()
    with pytest.raises(NodeUnreachable):
        call_until_taken(
            Refusing(*[NodeUnreachable("nobody") for _ in range(100)]),
            stop=threading.Event(), max_backoff_seconds=1.0, deadline=10.0, sleep=clock.advance, clock=clock,
        )  # fmt: skip
    assert 10.0 <= clock.now <= 11.0


def test_a_refusal_is_made_of_nothing_else_than_a_retry() -> None:
    with pytest.raises(AssertionError):
        refusal(Judgement(Verdict.STOP, 401))
