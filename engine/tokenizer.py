"""Text to token ids and back, and messages to prompts. No torch.

`encode` and everything that passes `escape` treat text as data: a special token's spelling in it becomes ordinary
tokens. Only what a template writes can become a special token.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.chat_template import ChatTemplate
from engine.gguf_tokenizer import build_gguf_tokenizer, byte_alphabet
from engine.special_tokens import SpecialToken, SpecialTokenSplitter
from engine.weights.gguf_metadata import is_gguf, read_gguf_metadata
from schemas.errors import DocumentError, FailureCode, ModelError, Stage

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PIECE_OF_A_BYTE = {f"<0x{byte:02X}>": byte for byte in range(256)}
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a model's files say, before anything is worked out from it."""

    backend: tokenizers.Tokenizer
    origin: str  # names the model in errors
    roles: Mapping[str, str] = field(default_factory=dict)  # bos_token and the like -> spelling
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None


class Tokenizer:
    """One model's tokenizer. Its methods may be called from any thread."""

    def __init__(self, parts: _Parts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        role_ids = {role: backend.token_to_id(spelling) for role, spelling in parts.roles.items()}
        eos_token_ids = set(parts.eos_token_ids)
        if (eos_token_id := role_ids.get("eos_token")) is not None:
            eos_token_ids.add(eos_token_id)
        _make_special(backend, {token_id for token_id in role_ids.values() if token_id is not None} | eos_token_ids)
        backend.encode_special_tokens = True  # text is data; what a template writes is split off before
        self._backend = backend
        self._inner = _without_prefix_space(backend)
        self._origin = parts.origin
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

        added = backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._splitter = SpecialTokenSplitter(
            SpecialToken(i, token.content, token.lstrip, token.rstrip) for i, token in added.items() if token.special
        )
        self._start = _prompt_start_ids(backend)
        self._template = (
            ChatTemplate(parts.chat_template, parts.roles, parts.origin) if parts.chat_template is not None else None
        )
        self.chat_template_fingerprint: str = _digest((parts.chat_template or "").encode("utf-8", "surrogatepass"))

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder or of a GGUF file. Raises ModelError where there is none."""
        path = Path(path)
        if path.is_dir():
            return cls(_from_folder(path))
        if is_gguf(path):
            built = build_gguf_tokenizer(read_gguf_metadata(path))
            return cls(_Parts(built.backend, str(path), built.roles, built.eos_token_ids, built.chat_template))
        if not path.exists():
            raise ModelError(f"there is no model at {path}; give a Hugging Face folder or a GGUF file")
        raise ModelError(f"{path} is neither a Hugging Face folder nor a GGUF file")

    # Text that is data

    def encode(self, text: str) -> list[int]:
        """A text as it is, with the beginning-of-sequence token where the model wants one. No special token from it."""
        return [*self._start, *self._ordinary(self._backend, [text])[0]]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all cores."""
        return [[*self._start, *ids] for ids in self._ordinary(self._backend, list(texts))]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens; special tokens are left out, bytes that are no character become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    # Templates: their text is the operator's, what is put into it is data

    def escape(self, text: str) -> str:
        """A document's text, ready to be put into a template whose rendering goes through `encode_escaped`."""
        return self._splitter.escape(text)

    def escape_values(self, value: Any) -> Any:
        """`escape` on every string inside a JSON value, keys of objects left alone."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {key: self.escape_values(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_values(inner) for inner in value]
        return value

    def encode_escaped(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Rendered text: special tokens that the template wrote become such, escaped ones stay ordinary text."""
        return self.encode_escaped_batch([text], add_bos=add_bos)[0]

    def encode_escaped_batch(self, texts: Sequence[str], *, add_bos: bool = True) -> list[list[int]]:
        """`encode_escaped` of each, on all cores. The beginning-of-sequence token is never there twice."""
        stretches = [list(self._splitter.split(text)) for text in texts]
        first = [s.text for split in stretches for s in split if s.text and s.is_first]
        later = [s.text for split in stretches for s in split if s.text and not s.is_first]
        first_ids = iter(self._ordinary(self._backend, first))
        later_ids = iter(self._ordinary(self._inner, later))
        prompts: list[list[int]] = []
        for split in stretches:
            ids: list[int] = []
            for stretch in split:
                if stretch.text:
                    ids += next(first_ids if stretch.is_first else later_ids)
                if stretch.then is not None:
                    ids.append(stretch.then.token_id)
            if add_bos and self._start and ids[: len(self._start)] != self._start:
                ids = self._start + ids
            prompts.append(ids)
        return prompts

    # Conversations

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The model's own template over messages whose contents were escaped; for `encode_escaped(add_bos=False)`."""
        if self._template is None:
            raise ModelError(f"{self._origin} has no chat template; set chat = false in the task, or use another model")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """A conversation's token ids. Contents are data: none of them can end a turn."""
        escaped = [
            {key: value if key == "role" else self.escape_values(value) for key, value in message.items()}
            for message in messages
        ]
        return self.encode_escaped(self.render_chat(escaped, add_generation_prompt), add_bos=False)

    # What receipts, masks and stop strings need

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids."""
        return _digest(self._backend.to_str().encode("utf-8", "surrogatepass"))

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...] | None:
        """Each token's bytes in a text, by id; empty for special ones. None where bytes do not make up the text.

        A text is these joined and decoded as UTF-8; SentencePiece vocabularies drop one space at the very start.
        """
        kinds = _decoder_kinds(self._backend)
        if kinds == ["ByteLevel"]:
            spell = _byte_level_speller()
        elif "ByteFallback" in kinds:
            spell = _sentencepiece_bytes
        else:
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        table = [b""] * (max(vocabulary.values()) + 1)
        for token, token_id in vocabulary.items():
            if token_id not in self.special_token_ids:
                table[token_id] = spell(token)
        for token_id, added_token in added.items():
            if not added_token.special:
                table[token_id] = spell(added_token.content)
        return tuple(table)

    @cached_property
    def drops_first_space(self) -> bool:
        """Whether decoding leaves out one space at the text's very start (SentencePiece put it there)."""
        return "Strip" in _decoder_kinds(self._backend)

    def _ordinary(self, backend: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            if len(texts) == 1:
                return [backend.encode(texts[0], add_special_tokens=False).ids]
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate
            raise DocumentError(
                FailureCode.BAD_MESSAGE, Stage.PROMPT, "the text holds a lone surrogate, which is no character"
            ) from error


def _from_folder(folder: Path) -> _Parts:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{file} cannot be read as a tokenizer: {error}") from error
    config = _json_file(folder / "tokenizer_config.json")
    roles = {role: spelling for role in _ROLES if (spelling := _spelling(config.get(role))) is not None}
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        model_config = _json_file(folder / name)
        ends |= _ids(model_config.get("eos_token_id"))
        if isinstance(text_config := model_config.get("text_config"), dict):
            ends |= _ids(text_config.get("eos_token_id"))
    return _Parts(backend, str(folder), roles, frozenset(ends), _folder_chat_template(folder, config))


def _folder_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = _json_file(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _json_file(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _spelling(token: Any) -> str | None:
    """A token as tokenizer_config.json has it: its spelling, or an object that holds it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _ids(value: Any) -> set[int]:
    listed = value if isinstance(value, list) else [value]
    return {entry for entry in listed if isinstance(entry, int) and not isinstance(entry, bool)}


def _make_special(backend: tokenizers.Tokenizer, token_ids: Iterable[int]) -> None:
    """What begins or ends a text or turn is special even where the files call it an ordinary token."""
    added = backend.get_added_tokens_decoder()
    missing = []
    for token_id in sorted(token_ids):
        known = added.get(token_id)
        spelling = known.content if known is not None else backend.id_to_token(token_id)
        if spelling and (known is None or not known.special):
            missing.append(AddedToken(spelling, normalized=False, special=True))
    if missing:
        backend.add_special_tokens(missing)


def _without_prefix_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For stretches that do not begin the text: SentencePiece's space goes before the first one only."""
    state = json.loads(_pre_tokenizer_state(backend))
    if not (isinstance(state, dict) and state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first"):
        return backend
    inner = tokenizers.Tokenizer.from_str(backend.to_str())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        replacement=state["replacement"], prepend_scheme="never", split=state.get("split", True)
    )
    inner.encode_special_tokens = True
    return inner


def _pre_tokenizer_state(backend: tokenizers.Tokenizer) -> bytes | str:
    part = backend.pre_tokenizer
    return part.__getstate__() if part is not None else "null"


def _prompt_start_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that the post-processor puts before a text; what it would put after it is no part of a prompt."""
    body = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return list(whole[:start])
    return []


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state.get("type") == "Sequence" else [state]
    return [part["type"] for part in parts]


def _byte_level_speller() -> Any:
    by_character = {character: byte for byte, character in byte_alphabet().items()}

    def spell(token: str) -> bytes:
        try:
            return bytes([by_character[character] for character in token])
        except KeyError:  # an added token is written in plain characters
            return token.encode("utf-8", errors="replace")

    return spell


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _PIECE_OF_A_BYTE.get(token)
    return bytes([byte]) if byte is not None else token.replace(_SPACE, " ").encode("utf-8", errors="replace")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
