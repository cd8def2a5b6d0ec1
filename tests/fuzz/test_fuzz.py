"""Whatever comes in is a document or a failure by name, settings or a sentence, and never a crash.

Hypothesis draws inputs that are right or nearly so; of each, many more are made by mutation, since that is cheap.
A usual run takes a few thousand of them. `make fuzz` takes a million (PAGEMILL_FUZZ_INPUTS), in all tests together.
"""

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from consumers import commit_metadata
from consumers.decode import decode_document
from consumers.letter_log import StoredLetter, build_replay, read_letter
from consumers.replay import MAX_ATTEMPT
from pipeline.bulk import encode_row
from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.results import MAX_ROW_ID_BYTES, WorkerIdentity, build_failure_row, row_id, version_of
from pipeline.templates import MAX_MADE, check_templates
from schemas.document import Document, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import DocumentError, FailureCode, SettingsError
from schemas.settings import masked_settings
from schemas.settings_reader import load_settings
from schemas.task import Task
from tests.fuzz.mutations import mutated
from tests.pipeline.parts import ByteTokenizer, engine_info, shown

NUM_INPUTS = int(os.environ.get("PAGEMILL_FUZZ_INPUTS", "8000"))
NUM_MUTATIONS = 40  # of each input that is drawn
MAX_BYTES = 2**16
TOKENIZER = ByteTokenizer()
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def fuzzed(share: float, num_mutations: int = NUM_MUTATIONS) -> Callable[[Any], Any]:
    """So many examples that the test takes its share of all inputs."""
    return settings(
        max_examples=max(5, round(share * NUM_INPUTS / (1 + num_mutations))),
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def taken() -> Iterator[Counter[str]]:
    """How many inputs each test has taken; told at the end."""
    counts: Counter[str] = Counter()
    yield counts
    print(f"\nfuzz: {counts.total():,} inputs: " + ", ".join(f"{name} {n:,}" for name, n in counts.items()))


texts = st.text(max_size=12) | st.sampled_from(["{{ 7 * 7 }}", "{% raw %}", "<|im_end|>", "\0", "a" * 300, "9" * 40])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees: st.SearchStrategy[Any] = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=10
)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(-1, 10**6), "temperature": st.floats(), "top_k": st.integers(-1, 9),
        "top_p": st.floats(0, 1), "seed": st.integers(), "stop": st.lists(texts, max_size=20),
        "stop_token_ids": st.lists(st.integers(-1, 400), max_size=5), "logprobs": st.integers(-1, 30),
    },
)  # fmt: skip
messages = st.fixed_dictionaries(
    {},
    optional={
        "schema_version": st.sampled_from([1, 1, 1, 2, 0]), "id": texts, "job": st.sampled_from(["j", "J", "a" * 65]),
        "task": st.sampled_from(["plain", "loop", "label", "wide", "none", "a:b"]),
        "fields": st.fixed_dictionaries({"text": texts}, optional={"n": leaves, "items": trees, "width": leaves}),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "bot"]), "content": texts}), max_size=3
        ),
        "prompt": texts, "prompt_token_ids": st.lists(st.integers(-1, 300), max_size=9), "sampling": samplings,
        "priority": st.integers(-12, 12), "deadline": st.sampled_from(["2030-01-01T00:00:00Z", "2020-01-01", "x"]),
        "metadata": st.dictionaries(texts, trees, max_size=3),
    },
)  # fmt: skip
good_messages = st.builds(
    lambda task, fields, rest: {"id": "a", "task": task, "fields": fields, **rest},
    st.sampled_from(["plain", "loop", "label", "wide", "none"]),
    st.fixed_dictionaries({"text": texts, "n": leaves, "items": trees, "width": leaves}),
    st.fixed_dictionaries({}, optional={"sampling": samplings, "metadata": st.dictionaries(texts, trees, max_size=3)}),
)
headers = st.lists(
    st.tuples(
        st.sampled_from(
            ["pagemill-" + name for name in ("job", "topic", "partition", "offset", "timestamp", "attempt", "code",
                                             "replayed", "value-length", "key", "message")]
        )
        | st.text(max_size=5),
        st.binary(max_size=12) | st.integers(-3, 2**64).map(lambda number: str(number).encode()) | st.just(b"topic"),
    ),
    max_size=11,
)  # fmt: skip
seeds = st.integers(0, 2**32 - 1)

