"""What each message becomes: the table of bad input, identities, and random bytes."""

import json
import string
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.decode import MAX_DEPTH, decode_document
from schemas.document import Document, Identity, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import FailureCode, Stage

MAX_BYTES = 10_000
POSITION = SourcePosition("documents", 3, 17, epoch=2)


def raw_message(value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()) -> RawMessage:
    return RawMessage(POSITION, timestamp_ms=1_700_000_000_000, key=b"key", value=value, headers=headers)


def decode(value: object, headers: tuple[tuple[str, bytes], ...] = ()) -> Document | RejectedDocument:
    encoded = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    return decode_document(raw_message(encoded, headers), MAX_BYTES)


def rejection(value: object, headers: tuple[tuple[str, bytes], ...] = ()) -> RejectedDocument:
    decoded = decode(value, headers)
    assert isinstance(decoded, RejectedDocument), decoded
    assert decoded.failure.stage is Stage.DECODE
    return decoded


def text_of(value: object) -> str:
    rejected = rejection(value)
    assert rejected.failure.code is FailureCode.BAD_MESSAGE
    return rejected.failure.message


def test_a_full_message_becomes_a_document_with_key_timestamp_and_position() -> None:
    decoded = decode(
        {
            "schema_version": 1,
            "id": "invoice-7",
            "job": "2026-q1",
            "task": "Summary.v2",
            "fields": {"text": "Grüße \0 ja", "rows": [1, 2.5, None, True]},
            "sampling": {"temperature": 1, "stop": ["\n"], "seed": 5},
            "priority": -10,
            "deadline": "2026-01-31T12:00:00Z",
            "metadata": {"a": {"b": []}},
        }
    )
    assert isinstance(decoded, Document)
    assert decoded.identity == Identity("2026-q1", "Summary.v2", "invoice-7")
    assert (decoded.position, decoded.key, decoded.timestamp_ms) == (POSITION, b"key", 1_700_000_000_000)
    assert decoded.message.deadline == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert decoded.message.fields == {"text": "Grüße \0 ja", "rows": [1, 2.5, None, True]}
    assert decoded.attempt == 0


