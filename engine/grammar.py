"""Which tokens may come next where an answer must be one of a task's labels. No torch.

A label set is compiled once into an automaton over the labels' bytes: a state is what has been spelled so far, and a
token is allowed where its bytes go on along some label, however the label was cut into tokens.

    labels  yes, yesterday      ""  --y, ye, yes, yest...-->  "yes"  --t, ter...-->  ...  "yesterday"
                                                              EOS ends it here
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

LabelTokenIds = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Node:
    """What has been spelled is a prefix of a label. `next_nodes`: token id -> index of the node it leads to."""

    next_nodes: dict[int, int] = field(default_factory=dict)
    label_id: int | None = None  # the label that is spelled here in full
    allowed: tuple[int, ...] = ()  # ascending; EOS included where the label may end here


class LabelSet:
    """The automaton of one set of labels. Immutable once made."""

    def __init__(
        self,
        label_token_ids: LabelTokenIds,
        eos_token_ids: Iterable[int],
        token_bytes: Sequence[bytes] | None = None,
        tokens_of_bytes: dict[bytes, list[int]] | None = None,
    ) -> None:
        """`token_bytes` by id, and its inverse; without them only the given cuts into tokens are allowed."""
        assert label_token_ids, "a label set needs a label"
        assert all(label_token_ids), f"a label of no tokens: {label_token_ids}"
        self.eos_token_ids = frozenset(eos_token_ids)
        self.nodes: list[_Node] = []
        if token_bytes is not None and tokens_of_bytes is not None:
            spelled = [b"".join(token_bytes[t] for t in label) for label in label_token_ids]
            assert all(spelled), f"a label of special tokens alone: {label_token_ids}"
            self._compile(spelled, lambda rest: tokens_of_bytes.get(rest, []))
        else:
            self._compile(list(label_token_ids), lambda rest: list(rest) if len(rest) == 1 else [])

    def _compile(self, labels: Sequence[Sequence[int]], tokens_for: Callable[..., list[int]]) -> None:
        """`labels` as sequences of symbols (bytes, or token ids); `tokens_for` gives the tokens spelled by a run."""
        index: dict[Sequence[int], int] = {labels[0][:0]: 0}
        pending: list[Sequence[int]] = [labels[0][:0]]
        self.nodes.append(_Node())
        while pending:
            prefix = pending.pop()
            node = self.nodes[index[prefix]]
            for label_id, label in enumerate(labels):
                if label[: len(prefix)] != prefix:
                    continue
                if len(label) == len(prefix):
                    node.label_id = label_id if node.label_id is None else node.label_id
                for end in range(len(prefix) + 1, len(label) + 1):
                    for token_id in tokens_for(label[len(prefix) : end]):
                        longer = label[:end]
                        if longer not in index:
                            index[longer] = len(self.nodes)
                            self.nodes.append(_Node())
                            pending.append(longer)
                        node.next_nodes[token_id] = index[longer]
            allowed = set(node.next_nodes)
            if node.label_id is not None:
                allowed |= self.eos_token_ids
            node.allowed = tuple(sorted(allowed))


class LabelState:
    """Where one answer is in its label set."""

    __slots__ = ("_ended", "_labels", "_node")

    def __init__(self, labels: LabelSet, token_ids: Iterable[int] = ()) -> None:
        self._labels = labels
        self._node = labels.nodes[0]
        self._ended = False
        for token_id in token_ids:
            self.append(token_id)

    def allowed(self) -> tuple[int, ...]:
        """The tokens that can come next, ascending; never empty before the label is complete."""
        return self._node.allowed

    def append(self, token_id: int) -> None:
        """Takes a sampled token, one of `allowed`."""
        if token_id in self._labels.eos_token_ids and self._node.label_id is not None:
            self._ended = True
            return
        following = self._node.next_nodes.get(token_id)
        assert following is not None, f"token {token_id} is not one of the allowed {self._node.allowed[:8]}"
        self._node = self._labels.nodes[following]

    @property
    def label_id(self) -> int | None:
        """The answer's label once it is complete: nothing longer is possible, or EOS came after it.

        Of an answer that was cut short before that nobody knows whether a longer label was coming.
        """
        complete = self._ended or not self._node.next_nodes
        return self._node.label_id if complete else None


class LabelSets:
    """Every label set that is in use, compiled once each; one owner per engine."""

    def __init__(
        self, eos_token_ids: Iterable[int], token_bytes: Callable[[], Sequence[bytes] | None] = lambda: None
    ) -> None:
        """`token_bytes` is called at the first classification: making the table takes a moment."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._read_token_bytes = token_bytes
        self._token_bytes: Sequence[bytes] | None = None
        self._tokens_of_bytes: dict[bytes, list[int]] | None = None
        self._compiled: dict[LabelTokenIds, LabelSet] = {}

    def get(self, label_token_ids: LabelTokenIds) -> LabelSet:
        """The compiled set of these labels."""
        labels = self._compiled.get(label_token_ids)
        if labels is None:
            if self._tokens_of_bytes is None:
                self._token_bytes = self._read_token_bytes()
                self._tokens_of_bytes = _tokens_of_bytes(self._token_bytes or ())
            known = self._tokens_of_bytes if self._token_bytes is not None else None
            labels = LabelSet(label_token_ids, self._eos_token_ids, self._token_bytes, known)
            self._compiled[label_token_ids] = labels
        return labels

    def state(self, label_token_ids: LabelTokenIds, sampled: Iterable[int]) -> LabelState:
        """Where an answer of these sampled tokens is; labels are a few tokens, so it is walked anew each time."""
        return LabelState(self.get(label_token_ids), sampled)


def _tokens_of_bytes(token_bytes: Sequence[bytes]) -> dict[bytes, list[int]]:
    table: dict[bytes, list[int]] = {}
    for token_id, spelled in enumerate(token_bytes):
        if spelled:
            table.setdefault(spelled, []).append(token_id)
    return table
