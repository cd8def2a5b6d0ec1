"""The decoder's two ends over the vocabulary: the embedding, and the language model head.

Where several ranks hold the model, each has the rows of a run of ids: rank r those of [r * rows, (r + 1) * rows).
"""

import torch
from torch.nn import functional

from engine.group import Group
from engine.models.linear import Linear
from kernels.sampling import greedy, greedy_of_part, greedy_of_parts

ROWS_AT_A_TIME = 128  # of logits that are gathered: no second copy of all of them


class Embedding:
    """Token ids to the first hidden states."""

    def __init__(self, weight: torch.Tensor, group: Group) -> None:
        """weight (rows, hidden_size): the rank's."""
        self._weight = weight
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        if self._group.size == 1:
            return functional.embedding(token_ids, self._weight)
        num_rows = self._weight.shape[0]
        rows = token_ids - self._group.rank * num_rows
        is_ours = (rows >= 0) & (rows < num_rows)
        hidden = functional.embedding(rows.clamp(0, num_rows - 1), self._weight)
        return self._group.all_reduce(hidden.masked_fill_(~is_ours[:, None], 0.0))


class LanguageModelHead:
    """Hidden states to logits over the vocabulary, and the greedy choice from them.

    Logits are float32 on a GPU; on a CPU as the product leaves them, since a copy takes longer than the choice.

    A checkpoint may pad its vocabulary past the tokenizer's: those ids mean nothing, so their logits are -inf and they
    are neither sampled nor share in a log-probability.
    """

    def __init__(self, weight: torch.Tensor, num_tokens: int, group: Group, widen: bool = False) -> None:
        """weight (rows, hidden_size): the rank's; ids from `num_tokens` on are padding. `widen`: as Linear's."""
        self._group = group
        self._first_id = group.rank * weight.shape[0]
        self._num_tokens = max(0, num_tokens - self._first_id)  # of the rank's rows; more than these: all
        assert 0 < num_tokens <= weight.shape[0] * group.size, f"{num_tokens} tokens in {weight.shape[0]} rows"
        # On a GPU in 16 bits the product's float32 sums are the logits; elsewhere it rounds first.
        in_16_bits = weight.is_cuda and weight.dtype != torch.float32
        self._weight = weight if in_16_bits else None
        self._linear = None if in_16_bits else Linear(weight, widen=widen)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size); of several ranks, each has its ids' columns."""
        if self._weight is not None:
            logits = torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)
        else:
            assert self._linear is not None
            logits = self._linear.unrounded(hidden)
        logits[:, self._num_tokens :] = float("-inf")
        return logits

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As kernels.sampling.greedy over all ranks' columns; the same on each. Pairs are exchanged, not logits."""
        if self._group.size == 1:
            return greedy(logits)
        token_ids, largest = greedy_of_part(logits)
        pair = torch.stack(((token_ids + self._first_id).to(torch.int32), largest.view(torch.int32)))
        of_ranks = self._group.all_gather(pair)
        return greedy_of_parts(of_ranks[:, 0].long(), of_ranks[:, 1].view(torch.float32))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns side by side."""
        if self._group.size == 1:
            return logits
        whole = logits.new_empty((logits.shape[0], self._group.size, logits.shape[1]))
        for start in range(0, logits.shape[0], ROWS_AT_A_TIME):
            part = logits[start : start + ROWS_AT_A_TIME]
            whole[start : start + ROWS_AT_A_TIME] = self._group.all_gather(part).transpose(0, 1)
        return whole.flatten(1)
