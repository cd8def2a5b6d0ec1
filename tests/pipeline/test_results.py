import base64
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.results import (
    ACTIONS,
    Action,
    AnswerReader,
    WorkerIdentity,
    build_answer,
    build_failure_row,
    build_rejection_row,
    key_text,
    packed_prompt,
    row_id,
    row_version,
)
from schemas.document import Document, DocumentMessage, Identity, RejectedDocument, ResultSource, SourcePosition, Usage
from schemas.errors import Failure, FailureCode, SettingsError, Stage
from schemas.inference import InferenceOutput, RequestTiming, TokenLogprobs
from schemas.task import Task

SCHEMA = {"type": "object", "properties": {"stars": {"type": "integer", "minimum": 1}}, "required": ["stars"]}
MADE_BY = WorkerIdentity(worker="worker-1", model="tiny")
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def document(**parts: object) -> Document:
    message = DocumentMessage(prompt="p", metadata={"a": 1})
    return Document(Identity("job", "task", "7"), SourcePosition("in", 2, 9, 4), 1000, b"key", message, 10)


def read(task: Task, output: InferenceOutput) -> tuple[object, ...]:
    answer = AnswerReader("t", task).read(output)
    return (answer.text, answer.parsed, answer.label, answer.failure.code if answer.failure else None)


def test_a_row_id_is_job_task_and_id_and_a_colon_in_the_id_is_no_matter() -> None:
    assert row_id(Identity("job", "task", "a:b/ü")) == "job:task:a:b/ü"


def test_512_bytes_are_a_plain_row_id_and_513_are_hashed() -> None:
    prefix = len("job:task:")
    assert row_id(Identity("job", "task", "é" * 251 + "a")) == "job:task:" + "é" * 251 + "a"
    assert len(row_id(Identity("job", "task", "a" * (512 - prefix)))) == 512
    hashed = row_id(Identity("job", "task", "a" * (513 - prefix)))
    assert hashed.startswith("job:task:sha256-")
    assert len(hashed) == prefix + len("sha256-") + 64


@pytest.mark.parametrize("document_id", ["a\x00b", "tab\t", "\x7f", "\x85", "\ud800"])
def test_an_id_with_a_control_character_or_a_surrogate_is_hashed(document_id: str) -> None:
    assert row_id(Identity("job", "task", document_id)).startswith("job:task:sha256-")


def test_a_task_that_no_setting_could_name_cannot_take_another_documents_row_id() -> None:
    assert row_id(Identity("job", "a:b", "c")).startswith("::sha256-")
    assert row_id(Identity("job", "a:b", "c")) != row_id(Identity("job", "a", "b:c"))


@given(st.text(max_size=600), st.text(max_size=600))
def test_every_row_id_is_accepted_by_elasticsearch_and_two_documents_never_share_one(first: str, second: str) -> None:
    ids = [row_id(Identity("job", "task", each)) for each in (first, second)]
    assert all(0 < len(each.encode()) <= 512 for each in ids)
    assert (ids[0] == ids[1]) == (first == second)


def test_a_version_is_timestamp_then_offset_then_attempt() -> None:
    assert row_version(1, 0, 0) == 2**21
    assert row_version(0, 1, 0) == 2**4
    assert row_version(0, 2**17 + 3, 5) == 3 * 2**4 + 5
    assert row_version(2**42 - 1, 2**17 - 1, 15) == 2**63 - 1


@pytest.mark.parametrize("timestamp_ms", [-1, 2**42, 2**60])
def test_a_timestamp_out_of_range_counts_as_0(timestamp_ms: int) -> None:
    assert row_version(timestamp_ms, 7, 1) == row_version(0, 7, 1)


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**63), st.integers(0, 100))
def test_every_version_fits_a_positive_long(timestamp_ms: int, offset: int, attempt: int) -> None:
    assert 0 <= row_version(timestamp_ms, offset, attempt) < 2**63


def test_a_key_is_utf8_or_base64_and_can_be_told_apart() -> None:
    assert key_text(None) is None
    assert key_text(b"") == ""
    assert key_text("ü".encode()) == "ü"
    assert key_text(b"\xff\x00") == "base64:/wA="
    assert key_text(b"base64:/wA=") == "base64:" + base64.b64encode(b"base64:/wA=").decode()


