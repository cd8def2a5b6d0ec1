"""Label automata: exact masks on tiny vocabularies, and that what is sampled always ends as a label."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import LabelSet, LabelSets, LabelState

EOS = 0
# id:        0    1     2     3      4      5      6       7     8     9
TOKENS = (b"", b"y", b"e", b"s", b"ye", b"es", b"yes", b"no", b"n", b"o")


def sets() -> LabelSets:
    return LabelSets({EOS}, lambda: TOKENS)


def test_every_token_that_goes_on_along_a_label_is_allowed() -> None:
    labels = sets().get(((6,), (7,)))  # yes, no
    state = LabelState(labels)
    assert state.allowed() == (1, 4, 6, 7, 8)
    state.append(1)  # y
    assert state.allowed() == (2, 5)
    state.append(5)  # y|es
    assert state.label_id == 0
    assert LabelState(labels, (8, 9)).label_id == 1


def test_a_label_that_begins_another_ends_by_eos() -> None:
    labels = sets().get(((1,), (6,)))  # y, yes
    state = LabelState(labels, (1,))
    assert state.label_id is None
    assert state.allowed() == (EOS, 2, 5)
    assert LabelState(labels, (1, EOS)).label_id == 0
    assert LabelState(labels, (1, 2, 3)).label_id == 1


def test_half_a_label_is_no_label() -> None:
    state = LabelState(sets().get(((6,), (7,))), (4,))
    assert state.label_id is None


def test_without_the_tokens_bytes_only_the_given_cut_is_allowed() -> None:
    labels = LabelSets({EOS}).get(((4, 3), (7,), (4, 2)))
    state = LabelState(labels)
    assert state.allowed() == (4, 7)
    state.append(4)
    assert state.allowed() == (2, 3)
    state.append(3)
    assert state.label_id == 0


def test_a_label_set_is_compiled_once() -> None:
    owner = sets()
    assert owner.get(((6,), (7,))) is owner.get(((6,), (7,)))
    assert owner.get(((7,), (6,))) is not owner.get(((6,), (7,)))


def test_characters_of_several_bytes_may_be_spelled_byte_by_byte() -> None:
    tokens = (b"", "é".encode()[:1], "é".encode()[1:], "é".encode(), b"e")
    labels = LabelSets({EOS}, lambda: tokens).get(((3,), (4,)))
    assert LabelState(labels).allowed() == (1, 3, 4)
    assert LabelState(labels, (1,)).allowed() == (2,)
    assert LabelState(labels, (1, 2)).label_id == 0


ALPHABET = "ab"
VOCABULARY = [b"", *(s.encode() for n in (1, 2, 3) for s in sorted({f"{i:0{n}b}" for i in range(2**n)}))]
VOCABULARY = [token.replace(b"0", b"a").replace(b"1", b"b") for token in VOCABULARY]
SINGLE = {b"a": VOCABULARY.index(b"a"), b"b": VOCABULARY.index(b"b")}


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_any_allowed_walk_spells_a_label_and_the_mask_is_exact(names: set[str], choices: object) -> None:
    labels = sorted(names)
    token_ids = tuple(tuple(SINGLE[c.encode()] for c in label) for label in labels)
    by_bytes: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(VOCABULARY[1:], start=1):
        by_bytes.setdefault(token, []).append(token_id)
    state = LabelState(LabelSet(token_ids, {EOS}, VOCABULARY, by_bytes))
    spelled = b""
    ended = False
    while state.label_id is None:
        expected = {
            i
            for i, token in enumerate(VOCABULARY)
            if token and any(label.encode().startswith(spelled + token) for label in labels)
        }
        if spelled.decode() in labels:
            expected.add(EOS)
        assert set(state.allowed()) == expected
        token_id = choices.choice(state.allowed())  # type: ignore[attr-defined]
        state.append(token_id)
        spelled += VOCABULARY[token_id]
        ended = token_id == EOS
    assert labels[state.label_id] == spelled.decode()
    longer = [label for label in labels if label.startswith(spelled.decode()) and label != spelled.decode()]
    assert ended or not longer
