"""Builds a tokenizer from a GGUF file's metadata: vocabulary, merges, token types, how text is split before merging.

Split patterns are those of the models' own tokenizer.json files. No normaliser is added to byte-level vocabularies,
since GGUF has no word for one (Qwen's own files have NFC; llama.cpp and transformers leave it out for GGUF too).
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.weights.gguf_metadata import GGUFMetadata
from schemas.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types
_NOT_MERGED = frozenset((_UNKNOWN, _CONTROL, _BYTE))

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a kind of byte-level vocabulary splits text. `whole_words`: a word that is a token skips the merges."""

    pattern: str
    whole_words: bool = False
    adds_bos: bool = False  # where the file does not say
    single_digits: bool = False


_SPLITTINGS = {
    "default": _Splitting(_GPT2_SPLIT),
    "gpt-2": _Splitting(_GPT2_SPLIT),
    "gpt2": _Splitting(_GPT2_SPLIT),
    "qwen2": _Splitting(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _Splitting(_QWEN2_SPLIT),
    "llama-bpe": _Splitting(_LLAMA3_SPLIT, whole_words=True, adds_bos=True),
    "llama3": _Splitting(_LLAMA3_SPLIT, whole_words=True, adds_bos=True),
    "llama-v3": _Splitting(_LLAMA3_SPLIT, whole_words=True, adds_bos=True),
    "tekken": _Splitting(_TEKKEN_SPLIT, whole_words=True, adds_bos=True),
    "smollm": _Splitting(_GPT2_SPLIT, single_digits=True),
}
_GEMMAS = ("gemma", "gemma2", "gemma3")

# End-of-turn tokens that files often hold without naming them as such.
_END_OF_TURN_SPELLINGS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
)  # fmt: skip
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a file holds of its tokenizer. `roles` maps `bos_token` and the like to spellings."""

    backend: Tokenizer
    roles: dict[str, str]
    eos_token_ids: frozenset[int]
    chat_template: str | None


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return table


def build_gguf_tokenizer(metadata: GGUFMetadata) -> GGUFTokenizer:
    """Raises ModelError where the file lacks a part, or holds a kind of tokenizer that is not built here."""
    fields, path = metadata.fields, metadata.path
    kind = fields.get("tokenizer.ggml.model")
    tokens = _field(metadata, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path} is damaged: {len(tokens)} tokens, but {len(types)} token types")
    roles = {role: _token(metadata, tokens, fields[key]) for role, key in _ROLES.items() if key in fields}

    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        is_gemma = fields.get("general.architecture") in _GEMMAS
        backend, adds_bos = _sentencepiece(metadata, tokens, types, is_gemma, roles.get("unk_token")), True
    else:
        raise ModelError(f"{path} has a tokenizer of kind {kind!r}; kinds 'gpt2' and 'llama' are built from GGUF")

    known = backend.get_vocab(with_added_tokens=True)
    control = [t for t, kind_of in zip(tokens, types, strict=True) if kind_of == _CONTROL and t in known]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    plain = [t for t, kind_of in zip(tokens, types, strict=True) if kind_of == _USER_DEFINED and t in known]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])

    bos = roles.get("bos_token") if fields.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    backend.post_processor = _prompt_start(backend, bos)
    return GGUFTokenizer(
        backend, roles, _eos_token_ids(fields, tokens, types), fields.get("tokenizer.chat_template") or None
    )


def _prompt_start(backend: Tokenizer, bos: str | None) -> Any:
    """The post-processor that puts the beginning-of-sequence token before a text, or nothing."""
    if bos is None:
        return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    bos_id = backend.token_to_id(bos)
    return processors.TemplateProcessing(
        single=[f"{bos}:0", "$A:0"], pair=[f"{bos}:0", "$A:0", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )


def _byte_level(metadata: GGUFMetadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    name = metadata.fields.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        known = ", ".join(sorted(_SPLITTINGS))
        raise ModelError(f"{metadata.path} splits text in the way {name!r}; known ways are {known}")
    spelled = byte_alphabet()
    alphabet = frozenset(spelled.values())
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (_CONTROL, _USER_DEFINED) and not alphabet.issuperset(token):
            token = "".join(spelled[byte] for byte in token.encode("utf-8", errors="surrogateescape"))
        vocabulary[token] = token_id
    merges = [_merge(metadata, line) for line in _field(metadata, "tokenizer.ggml.merges")]
    backend = Tokenizer(_bpe(metadata, vocabulary, merges, ignore_merges=splitting.whole_words))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *digits,
            pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _sentencepiece(
    metadata: GGUFMetadata, tokens: list[str], types: list[int], is_gemma: bool, unknown: str | None
) -> Tokenizer:
    if is_gemma:  # runs of spaces stand in the file as they are, and every other space as ▁
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores: list[float] = [-float(token_id) for token_id in range(len(tokens))]  # Gemma merges in the file's order
    else:
        scores = _field(metadata, "tokenizer.ggml.scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_from_scores(vocabulary, scores, types)
    known_unknown = {"unk_token": unknown} if unknown is not None and unknown in vocabulary else {}
    backend = Tokenizer(_bpe(metadata, vocabulary, merges, fuse_unk=True, byte_fallback=True, **known_unknown))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif metadata.fields.get("tokenizer.ggml.add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        parts.append(decoders.Strip(content=" ", left=1))
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: two pieces join where their join is a piece, the best score first."""
    merged = {token: i for token, i in vocabulary.items() if types[i] not in _NOT_MERGED}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in merged.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in merged and right in merged:
                ranked.append((-scores[token_id], -cut, token_id, left, right))
    ranked.sort(key=lambda entry: (entry[0], entry[1], -len(entry[4]), entry[2]))
    return [(left, right) for *_, left, right in ranked]


def _bpe(metadata: GGUFMetadata, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{metadata.path} has merges that its vocabulary lacks: {error}") from error


def _merge(metadata: GGUFMetadata, line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not (left and separator and right):
        raise ModelError(f"{metadata.path} is damaged: {line!r} is not a merge of two tokens")
    return left, right


def _eos_token_ids(fields: dict[str, Any], tokens: list[str], types: list[int]) -> frozenset[int]:
    """The tokens that end an answer: those that the file names, and its control tokens that are known to end turns."""
    named = (fields.get(f"tokenizer.ggml.{part}_token_id") for part in ("eos", "eot", "eom"))
    ids = {token_id for token_id in named if isinstance(token_id, int) and token_id < len(tokens)}
    spelled = frozenset(_END_OF_TURN_SPELLINGS)
    ids.update(i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in spelled)
    return frozenset(ids)


def _token(metadata: GGUFMetadata, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"{metadata.path} names token {token_id}, but its vocabulary has {len(tokens)} tokens")
    return tokens[token_id]


def _field(metadata: GGUFMetadata, key: str) -> list[Any]:
    value = metadata.fields.get(key)
    if not isinstance(value, list) or not value:
        raise ModelError(f"{metadata.path} holds no tokenizer that can be built: {key} is missing")
    return value
