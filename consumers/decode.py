"""A message's bytes become a Document, or a RejectedDocument that says why in words. Knows the format, not the tasks.

The good path is one pass of pydantic over the JSON. Only a message that fails is looked at again, for its identity
and for a sentence that names the key.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from consumers.replay import JOB_HEADER, first_delivery
from schemas.document import (
    DEFAULT_JOB,
    DEFAULT_TASK,
    JOB_PATTERN,
    SCHEMA_VERSION,
    ChatMessage,
    Document,
    DocumentMessage,
    Identity,
    RawMessage,
    RejectedDocument,
    SamplingOverrides,
    SourcePosition,
)
from schemas.errors import DocumentError, Failure, FailureCode, Stage
from schemas.settings import TASK_NAME_PATTERN

MAX_DEPTH = 64  # of objects and arrays in each other
MAX_ID_CHARACTERS = 256
MAX_ENVELOPE_BYTES = 2**16  # of a record's key and headers: the row has the key, a dead letter both

# The model also reads seconds since 1970 in quotes; the format does not have those.
_RFC_3339_DEADLINE = re.compile(rb'"deadline"\s*:\s*"\d{4}-\d\d-\d\d[Tt ]')
# What model_validate_json calls, without its own fifth of the time.
_READ = DocumentMessage.__pydantic_validator__.validate_json
_JOB_NAME, _TASK_NAME = re.compile(JOB_PATTERN), re.compile(TASK_NAME_PATTERN)
_INT_RANGE = range(-(2**63), 2**63)
_NUM_ERRORS_NAMED = 3
_NUM_ERRORS_DESCRIBED = 50  # a message of nothing but unknown keys has 100,000, and each takes a search for its nearest
_Place: TypeAlias = tuple[Any, str | int]  # the place that holds it (None: the document), name or index there
_MODELS: dict[str, type[BaseModel]] = {"sampling": SamplingOverrides, "messages": ChatMessage}
_JSON_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}


def decode_document(raw: RawMessage, max_document_bytes: int) -> Document | RejectedDocument:
    """Never raises for what a message holds; every outcome has an identity that a row can be found by."""
    value = raw.value
    if value is None:
        return _reject(raw, None, FailureCode.BAD_MESSAGE, "the message has no value; a document is a JSON object")
    if len(value) > max_document_bytes:
        text = f"the message has {len(value):,} bytes; max_document_bytes is {max_document_bytes:,}"
        return _reject(raw, None, FailureCode.DOCUMENT_TOO_LARGE, text)
    num_bytes = raw.num_bytes
    if num_bytes - len(value) > MAX_ENVELOPE_BYTES:
        text = f"key and headers have {num_bytes - len(value):,} bytes; at most {MAX_ENVELOPE_BYTES:,} are taken"
        return _reject(raw, None, FailureCode.DOCUMENT_TOO_LARGE, text)
    try:
        message: DocumentMessage = _READ(value, strict=True)
        _check_beyond_the_model(message, value)
    except ValidationError as error:
        parsed = _parse_leniently(value)
        return _reject(raw, parsed, FailureCode.BAD_MESSAGE, _describe(error, value, parsed))
    except DocumentError as error:
        return _reject(raw, _parse_leniently(value), error.failure.code, error.failure.message)
    first, timestamp_ms, attempt = first_delivery(raw) if raw.headers else (raw.position, raw.timestamp_ms, 0)
    return Document(
        Identity(message.job, message.task, message.id or str(first)),
        raw.position,
        timestamp_ms,
        raw.key,
        message,
        num_bytes,
        attempt,
        first_position=first if first is not raw.position else None,
    )


def _check_beyond_the_model(message: DocumentMessage, value: bytes) -> None:
    """What JSON Schema cannot say, or pydantic lets through. Raises DocumentError."""
    if message.schema_version != SCHEMA_VERSION:
        raise _bad_message(_wrong_version(message.schema_version))
    if message.task != DEFAULT_TASK and not _TASK_NAME.fullmatch(message.task):
        text = f"no task can be called {_shown(message.task)}: a name has 1 to 64 letters, digits, '.', '_' and '-'"
        raise DocumentError(FailureCode.UNKNOWN_TASK, Stage.DECODE, text)
    if message.deadline is not None and not _RFC_3339_DEADLINE.search(value):
        raise _bad_message("'deadline' must be a date and time with zone, as in 2026-01-31T12:00:00Z")
    num_keys = len(message.model_fields_set)
    if message.fields is not None:
        num_keys += _check_tree("fields", message.fields)
    if message.metadata is not None:
        num_keys += _check_tree("metadata", message.metadata)
    if message.sampling is not None:
        given = {name: getattr(message.sampling, name) for name in message.sampling.model_fields_set}
        num_keys += _check_tree("sampling", given)
    if message.messages is not None:
        num_keys += 2 * len(message.messages)
    # Cheap upper bounds: text may hold the same bytes, so only then is the message read a second time.
    if (
        value.count(b":") > num_keys
        and value.count(b'":') + value.count(b'" :') > num_keys
        and (twice := _first_repeated_key(value)) is not None
    ):
        raise _bad_message(f"the key {_shown(twice)} is given twice in one object")


def _check_tree(name: str, tree: Mapping[str, Any]) -> int:
    """The number of keys in it. Raises DocumentError where Elasticsearch or the next reader would choke on it."""
    num_keys = 0
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for branch in level:
            if isinstance(branch, Mapping):
                num_keys += len(branch)
                leaves: Any = branch.values()
            else:
                leaves = branch
            for leaf in leaves:
                if isinstance(leaf, dict | list | tuple):
                    below.append(leaf)
                elif isinstance(leaf, float) and not math.isfinite(leaf):
                    raise _bad_message(f"'{name}' holds {leaf}, which is not a JSON number")
                elif isinstance(leaf, int) and leaf not in _INT_RANGE:
                    raise _bad_message(f"'{name}' holds an integer beyond 64 bits: {_shown(leaf)}")
        if not below:
            return num_keys
        level = below
    raise _bad_message(f"'{name}' is nested more than {MAX_DEPTH} levels deep")


def _reject(raw: RawMessage, parsed: object, code: FailureCode, text: str) -> RejectedDocument:
    keys = {"job": DEFAULT_JOB, **parsed} if isinstance(parsed, dict) else {}  # the default, as where it is accepted
    metadata = keys.get("metadata")
    first, timestamp_ms, attempt = first_delivery(raw)
    return RejectedDocument(
        identity=_readable_identity(raw, keys, first),
        position=raw.position,
        timestamp_ms=timestamp_ms,
        key=raw.key,
        failure=Failure(code, Stage.DECODE, text),
        num_bytes=raw.num_bytes,
        attempt=attempt,
        metadata=metadata if isinstance(metadata, dict) and _is_storable(metadata) else None,
        first_position=first if first is not raw.position else None,
    )


def _readable_identity(raw: RawMessage, keys: Mapping[str, Any], first: SourcePosition) -> Identity:
    job, task, document_id = keys.get("job"), keys.get("task"), keys.get("id")
    if not _matches(_JOB_NAME, job):
        job = next((v.decode("ascii", "replace") for k, v in raw.headers if k == JOB_HEADER and v is not None), None)
    if not isinstance(document_id, str) or not 1 <= len(document_id) <= MAX_ID_CHARACTERS or not _is_utf8(document_id):
        document_id = str(first)
    return Identity(
        job=job if isinstance(job, str) and _matches(_JOB_NAME, job) else DEFAULT_JOB,
        task=task if isinstance(task, str) and _matches(_TASK_NAME, task) else DEFAULT_TASK,
        document_id=document_id,
    )


def _describe(error: ValidationError, value: bytes, parsed: object) -> str:
    """One sentence for a person: the keys, what was expected of each, and what stood there."""
    if isinstance(parsed, dict):
        version = parsed.get("schema_version")
        if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION:
            return _wrong_version(version)
    errors = error.errors(include_url=False)
    if errors[0]["type"] == "json_invalid" and (why := _why_unreadable(value, parsed)) is not None:
        return why
    inner = {one["loc"][:depth] for one in errors for depth in range(1, len(one["loc"]))}
    errors = [one for one in errors if one["loc"] not in inner]  # a list is also called too short for a bad entry
    sentences = list(dict.fromkeys(_describe_one(one, parsed) for one in errors[:_NUM_ERRORS_DESCRIBED]))
    more = len(sentences) - _NUM_ERRORS_NAMED + len(errors[_NUM_ERRORS_DESCRIBED:])
    return "; ".join(sentences[:_NUM_ERRORS_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _why_unreadable(value: bytes, parsed: object) -> str | None:
    """What the JSON reader does not say: that the bytes are no text, or which key's text holds a lone surrogate."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {error.start} is 0x{value[error.start]:02x}"
    # Places, not their paths: those of a long list under a long key, written out, would fill the memory.
    below: list[tuple[_Place | None, object]] = [(None, parsed)]
    while below:
        place, branch = below.pop()
        if place is not None and isinstance(place[1], str) and not _is_utf8(place[1]):
            return f"the key {_shown(_path(place))} holds a lone surrogate, which is no character"
        if isinstance(branch, str) and not _is_utf8(branch):
            return f"'{_path(place)}' holds a lone surrogate, which is no character"
        named = branch.items() if isinstance(branch, dict) else enumerate(branch) if isinstance(branch, list) else ()
        below += [((place, name), inner) for name, inner in named]
    return None


