"""Small real tokenizers for tests: byte-level and SentencePiece, as Hugging Face folders and as GGUF files."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.gguf_tokenizer import byte_alphabet
from engine.tokenizer import Tokenizer

CORPUS = [
    "the answer to the question is in the text, and the text is here",
    "a b ab abc abcdef the a an answer answers question questions é € 😀 naïve",
    "it's what they'll say: we've 1234 items, 56 of 7890; don't\n\n  def f(x):\n    return x + 1\n",
] * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_byte_level(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with ChatML's special tokens last, trained on CORPUS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(byte_alphabet().values()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(list(SPECIAL))
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A Hugging Face folder with nothing but its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_gguf(path: Path, architecture: str, kind: str, tokens: list[str], types: list[int], **fields: Any) -> Path:
    """A GGUF file of metadata alone. `fields` are keys under `tokenizer.`, dots written as two underscores."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("general.name", "tiny")
    writer.add_uint32(f"{architecture}.block_count", 1)
    writer.add_uint32(f"{architecture}.context_length", 64)
    writer.add_uint32(f"{architecture}.embedding_length", 8)
    writer.add_uint32(f"{architecture}.feed_forward_length", 8)
    writer.add_uint32(f"{architecture}.attention.head_count", 1)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        key = "tokenizer." + name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str = "gpt-2", architecture: str = "qwen2", **fields: Any) -> Path:
    """The trained byte-level tokenizer as a GGUF file."""
    backend = train_byte_level()
    state = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in SPECIAL else 1 for token in tokens]
    given = {
        "ggml__pre": pre,
        "ggml__merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "ggml__eos_token_id": vocabulary["<|im_end|>"],
        "ggml__bos_token_id": vocabulary["<|endoftext|>"],
        "ggml__add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        **fields,
    }
    return write_gguf(path, architecture, "gpt2", tokens, types, **given)


SENTENCEPIECE = [
    ("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0),
    *((f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)),
    ("▁t", 1, -1.0), ("he", 1, -2.0), ("▁the", 1, -3.0), ("▁a", 1, -4.0), ("an", 1, -5.0), ("▁an", 1, -6.0),
    ("sw", 1, -7.0), ("er", 1, -8.0), ("▁answ", 1, -9.0), ("▁answer", 1, -10.0), ("▁▁", 1, -11.0),
    *((character, 1, -20.0 - n) for n, character in enumerate("▁etaoinshrdlcumwfgypbvkxjqz.,!?é")),
]  # fmt: skip


def sentencepiece_gguf(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A hand-made SentencePiece vocabulary as a GGUF file."""
    given = {
        "ggml__scores": [score for *_, score in SENTENCEPIECE],
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0,
        **fields,
    }
    tokens, types = [token for token, *_ in SENTENCEPIECE], [kind for _, kind, _ in SENTENCEPIECE]
    return write_gguf(path, architecture, "llama", tokens, types, **given)


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_path(write_folder(Path(mkdtemp(prefix="pagemill-test-")), train_byte_level()))


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_path(sentencepiece_gguf(Path(mkdtemp(prefix="pagemill-test-")) / "tiny.gguf"))
