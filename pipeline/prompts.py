"""Turns a document into a prompt: task, template, chat template, token ids, block hashes, sampling and seed."""

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from engine.block_hash import BlockHasher
from pipeline.templates import TemplateEnvironment, compile_template
from schemas.document import DEFAULT_TASK, Document, DocumentMessage, Identity, SamplingOverrides
from schemas.errors import DocumentError, FailureCode, SettingsError, Stage
from schemas.inference import EngineInfo, SamplingParams
from schemas.task import Task, stop_inside_label

MAX_RENDERED_CHARACTERS = 8 * 2**20  # a template may repeat a document's text, but not fill the memory with it


class PromptTokenizer(Protocol):
    """What prompts ask of engine.tokenizer.Tokenizer, which says what each does."""

    def encode(self, text: str) -> list[int]: ...
    def escape(self, text: str) -> str: ...
    def encode_escaped(self, text: str, *, add_bos: bool = True) -> list[int]: ...
    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...


class CompiledTask:
    """A task made ready at start, so that what is wrong with it is told before anything is consumed."""

    __slots__ = (
        "fingerprint", "known_fields", "label_token_ids", "longest_label", "name", "plain_sampling", "sampling",
        "system", "task", "template",
    )  # fmt: skip

    def __init__(self, name: str, task: Task, environment: SandboxedEnvironment, tokenizer: PromptTokenizer) -> None:
        self.name = name
        self.task = task
        self.system = task.system
        self.template: jinja2.Template | None = None
        self.known_fields: frozenset[str] = frozenset()  # what the template may read of a document
        if task.template is not None:
            self.known_fields, self.template = compile_template(name, task.template, environment)
        if not task.chat and task.system is not None:
            raise SettingsError(
                f"tasks.{name}.system needs chat = true; with chat = false, write it into the template itself"
            )
        if task.chat and task.template is not None and not tokenizer.has_chat_template:
            raise SettingsError(
                f"tasks.{name} needs a chat template and the model has none; set tasks.{name}.chat = false and write "
                "the whole prompt into the template"
            )
        self.label_token_ids = tuple(
            tuple(tokenizer.encode_escaped(tokenizer.escape(label), add_bos=False)) for label in task.labels
        )
        for label, token_ids in zip(task.labels, self.label_token_ids, strict=True):
            if not token_ids:
                raise SettingsError(f"tasks.{name}.labels: {label!r} makes no token")
        if (inside := self.stop_token_inside_label(task.sampling.stop_token_ids)) is not None:
            raise SettingsError(f"tasks.{name}.sampling.{inside}")
        # Of the tokenizer's own cut; and one that begins another is ended by a token of its own.
        self.longest_label = max(
            (
                len(token_ids) + any(other != label and other.startswith(label) for other in task.labels)
                for label, token_ids in zip(task.labels, self.label_token_ids, strict=True)
            ),
            default=0,
        )
        self.sampling = self.with_room_for_labels(task.sampling)
        self.plain_sampling = dataclasses.asdict(self.sampling)  # for receipts
        uses_chat = task.chat and tokenizer.has_chat_template
        chat = tokenizer.render_chat([{"role": "user", "content": ""}]) if uses_chat else None
        parts = [task.template, task.system, task.chat, chat]
        self.fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def stop_token_inside_label(self, stop_token_ids: Sequence[int]) -> str | None:
        """Says which of them would end which label before it is spelled; None where none would."""
        for label, token_ids in zip(self.task.labels, self.label_token_ids, strict=True):
            if ends := set(token_ids) & set(stop_token_ids):
                return (
                    f"stop_token_ids holds {min(ends)}, a token of the label {label!r}: the answer would end there and "
                    "be no label"
                )
        return None

    def with_room_for_labels(self, sampling: SamplingParams) -> SamplingParams:
        """A label is spelled to its end, whatever `max_tokens` says; one token more is for the end itself."""
        longest = max((len(token_ids) for token_ids in self.label_token_ids), default=-1) + 1
        if sampling.max_tokens >= longest:
            return sampling
        return dataclasses.replace(sampling, max_tokens=longest)


def compile_tasks(tasks: Mapping[str, Task], tokenizer: PromptTokenizer) -> dict[str, CompiledTask]:
    """Every task of the settings, and `default` where they have none. Raises SettingsError, the task named."""
    environment = TemplateEnvironment()
    named = dict(tasks)
    named.setdefault(DEFAULT_TASK, Task())
    return {name: CompiledTask(name, task, environment, tokenizer) for name, task in named.items()}