def test_a_message_without_id_is_called_by_its_position_under_the_defaults() -> None:
    decoded = decode({"prompt": ""})
    assert isinstance(decoded, Document)
    assert decoded.identity == Identity("default", "default", "documents/3/17")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"feilds": {}}, "unknown key \"feilds\"; did you mean 'fields'?"),
        ({"prompt": "a", "sampling": {"temprature": 1}},
         "unknown key \"sampling.temprature\"; did you mean 'temperature'?"),
        ({"prompt": "a", "zzz": 1}, 'unknown key "zzz"; known are schema_version, id, job, task, fields, messages, '
         "prompt, prompt_token_ids, sampling, priority, deadline, metadata"),
        ({"schema_version": 2, "prompt": "a", "new": 1},
         "schema_version 2 is newer than 1, the newest that this worker reads: upgrade the worker, or send version 1"),
        ({"schema_version": 0, "prompt": "a"}, "there is no schema_version 0; the current one is 1"),
        ({"prompt": "a", "priority": "5"}, "'priority': must be a valid integer, not \"5\""),
        ({"prompt": "a", "priority": 11}, "'priority': must be less than or equal to 10, not 11"),
        ({"prompt": "a", "job": "Q1"}, "'job' must match ^[a-z0-9._-]{1,64}$, not \"Q1\""),
        ({"prompt": "a", "deadline": "2026-01-31T12:00:00"},
         "'deadline' needs a time zone, as in 2026-01-31T12:00:00Z, not \"2026-01-31T12:00:00\""),
        ({"prompt": "a", "deadline": "99999"},
         "'deadline' must be a date and time with zone, as in 2026-01-31T12:00:00Z"),
        ({"prompt": "a", "deadline": "yesterday"},
         "'deadline' must be a date and time with zone, as in 2026-01-31T12:00:00Z, not \"yesterday\""),
        ({"messages": []}, "'messages' must not be empty"),
        ({"prompt": "a", "fields": {}},
         "exactly one of fields, messages, prompt, prompt_token_ids is needed; fields and prompt given"),
        ({"id": "a"}, "exactly one of fields, messages, prompt, prompt_token_ids is needed; none of them given"),
        ({"messages": [{"role": "bot", "content": "x"}]},
         "'messages.0.role': must be 'system', 'user' or 'assistant', not \"bot\""),
        ({"prompt_token_ids": [1, -1]}, "'prompt_token_ids.1': must be greater than or equal to 0, not -1"),
        ({"prompt_token_ids": [2**31]}, "'prompt_token_ids.0': must be less than 2147483648, not 2147483648"),
        ([1], "a document is a JSON object, not an array"),
        (b"7", "a document is a JSON object, not an integer"),
        (b"null", "a document is a JSON object, not null"),
        (b"", "not JSON: EOF while parsing a value at line 1 column 0"),
        (b"\xff\xfe", "not UTF-8: byte 0 is 0xff"),
        (b'{"prompt": "a"} x', "not JSON: trailing characters at line 1 column 17"),
        (b'{"prompt": "\\ud800"}', "'prompt' holds a lone surrogate, which is no character"),
        (b'{"fields": {"\\ud800": "x"}}', 'the key "fields.\\ud800" holds a lone surrogate, which is no character'),
        (b'{"prompt": "a", "prompt": "b"}', 'the key "prompt" is given twice in one object'),
        (b'{"fields": {"n": {"a": 1, "a" : 2}}}', 'the key "a" is given twice in one object'),
        (b'{"fields": {"a": NaN}}', "'fields' holds nan, which is not a JSON number"),
        (b'{"metadata": {"a": [1e999]}, "prompt": ""}', "'metadata' holds inf, which is not a JSON number"),
        ({"prompt": "", "metadata": {"a": 2**63}}, "'metadata' holds an integer beyond 64 bits: 9223372036854775808"),
        ({"prompt": "", "sampling": {"max_tokens": 10**30}},
         "'sampling' holds an integer beyond 64 bits: 1000000000000000000000000000000"),
        (None, "the message has no value; a document is a JSON object"),
    ],
)  # fmt: skip
def test_bad_messages_say_which_key_and_why(value: object, expected: str) -> None:
    assert text_of(value) == expected


def test_several_faults_are_named_together_and_counted_beyond_three() -> None:
    faults = {"prompt": 1, "id": 2, "job": 3, "task": 4, "priority": None}
    assert text_of(faults) == (
        "'id': must be a valid string, not 2; 'job': must be a valid string, not 3; "
        "'task': must be a valid string, not 4; and 2 more"
    )


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 150, 1000])
def test_nesting_is_legal_up_to_the_limit_and_named_beyond_it(depth: int) -> None:
    tree = b"[" * (depth - 1) + b"]" * (depth - 1)  # the object itself is the first level
    decoded = decode(b'{"prompt": "a", "metadata": {"a": %b}}' % tree)
    if depth == MAX_DEPTH:
        assert isinstance(decoded, Document)
    elif depth <= 150:
        assert isinstance(decoded, RejectedDocument)
        assert decoded.failure.message == f"'metadata' is nested more than {MAX_DEPTH} levels deep"
        assert decoded.metadata is None
    else:
        assert isinstance(decoded, RejectedDocument)
        assert "recursion limit" in decoded.failure.message


def test_a_text_that_looks_like_keys_is_not_taken_for_a_repeated_key() -> None:
    decoded = decode({"prompt": '{"prompt": "prompt": "id":', "metadata": {"prompt": "x", "id": "y"}})
    assert isinstance(decoded, Document)


def test_what_is_too_large_is_not_decoded_and_is_found_by_its_header_and_position() -> None:
    value = json.dumps({"id": "a", "job": "x", "prompt": "p" * MAX_BYTES}).encode()
    rejected = rejection(value, headers=(("pagemill-job", b"from-header"),))
    assert rejected.failure.code is FailureCode.DOCUMENT_TOO_LARGE
    assert rejected.failure.message == f"the message has {len(value):,} bytes; max_document_bytes is 10,000"
    assert rejected.identity == Identity("from-header", "default", "documents/3/17")
    assert isinstance(decode(json.dumps({"prompt": "p" * (MAX_BYTES - 14)}).encode()), Document)


