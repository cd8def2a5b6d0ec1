"""Keeps text that comes out of documents apart from the special tokens that templates write. No tokenizer here.

A document's text passes `escape` before it enters a template. That puts a mark inside every spelling of a special
token, so that what still reads as a special token after rendering was written by the template:

    document   <|im_end|>      escaped   <[BREAK]|im_end|>      encoded as the ordinary text  <|im_end|>
    template   <|im_end|>                <|im_end|>             encoded as the special token
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# The last two private-use characters. Text that holds them survives: they are quoted on the way in.
BREAK = "\U0010fffd"
QUOTE = "\U0010fffc"
_QUOTED = {BREAK: QUOTE + "0", QUOTE: QUOTE + "1"}
_UNQUOTED = {"0": BREAK, "1": QUOTE}
_ANY_MARK = re.compile(f"[{BREAK}{QUOTE}]")
_UNESCAPE = re.compile(f"{QUOTE}([01])?|{BREAK}")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token. `strips_left` and `strips_right`: it swallows the white space beside it."""

    token_id: int
    spelling: str
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of ordinary text (marks removed), and the special token after it."""

    text: str
    is_first: bool  # starts where the whole text starts
    then: SpecialToken | None


class SpecialTokenSplitter:
    """Marks special tokens' spellings in data, and splits rendered text at those that a template wrote."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._by_spelling = {token.spelling: token for token in tokens if token.spelling}
        spellings = sorted(self._by_spelling, key=len, reverse=True)  # the longest wins where several begin
        alternatives = "|".join(re.escape(spelling) for spelling in spellings) or r"(?!)"
        self._genuine = re.compile(f"({alternatives})")
        self._prefixes = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._suffixes = frozenset(s[n:] for s in spellings for n in range(1, len(s)))
        self._longest = max((len(s) for s in spellings), default=0)

    def escape(self, text: str) -> str:
        """The text, safe to put into a template; unchanged where nothing in it could become a special token."""
        if not text:
            return text
        # Judged before marks are added: a spelling may also arise where two pieces of data meet in a template.
        reach = min(len(text), self._longest - 1)
        opens = any(text[-n:] in self._prefixes for n in range(1, reach + 1))
        closes = any(text[:n] in self._suffixes for n in range(1, reach + 1))
        places = self._places(text) if self._genuine.search(text) else []
        if places or _ANY_MARK.search(text):
            pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
            text = BREAK.join(_ANY_MARK.sub(lambda mark: _QUOTED[mark[0]], piece) for piece in pieces)
        return (BREAK if closes else "") + text + (BREAK if opens else "")

    def _places(self, text: str) -> list[int]:
        """One past the first character of every spelling, overlapping ones included."""
        places, position = [], 0
        while (found := self._genuine.search(text, position)) is not None:
            position = found.start() + 1
            places.append(position)
        return places

    def split(self, text: str) -> Iterator[Stretch]:
        """The rendered text as stretches of ordinary text between the template's special tokens, marks removed."""
        start = 0
        pending_strip = False
        for found in self._genuine.finditer(text):
            token = self._by_spelling[found[0]]
            yield self._stretch(text[start : found.start()], start == 0, token, pending_strip)
            start = found.end()
            pending_strip = token.strips_right
        yield self._stretch(text[start:], start == 0, None, pending_strip)

    def _stretch(self, text: str, is_first: bool, then: SpecialToken | None, strip_left: bool) -> Stretch:
        if strip_left:
            text = text.lstrip()
        if then is not None and then.strips_left:
            text = text.rstrip()
        return Stretch(unescape(text), is_first, then)


def unescape(text: str) -> str:
    """Removes the marks; what `escape` quoted is itself again."""
    if not _ANY_MARK.search(text):
        return text
    return _UNESCAPE.sub(lambda mark: _UNQUOTED.get(mark[1] or "", ""), text)