def test_a_label_is_read_by_its_number() -> None:
    task = Task(kind="classify", labels=("good", "bad"))
    assert read(task, InferenceOutput(1, text=" bad", label_id=1)) == (" bad", None, "bad", None)


def test_no_label_is_invalid_output_with_the_text_and_the_labels_named() -> None:
    answer = AnswerReader("t", Task(kind="classify", labels=("good", "bad"))).read(InferenceOutput(1, text="hm"))
    assert answer.text == "hm"
    assert answer.failure == Failure(
        FailureCode.INVALID_OUTPUT, Stage.RESULT, "no label was spelled; expected one of: good, bad"
    )


@pytest.mark.parametrize(
    "text", ['{"stars":3}', ' {"stars": 3}\n', '```json\n{"stars":3}\n```', '\n```\n{"stars":3}```\n']
)
def test_json_is_read_bare_or_out_of_one_fenced_block(text: str) -> None:
    assert read(Task(output_schema=SCHEMA), InferenceOutput(1, text=text)) == (text, {"stars": 3}, None, None)


@pytest.mark.parametrize(
    "text", ["", "three", '{"stars":', 'Here: ```json\n{"stars":3}\n```', '{"stars":0}', "{}", "[]"]
)
def test_output_that_is_not_json_or_breaks_the_schema_is_invalid_with_its_text(text: str) -> None:
    answer = read(Task(output_schema=SCHEMA), InferenceOutput(1, text=text))
    assert answer == (text, None, None, FailureCode.INVALID_OUTPUT)


def test_the_message_says_where_the_schema_is_broken_and_that_the_output_was_cut_off() -> None:
    reader = AnswerReader("t", Task(output_schema=SCHEMA))
    broken = reader.read(InferenceOutput(1, text='{"stars":0}')).failure
    assert broken is not None
    assert "$.stars: 0 is less than the minimum of 1" in broken.message
    cut = reader.read(InferenceOutput(1, text='{"stars":', finish_reason="length")).failure
    assert cut is not None
    assert cut.message.endswith("it was cut off at max_tokens")


def test_deep_output_and_deep_schemas_fail_the_document_and_not_the_worker() -> None:
    recursive = {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}
    for depth in (300, 5000):
        text = "[" * depth + "]" * depth
        assert read(Task(output_schema=recursive), InferenceOutput(1, text=text))[3] is FailureCode.INVALID_OUTPUT


def test_a_fenced_answer_that_ends_in_a_loop_of_blanks_is_read_in_one_pass() -> None:
    text = "```json\n{}" + " " * 2_000_000
    assert read(Task(output_schema=SCHEMA), InferenceOutput(1, text=text))[3] is FailureCode.INVALID_OUTPUT
    assert read(Task(output_schema={}), InferenceOutput(1, text=text + "```"))[1:] == ({}, None, None)


def test_a_schema_that_is_none_is_refused_at_start_by_the_tasks_name() -> None:
    with pytest.raises(SettingsError, match=r"tasks\.reviews\.output_schema is not a JSON Schema, at \$\.type"):
        AnswerReader("reviews", Task(output_schema={"type": "objekt"}))


@pytest.mark.parametrize(
    "reference",
    [
        {"properties": {"stars": {"$ref": "#/$defs/missing"}}},
        {"items": {"$dynamicRef": "#missing"}},
        {"$defs": {"a": {"$ref": "http://127.0.0.1:1/schema.json"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#/definitions/missing"}}},
        {"$ref": "#/elsewhere", "elsewhere": {"items": {"$ref": "#/missing"}}},
    ],
)
def test_a_schema_that_refers_to_what_is_not_in_it_is_refused_at_start(reference: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"tasks\.reviews\.output_schema refers to '.*', which is not in it"):
        AnswerReader("reviews", Task(output_schema=reference))


def test_references_inside_a_schema_and_to_the_standards_own_are_followed() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "tree"}, "c": {"$ref": "#word"}},
        "$defs": {
            "a": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
            "tree": {"$id": "tree", "type": "array", "items": {"$ref": "#"}},
            "word": {"$anchor": "word", "type": "string"},
        },
    }
    reader = AnswerReader("reviews", Task(output_schema=schema))
    assert reader.read(InferenceOutput(1, text='{"a": {"type": "array"}, "b": [[]], "c": ""}')).failure is None
    for text in ('{"a": {"type": 1}}', '{"b": [1]}', '{"c": 1}'):
        assert reader.read(InferenceOutput(1, text=text)).failure is not None


