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
        # On a GPU in 16 bits the product's float32 sums are the logits; elsewhere it rounds first.
        in_16_bits = weight.is_cuda and weight.dtype != torch.float32
        self._weight = weight if in_16_bits else None
        self._linear = None if in_16_bits else Linear(weight)
        self._num_tokens = num_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size) float32."""
        if self._weight is not None:
            logits = torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)
        else:
            assert self._linear is not None
            logits = self._linear(hidden).float()
        logits[:, self._num_tokens :] = float("-inf")
        return logits
