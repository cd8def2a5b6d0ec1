"""What becomes of an output: the row's id and version, the answer read out of the text, the row itself.

Pure functions. Where a row goes, and how, is the sink's; what happens to a failed document is the flow's, by ACTIONS.
"""

import base64
import binascii
import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema
import orjson
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]
from referencing import Registry, Resource
from referencing.exceptions import NoSuchResource, Unresolvable
from referencing.jsonschema import DRAFT202012

from schemas.document import (
    JOB_PATTERN,
    Document,
    DocumentResult,
    Identity,
    Receipt,
    RejectedDocument,
    ResultSource,
    Timing,
    Usage,
)
from schemas.errors import Failure, FailureCode, SettingsError, Stage
from schemas.inference import InferenceOutput, Kind, TokenLogprobs
from schemas.settings import TASK_NAME_PATTERN
from schemas.task import Task

MAX_ROW_ID_BYTES = 512  # Elasticsearch refuses a longer _id, and with it the whole bulk
MAX_ATTEMPT = 15
MAX_QUOTED_CHARACTERS = 200

_TIMESTAMP_LIMIT = 2**42
_OFFSET_MODULUS = 2**17
_ATTEMPT_BITS = 4
_TIMESTAMP_SHIFT = 21  # 17 bits of offset, 4 of attempt

_JOB = re.compile(JOB_PATTERN)
_TASK = re.compile(TASK_NAME_PATTERN)
_UNSAFE_IN_ID = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_FENCE = "```"
_OPENING_FENCE = re.compile(r"\s*```(?:json|JSON)?[ \t]*\r?\n")


class Action(Enum):
    """What the flow does about a failed document."""

    FAIL = "fail"  # dead letter, then a failed row
    RETRY_ONCE = "retry_once"  # once more with another seed where sampling is random; else FAIL


ACTIONS: dict[FailureCode, Action] = {
    FailureCode.BAD_MESSAGE: Action.FAIL,
    FailureCode.UNKNOWN_TASK: Action.FAIL,
    FailureCode.EMPTY_PROMPT: Action.FAIL,
    FailureCode.PROMPT_TOO_LONG: Action.FAIL,
    FailureCode.DOCUMENT_TOO_LARGE: Action.FAIL,
    FailureCode.DEADLINE_PASSED: Action.FAIL,
    FailureCode.INVALID_OUTPUT: Action.RETRY_ONCE,
    FailureCode.NUMERIC_ERROR: Action.FAIL,
    FailureCode.ENGINE_LOST: Action.FAIL,  # it has run again, in company and alone, before it is called this
    FailureCode.SINK_REJECTED: Action.FAIL,
    FailureCode.CANCELLED: Action.FAIL,
}


def row_id(identity: Identity) -> str:
    """The row's `_id`, the same for every delivery of a document.

    `{job}:{task}:{id}`; where that passes 512 bytes, or the id holds a control character or a surrogate,
    `{job}:{task}:sha256-{hex of the id}`. A job or task that no setting could name (an unreadable message has any)
    would make the colons ambiguous: then `::sha256-{hex of all three}`.
    """
    job, task, document_id = identity
    if not _are_nameable(job, task):
        return f"::sha256-{_sha256(chr(0).join((job, task, document_id)))}"
    plain = f"{job}:{task}:{document_id}"
    if plain.isascii() and plain.isprintable() and len(plain) <= MAX_ROW_ID_BYTES:
        return plain  # as nearly all are
    if _UNSAFE_IN_ID.search(document_id) or len(plain.encode()) > MAX_ROW_ID_BYTES:
        return f"{job}:{task}:sha256-{_sha256(document_id)}"
    return plain


@lru_cache(maxsize=256)  # there are few, and every row asks
def _are_nameable(job: str, task: str) -> bool:
    return _JOB.fullmatch(job) is not None and _TASK.fullmatch(task) is not None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def row_version(timestamp_ms: int, offset: int, attempt: int) -> int:
    """The row's external version, at most 2^63 - 1: a later record of the same document wins, an older one never does.

    Bits, high to low: 42 of the record's timestamp (0 where it lies outside), 17 of the offset, 4 of the attempt.
    """
    timestamp = timestamp_ms if 0 <= timestamp_ms < _TIMESTAMP_LIMIT else 0
    if not 0 <= attempt <= MAX_ATTEMPT:
        attempt = min(max(attempt, 0), MAX_ATTEMPT)
    return timestamp << _TIMESTAMP_SHIFT | offset % _OFFSET_MODULUS << _ATTEMPT_BITS | attempt


