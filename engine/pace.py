"""How fast a known backlog's prompts are taken in, so that its long outputs are never left to run alone. No torch.

A step reads all weights however few rows it has. Where all prompts are computed as early as possible, a backlog of
mixed lengths ends in many steps of few rows; so once the longest outputs are under way, the other prompts are spread
over the steps that these take anyway. A prompt whose output takes o steps may start T - o steps from now, T being the
steps that the longest needs; the pace is the least that keeps every such appointment.
"""

from collections import Counter
from collections.abc import Mapping

MIN_ROWS = 256  # a step of fewer costs as much, for it reads the weights


def prefill_tokens_per_step(tokens_by_output: Mapping[int, int], num_steps: int, num_decodes: int) -> int | None:
    """Prompt tokens to take in with this step; None: as many as there is room for.

    tokens_by_output: output length -> prompt tokens not computed yet of the requests with that length.
    num_steps: that the longest running output still takes. num_decodes: the step's rows of running requests.
    """
    pace, tokens = 0, 0
    for output in sorted(tokens_by_output, reverse=True):
        tokens += tokens_by_output[output]
        slack = num_steps - output
        if tokens and slack <= 0:
            return None
        pace = max(pace, -(-tokens // slack) if tokens else 0)
    return max(pace, MIN_ROWS - num_decodes)


class BacklogPace:
    """The prompt tokens of one scheduler's waiting requests, by output length."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()

    def waits(self, num_tokens: int, output: int) -> None:
        self._tokens[output] += num_tokens

    def leaves(self, num_tokens: int, output: int) -> None:
        self._tokens[output] -= num_tokens
        if not self._tokens[output]:
            del self._tokens[output]

    def tokens_per_step(self, prefilling: Mapping[int, int], num_steps: int, num_decodes: int) -> int | None:
        """`prefilling`: the same of running requests whose prompts are not computed yet."""
        return prefill_tokens_per_step(self._tokens + Counter(prefilling), num_steps, num_decodes)
