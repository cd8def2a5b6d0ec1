"""What the pipeline's tests have in common: documents, a tokenizer of bytes, a source in memory."""

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.special_tokens import SpecialToken, SpecialTokenSplitter
from schemas.document import Assignment, Document, DocumentMessage, Identity, RejectedDocument, SourcePosition
from schemas.errors import Failure, FailureCode, SourceError, Stage
from schemas.inference import EngineInfo

TURN_START, TURN_END = 256, 257
VOCAB_SIZE = 258


class ByteTokenizer:
    """A byte a token, and two special tokens around turns, ids 256 and 257."""

    def __init__(self, has_chat_template: bool = True) -> None:
        self._has_chat_template = has_chat_template
        self._splitter = SpecialTokenSplitter(
            [SpecialToken(TURN_START, "<|im_start|>"), SpecialToken(TURN_END, "<|im_end|>")]
        )

    @property
    def has_chat_template(self) -> bool:
        return self._has_chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def escape(self, text: str) -> str:
        return self._splitter.escape(text)

    def encode_escaped(self, text: str, *, add_bos: bool = True) -> list[int]:
        token_ids: list[int] = []
        for stretch in self._splitter.split(text):
            token_ids += stretch.text.encode()
            if stretch.then is not None:
                token_ids.append(stretch.then.token_id)
        return token_ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def shown(token_ids: Sequence[int]) -> str:
    """The ids as text, special tokens as « and »."""
    pieces = itertools.groupby(token_ids, key=lambda token_id: token_id >= TURN_START)
    marks = {TURN_START: "«", TURN_END: "»"}
    return "".join(
        "".join(marks[token_id] for token_id in run) if is_special else bytes(run).decode("utf-8", "replace")
        for is_special, run in ((is_special, list(run)) for is_special, run in pieces)
    )


def engine_info(max_model_len: int = 1000, block_size: int = 16, vocab_size: int = VOCAB_SIZE) -> EngineInfo:
    return EngineInfo("model", b"identity", "weights", vocab_size, max_model_len, block_size, 0, "cpu")


def make_document(offset: int = 0, partition: int = 0, epoch: int = 1, **keys: Any) -> Document:
    """A decoded document; `prompt="x"` where no content is given."""
    if not {"fields", "messages", "prompt", "prompt_token_ids"} & keys.keys():
        keys["prompt"] = "x"
    message = DocumentMessage.model_validate({"id": f"d{offset}", **keys})
    identity = Identity(message.job, message.task, message.id or "")
    return Document(identity, SourcePosition("documents", partition, offset, epoch), 1000 + offset, None, message, 100)


def make_rejected(offset: int, epoch: int = 1) -> RejectedDocument:
    failure = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "not JSON")
    identity = Identity("default", "default", f"documents/0/{offset}")
    return RejectedDocument(identity, SourcePosition("documents", 0, offset, epoch), 1000 + offset, None, failure, 10)


class MemorySource:
    """A Source (consumers/source.py) of documents in memory. Dead letters are acknowledged at once, or when told to."""

    def __init__(self, documents: Sequence[Document | RejectedDocument] = ()) -> None:
        self.completed: list[int] = []  # offsets, in the order of completion
        self.handed_back: list[int] = []
        self.isolated: list[list[int]] = []  # what was noted, one after another
        self.skipped: Counter[Assignment] = Counter()
        self.started = 0  # one past the highest offset that an earlier owner had
        self.dead_letters: list[tuple[SourcePosition, Failure]] = []
        self.epoch = 1
        self.holds_dead_letters = False
        self.held: list[Callable[[], None]] = []
        self.is_draining = False
        self.is_paused = False
        self.failure: SourceError | None = None
        self._waiting = deque(documents)
        self._in_flight: set[SourcePosition] = set()
        self._lock = threading.Lock()

    def add(self, documents: Sequence[Document | RejectedDocument]) -> None:
        self._waiting.extend(documents)

    def start(self) -> None: ...

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        if self.failure is not None:
            raise self.failure
        taken: list[Document | RejectedDocument] = []
        while self._waiting and len(taken) < max_documents and not self.is_draining:
            taken.append(self._waiting.popleft())
        with self._lock:
            self._in_flight.update(document.position for document in taken)
        return taken

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        if not self.is_current(position):
            return
        self.dead_letters.append((position, failure))
        if self.holds_dead_letters:
            self.held.append(then)
        else:
            then()

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        with self._lock:
            self.completed += [position.offset for position in positions if self.is_current(position)]
            self._in_flight.difference_update(positions)

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        with self._lock:
            self.handed_back += [position.offset for position in positions if self.is_current(position)]
            self._in_flight.difference_update(positions)

    def take_skipped(self) -> Counter[Assignment]:
        skipped, self.skipped = self.skipped, Counter()
        return skipped

    def started_before(self, position: SourcePosition) -> int:
        return self.started

    def isolate(self, positions: Sequence[SourcePosition]) -> None:
        self.isolated.append([position.offset for position in positions])

    def expect_no_clean_end(self) -> None: ...

    def is_current(self, position: SourcePosition) -> bool:
        return position.epoch == self.epoch

    @property
    def has_assignment(self) -> bool:
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_handed_out(self) -> int:
        with self._lock:
            return sum(map(self.is_current, self._in_flight))

    def is_drained(self) -> bool:
        return not self._waiting and not self._in_flight

    def drain(self) -> None:
        self.is_draining = True

    def close(self) -> None: ...
