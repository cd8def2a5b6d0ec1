"""Notices that it is the deployment that fails and not the documents, before a backlog has become dead letters.

Every document passes up to three gates, and is counted there as passed or failed: it becomes a prompt, or not; its
output can be used, or not; Elasticsearch takes its row, or not. Gates are counted apart, since a document without a
prompt fails long before the ones that came with it are answered.
"""

from collections import Counter
from enum import StrEnum

from schemas.errors import Failure, FailureCode, FailureLimitError, Stage

# Not the deployment's fault, whichever way many documents end so.
NOT_COUNTED = frozenset({FailureCode.DEADLINE_PASSED, FailureCode.CANCELLED})


class Gate(StrEnum):
    """Where documents pass or fail; the value is what is counted there."""

    PROMPT = "documents that arrived"
    ANSWER = "answers"
    ROW = "rows"


_GATES = {
    Stage.DECODE: Gate.PROMPT,
    Stage.PROMPT: Gate.PROMPT,
    Stage.ENGINE: Gate.ANSWER,
    Stage.RESULT: Gate.ANSWER,
    Stage.SINK: Gate.ROW,
}


class FailureLimits:
    """`exceeded` is None until one gate has had too many failures: in a row, or in a window.

    A window is so many documents one after another; then the next one begins. A limit of `max_consecutive` 0 or of
    `max_ratio` 1 is none. One thread's.
    """

    def __init__(self, max_ratio: float = 1.0, window_documents: int = 1000, max_consecutive: int = 0) -> None:
        self.exceeded: FailureLimitError | None = None
        self._max_ratio = max_ratio
        self._window_documents = window_documents
        self._max_consecutive = max_consecutive
        self._counts = {gate: _Counts() for gate in Gate}

    def passed(self, gate: Gate, num_documents: int = 1) -> None:
        """So many documents, one after another."""
        counts = self._counts[gate]
        if counts.in_a_row:
            counts.in_a_row = 0
            counts.causes_in_a_row.clear()
        counts.num_seen += num_documents
        if counts.num_seen >= self._window_documents:
            counts.begin_window()

    def failed(self, failure: Failure) -> None:
        """One document, at the gate of the failure's stage."""
        gate = _GATES[failure.stage]
        if failure.code in NOT_COUNTED or self.exceeded is not None:
            return
        counts = self._counts[gate]
        counts.num_seen += 1
        counts.num_failed += 1
        counts.in_a_row += 1
        counts.causes[failure.code] += 1
        counts.causes_in_a_row[failure.code] += 1
        counts.last[failure.code] = failure.message
        if self._max_consecutive and counts.in_a_row >= self._max_consecutive:
            said = f"the last {counts.in_a_row} {gate.value} failed, all in a row (worker.max_consecutive_failures)"
            self.exceeded = _error(said, counts.causes_in_a_row, counts.last)
        elif counts.num_failed > self._max_ratio * self._window_documents:
            said = (
                f"{counts.num_failed} of the last {counts.num_seen} {gate.value} failed, more than the "
                f"{self._max_ratio:.0%} of {self._window_documents} that may (worker.max_failed_ratio)"
            )
            self.exceeded = _error(said, counts.causes, counts.last)
        elif counts.num_seen >= self._window_documents:
            counts.begin_window()


class _Counts:
    """Of one gate."""

    __slots__ = ("causes", "causes_in_a_row", "in_a_row", "last", "num_failed", "num_seen")

    def __init__(self) -> None:
        self.num_seen = 0  # in the window
        self.num_failed = 0
        self.in_a_row = 0
        self.causes: Counter[FailureCode] = Counter()  # of the window
        self.causes_in_a_row: Counter[FailureCode] = Counter()
        self.last: dict[FailureCode, str] = {}  # -> what the last one said

    def begin_window(self) -> None:
        self.num_seen = self.num_failed = 0
        self.causes.clear()


_WHAT_TO_DO = {
    FailureCode.BAD_MESSAGE: "is this the right topic, and does whoever fills it write what the tasks' templates need?",
    FailureCode.UNKNOWN_TASK: "does this worker have the settings of the topic's jobs?",
    FailureCode.PROMPT_TOO_LONG: "is this the right model, and model.max_model_len right? overflow may be the answer",
    FailureCode.DOCUMENT_TOO_LARGE: "is kafka.max_document_bytes what the topic's documents need?",
    FailureCode.INVALID_OUTPUT: "are the task's labels or its output_schema what this model can answer?",
    FailureCode.NUMERIC_ERROR: "are the model's weights whole, and model.dtype one that they can be computed in?",
    FailureCode.ENGINE_LOST: "what does the engine's log say of its end?",
    FailureCode.SINK_REJECTED: "is elasticsearch.index the index that this version made?",
}


def _error(said: str, causes: Counter[FailureCode], last: dict[FailureCode, str]) -> FailureLimitError:
    code, number = causes.most_common(1)[0]
    hint = _WHAT_TO_DO.get(code, "what do these documents have in common?")
    example = last[code] if len(last[code]) <= 300 else last[code][:300] + "…"
    return FailureLimitError(
        f"{said}, {number} of them with {code.value}: {example}. This looks like a wrong deployment: {hint} What "
        "failed is in the dead-letter topic; once the cause is gone, "
        f"`pagemill dlq replay --code {code.value}` sends it again. Where the documents are to blame, raise the limit"
    )