def version_of(document: Document | RejectedDocument) -> int:
    """The version of the document's row, whichever delivery or replay of it this is."""
    return row_version(document.timestamp_ms, document.source.offset, document.attempt)


def key_text(key: bytes | None) -> str | None:
    """A record's key as a row holds it: UTF-8 where it is that, else base64 behind `base64:`. None stays None."""
    if key is None:
        return None
    try:
        text = key.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None or text.startswith("base64:"):  # or reading it back would be ambiguous
        return "base64:" + base64.b64encode(key).decode("ascii")
    return text


class Answer(NamedTuple):
    """What an output says: `failure` is set where the task cannot use it, and `text` is kept either way."""

    text: str | None = None
    parsed: Any = None
    label: str | None = None
    failure: Failure | None = None


class AnswerReader:
    """Reads outputs as one task wants them. Its JSON Schema is checked and compiled once, here.

    Raises SettingsError where the schema is not one, or refers to what is not in it.
    """

    def __init__(self, task_name: str, task: Task) -> None:
        self.kind: Kind = task.kind
        self._labels = task.labels
        self._validator: Validator | None = None
        if task.output_schema is not None:
            self._validator = _compile_schema(task_name, task.output_schema)

    def read(self, output: InferenceOutput) -> Answer:
        """The label, the parsed JSON, or the text; a Failure where there is none of what the task asks for."""
        if output.failure is not None:
            return Answer(text=output.text or None, failure=output.failure)
        if self.kind == "classify":
            return self._read_label(output)
        if self._validator is not None:
            return self._read_json(output, self._validator)
        return Answer(output.text)

    def _read_label(self, output: InferenceOutput) -> Answer:
        if output.label_id is None or not 0 <= output.label_id < len(self._labels):
            wanted = ", ".join(self._labels)
            return _invalid(output, f"no label was spelled; expected one of: {wanted}")
        return Answer(text=output.text, label=self._labels[output.label_id])

    def _read_json(self, output: InferenceOutput, validator: Validator) -> Answer:
        cut = "; it was cut off at max_tokens" if output.finish_reason == "length" else ""
        try:
            parsed = orjson.loads(unfenced(output.text))
        except orjson.JSONDecodeError as error:
            return _invalid(output, f"the output is not JSON ({error}){cut}")
        try:
            error_found = next(iter(validator.iter_errors(parsed)), None)
        except RecursionError:
            return _invalid(output, "the output is nested too deeply to be checked against the task's output_schema")
        if error_found is not None:
            where = error_found.json_path
            said = _quoted(error_found.message)
            return _invalid(output, f"the output breaks the task's output_schema at {where}: {said}{cut}")
        return Answer(text=output.text, parsed=parsed)


def _compile_schema(task_name: str, schema: dict[str, Any]) -> Validator:
    validator_class = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator_class.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SettingsError(
            f"tasks.{task_name}.output_schema is not a JSON Schema, at {error.json_path}: {_quoted(error.message)}"
        ) from error
    try:
        registry = _registry_of(schema)
    except (Unresolvable, NoSuchResource) as error:
        raise SettingsError(
            f"tasks.{task_name}.output_schema refers to {error.ref!r}, which is not in it; nothing is fetched, so "
            "write it under its $defs"
        ) from None
    compiled: Validator = validator_class(schema, registry=registry, format_checker=validator_class.FORMAT_CHECKER)
    return compiled


def _registry_of(schema: dict[str, Any]) -> Registry[Any]:
    """What the schema's references are looked up in: itself and the standard's own schemas, nothing on a network.

    Raises Unresolvable or NoSuchResource where one leads nowhere; a validator would only notice at an output.
    """
    root: Resource[Any] = Resource.from_contents(schema, default_specification=DRAFT202012)
    registry: Registry[Any] = SPECIFICATIONS.with_resource(root.id() or "", root)
    pending = [(root, registry.resolver_with_root(root))]
    seen: set[int] = set()
    while pending:
        resource, resolver = pending.pop()
        if id(resource.contents) in seen:
            continue
        seen.add(id(resource.contents))
        if isinstance(resource.contents, dict):
            for keyword in ("$ref", "$dynamicRef"):
                if isinstance(reference := resource.contents.get(keyword), str):
                    found = resolver.lookup(reference)
                    pending.append((DRAFT202012.create_resource(found.contents), found.resolver))
        pending += [(inner, resolver.in_subresource(inner)) for inner in resource.subresources()]
    return registry