def test_a_rejected_message_keeps_whatever_identity_can_be_read() -> None:
    whole = rejection({"id": "a", "job": "j", "task": "t", "metadata": {"m": 1}, "oops": 1})
    assert (whole.identity, whole.metadata) == (Identity("j", "t", "a"), {"m": 1})
    wrong = rejection({"id": 7, "job": "NO", "task": "a:b", "prompt": "x"}, headers=(("pagemill-job", b"h"),))
    assert wrong.identity == Identity("h", "default", "documents/3/17")
    newline = rejection({"id": "", "job": "a\n", "task": "t\n", "prompt": "x"}, headers=(("pagemill-job", b"\xff"),))
    assert newline.identity == Identity("default", "default", "documents/3/17")
    surrogate = rejection(b'{"id": "\\ud800", "job": "j", "prompt": 5, "metadata": {"a": "\\udfff"}}')
    assert (surrogate.identity, surrogate.metadata) == (Identity("j", "default", "documents/3/17"), None)


def test_a_message_that_names_no_job_is_of_the_default_one_accepted_or_not_whatever_its_header_says() -> None:
    header = (("pagemill-job", b"h"),)
    assert decode({"id": "a", "prompt": "x"}, headers=header).identity == Identity("default", "default", "a")
    assert rejection({"id": "a", "oops": 1}, headers=header).identity == Identity("default", "default", "a")
    assert rejection(b"[]", headers=header).identity.job == rejection(b"{", headers=header).identity.job == "h"


def test_a_task_that_no_settings_could_have_is_an_unknown_task_under_the_default_name() -> None:
    rejected = rejection({"id": "a", "task": "a:b", "prompt": "x"})
    assert rejected.failure.code is FailureCode.UNKNOWN_TASK
    assert rejected.failure.message.startswith('no task can be called "a:b"')
    assert rejected.identity.task == "default"


@pytest.mark.parametrize(
    ("header", "attempt"),
    [(b"0", 0), (b"3", 3), (b"15", 15), (b"16", 15), (b"-1", 0), (b"", 0), (b"x", 0), (b"999", 0)],
)
def test_a_replay_says_its_attempt_in_a_header(header: bytes, attempt: int) -> None:
    headers = (("other", b"9"), ("pagemill-attempt", header))
    assert decode({"prompt": ""}, headers).attempt == attempt
    assert rejection({"nothing": 1}, headers).attempt == attempt


def assert_is_a_valid_outcome(value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()) -> None:
    raw = raw_message(value, headers)
    decoded = decode_document(raw, MAX_BYTES)
    job, task, document_id = decoded.identity.job, decoded.identity.task, decoded.identity.document_id
    assert 1 <= len(job) <= 64
    assert set(job) <= set(string.ascii_lowercase + string.digits + "._-")
    assert 1 <= len(task) <= 64
    assert set(task) <= set(string.ascii_letters + string.digits + "._-")
    assert 1 <= len(document_id) <= 256
    document_id.encode()
    assert (decoded.position, decoded.num_bytes) == (POSITION, raw.num_bytes)
    assert 0 <= decoded.attempt <= 15
    if isinstance(decoded, RejectedDocument):
        decoded.failure.message.encode()
        assert decoded.failure.message
        json.dumps(decoded.metadata, allow_nan=False).encode()


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known_keys = st.sampled_from(
    ["schema_version", "id", "job", "task", "fields", "messages", "prompt", "prompt_token_ids", "sampling",
     "priority", "deadline", "metadata", "feilds", ""]
)  # fmt: skip
header_lists = st.lists(
    st.tuples(
        st.sampled_from(
            ["pagemill-" + name for name in ("job", "attempt", "topic", "partition", "offset", "timestamp")]
        ),
        st.binary(max_size=70) | st.integers(-(2**64), 2**64).map(lambda number: str(number).encode()),
    )
    | st.tuples(st.text(max_size=8), st.binary(max_size=8)),
    max_size=7,
).map(tuple)


