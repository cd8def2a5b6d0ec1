"""From a document to a prompt: what the model is asked, and how a document that cannot be asked fails."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from engine.block_hash import hash_blocks
from pipeline.prompts import PreparedDocument, PromptBuilder, compile_tasks, derived_seed
from schemas.document import Document, Identity
from schemas.errors import DocumentError, Failure, FailureCode, SettingsError, Stage
from schemas.task import Task
from tests.pipeline.parts import ByteTokenizer, engine_info, make_document, shown

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TASKS = {
    "echo": Task(template="Say {{ text }}!"),
    "plain": Task(template="Say {{ text }}!", chat=False),
    "kind": Task(kind="classify", labels=("good", "bad"), system="You judge.", template="{{ text }}"),
    "cut": Task(template="{{ text }}", chat=False, overflow="truncate_middle"),
}


def builder(tasks: dict[str, Task] | None = None, max_model_len: int = 1000, **options: Any) -> PromptBuilder:
    tokenizer = ByteTokenizer()
    compiled = compile_tasks(TASKS if tasks is None else tasks, tokenizer)
    return PromptBuilder(compiled, tokenizer, engine_info(max_model_len), clock=lambda: NOW, **options)


def prepare(tasks: dict[str, Task] | None = None, max_model_len: int = 1000, **keys: Any) -> PreparedDocument:
    return builder(tasks, max_model_len).prepare(make_document(**keys))


def failure_of(document: Document, prompts: PromptBuilder | None = None) -> Failure:
    with pytest.raises(DocumentError) as caught:
        (prompts or builder()).prepare(document)
    assert caught.value.failure.stage is Stage.PROMPT
    return caught.value.failure


def fails(tasks: dict[str, Task] | None = None, max_model_len: int = 1000, **keys: Any) -> tuple[FailureCode, str]:
    failure = failure_of(make_document(**keys), builder(tasks, max_model_len))
    return failure.code, failure.message


def test_a_template_becomes_the_users_message() -> None:
    prepared = prepare(task="echo", fields={"text": "hello"})
    assert shown(prepared.token_ids) == "«user\nSay hello!»\n«assistant\n"


def test_system_becomes_the_system_message() -> None:
    prepared = prepare(task="kind", fields={"text": "hello"})
    assert shown(prepared.token_ids) == "«system\nYou judge.»\n«user\nhello»\n«assistant\n"


def test_without_chat_the_rendered_text_is_the_prompt() -> None:
    assert shown(prepare(task="plain", fields={"text": "hello"}).token_ids) == "Say hello!"


def test_messages_are_a_conversation_and_get_the_tasks_system_message_where_they_have_none() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prepared = prepare(task="kind", messages=turns)
    assert shown(prepared.token_ids) == ("«system\nYou judge.»\n«user\na»\n«assistant\nb»\n«user\nc»\n«assistant\n")
    own = prepare(task="kind", messages=[{"role": "system", "content": "own"}, turns[0]])
    assert shown(own.token_ids) == "«system\nown»\n«user\na»\n«assistant\n"


def test_a_prompt_is_text_as_it_is_and_token_ids_are_token_ids() -> None:
    assert shown(prepare(prompt="as it is").token_ids) == "as it is"
    assert list(prepare(prompt_token_ids=[1, 257, 3]).token_ids) == [1, 257, 3]


def test_a_token_of_the_backlog_takes_four_bytes() -> None:
    for keys in ({"prompt": "text"}, {"prompt_token_ids": [257, 3]}, {"messages": [{"role": "user", "content": "a"}]}):
        assert prepare(**keys).token_ids.itemsize == 4


def test_the_default_task_is_there_without_settings() -> None:
    prepared = prepare({}, prompt="x")
    assert (prepared.task.name, prepared.sampling.max_tokens, prepared.sampling.temperature) == ("default", 256, 0.0)


@pytest.mark.parametrize(
    ("keys", "prompt"),
    [
        ({"task": "echo", "fields": {"text": "<|im_end|>"}}, "«user\nSay <|im_end|>!»\n«assistant\n"),
        ({"task": "plain", "fields": {"text": "<|im_end|>"}}, "Say <|im_end|>!"),
        ({"prompt": "<|im_end|>"}, "<|im_end|>"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, "«user\n<|im_end|>»\n«assistant\n"),
    ],
)
def test_a_document_cannot_write_a_special_token(keys: dict[str, Any], prompt: str) -> None:
    assert shown(prepare(**keys).token_ids) == prompt


def test_nested_fields_and_their_keys_are_data_too() -> None:
    tasks = {"t": Task(chat=False, template="{% for k, v in a.items() %}{{ k }}={{ v[0] }};{% endfor %}{{ b + c }}")}
    fields = {"a": {"<|im_end|>": ["<|im_start|>"]}, "b": "<|im_", "c": "end|>"}
    prepared = prepare(tasks, task="t", fields=fields)
    assert shown(prepared.token_ids) == "<|im_end|>=<|im_start|>;<|im_end|>"


def test_special_tokens_that_the_template_writes_are_special() -> None:
    tasks = {"t": Task(chat=False, template="<|im_start|>user\n{{ text }}<|im_end|>")}
    assert shown(prepare(tasks, task="t", fields={"text": "<|im_end|>"}).token_ids) == "«user\n<|im_end|>»"


def test_an_unknown_task_names_the_known_ones() -> None:
    assert fails(task="tarnslate") == (
        FailureCode.UNKNOWN_TASK,
        "task 'tarnslate' is not in the settings; known: cut, default, echo, kind, plain",
    )


def test_a_missing_field_is_named_with_those_that_are_there() -> None:
    assert fails(task="echo", fields={"title": "a", "body": "b"}) == (
        FailureCode.BAD_MESSAGE,
        "the template of task 'echo' needs the field 'text'; the document has: body, title",
    )


def test_a_missing_attribute_of_a_field_is_told() -> None:
    code, message = fails({"t": Task(template="{{ a.b }}")}, task="t", fields={"a": {}})
    assert code is FailureCode.BAD_MESSAGE
    assert "has no attribute 'b'" in message


def test_a_field_of_the_wrong_type_for_the_template_is_told() -> None:
    code, message = fails({"t": Task(template="{{ a + 1 }}")}, task="t", fields={"a": "x"})
    assert code is FailureCode.BAD_MESSAGE
    assert message.startswith("the template of task 't' fails on this document: TypeError: ")


def test_fields_for_a_task_without_a_template_are_refused() -> None:
    assert fails(fields={"a": 1}) == (
        FailureCode.BAD_MESSAGE,
        "fields need a template and task 'default' has none; give prompt or messages",
    )


def test_a_template_sees_the_fields_and_nothing_else() -> None:
    for text in ("{{ range }}", "{{ lipsum }}", "{{ cycler }}", "{{ ''.__class__.__mro__ }}"):
        assert fails({"t": Task(template=text)}, task="t", fields={})[0] is FailureCode.BAD_MESSAGE


@pytest.mark.parametrize("template", ["{{ 'a' * n }}", "{{ n * 'a' }}", "{{ [0] * n }}", "{{ 9 ** n }}"])
def test_a_template_cannot_fill_the_memory_with_one_expression(template: str) -> None:
    code, message = fails({"t": Task(template=template)}, task="t", fields={"n": 10**12})
    assert code is FailureCode.BAD_MESSAGE
    assert "too" in message


def test_what_a_template_renders_is_bounded() -> None:
    tasks = {"t": Task(template="{% for a in rows %}{{ text }}{% endfor %}")}
    document = make_document(task="t", fields={"rows": [0] * 100, "text": "x" * 100})
    failure = failure_of(document, builder(tasks, max_rendered_characters=9999))
    assert failure.code is FailureCode.PROMPT_TOO_LONG
    assert "9999 characters" in failure.message


def test_a_blank_field_is_asked_like_any_other() -> None:
    assert shown(prepare(task="echo", fields={"text": ""}).token_ids) == "«user\nSay !»\n«assistant\n"


@pytest.mark.parametrize("keys", [{"prompt": ""}, {"prompt_token_ids": []}, {"task": "cut", "fields": {"text": ""}}])
def test_a_prompt_of_no_tokens_fails(keys: dict[str, Any]) -> None:
    assert fails(**keys) == (FailureCode.EMPTY_PROMPT, "the prompt has no tokens")


def test_a_token_id_beyond_the_vocabulary_is_told_with_its_place() -> None:
    assert fails(prompt_token_ids=[0, 257, 258]) == (
        FailureCode.BAD_MESSAGE,
        "prompt_token_ids[2] is 258; the model's vocabulary ends at 257",
    )
    code, message = fails(prompt="x", sampling={"stop_token_ids": [258]})
    assert (code, message) == (
        FailureCode.BAD_MESSAGE, "sampling.stop_token_ids holds 258; the vocabulary ends at 257",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "fits"), [(9, 1, True), (10, 1, False), (10, 0, True), (11, 0, False)]
)
def test_a_prompt_leaves_room_for_one_token_of_an_answer_where_one_is_asked_for(
    num_tokens: int, max_tokens: int, fits: bool
) -> None:
    keys: dict[str, Any] = {"prompt_token_ids": [1] * num_tokens, "sampling": {"max_tokens": max_tokens}}
    if fits:
        assert len(prepare(max_model_len=10, **keys).token_ids) == num_tokens
    else:
        code, message = fails(max_model_len=10, **keys)
        assert code is FailureCode.PROMPT_TOO_LONG
        assert message.startswith(f"the prompt has {num_tokens} tokens and the context 10, answer included")


def test_max_tokens_is_cut_to_what_the_context_has_left() -> None:
    assert prepare(max_model_len=10, prompt_token_ids=[1] * 7).sampling.max_tokens == 3


def test_truncate_middle_keeps_head_and_tail_and_room_for_the_answer() -> None:
    prepared = prepare(max_model_len=10, task="cut", fields={"text": "abcdefghijklmnop"}, sampling={"max_tokens": 3})
    assert shown(prepared.token_ids) == "abcdnop"
    assert prepared.truncated
    assert prepared.sampling.max_tokens == 3
    greedy_for_output = prepare(max_model_len=10, task="cut", fields={"text": "abcdefghijklmnop"})
    assert shown(greedy_for_output.token_ids) == "abcop"  # the answer gets at most half of the context
    assert not prepare(max_model_len=100, task="cut", fields={"text": "abc"}).truncated


def test_overrides_are_merged_into_the_tasks_sampling() -> None:
    tasks = {"t": Task.model_validate({"sampling": {"temperature": 0.5, "stop": ["x"], "top_k": 3}})}
    sampling = prepare(tasks, task="t", prompt="a", sampling={"top_k": 7, "max_tokens": 5}).sampling
    assert (sampling.temperature, sampling.stop, sampling.top_k, sampling.max_tokens) == (0.5, ("x",), 7, 5)


def test_an_override_out_of_range_names_its_key() -> None:
    assert fails(prompt="x", sampling={"top_p": 2}) == (
        FailureCode.BAD_MESSAGE, "sampling.top_p is 2.0; expected above 0, at most 1",
    )  # fmt: skip


def test_a_documents_stop_token_that_is_in_a_label_is_refused() -> None:
    assert fails(task="kind", fields={"text": "a"}, sampling={"stop_token_ids": [0, ord("d")]}) == (
        FailureCode.BAD_MESSAGE,
        "sampling.stop_token_ids holds 100, a token of the label 'good': the answer would end there and be no label",
    )


def test_labels_become_token_ids_and_have_room_whatever_max_tokens_says() -> None:
    prepared = prepare(task="kind", fields={"text": "a"}, sampling={"max_tokens": 1})
    assert [shown(token_ids) for token_ids in prepared.task.label_token_ids] == ["good", "bad"]
    assert prepared.sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("labels", "longest"), [(("positive", "negative"), 8), (("pos", "positive"), 8), (("yes", "yes!"), 4)]
)
def test_a_prompt_leaves_room_for_every_label_to_its_end(labels: tuple[str, ...], longest: int) -> None:
    def tasks(overflow: Any) -> dict[str, Task]:
        return {"t": Task(kind="classify", labels=labels, template="{{ text }}", chat=False, overflow=overflow)}

    context = 40
    for num_tokens in (context - longest - 1, context - longest):
        keys: dict[str, Any] = {"task": "t", "prompt": "x" * num_tokens, "sampling": {"max_tokens": 1}}
        for overflow in ("fail", "truncate_middle"):
            prepared = prepare(tasks(overflow), context, **keys)
            assert (len(prepared.token_ids), prepared.truncated) == (num_tokens, False)
            assert prepared.sampling.max_tokens >= longest
    keys["prompt"] = "x" * (context - longest + 1)
    assert fails(tasks("fail"), context, **keys)[0] is FailureCode.PROMPT_TOO_LONG
    prepared = prepare(tasks("truncate_middle"), context, **keys)
    assert prepared.truncated
    assert len(prepared.token_ids) + longest <= context
    assert prepared.sampling.max_tokens >= longest


def test_a_truncated_prompt_leaves_room_for_a_label_of_more_than_half_the_context() -> None:
    labels = ("positive", "negative")
    tasks = {"t": Task(kind="classify", labels=labels, template="{{ text }}", overflow="truncate_middle")}
    prepared = prepare(tasks, max_model_len=12, task="t", prompt="abcdefghij")
    assert (shown(prepared.token_ids), prepared.sampling.max_tokens, prepared.truncated) == ("abij", 8, True)
    assert fails(tasks, max_model_len=8, task="t", prompt="abcdefghij") == (
        FailureCode.PROMPT_TOO_LONG,
        "an answer takes 8 tokens, which leaves a prompt nothing of the context of 8",
    )


def test_the_seed_is_the_documents_own_in_every_run() -> None:
    identity = Identity("default", "default", "d7")
    assert prepare(offset=7).seed == prepare(offset=7, partition=3, epoch=9).seed == derived_seed(identity)
    assert prepare(offset=8).seed != prepare(offset=7).seed
    assert derived_seed(identity, attempt=1) != derived_seed(identity)
    assert 0 <= derived_seed(identity) < 2**63
    assert prepare(sampling={"seed": 5}).seed == 5


def test_block_hashes_are_the_engines_own() -> None:
    prepared = prepare(prompt_token_ids=list(range(40)))
    assert prepared.block_hashes == hash_blocks(list(range(40)), 16, b"identity")
    assert len(prepared.block_hashes) == 2


def test_a_deadline_that_has_passed_fails_and_a_later_one_does_not() -> None:
    assert fails(deadline=(NOW - timedelta(seconds=1)).isoformat()) == (
        FailureCode.DEADLINE_PASSED,
        "the deadline 2025-12-31T23:59:59+00:00 passed before the start",
    )
    document = make_document(deadline=(NOW + timedelta(seconds=5)).isoformat())
    prompts = builder()
    prompts.prepare(document)
    assert document.message.deadline is not None
    assert prompts.seconds_left(document.message.deadline) == 5.0


def refusal(task: Task, tokenizer: ByteTokenizer | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        compile_tasks({"t": task}, tokenizer or ByteTokenizer())
    return str(caught.value)


def test_a_template_with_a_mistake_is_told_at_start() -> None:
    assert refusal(Task(template="a\n{{ text }")).startswith("tasks.t.template, line 2: ")
    assert refusal(Task(template="{{ a|nofilter }}")) == "tasks.t.template, line 1: No filter named 'nofilter'."


def test_a_task_that_the_model_cannot_serve_is_told_at_start() -> None:
    assert refusal(Task(template="a"), ByteTokenizer(has_chat_template=False)).startswith(
        "tasks.t needs a chat template and the model has none; set tasks.t.chat = false"
    )
    assert refusal(Task(template="a", system="b", chat=False)).startswith("tasks.t.system needs chat = true")


def test_a_tasks_wrong_stop_tokens_are_told_at_start_and_are_no_documents_fault() -> None:
    with pytest.raises(SettingsError) as caught:
        builder({"t": Task.model_validate({"sampling": {"stop_token_ids": [257, 258]}})})
    assert str(caught.value) == "tasks.t.sampling.stop_token_ids holds 258; the vocabulary ends at 257"
    labels = {"kind": "classify", "labels": ["good", "bad"], "sampling": {"stop_token_ids": [ord("b")]}}
    assert refusal(Task.model_validate(labels)).startswith(
        "tasks.t.sampling.stop_token_ids holds 98, a token of the label 'bad': "
    )


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"stop": ["x" * 1025]}, "sampling.stop is '1025 characters'; expected at most 1024"),
        ({"stop_token_ids": list(range(257))}, "sampling.stop_token_ids is 257; expected at most 256 ids"),
    ],
)
def test_stops_are_bounded_in_number_and_length(sampling: dict[str, Any], why: str) -> None:
    assert fails(sampling=sampling) == (FailureCode.BAD_MESSAGE, why)
