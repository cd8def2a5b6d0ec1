"""Token ids equal transformers' on real text, from folders and GGUF files; text is data; BOS is never there twice."""

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from engine.tokenizer import Tokenizer
from engine.weights.gguf_metadata import read_gguf_metadata
from schemas.errors import DocumentError, FailureCode, ModelError
from tests.engine.tiny_tokenizers import (
    byte_level,
    byte_level_gguf,
    sentencepiece,
    sentencepiece_gguf,
    train_byte_level,
    write_folder,
    write_gguf,
)

TEXTS = [
    "the answer to the question",
    " leading and trailing ",
    "two  spaces\n\n\nlines\ttabs\r\n",
    "it's 12345 items; naïve café €5 😀 \u0301combining",
    "日本語のテキスト and العربية",
    "",
    "a\x00b",
    "def f(x):\n    return x + 1\n",
]


def package_descriptions() -> list[str]:
    texts = []
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata.json
        texts += [f"{metadata.get('name')} {metadata.get('summary')}", str(metadata.get("description", ""))]
    return sorted({text.encode("utf-8", "replace").decode() for text in texts if text})


def theirs_from(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)


@pytest.mark.real_model
def test_the_real_gguf_models_ids_equal_transformers_on_all_package_descriptions(
    real_model: Path, real_transformers_tokenizer: Any
) -> None:
    ours, theirs = Tokenizer.from_path(real_model), real_transformers_tokenizer
    texts = package_descriptions() + TEXTS
    assert len(texts) > 100
    assert sum(map(len, texts)) > 200_000
    # Where a text spells a special token, theirs reads it as one unless it is told that text is data.
    theirs.backend_tokenizer.encode_special_tokens = True
    expected = [encoding.ids for encoding in theirs.backend_tokenizer.encode_batch(texts)]
    theirs.backend_tokenizer.encode_special_tokens = False
    plain = [text for text in texts if "<|" not in text]
    assert ours.encode_batch(texts) == expected
    assert [ours.encode(text) for text in plain[:50]] == [theirs.encode(text) for text in plain[:50]]
    assert ours.encode_escaped_batch(plain) == ours.encode_batch(plain)
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids, skip_special_tokens=True) for ids in expected]


@pytest.mark.real_model
def test_the_real_gguf_models_ends_are_its_own_and_end_of_text(real_model: Path) -> None:
    ours = Tokenizer.from_path(real_model)
    assert ours.eos_token_ids == {151645, 151643}
    assert ours.vocab_size == 151936


@pytest.mark.slow  # the package takes 10 s for the vocabulary
@pytest.mark.real_model
def test_the_real_gguf_header_is_what_the_gguf_package_reads(real_model: Path) -> None:
    import gguf

    ours, theirs = read_gguf_metadata(real_model), gguf.GGUFReader(str(real_model))
    assert [(t.name, t.shape, t.ggml_type, t.offset) for t in ours.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.data_offset)) for t in theirs.tensors
    ]
    for key, value in ours.fields.items():
        if not isinstance(value, list):
            assert theirs.fields[key].contents() == value
    tokens = theirs.fields["tokenizer.ggml.tokens"]
    assert ours.fields["tokenizer.ggml.tokens"][:2000] == [tokens.contents(i) for i in range(2000)]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_a_byte_level_gguf_gives_transformers_ids(tmp_path: Path, pre: str) -> None:
    path = byte_level_gguf(tmp_path / "tiny.gguf", pre)
    ours, theirs = Tokenizer.from_path(path), theirs_from(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True) == text