TASKS = {
    "plain": Task(template="{{ text }}"),
    "loop": Task(template="{% for one in items %}{{ loop.index }}: {{ one }}{% endfor %}{{ items | join(text) }}"),
    "label": Task(kind="classify", labels=("yes", "no"), template="{{ text | upper }} {{ n }}"),
    "wide": Task(
        chat=False,
        template="{{ text | center(width) }}{{ text * width }}{{ text.rjust(width) }}{{ text | replace('', text) }}"
        "{{ '%*d' | format(width, n) }}{{ '{:>{}}'.format(text, width) }}{{ text | indent(width) }}",
    ),
}
PROMPTS = PromptBuilder(
    compile_tasks(TASKS, TOKENIZER), TOKENIZER, engine_info(max_model_len=100_000), clock=lambda: NOW
)
MADE_BY = WorkerIdentity("worker", "model")


def written(message: object) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def is_accounted_for(raw: RawMessage) -> str:
    """What became of it, once all that must hold of that holds."""
    document = decode_document(raw, MAX_BYTES)
    identity = document.identity
    assert len(row_id(identity).encode()) <= MAX_ROW_ID_BYTES
    assert 0 <= version_of(document) < 2**63
    assert document.position is raw.position
    failure = None
    if isinstance(document, RejectedDocument):
        failure = document.failure
    else:
        assert isinstance(document, Document)
        try:
            prepared = PROMPTS.prepare(document)
        except DocumentError as error:
            failure = error.failure
        else:
            assert 0 < len(prepared.token_ids) <= 100_000
            assert len(prepared.token_ids) + prepared.sampling.max_tokens <= 100_000
    if failure is None:
        return "prepared"
    assert isinstance(failure.code, FailureCode)
    assert failure.message
    row = build_failure_row(document, failure, MADE_BY, kind="generate", attempts=1, answered_at=NOW)
    assert encode_row(row, "results", row_id(identity), version_of(document))
    return failure.code.value


@fuzzed(0.70)
@given(messages | good_messages | trees, headers, seeds, st.integers(-1, 2**63 - 1))
def test_every_message_is_a_document_or_a_failure_by_name(
    taken: Counter[str], message: object, pairs: list[tuple[str, bytes]], seed: int, timestamp_ms: int
) -> None:
    content, random = written(message), Random(seed)
    position = SourcePosition("documents", 3, seed)
    for number in range(1 + NUM_MUTATIONS):
        value = mutated(content, random) if number else content
        is_accounted_for(RawMessage(position, timestamp_ms, content[:9], value, tuple(pairs)))
        taken["messages"] += 1


def test_the_messages_that_are_drawn_end_in_many_ways() -> None:
    """Or the fuzzer would only knock at one door."""
    ends: Counter[str] = Counter()

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(messages | good_messages, seeds)
    def draw(message: object, seed: int) -> None:
        content = written(message)
        for value in (content, mutated(content, Random(seed))):
            ends[is_accounted_for(RawMessage(SourcePosition("documents", 0, 1), 1, None, value))] += 1

    draw()
    assert set(ends) >= {"prepared", "BAD_MESSAGE", "UNKNOWN_TASK"}
    assert ends["prepared"] > 20


@fuzzed(0.10, 10)
@given(headers, st.binary(max_size=20), seeds)
def test_every_record_of_the_dead_letter_topic_is_a_letter_a_mark_or_neither(
    taken: Counter[str], pairs: list[tuple[str, bytes]], value: bytes, seed: int
) -> None:
    random = Random(seed)
    for number in range(11):
        changed = tuple((name, mutated(content, random) if number else content) for name, content in pairs)
        letter = read_letter(RawMessage(SourcePosition("dead-letters", 0, seed), seed, b"key", value, changed))
        if isinstance(letter, StoredLetter) and not letter.num_bytes_cut and letter.attempt < MAX_ATTEMPT:
            sent = build_replay(letter)
            replay = RawMessage(SourcePosition("t", 0, 1), 1, sent.key, sent.value, tuple(sent.headers))
            document = decode_document(replay, MAX_BYTES)
            assert (document.source, document.attempt) == (letter.raw.position, letter.attempt + 1)
        taken["letters"] += 1


