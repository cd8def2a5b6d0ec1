"""A document on its way in, and its row on the way out. The formats here are the contract with users.

Tens of thousands a second pass, so what is made once a document is made cheaply: a named tuple takes half the time of a
frozen dataclass with slots, and orjson writes a dataclass without slots in a sixth of the time of one with them.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from schemas.errors import Failure
from schemas.inference import FinishReason, Kind

SCHEMA_VERSION = 1
JOB_PATTERN = r"^[a-z0-9._-]{1,64}$"
DEFAULT_JOB = "default"
DEFAULT_TASK = "default"
MAX_TURNS = 4096  # of a conversation
MAX_PROMPT_TOKEN_IDS = 2**20  # longer than any model's context; memory is what it spares


class SourcePosition(NamedTuple):
    """Where a document came from. `epoch` counts assignments: work started under an earlier one is fenced off."""

    topic: str
    partition: int
    offset: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @property
    def assignment(self) -> "Assignment":
        return Assignment(self.topic, self.partition, self.epoch)


class Assignment(NamedTuple):
    """One epoch of one partition."""

    topic: str
    partition: int
    epoch: int


class RawMessage(NamedTuple):
    """A record as the broker gave it. `timestamp_ms` is -1 where the record has none."""

    position: SourcePosition
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def num_bytes(self) -> int:
        num_bytes = len(self.key or b"") + len(self.value or b"")
        return num_bytes + sum([len(k) + len(v or b"") for k, v in self.headers]) if self.headers else num_bytes


class SamplingOverrides(BaseModel):
    """Overrides of the task's sampling (SamplingParams says what each means); what is absent stays as the task has it.

    Ranges are checked where the overrides are applied, so that one place knows them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: one sentence for half a million wrong entries, and not their number of errors.
TokenIds: TypeAlias = Annotated[tuple[TokenId, ...], Field(max_length=MAX_PROMPT_TOKEN_IDS, fail_fast=True)]


class DocumentMessage(BaseModel):
    """One JSON object a Kafka message. Unknown keys are refused, so that a misspelled one is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Pagemill document")

    schema_version: int = Field(SCHEMA_VERSION, description=f"{SCHEMA_VERSION}; a newer one is refused by name")
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="unique within job and task; absent: topic/partition/offset"
    )
    job: str = Field(DEFAULT_JOB, pattern=JOB_PATTERN, description="a job's name; results are found by it")
    task: str = Field(DEFAULT_TASK, description="a task of the worker's settings")
    fields: dict[str, Any] | None = Field(None, description="what the task's template sees")
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None, description="a conversation"
    )
    prompt: str | None = Field(None, description="text as it is, without task template or chat template")
    prompt_token_ids: TokenIds | None = Field(None, description="token ids as they are")
    sampling: SamplingOverrides | None = Field(None, description="overrides of the task's sampling")
    priority: int = Field(0, ge=-10, le=10, description="higher goes first")
    deadline: AwareDatetime | None = Field(None, description="RFC 3339 with zone; not started by then: failed")
    metadata: dict[str, Any] | None = Field(None, description="stored and returned, not indexed")

    @model_validator(mode="after")
    def _one_content(self) -> "DocumentMessage":
        contents = (self.fields, self.messages, self.prompt, self.prompt_token_ids)
        if contents.count(None) != len(contents) - 1:
            names = ("fields", "messages", "prompt", "prompt_token_ids")
            given = [name for name, content in zip(names, contents, strict=True) if content is not None]
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"exactly one of fields, messages, prompt, prompt_token_ids is needed; {what} given")
        return self


class Identity(NamedTuple):
    """What a row is found by. Unreadable parts have their defaults, so that every message has an identity."""

    job: str
    task: str
    document_id: str


class Suspicion(NamedTuple):
    """Workers died while a document was in flight, as far as the commits tell."""

    num_crashes: int  # in a row
    group: range = range(0)  # offsets of its partition, which run with nothing else in the engine; empty: not yet so
    losses_alone: int = 0  # the last so many of those workers had this document in their engine and no other


class Document(NamedTuple):
    """A decoded message with its place and its record's timestamp and key."""

    identity: Identity
    position: SourcePosition
    timestamp_ms: int
    key: bytes | None
    message: DocumentMessage
    num_bytes: int  # of the raw message
    attempt: int = 0  # 0 for the first; a replay carries one more
    suspicion: Suspicion | None = None
    first_position: SourcePosition | None = None  # of a replay: where it was delivered first, and timestamp_ms is when

    @property
    def source(self) -> SourcePosition:
        """What its row calls its source, and its version is made from."""
        return self.first_position or self.position


class RejectedDocument(NamedTuple):
    """A message that cannot become a Document, with whatever identity could be read from it."""

    identity: Identity
    position: SourcePosition
    timestamp_ms: int
    key: bytes | None
    failure: Failure
    num_bytes: int
    attempt: int = 0
    metadata: dict[str, Any] | None = None
    first_position: SourcePosition | None = None

    @property
    def source(self) -> SourcePosition:
        """As a Document's."""
        return self.first_position or self.position


@dataclass
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Timing:
    """Milliseconds: in the batcher's window, in the engine's queue, to the first token, to the last, in all."""

    wait_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0


@dataclass
class ResultSource:
    topic: str
    partition: int
    offset: int
    timestamp: int | None  # the record's, ms since the epoch
    key: str | None  # UTF-8 where it is that, else base64 behind "base64:"


@dataclass
class Receipt:
    """What a rerun of the document needs to know. `prompt_token_ids` is base64 of little-endian uint32."""

    weights: str
    tokenizer: str
    template: str
    sampling: dict[str, Any]
    seed: int
    engine_version: str
    prompt_token_ids: str | None = None


@dataclass
class DocumentResult:
    """One row of the results index: every document has exactly one, answered or failed."""

    job: str
    id: str
    task: str
    kind: Kind
    model: str
    status: Literal["answered", "failed"]
    source: ResultSource
    worker: str
    attempts: int
    answered_at: datetime
    failure: Failure | None = None
    text: str | None = None
    parsed: Any = None
    label: str | None = None
    label_scores: dict[str, float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    truncated: bool = False
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    metadata: dict[str, Any] | None = None
    receipt: Receipt | None = None