def test_an_answered_row_holds_all_that_is_known() -> None:
    output = InferenceOutput(
        5, (1, 2, 3), "yes", "stop", stop_reason=42, num_prompt_tokens=8, num_cached_tokens=4,
        timing=RequestTiming(1.0, 2.0, 3.0), logprobs=(TokenLogprobs(1, -0.5, (1, 2), (-0.5, -1.5)),),
    )  # fmt: skip
    answer = AnswerReader("task", Task()).read(output)
    row = build_answer(
        document(), answer, output, MADE_BY, kind="generate", attempts=2, answered_at=NOW, wait_ms=0.5, total_ms=9.0
    )
    assert (row.status, row.text, row.failure, row.attempts) == ("answered", "yes", None, 2)
    assert (row.finish_reason, row.stop_reason) == ("stop", "42")
    assert row.usage == Usage(8, 4, 3)
    assert row.source == ResultSource("in", 2, 9, 1000, "key")
    assert row.logprobs == [
        {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.5}]}
    ]
    assert (row.timing.wait_ms, row.timing.queue_ms, row.timing.decode_ms, row.timing.total_ms) == (0.5, 1.0, 3.0, 9.0)
    assert row.metadata == {"a": 1}


def test_invalid_output_makes_a_failed_row_that_keeps_the_text() -> None:
    output = InferenceOutput(5, text="no json", finish_reason="stop")
    answer = AnswerReader("task", Task(output_schema=SCHEMA)).read(output)
    row = build_answer(document(), answer, output, MADE_BY, kind="generate", attempts=1, answered_at=NOW)
    assert (row.status, row.text, row.parsed) == ("failed", "no json", None)
    assert row.failure is not None
    assert row.failure.code is FailureCode.INVALID_OUTPUT


def test_an_unreadable_message_has_a_row_too() -> None:
    failure = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "not JSON")
    rejected = RejectedDocument(
        Identity("default", "default", "in/0/3"), SourcePosition("in", 0, 3), -1, None, failure, 9
    )
    row = build_failure_row(rejected, failure, MADE_BY, kind="generate", attempts=0, answered_at=NOW)
    assert (row.id, row.status, row.failure, row.source.timestamp) == ("in/0/3", "failed", failure, None)


def test_the_row_after_a_rejection_holds_nothing_that_elasticsearch_may_have_choked_on() -> None:
    output = InferenceOutput(5, text="text")
    answer = AnswerReader("task", Task()).read(output)
    row = build_answer(document(), answer, output, MADE_BY, kind="generate", attempts=1, answered_at=NOW)
    failure = Failure(FailureCode.SINK_REJECTED, Stage.SINK, "too deep")
    after = build_rejection_row(row, failure)
    assert (after.id, after.status, after.failure) == ("7", "failed", failure)
    assert (after.text, after.parsed, after.metadata, after.receipt, after.logprobs) == (None,) * 5


def test_a_receipt_holds_the_prompt_as_little_endian_uint32() -> None:
    assert base64.b64decode(packed_prompt([1, 2**31 - 1])) == b"\x01\x00\x00\x00\xff\xff\xff\x7f"


def test_every_failure_has_its_action() -> None:
    assert set(ACTIONS) == set(FailureCode)
    assert ACTIONS[FailureCode.ENGINE_LOST] is Action.FAIL
    assert ACTIONS[FailureCode.INVALID_OUTPUT] is Action.RETRY_ONCE
    assert ACTIONS[FailureCode.SINK_REJECTED] is Action.FAIL
