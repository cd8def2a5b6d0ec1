"""Text streams: the end equals decoding everything, stops are cut exactly, characters are never split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import TextStream
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_level, sentencepiece


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def stream_of(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[TextStream, str | None]:
    stream = TextStream(tokenizer, stop)
    for token_id in token_ids:
        if (found := stream.append(token_id)) is not None:
            return stream, found
    return stream, None


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    table = tokenizer.token_bytes
    assert table is not None
    return [table.index(bytes([byte])) for byte in text.encode()]


def test_a_stop_string_is_found_across_tokens_and_cut_exactly(tokenizer: Tokenizer) -> None:
    stream, found = stream_of(tokenizer, single_bytes(tokenizer, "one STOP two"), ("STOP",))
    assert found == "STOP"
    assert stream.text == stream.finish() == "one "


def test_a_stop_string_inside_one_token_is_cut_exactly(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the answer")
    assert len(token_ids) < 10
    stream, found = stream_of(tokenizer, token_ids, ("nsw",))
    assert (found, stream.finish()) == ("nsw", "the a")


def test_the_stop_that_ends_first_counts_and_of_these_the_longest(tokenizer: Tokenizer) -> None:
    stream, found = stream_of(tokenizer, tokenizer.encode("abcdef"), ("def", "bcd", "cd"))
    assert (found, stream.finish()) == ("bcd", "a")


def test_a_stop_string_that_never_completes_leaves_the_text_whole(tokenizer: Tokenizer) -> None:
    stream, found = stream_of(tokenizer, single_bytes(tokenizer, "almost STO"), ("STOP",))
    assert found is None
    assert stream.finish() == "almost STO"


def test_a_character_of_several_bytes_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("never",))
    texts = []
    for token_id in single_bytes(tokenizer, "a€b"):
        assert stream.append(token_id) is None
        texts.append(stream.text)
    assert texts == ["a", "a", "a", "a€", "a€b"]


def test_a_stop_string_may_hold_characters_of_several_bytes(tokenizer: Tokenizer) -> None:
    stream, found = stream_of(tokenizer, single_bytes(tokenizer, "10 € each"), ("€ e",))
    assert (found, stream.finish()) == ("€ e", "10 ")


def test_special_tokens_leave_no_text(tokenizer: Tokenizer) -> None:
    end = next(iter(tokenizer.eos_token_ids))
    stream, _ = stream_of(tokenizer, [*tokenizer.encode("done"), end], ("<|im_end|>", "x"))
    assert stream.finish() == "done"


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_end_is_the_decoding_of_all_tokens_whatever_they_are(build: object, data: st.DataObject) -> None:
    assert callable(build)
    tokenizer: Tokenizer = build()
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for stop in ((), ("\x00never\x00",)):
        stream, found = stream_of(tokenizer, token_ids, stop)
        assert found is None
        assert stream.finish() == tokenizer.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab é€😀", max_size=24),
    stop=st.lists(st.text("ab é€😀", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    cuts=st.randoms(use_true_random=False),
)
def test_where_a_text_stops_does_not_depend_on_its_cut_into_tokens(
    text: str, stop: tuple[str, ...], cuts: object
) -> None:
    tokenizer = byte_level()
    table = tokenizer.token_bytes
    assert table is not None
    ids_of = {spelled: i for i, spelled in enumerate(table) if spelled}
    raw, token_ids, at = text.encode(), [], 0
    while at < len(raw):
        ends = [end for end in range(at + 1, len(raw) + 1) if raw[at:end] in ids_of]
        end = cuts.choice(ends)  # type: ignore[attr-defined]
        token_ids.append(ids_of[raw[at:end]])
        at = end
    # The truth, character by character: the first end of any stop, the longest of those that end there.
    expected: tuple[str | None, str] = (None, text)
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            expected = (longest, text[: end - len(longest)])
            break
    stream, found = stream_of(tokenizer, token_ids, stop)
    assert (found, stream.finish()) == expected