def _invalid(output: InferenceOutput, message: str) -> Answer:
    return Answer(text=output.text, failure=Failure(FailureCode.INVALID_OUTPUT, Stage.RESULT, message))


def _quoted(text: str) -> str:
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"


def unfenced(text: str) -> str:
    """The JSON of an output: models like to wrap it in one ```json block; a text that is exactly that is unwrapped."""
    # No one pattern for all of it: over an answer that ends in a loop of blanks that takes the square of its length.
    opening = _OPENING_FENCE.match(text)
    if opening is None:
        return text
    inside = text[opening.end() :].rstrip()
    if not inside.endswith(_FENCE):
        return text
    return inside.removesuffix(_FENCE).rstrip(" \t").removesuffix("\n")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What every row of one worker says about where it was made."""

    worker: str
    model: str


def build_answer(
    document: Document,
    answer: Answer,
    output: InferenceOutput,
    made_by: WorkerIdentity,
    kind: Kind,
    attempts: int,
    answered_at: datetime,
    wait_ms: float = 0.0,
    total_ms: float = 0.0,
    truncated: bool = False,
    receipt: Receipt | None = None,
) -> DocumentResult:
    """The row of an output. `answer.failure` set: a failed row that keeps the text, so that a person can see it."""
    job, task, document_id = document.identity
    queue_ms, prefill_ms, decode_ms = output.timing
    # In the order of the fields: to match so many names to theirs takes longer than all else about the object.
    return DocumentResult(
        job,
        document_id,
        task,
        kind,
        made_by.model,
        "answered" if answer.failure is None else "failed",
        _result_source(document),
        made_by.worker,
        attempts,
        answered_at,
        answer.failure,
        answer.text,
        answer.parsed,
        answer.label,
        None,  # label_scores
        output.finish_reason,
        None if output.stop_reason is None else str(output.stop_reason),
        None if output.logprobs is None else [_logprobs_entry(token) for token in output.logprobs],
        truncated,
        Usage(output.num_prompt_tokens, output.num_cached_tokens, len(output.token_ids)),
        Timing(wait_ms, queue_ms, prefill_ms, decode_ms, total_ms),
        document.message.metadata,
        receipt,
    )


def build_failure_row(
    document: Document | RejectedDocument,
    failure: Failure,
    made_by: WorkerIdentity,
    *,
    kind: Kind,
    attempts: int,
    answered_at: datetime,
) -> DocumentResult:
    """The row of a document that has no output. `kind` is the task's, "generate" where there is no such task."""
    return DocumentResult(
        job=document.identity.job,
        id=document.identity.document_id,
        task=document.identity.task,
        kind=kind,
        model=made_by.model,
        status="failed",
        source=_result_source(document),
        worker=made_by.worker,
        attempts=attempts,
        answered_at=answered_at,
        failure=failure,
        metadata=document.message.metadata if isinstance(document, Document) else document.metadata,
    )


def build_rejection_row(row: DocumentResult, failure: Failure) -> DocumentResult:
    """The failed row instead of one that Elasticsearch rejected, without the free parts that it may have choked on."""
    return replace(
        row, status="failed", failure=failure, text=None, parsed=None, label=None, logprobs=None, metadata=None,
        stop_reason=None, receipt=None,
    )  # fmt: skip


def packed_prompt(token_ids: Sequence[int]) -> str:
    """A receipt's `prompt_token_ids`: base64 of little-endian uint32."""
    packed = array("i", token_ids)  # the same bytes as unsigned: ids are below 2^31
    if sys.byteorder == "big":
        packed.byteswap()
    return binascii.b2a_base64(packed, newline=False).decode("ascii")


def _result_source(document: Document | RejectedDocument) -> ResultSource:
    position = document.source
    timestamp = document.timestamp_ms if document.timestamp_ms >= 0 else None
    return ResultSource(position.topic, position.partition, position.offset, timestamp, key_text(document.key))


def _logprobs_entry(token: TokenLogprobs) -> dict[str, Any]:
    top = zip(token.top_token_ids, token.top_logprobs, strict=True)
    return {
        "token_id": token.token_id,
        "logprob": token.logprob,
        "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in top],
    }
