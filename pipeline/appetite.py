"""How many tokens of prompts the engine should be given now. Standard library only, as the batcher.

Order is decided where a document leaves the batcher, so it is decided late: what waits in the engine is what its next
steps take, and no more. Given earlier, documents would come in the order in which they happened to be prepared.
"""

STEPS_AHEAD = 3  # steps' worth of tokens that wait in the engine: for one planned, one on its way, and one to spare
MAX_HIT_RATE = 0.98  # cached tokens fill no step, so more are sent; beyond this rate the estimate is not followed


class EngineAppetite:
    """Keeps one engine's queue short and never empty, by what it was given and what it says that it has begun."""

    def __init__(self, max_tokens_per_step: int) -> None:
        self._max_tokens_per_step = max_tokens_per_step
        self._num_given = 0  # tokens of prompts, since the engine's start
        self._num_begun = 0
        self._num_begun_cached = 0
        self._hit_rate = 0.0  # of late: of about as many tokens as wait

    def gave(self, num_tokens: int) -> None:
        """So many tokens of prompts went to the engine."""
        self._num_given += num_tokens

    def starts_anew(self) -> None:
        """There is another engine, which was given nothing."""
        self._num_given = self._num_begun = self._num_begun_cached = 0

    def num_wanted(self, num_begun: int, num_begun_cached: int) -> int:
        """Tokens to give now, 0 or less for none. By what the engine has begun since its start: EngineStats says it."""
        begun = num_begun - self._num_begun
        if begun > 0:
            hit_rate = (num_begun_cached - self._num_begun_cached) / begun
            self._hit_rate += min(1.0, begun / self._num_ahead()) * (hit_rate - self._hit_rate)
            self._num_begun, self._num_begun_cached = num_begun, num_begun_cached
        return self._num_ahead() - (self._num_given - self._num_begun)

    def _num_ahead(self) -> int:
        return int(STEPS_AHEAD * self._max_tokens_per_step / (1.0 - min(self._hit_rate, MAX_HIT_RATE)))
