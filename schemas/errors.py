"""Everything that can go wrong, as one tree of exceptions, and a document's failure as data.

    PagemillError
    ├── SettingsError      the settings cannot be used; nothing was started
    ├── ModelError         the model folder or file cannot be served
    ├── EngineError        the engine process did not start, died, or broke its protocol
    ├── SourceError        Kafka: unreachable, refused, a topic or range that is gone
    ├── SinkError          Elasticsearch: unreachable, refused, a mapping that disagrees
    ├── FailureLimitError  too many documents fail: it is the deployment that is wrong, not they
    ├── AccountError       a document was lost or counted twice: a bug of ours
    ├── DemoError          the demo cannot run on this machine: an extra, a port, the network or the disk
    └── DocumentError      one document cannot be answered; becomes a Failure when it leaves its stage

Only DocumentError is about a document. Every other one stops the worker, and its text says what to do.
Standard library only: this module crosses to the engine process.
"""

from dataclasses import dataclass
from enum import StrEnum


class PagemillError(Exception):
    """The root: `except PagemillError` is "one of ours, with a sentence for a person"."""


class SettingsError(PagemillError):
    """The settings cannot be used; nothing was started."""


class ModelError(PagemillError):
    """The model folder or file cannot be served."""


class EngineError(PagemillError):
    """The engine process did not start, died, or broke its protocol."""


class SourceError(PagemillError):
    """Kafka is unreachable, refuses us, or lost what we were reading."""


class SinkError(PagemillError):
    """Elasticsearch is unreachable, refuses us, or holds an index that disagrees with ours."""


class FailureLimitError(PagemillError):
    """Too many documents fail: a wrong deployment, which must not turn a backlog into dead letters."""


class AccountError(PagemillError):
    """The account of documents does not balance: one was lost or counted twice."""


class DemoError(PagemillError):
    """The demo cannot run on this machine: an extra that is missing, a taken port, no network, a full disk."""


class FailureCode(StrEnum):
    """Why a document has no answer. The names are part of the contract: they stand in rows and dead letters."""

    BAD_MESSAGE = "BAD_MESSAGE"
    UNKNOWN_TASK = "UNKNOWN_TASK"
    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    DOCUMENT_TOO_LARGE = "DOCUMENT_TOO_LARGE"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    INVALID_OUTPUT = "INVALID_OUTPUT"
    NUMERIC_ERROR = "NUMERIC_ERROR"
    ENGINE_LOST = "ENGINE_LOST"
    SINK_REJECTED = "SINK_REJECTED"
    CANCELLED = "CANCELLED"


class Stage(StrEnum):
    """Where on its way a document failed."""

    DECODE = "decode"
    PROMPT = "prompt"
    ENGINE = "engine"
    RESULT = "result"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Failure:
    """A document's failure as data: a cause from the table, where it happened, and a sentence for a person."""

    code: FailureCode
    stage: Stage
    message: str


class DocumentError(PagemillError):
    """One document cannot be answered. The stage that raises it catches it at its edge and passes `failure` on."""

    def __init__(self, code: FailureCode, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code, stage, message)