def _path(place: _Place | None) -> str:
    names: list[str] = []
    while place is not None:
        names.append(str(place[1]))
        place = place[0]
    return ".".join(reversed(names))


def _describe_one(error: ErrorDetails, parsed: object) -> str:
    kind, context = error["type"], error.get("ctx", {})
    path = ".".join(str(part) for part in error["loc"])
    if kind == "json_invalid":
        return f"not JSON: {context.get('error', 'unreadable')}"
    if kind == "model_type" and not path:
        return f"a document is a JSON object, not {_json_name(parsed)}"
    if kind == "extra_forbidden":
        return f"unknown key {_shown(path)}{_nearest(error['loc'])}"
    if kind == "value_error":
        return f"'{path}': {context['error']}" if path else str(context["error"])
    if kind == "missing":
        return f"'{path}' is missing"
    if kind == "timezone_aware":
        return f"'{path}' needs a time zone, as in 2026-01-31T12:00:00Z, not {_shown(error['input'])}"
    if kind.startswith("datetime_"):
        return f"'{path}' must be a date and time with zone, as in 2026-01-31T12:00:00Z, not {_shown(error['input'])}"
    if kind == "too_short":
        return f"'{path}' must not be empty"
    if kind == "string_pattern_mismatch":
        return f"'{path}' must match {context['pattern']}, not {_shown(error['input'])}"
    expected = error["msg"].replace("Input should be", "must be").replace("should", "must")
    expected = expected.replace("valid dictionary", "JSON object").replace("valid tuple", "JSON array")
    return f"'{path}': {expected[0].lower()}{expected[1:]}, not {_shown(error['input'])}"


