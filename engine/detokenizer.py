"""The text of a growing answer, and the stop strings in it. No torch."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What a text needs of its tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def token_bytes(self) -> tuple[bytes, ...] | None: ...

    @property
    def drops_first_space(self) -> bool: ...


class TextStream:
    """One answer's text. Without stop strings nothing is decoded until `finish`: this runs for every row of a step.

    A stop string has completed once its last character has; of several completed by one token, the one that ends
    first counts (the longest of those that end together), so how the text is cut into tokens does not matter.
    """

    __slots__ = (
        "_begun", "_decode_bytes", "_decoder", "_length", "_pieces", "_stop", "_stopped_at", "_tail", "_tail_length",
        "_token_ids",
    )  # fmt: skip

    def __init__(self, tokenizer: Decoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = tokenizer
        self._stop = stop
        self._token_ids: list[int] = []
        self._stopped_at: tuple[int, str] | None = None  # characters before the stop string, and which
        # With stop strings: the text so far in complete characters.
        self._pieces: list[str] = []
        self._length = 0
        self._begun = False
        self._tail = ""  # its last characters, in which a stop string may have begun
        self._tail_length = max(map(len, stop), default=1) - 1
        self._decode_bytes = codecs.getincrementaldecoder("utf-8")("replace") if stop else None

    def append(self, token_id: int) -> str | None:
        """Takes one token; the stop string that it completed, if any. After one, further tokens are refused."""
        assert self._stopped_at is None, f"token {token_id} after the stop string {self._stopped_at!r}"
        self._token_ids.append(token_id)
        if self._decode_bytes is None:
            return None
        new = self._new_characters(token_id)
        return self._find_stop(new) if new else None

    @property
    def text(self) -> str:
        """The text so far, complete characters only, cut at the stop string."""
        if self._decode_bytes is None:
            return self._decoder.decode(self._token_ids)
        whole = "".join(self._pieces)
        return whole if self._stopped_at is None else whole[: self._stopped_at[0]]

    def finish(self) -> str:
        """The final text: the decoding of all tokens, cut exactly before the stop string if there was one."""
        whole = self._decoder.decode(self._token_ids)
        if self._stopped_at is None:
            return whole
        at, stop = self._stopped_at
        if whole.startswith(stop, at):
            return whole[:at]
        # Only where bytes that are no character decode to another number of U+FFFD than they did one by one.
        found = whole.find(stop)
        return whole[:found] if found >= 0 else self.text

    def _new_characters(self, token_id: int) -> str:
        """The characters that this token completes."""
        assert self._decode_bytes is not None
        table = self._decoder.token_bytes
        if table is None:  # no bytes to go by: decode all again, and hold back what may still change
            whole = self._decoder.decode(self._token_ids).rstrip("\ufffd")
            return whole[self._length :]
        new = self._decode_bytes.decode(table[token_id] if token_id < len(table) else b"")
        if new and not self._begun:
            self._begun = True
            if self._decoder.drops_first_space:
                new = new.removeprefix(" ")
        return new

    def _find_stop(self, new: str) -> str | None:
        window = self._tail + new
        start = self._length - len(self._tail)
        best: tuple[int, int, str] | None = None  # end, start, which: the smallest end, then the longest
        for stop in self._stop:
            # A match that ended before the new characters would have been found then.
            at = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        self._pieces.append(new)
        self._length += len(new)
        self._tail = window[max(0, len(window) - self._tail_length) :]
        if best is None:
            return None
        self._stopped_at = (start + best[1], best[2])
        return best[2]
