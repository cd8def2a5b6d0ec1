"""500 documents whose ends are known beforehand: 475 that a model answers, 25 that each fail in a way of their own.

The tasks that go with them are `TASKS`; the limits that some of them break are `LIMITS`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from schemas.errors import FailureCode

NUM_GOOD, NUM_BAD = 475, 25
JOB = "e2e"
MAX_MODEL_LEN = 128
LIMITS: dict[str, Any] = {
    "kafka": {"max_document_bytes": 20_000},
    "model": {"max_model_len": MAX_MODEL_LEN, "dtype": "float32", "device": "cpu"},
    "engine": {"kv_cache_tokens": 4096, "max_tokens_per_step": 512},
}
TASKS: dict[str, Any] = {
    "default": {"sampling": {"max_tokens": 4}},
    "echo": {"chat": False, "template": "Say it again: {{ text }}", "sampling": {"max_tokens": 4}},
    "long": {
        "chat": False, "template": "{{ text }}", "overflow": "truncate_middle", "sampling": {"max_tokens": 4},
    },
    "sentiment": {
        "kind": "classify", "labels": ["good", "bad", "goodish"], "chat": False, "template": "{{ text }} is",
    },
    "person": {
        "chat": False, "template": "{{ text }}", "sampling": {"max_tokens": 4},
        "output_schema": {"type": "object", "required": ["name"]},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """One message and what must become of it. In a fresh topic its place is (partition, number in partition)."""

    name: str
    partition: int
    value: bytes | None
    key: bytes | None = None
    expected: FailureCode | None = None  # None: answered
    truncated: bool = False
    document_id: str | None = None  # None: the position is its id


def document(**keys: Any) -> bytes:
    return json.dumps({"job": JOB, **keys}).encode()


BAD: dict[str, tuple[bytes | None, FailureCode]] = {
    # The first ones stand at the heads of partitions.
    "not JSON": (b'{"id": "cut", "prompt": "and then', FailureCode.BAD_MESSAGE),
    "too large": (document(id="large", prompt="x" * 30_000), FailureCode.DOCUMENT_TOO_LARGE),
    "not UTF-8": (b'\xff\xfe{"prompt": "a"}', FailureCode.BAD_MESSAGE),
    "no value": (None, FailureCode.BAD_MESSAGE),
    "empty value": (b"", FailureCode.BAD_MESSAGE),
    "an array": (b'[{"prompt": "a"}]', FailureCode.BAD_MESSAGE),
    "wrong type": (document(id="type", prompt="a", priority="high"), FailureCode.BAD_MESSAGE),
    "out of range": (document(id="range", prompt="a", priority=11), FailureCode.BAD_MESSAGE),
    "unknown key": (document(id="key", promt="a"), FailureCode.BAD_MESSAGE),
    "lone surrogate": (b'{"id": "surrogate", "job": "e2e", "prompt": "a\\ud800b"}', FailureCode.BAD_MESSAGE),
    "version of the future": (document(id="future", schema_version=2, prompt="a"), FailureCode.BAD_MESSAGE),
    "no content": (document(id="nothing"), FailureCode.BAD_MESSAGE),
    "two contents": (document(id="two", prompt="a", prompt_token_ids=[1]), FailureCode.BAD_MESSAGE),
    "field missing": (document(id="field", task="echo", fields={"title": "a"}), FailureCode.BAD_MESSAGE),
    "sampling key": (document(id="sampling-key", prompt="a", sampling={"max_token": 1}), FailureCode.BAD_MESSAGE),
    "sampling range": (document(id="sampling-range", prompt="a", sampling={"top_p": 2}), FailureCode.BAD_MESSAGE),
    "id too long": (document(id="x" * 257, prompt="a"), FailureCode.BAD_MESSAGE),
    "job's name": (b'{"id": "job", "job": "Not A Job", "prompt": "a"}', FailureCode.BAD_MESSAGE),
    "deadline without zone": (document(id="zone", prompt="a", deadline="2030-01-01T00:00:00"), FailureCode.BAD_MESSAGE),
    "unknown task": (document(id="task", task="translate", fields={"text": "a"}), FailureCode.UNKNOWN_TASK),
    "no tokens": (document(id="no-tokens", prompt_token_ids=[]), FailureCode.EMPTY_PROMPT),
    "empty prompt": (document(id="empty", prompt=""), FailureCode.EMPTY_PROMPT),
    "longer than the context": (
        document(id="long", prompt_token_ids=[1] * (MAX_MODEL_LEN + 1)),
        FailureCode.PROMPT_TOO_LONG,
    ),
    "deadline passed": (document(id="late", prompt="a", deadline="2020-01-01T00:00:00Z"), FailureCode.DEADLINE_PASSED),
    "output against the schema": (
        document(id="schema", task="person", fields={"text": "Ada"}),
        FailureCode.INVALID_OUTPUT,
    ),
}

# Answered, though each might have been thought bad. The number makes their prompts differ.
GOOD: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda i: {"prompt": f"document number {i}"},
    lambda i: {"prompt_token_ids": [1 + (i * 7 + k) % 200 for k in range(20 + i % 40)]},
    lambda i: {"task": "echo", "fields": {"text": f"word {i}", "unused": [i, None]}},
    lambda i: {"task": "echo", "fields": {"text": ""}},
    lambda i: {"task": "echo", "fields": {"text": f"a NUL \0 in {i}"}},
    lambda i: {"task": "sentiment", "fields": {"text": f"thing {i}"}},
    lambda i: {"task": "long", "fields": {"text": f"{i} and on " * 60}},
    lambda i: {"prompt": f"<|im_end|> </s> ü 漢 🙂 {i}", "metadata": {"deep": {"n": i}, "": [1, {"a.b": None}]}},
    lambda i: {"prompt": f"soon {i}", "priority": i % 21 - 10, "deadline": "2100-01-01T00:00:00+02:00"},
    lambda i: {"prompt": f"nothing asked {i}", "sampling": {"max_tokens": 0}},
    lambda i: {"prompt": f"drawn {i}", "sampling": {"temperature": 1.0, "top_k": 5, "logprobs": 2, "max_tokens": 3}},
    lambda i: {"prompt": f"until {i}", "sampling": {"stop": ["e"], "ignore_eos": True, "max_tokens": 6}},
)


def make_documents(num_partitions: int, num_good: int = NUM_GOOD) -> list[Sent]:
    """In the order to send them: partitions in turn, bad ones first in some partitions and spread over the rest."""
    bad = list(BAD.items())
    heads, spread = bad[: num_partitions // 2 + 1], iter(bad[num_partitions // 2 + 1 :])
    every = max(1, num_good // (NUM_BAD - len(heads) + 1))
    turn = iter(range(10**6))
    sent = [_bad(name, value, code, next(turn) % num_partitions) for name, (value, code) in heads]
    for i in range(num_good):
        sent.append(_good(i, next(turn) % num_partitions))
        if i % every == every - 1 and (one := next(spread, None)) is not None:
            name, (value, code) = one
            sent.append(_bad(name, value, code, next(turn) % num_partitions))
    sent += [_bad(name, value, code, next(turn) % num_partitions) for name, (value, code) in spread]
    return sent


def by_position(sent: list[Sent]) -> Iterator[tuple[tuple[int, int], Sent]]:
    """Each message's (partition, offset) in a topic that was empty."""
    next_offset: dict[int, int] = {}
    for one in sent:
        offset = next_offset.get(one.partition, 0)
        next_offset[one.partition] = offset + 1
        yield (one.partition, offset), one


def _bad(name: str, value: bytes | None, code: FailureCode, partition: int) -> Sent:
    return Sent(name, partition, value, key=name.encode(), expected=code)


def _good(number: int, partition: int) -> Sent:
    keys = GOOD[number % len(GOOD)](number)
    document_id = f"good-{number:03}"
    return Sent(
        name=document_id,
        partition=partition,
        value=document(id=document_id, **keys),
        key=None if number % 5 == 0 else document_id.encode(),
        truncated=keys.get("task") == "long",
        document_id=document_id,
    )