@dataclass(slots=True)
class PreparedDocument:
    """A document ready for the engine. Not frozen: tens of thousands a second are made."""

    document: Document
    task: CompiledTask
    token_ids: "array[int]"  # int32: 4 bytes a token of the backlog, as everything that packs them wants them
    block_hashes: tuple[bytes, ...]
    sampling: SamplingParams
    seed: int
    truncated: bool = False


class PromptBuilder:
    """Prepares documents for one started engine. `clock` gives the wall time that deadlines are compared with.

    Raises SettingsError where a task does not fit the engine's vocabulary.
    """

    def __init__(
        self,
        tasks: Mapping[str, CompiledTask],
        tokenizer: PromptTokenizer,
        engine: EngineInfo,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        max_rendered_characters: int = MAX_RENDERED_CHARACTERS,
    ) -> None:
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._vocab_size = engine.vocab_size
        self._context = min(engine.max_model_len, engine.kv_cache_tokens or engine.max_model_len)
        self._hasher = BlockHasher(engine.block_size, engine.identity)
        self._clock = clock
        self._max_rendered_characters = max_rendered_characters
        for name, task in tasks.items():
            if (beyond := self._stop_token_beyond(task.sampling)) is not None:
                raise SettingsError(f"tasks.{name}.sampling.{beyond}")

    def prepare(self, document: Document) -> PreparedDocument:
        """The document's prompt. Raises DocumentError, which says what is wrong with the document."""
        message = document.message
        task = self._tasks.get(message.task)
        if task is None:
            raise _failure(
                FailureCode.UNKNOWN_TASK,
                f"task {message.task!r} is not in the settings; known: {', '.join(sorted(self._tasks))}",
            )
        if message.deadline is not None:
            self.require_time(document)
        sampling = self._sampling(task, message.sampling)
        token_ids = self._token_ids(task, message)
        if not token_ids:
            raise _failure(FailureCode.EMPTY_PROMPT, "the prompt has no tokens")
        truncated = False
        # A prompt as long as the context leaves no room for an answer; it is legal where none is asked for.
        if len(token_ids) + _shortest_answer(task, sampling) > self._context:
            token_ids = self._truncated(task, token_ids, sampling)
            truncated = True
        if sampling.max_tokens > self._context - len(token_ids):
            sampling = dataclasses.replace(sampling, max_tokens=self._context - len(token_ids))
        seed = sampling.seed if sampling.seed is not None else derived_seed(document.identity)
        hashes = self._hasher.hash_blocks(token_ids)
        return PreparedDocument(document, task, token_ids, hashes, sampling, seed, truncated)

    def require_time(self, document: Document) -> None:
        """Raises DocumentError where the deadline has passed."""
        deadline = document.message.deadline
        if deadline is not None and deadline <= self._clock():
            raise _failure(FailureCode.DEADLINE_PASSED, f"the deadline {deadline.isoformat()} passed before the start")

    def seconds_left(self, deadline: datetime) -> float:
        """Until then; negative where it has passed."""
        return (deadline - self._clock()).total_seconds()

    def _token_ids(self, task: CompiledTask, message: DocumentMessage) -> "array[int]":
        if message.prompt_token_ids is not None:
            token_ids = message.prompt_token_ids
            if token_ids and max(token_ids) >= self._vocab_size:
                at, bad = next((i, t) for i, t in enumerate(token_ids) if t >= self._vocab_size)
                raise _failure(
                    FailureCode.BAD_MESSAGE,
                    f"prompt_token_ids[{at}] is {bad}; the model's vocabulary ends at {self._vocab_size - 1}",
                )
            return array("i", token_ids)
        if message.prompt is not None:
            if not message.prompt:
                return array("i")  # a beginning-of-sequence token alone asks nothing
            return array("i", self._tokenizer.encode(message.prompt))
        escape = self._tokenizer.escape
        if message.messages is not None:
            if not self._tokenizer.has_chat_template:
                raise _failure(
                    FailureCode.BAD_MESSAGE, "messages need a chat template and the model has none; give prompt"
                )
            turns = [{"role": turn.role, "content": escape(turn.content)} for turn in message.messages]
            if task.system is not None and turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": task.system})
            return self._chat_ids(turns)
        assert message.fields is not None, "a message has one content"
        text = self._render(task, message.fields)
        if not task.task.chat:
            return array("i", self._tokenizer.encode_escaped(text))
        turns = [{"role": "user", "content": text}]
        if task.system is not None:
            turns.insert(0, {"role": "system", "content": task.system})
        return self._chat_ids(turns)

    def _chat_ids(self, turns: list[dict[str, str]]) -> "array[int]":
        return array("i", self._tokenizer.encode_escaped(self._tokenizer.render_chat(turns), add_bos=False))

    def _render(self, task: CompiledTask, fields: dict[str, Any]) -> str:
        if task.template is None:
            raise _failure(
                FailureCode.BAD_MESSAGE,
                f"fields need a template and task {task.name!r} has none; give prompt or messages",
            )
        pieces: list[str] = []
        length = 0
        try:
            for piece in task.template.generate(_escaped(fields, self._tokenizer.escape)):
                length += len(piece)
                if length > self._max_rendered_characters:
                    raise _failure(
                        FailureCode.PROMPT_TOO_LONG,
                        f"the template of task {task.name!r} renders to more than {self._max_rendered_characters} "
                        "characters on this document",
                    )
                pieces.append(piece)
        except jinja2.UndefinedError as error:
            missing = sorted(name for name in task.known_fields - fields.keys() if repr(name) in str(error.message))
            what = f"the field {missing[0]!r}" if missing else f"more than it finds ({error.message})"
            raise _failure(
                FailureCode.BAD_MESSAGE,
                f"the template of task {task.name!r} needs {what}; the document has: {_names(fields)}",
            ) from None
        except DocumentError:
            raise
        except Exception as error:  # whatever a filter or an operator makes of a document's types
            cause = f"{type(error).__name__}: {str(error)[:200]}"
            raise _failure(
                FailureCode.BAD_MESSAGE, f"the template of task {task.name!r} fails on this document: {cause}"
            ) from None
        return "".join(pieces)

    def _sampling(self, task: CompiledTask, overrides: SamplingOverrides | None) -> SamplingParams:
        if overrides is None:
            return task.sampling
        given = {name: getattr(overrides, name) for name in overrides.model_fields_set}
        changes = {name: value for name, value in given.items() if value is not None}
        try:
            sampling = dataclasses.replace(task.task.sampling, **changes)
        except ValueError as error:
            raise _failure(FailureCode.BAD_MESSAGE, f"sampling.{error}") from None
        if (inside := stop_inside_label(sampling.stop, task.task.labels)) is not None:
            raise _failure(FailureCode.BAD_MESSAGE, f"sampling.{inside}")
        wrong = self._stop_token_beyond(sampling) or task.stop_token_inside_label(sampling.stop_token_ids)
        if wrong is not None:
            raise _failure(FailureCode.BAD_MESSAGE, f"sampling.{wrong}")
        return task.with_room_for_labels(sampling)

    def _stop_token_beyond(self, sampling: SamplingParams) -> str | None:
        """Says which stop token the model does not have; None where it has all."""
        for token_id in sampling.stop_token_ids:
            if token_id >= self._vocab_size:
                return f"stop_token_ids holds {token_id}; the vocabulary ends at {self._vocab_size - 1}"
        return None

    def _truncated(self, task: CompiledTask, token_ids: "array[int]", sampling: SamplingParams) -> "array[int]":
        """The prompt without its middle, or DocumentError where the task does not want that.

        What remains is the context less the room for the answer (at most half of it, unless a label takes more), in
        equal parts from head and tail: the system message and the instruction before the document, and the question
        after it, survive while each is shorter than half of what remains.
        """
        if task.task.overflow == "fail":
            raise _failure(
                FailureCode.PROMPT_TOO_LONG,
                f"the prompt has {len(token_ids)} tokens and the context {self._context}, answer included; shorten it, "
                'or set the task\'s overflow = "truncate_middle"',
            )
        shortest = _shortest_answer(task, sampling)
        keep = self._context - max(shortest, min(sampling.max_tokens, self._context // 2))
        if keep < 1:
            raise _failure(
                FailureCode.PROMPT_TOO_LONG,
                f"an answer takes {shortest} tokens, which leaves a prompt nothing of the context of {self._context}",
            )
        head = (keep + 1) // 2
        return token_ids[:head] + token_ids[len(token_ids) - (keep - head) :]


def _shortest_answer(task: CompiledTask, sampling: SamplingParams) -> int:
    """The tokens that a prompt must leave room for: any label, or one where an answer is asked for at all."""
    return task.longest_label or min(sampling.max_tokens, 1)


def derived_seed(identity: Identity, attempt: int = 0) -> int:
    """The seed of a document that gives none: the same in every run, another one for a second attempt."""
    text = f"{identity.job}:{identity.task}:{identity.document_id}"
    if attempt:
        text += f"\0{attempt}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # below 2^63


def _escaped(value: Any, escape: Callable[[str], str]) -> Any:
    """The same value with every string in it marked as data, keys included."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {_escaped(key, escape): _escaped(inner, escape) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner, escape) for inner in value]
    return value


def _names(fields: dict[str, Any]) -> str:
    names = sorted(fields)
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "no field"


def _failure(code: FailureCode, message: str) -> DocumentError:
    return DocumentError(code, Stage.PROMPT, message)