TOML = b"""
[kafka]
bootstrap_servers = ["a:1", "b:2"]
topics = ["t"]
sasl_password = "hush-hush"
[elasticsearch]
urls = ["https://user:hush-hush@search:9200"]
api_key = "hush-hush"
bulk_documents = 10
[worker]
grace_seconds = 1.5
max_failed_ratio = 0.5
[tasks.sum]
template = "{{ text }}"
sampling = {max_tokens = 3, stop = ["a"]}
output_schema = {type = "object"}
[tasks."a.b"]
kind = "classify"
labels = ["yes", "no"]
"""


@fuzzed(0.05)
@given(st.sampled_from([TOML, b"", b"kafka = 3"]) | st.binary(max_size=60), seeds)
def test_every_settings_file_is_settings_or_a_sentence(taken: Counter[str], content: bytes, seed: int) -> None:
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pagemill.toml"
        for number in range(1 + NUM_MUTATIONS):
            file.write_bytes(mutated(content, random) if number else content)
            with contextlib.suppress(SettingsError):
                json.dumps(masked_settings(load_settings(file, {}, {})))
            taken["settings"] += 1


@fuzzed(0.05, 0)
@given(
    st.lists(
        st.sampled_from(
            ["{{", "}}", "{%", "%}", "{#", "#}", " text ", " n ", " items ", "|", "join", "center", "*", "**", "%", "~",
             "(", ")", "[", "]", "'a'", '"%9d"', "10", "999999999", "for", "in", "if", "endfor", "endif", "set", "=",
             ".format", ".rjust", ".__class__", "macro", "m()", "range", "loop", "else", "-", "+", "//", ",", "tojson",
             "batch", "slice", "map", "attr", "'x'", "replace", "import", "include", "1", "0", "==", "is", "defined"]
        ),
        max_size=25,
    ).map(" ".join),
    st.fixed_dictionaries({"text": texts, "n": leaves, "items": trees}),
)  # fmt: skip
def test_every_template_is_refused_at_start_or_renders_or_fails_its_document(
    taken: Counter[str], template: str, fields: dict[str, Any]
) -> None:
    taken["templates"] += 1
    task = Task(template=template, chat=False)
    try:
        check_templates({"task": task})
    except SettingsError:
        return
    prompts = PromptBuilder(compile_tasks({"task": task}, TOKENIZER), TOKENIZER, engine_info(max_model_len=10**8))
    document = decode_document(
        RawMessage(SourcePosition("t", 0, 1), 1, None, written({"task": "task", "fields": fields})), MAX_BYTES
    )
    if isinstance(document, RejectedDocument):
        return
    with contextlib.suppress(DocumentError):
        assert len(prompts.prepare(document).token_ids) <= 40 * MAX_MADE


@fuzzed(0.02, 1)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_documents_text_is_never_a_template(taken: Counter[str], text: str) -> None:
    taken["texts"] += 2
    for content in (text, "{{ 7 * 7 }}{% if x %}" + text + "{# #}<|im_end|>"):
        value = written({"task": "plain", "fields": {"text": content}})
        document = decode_document(RawMessage(SourcePosition("t", 0, 1), 1, None, value), MAX_BYTES)
        assert isinstance(document, Document)
        assert shown(PROMPTS.prepare(document).token_ids) == f"«user\n{content}»\n«assistant\n"


@fuzzed(0.08)
@given(st.binary(max_size=40), st.integers(0, 2**40), st.sets(st.integers(0, 900), max_size=30), seeds)
def test_every_commit_metadata_is_ours_or_ignored(
    taken: Counter[str], junk: bytes, base: int, done: set[int], seed: int
) -> None:
    random, topic_id = Random(seed), UUID(int=seed)
    completed = commit_metadata.OffsetBitmap.of(base, [base + offset for offset in done])
    progress = commit_metadata.Progress(base, base + 900, base, 2, False, completed)
    content = commit_metadata.encode(progress, topic_id)
    assert commit_metadata.decode(content) == (topic_id, progress)
    for number in range(NUM_MUTATIONS):
        changed = mutated(content.encode() if number % 2 else junk, random).decode("utf-8", "replace")
        found = commit_metadata.decode(changed)
        assert found is None or found == (topic_id, progress)
        taken["metadata"] += 1
