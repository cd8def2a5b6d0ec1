"""How fast the prompts of a backlog's end are taken in, so that its long outputs are never left to run alone. No torch.

A step reads all weights however few rows it has. Where all prompts are computed as early as possible, a backlog of
mixed lengths ends in many steps of few rows; so once the longest outputs are under way, the other prompts are spread
over the steps that these take anyway. A prompt whose output takes o steps may start T - o steps from now, T being the
steps that the longest needs; the pace is the least that keeps every such appointment.

Prompts come in chunks, with steps of decode rows alone between them: a product over some hundred rows is the least
efficient there is (600 rows cost 9% more a row than 1,024 in bf16 on an H200, 30% in FP8), while one over fewer is
bound by the weights that it reads anyway.

All that will come must be known for that. As long as more may come, what ends makes room for it and no step is short of
rows, so prompts are taken in as fast as they fit.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

# Of a step that takes prompts in, its decode rows included: the least at which products run at their full rate, so that
# as many decode rows as possible share in it.
CHUNK_TOKENS = 1024


def prefill_tokens_per_step(tokens_by_output: Mapping[int, int], num_steps: int) -> int | None:
    """Prompt tokens to take in with each step, on average; None: as many as there is room for.

    tokens_by_output: output length -> prompt tokens not computed yet of the requests with that length.
    num_steps: that the longest running output still takes.
    """
    pace, tokens = 0, 0
    for output in sorted(tokens_by_output, reverse=True):
        tokens += tokens_by_output[output]
        slack = num_steps - output
        if tokens and slack <= 0:
            return None
        pace = max(pace, -(-tokens // slack) if tokens else 0)
    return pace


class BacklogPace:
    """How far the prompts of one scheduler are behind their pace."""

    def __init__(self) -> None:
        self._beyond: Counter[int] | None = None
        self._due = 0  # tokens; below 0: the last chunk was that much ahead

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        """What comes besides the requests that are here: output length -> prompt tokens. None: nobody knows."""
        self._beyond = None if beyond is None else Counter(beyond)
        if beyond is None:
            self._due = 0

    @property
    def is_kept(self) -> bool:
        """Whether there is a pace: whether all that will come is known."""
        return self._beyond is not None

    def next_chunk(self, waiting: Counter[int], running: Iterable[tuple[int, int]], num_decodes: int, room: int) -> int:
        """Prompt tokens for the step being planned, where a pace is kept; `room` where it allows as many as that.

        waiting: output length -> tokens not computed yet of the requests that wait.
        running: of each request that runs, its tokens not computed yet and what is left of its output; beyond one token
            it is still in its prompt, else it decodes.
        num_decodes: the step's decode rows.
        """
        assert self._beyond is not None, "no pace is kept"
        tokens, num_steps = waiting + self._beyond, 0
        for num_left, output in running:
            if num_left > 1:
                tokens[output] += num_left
            else:
                num_steps = max(num_steps, output)
        pace = prefill_tokens_per_step(tokens, num_steps)
        if pace is None:
            self._due = 0
            return room
        self._due += pace
        if self._due <= 0:
            return 0
        chunk = max(CHUNK_TOKENS - num_decodes, pace)
        self._due -= chunk
        return chunk