@given(st.binary(max_size=200) | st.none(), header_lists)
def test_any_bytes_have_exactly_one_outcome(value: bytes | None, headers: tuple[tuple[str, bytes], ...]) -> None:
    assert_is_a_valid_outcome(value, headers)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(known_keys, json_values, max_size=6), header_lists, st.booleans())
def test_any_object_with_any_values_has_exactly_one_outcome(
    message: dict[str, Any], headers: tuple[tuple[str, bytes], ...], is_ascii: bool
) -> None:
    assert_is_a_valid_outcome(json.dumps(message, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"), headers)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(json_values)
def test_any_json_has_exactly_one_outcome(value: object) -> None:
    assert_is_a_valid_outcome(json.dumps(value).encode())


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_good_message_with_one_byte_changed_has_exactly_one_outcome(data: st.DataObject) -> None:
    value = bytearray(
        b'{"id":"a-1","job":"j","task":"t","messages":[{"role":"user","content":"hi"}],'
        b'"sampling":{"stop":["x"],"seed":3},"priority":1,"deadline":"2026-01-31T12:00:00Z","metadata":{"k":[1.5]}}'
    )
    value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    assert_is_a_valid_outcome(bytes(value))


@given(st.text(max_size=300), st.text(max_size=70), st.text(max_size=70))
def test_any_names_have_a_valid_identity(document_id: str, job: str, task: str) -> None:
    assert_is_a_valid_outcome(json.dumps({"id": document_id, "job": job, "task": task, "prompt": "x"}).encode())


def test_what_is_wrong_with_a_message_takes_memory_of_its_own_size() -> None:
    key, entries = "k" * 5000, ",".join(["1"] * 100_000)  # the entries' paths, written out, are 500 MB
    value = f'{{"metadata": {{"a": [0, "\\ud800"]}}, "fields": {{"{key}": [{entries}]}}}}'.encode()
    tracemalloc.start()
    try:
        decoded = decode_document(RawMessage(SourcePosition("t", 0, 0), 0, None, value), 2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(decoded, RejectedDocument)
    assert decoded.failure.message == "'metadata.a.1' holds a lone surrogate, which is no character"
    assert peak < 100 * 2**20


def test_of_very_many_mistakes_the_first_are_named_and_all_are_counted() -> None:
    keys = ",".join(f'"a{number}":0' for number in range(2000))
    decoded = decode_document(
        RawMessage(SourcePosition("t", 0, 0), 0, None, f'{{"prompt":"x",{keys}}}'.encode()), 2**20
    )
    assert isinstance(decoded, RejectedDocument)
    assert decoded.failure.message.startswith('unknown key "a0"')
    assert decoded.failure.message.endswith("; and 1997 more")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 4097}, "'messages': tuple must have at most 4096 items"),
        ({"prompt_token_ids": [1] * (2**20 + 1)}, "'prompt_token_ids': tuple must have at most 1048576 items"),
        ({"prompt_token_ids": [-1] * 1000}, "'prompt_token_ids.0': must be greater than or equal to 0, not -1"),
    ],
)
def test_longer_lists_than_anybody_needs_are_refused(value: object, expected: str) -> None:
    raw = RawMessage(POSITION, 1000, None, json.dumps(value).encode())
    decoded = decode_document(raw, 2**24)
    assert isinstance(decoded, RejectedDocument)
    assert decoded.failure.message.startswith(expected)


def test_key_and_headers_have_a_limit_of_their_own() -> None:
    value = b'{"id": "a", "prompt": "x"}'
    most = RawMessage(POSITION, 1000, b"k" * 2**15, value, (("h", b"v" * (2**15 - 1)),))
    assert isinstance(decode_document(most, MAX_BYTES), Document)
    decoded = decode_document(RawMessage(POSITION, 1000, b"k" * 2**16, value, (("h", b""),)), MAX_BYTES)
    assert isinstance(decoded, RejectedDocument)
    assert (decoded.failure.code, decoded.failure.message) == (
        FailureCode.DOCUMENT_TOO_LARGE, "key and headers have 65,537 bytes; at most 65,536 are taken",
    )  # fmt: skip