def _nearest(location: tuple[int | str, ...]) -> str:
    model = _MODELS.get(str(location[0]), DocumentMessage) if len(location) > 1 else DocumentMessage
    near = difflib.get_close_matches(str(location[-1]), list(model.model_fields), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(model.model_fields)}"


def _wrong_version(version: int) -> str:
    if version > SCHEMA_VERSION:
        return (
            f"schema_version {_shown(version)} is newer than {SCHEMA_VERSION}, the newest that this worker reads: "
            f"upgrade the worker, or send version {SCHEMA_VERSION}"
        )
    return f"there is no schema_version {_shown(version)}; the current one is {SCHEMA_VERSION}"


def _shown(value: object) -> str:
    """A value as JSON, short, on one line, and always encodable."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value) if isinstance(value, str) else type(value).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _json_name(value: object) -> str:
    return "null" if value is None else _JSON_NAMES.get(type(value), "an object")


def _bad_message(text: str) -> DocumentError:
    return DocumentError(FailureCode.BAD_MESSAGE, Stage.DECODE, text)


def _parse_leniently(value: bytes) -> object:
    """What the JSON holds where it can be read at all; None otherwise. Accepts what the model refuses."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _first_repeated_key(value: bytes) -> str | None:
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated.append(key)
            seen.add(key)

    try:
        json.loads(value, object_pairs_hook=note_repeated)
    except (ValueError, RecursionError):
        return None
    return repeated[0] if repeated else None


def _is_storable(metadata: Mapping[str, Any]) -> bool:
    try:
        _check_tree("metadata", metadata)
        json.dumps(metadata, ensure_ascii=False).encode()
    except (DocumentError, UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    # fullmatch, as `$` also matches before a line's end
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