def test_a_sentencepiece_gguf_gives_transformers_ids(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "tiny.gguf")
    ours, theirs = Tokenizer.from_path(path), theirs_from(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.encode("the answer")[0] == 1
    assert ours.eos_token_ids == {2}


def test_a_gemma_gguf_gives_transformers_ids(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "tiny.gguf", "gemma3", ggml__add_bos_token=True)
    ours, theirs = Tokenizer.from_path(path), theirs_from(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_gguf_says_whether_a_text_begins_with_bos(tmp_path: Path, add_bos: bool) -> None:
    ours = Tokenizer.from_path(byte_level_gguf(tmp_path / "tiny.gguf", ggml__add_bos_token=add_bos))
    assert (ours.decode(ours.encode("text")), len(ours.encode("")) == 1) == ("text", add_bos)


def test_a_folder_gives_transformers_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train_byte_level(), bos_token="<|endoftext|>")
    ours, theirs = Tokenizer.from_path(folder), theirs_from(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def with_bos(tmp_path: Path) -> tuple[Tokenizer, int]:
    """A folder whose post-processor begins texts with BOS."""
    backend = train_byte_level()
    bos = backend.get_vocab()["<|endoftext|>"]
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|>:0 $A:0", pair="$A:0 $B:1", special_tokens=[("<|endoftext|>", bos)]
    )
    return Tokenizer.from_path(write_folder(tmp_path, backend)), bos


def test_a_folders_post_processor_says_whether_a_text_begins_with_bos(tmp_path: Path) -> None:
    ours, bos = with_bos(tmp_path)
    theirs = theirs_from(tmp_path)
    assert ours.encode("a text") == theirs.encode("a text") == [bos, *ours.encode_escaped("a text", add_bos=False)]


def test_bos_is_never_there_twice(tmp_path: Path) -> None:
    ours, bos = with_bos(tmp_path)
    body = ours.encode("text")[1:]
    assert ours.encode("text") == [bos, *body]
    assert ours.encode_escaped("text") == [bos, *body]
    assert ours.encode_escaped("<|endoftext|>text") == [bos, *body]
    assert ours.encode_escaped("text", add_bos=False) == body
    assert ours.encode(ours.decode([])) == [bos]


def test_a_special_tokens_spelling_in_a_text_is_ordinary_text() -> None:
    ours = byte_level()
    text = "a <|im_end|> b <|im_start|><|im_end|>"
    token_ids = ours.encode(text)
    assert not ours.special_token_ids & set(token_ids)
    assert ours.decode(token_ids) == text
    assert ours.encode_escaped(ours.escape(text)) == token_ids


def test_what_a_template_writes_is_special_and_what_it_is_given_is_not() -> None:
    ours = byte_level()
    start, end = (ours._backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    token_ids = ours.encode_escaped(f"<|im_start|>{ours.escape('x<|im_end|>y')}<|im_end|>")
    assert token_ids == [start, *ours.encode("x<|im_end|>y"), end]


def test_two_pieces_of_data_cannot_make_a_special_token_together() -> None:
    ours = byte_level()
    joined = ours.escape("a<|im_") + ours.escape("end|>b")
    assert ours.encode_escaped(joined) == ours.encode("a<|im_end|>b")
    in_three = ours.escape("<|") + ours.escape("im_end") + ours.escape("|>")
    assert ours.encode_escaped(in_three) == ours.encode("<|im_end|>")


def test_benign_text_is_not_changed_by_escaping() -> None:
    text = "plain | text with <tags> and im_end."
    assert byte_level().escape(text) == text


def test_values_are_escaped_wherever_they_stand() -> None:
    ours = byte_level()
    value = {"a": ["<|im_end|>", 1, None], "b": {"c": "x"}}
    escaped = ours.escape_values(value)
    assert escaped == {"a": [ours.escape("<|im_end|>"), 1, None], "b": {"c": "x"}}
    assert escaped["a"][0] != "<|im_end|>"


PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_", "end|>", "<|", "|>", "<", ">", "a b", " ", "\U0010fffd", "\U0010fffc", "0"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=5).map("".join), max_size=4))
def test_data_survives_escaping_and_never_becomes_special(fields: list[str]) -> None:
    for ours in (byte_level(), sentencepiece()):
        rendered = "".join(ours.escape(field) for field in fields)
        token_ids = ours.encode_escaped(rendered, add_bos=False)
        assert not ours.special_token_ids & set(token_ids)
        assert ours.decode(token_ids) == ours.decode(ours.encode("".join(fields)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_a_batch_gives_what_each_text_gives_alone(texts: list[str]) -> None:
    ours = byte_level()
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    assert ours.encode_escaped_batch(texts) == [ours.encode_escaped(text) for text in texts]


def test_sentencepieces_space_goes_before_the_first_stretch_only() -> None:
    ours = sentencepiece()
    the, start = ours._backend.token_to_id("▁the"), ours._backend.token_to_id("<s>")
    assert ours.encode_escaped("the") == [start, the]
    inner = ours.encode_escaped("the<s>the", add_bos=False)
    assert inner[:2] == [the, start]
    assert inner[2] != the


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_the_tokens_bytes_make_up_every_text(build: Any) -> None:
    ours: Tokenizer = build()
    table = ours.token_bytes
    assert table is not None
    for text in TEXTS:
        joined = b"".join(table[token_id] for token_id in ours.encode(text)).decode()
        assert (joined.removeprefix(" ") if ours.drops_first_space else joined) == ours.decode(ours.encode(text))


def test_ends_are_the_union_of_the_folders_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train_byte_level())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [9]}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    ours = Tokenizer.from_path(folder)
    own = ours._backend.token_to_id("<|im_end|>")
    assert ours.eos_token_ids == {7, 8, 9, own}
    assert ours.decode([7, 8, 9]) == ""  # an end leaves no text


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    one = Tokenizer.from_path(write_folder(tmp_path / "one", train_byte_level()))
    same = Tokenizer.from_path(write_folder(tmp_path / "same", train_byte_level()))
    other = Tokenizer.from_path(write_folder(tmp_path / "other", train_byte_level(300), chat_template="{{ 1 }}"))
    assert (one.fingerprint, one.chat_template_fingerprint) == (same.fingerprint, same.chat_template_fingerprint)
    assert one.fingerprint != other.fingerprint
    assert one.chat_template_fingerprint != other.chat_template_fingerprint


def test_a_lone_surrogate_fails_its_document() -> None:
    with pytest.raises(DocumentError) as error:
        byte_level().encode("a\ud800b")
    assert error.value.failure.code == FailureCode.BAD_MESSAGE


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        Tokenizer.from_path(path)
    return str(error.value)


def test_what_cannot_be_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    assert "there is no model at" in refused(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a Hugging Face folder nor a GGUF file" in refused(tmp_path / "notes.txt")
    assert "has no tokenizer.json" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read as a tokenizer" in refused(tmp_path)
    write_folder(tmp_path, train_byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{nope")
    assert "tokenizer_config.json is not valid JSON" in refused(tmp_path)


def test_a_gguf_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bert.gguf", "bert", "bert", ["a", "b"], [1, 1])
    assert "kind 'bert'" in refused(path)
    assert "in the way 'chameleon'" in refused(byte_level_gguf(tmp_path / "other.gguf", "chameleon"))
    assert "names token 99999" in refused(byte_level_gguf(tmp_path / "bad.gguf", ggml__eos_token_id=99999))


@pytest.mark.parametrize("kept", [3, 20, 100, 1000])
def test_a_gguf_that_is_cut_short_is_refused_in_a_sentence(tmp_path: Path, kept: int) -> None:
    whole = byte_level_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:kept])
    message = refused(cut)
    assert ("is cut short" in message) or ("neither" in message) or ("not a GGUF file" in message)


def test_a_vocabularys_special_tokens_are_read_from_the_gguf(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(byte_level_gguf(tmp_path / "tiny.gguf"))
    spellings = {ours._backend.id_to_token(i) for i in ours.special_token_ids}
    assert spellings == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert {ours._backend.id_to_token(i) for i in ours.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}


def test_no_module_of_the_tokenizer_imports_torch() -> None:
    import subprocess
    import sys

    program = "import sys, engine.tokenizer, engine.detokenizer, engine.grammar; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
