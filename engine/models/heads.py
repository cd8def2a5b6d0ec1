"""What comes behind the decoder's last layer: the language model head."""

import torch

from engine.models.linear import Linear


class LanguageModelHead:
    """Hidden states to logits over the vocabulary, in float32.

    A checkpoint may pad its vocabulary past the tokenizer's: those ids mean nothing, so their logits are -inf and they
    are neither sampled nor share in a log-probability.
    """

    def __init__(self, weight: torch.Tensor, num_tokens: int) -> None:
        """weight (vocab_size, hidden_size); ids from `num_tokens` on are padding."""
        assert 0 < num_tokens <= weight.shape[0], f"{num_tokens} tokens in a vocabulary of {weight.shape[0]}"
        self._linear = Linear(weight)
        self._num_tokens = num_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size) float32."""
        logits = self._linear(hidden).float()
        logits[:, self._num_tokens :] = float("-inf")
        return logits
