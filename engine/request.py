"""A request inside the engine: what is known of it, what is computed, and which blocks hold that. No torch."""

from dataclasses import dataclass, field
from enum import Enum, auto

from schemas.inference import InferenceRequest


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One request from admission to its end.

    token_ids     [0, num_prompt)  prompt;  [num_prompt, len)  sampled
    computed      [0, num_computed_tokens) has keys and values in blocks
    block_ids     block i holds tokens [i * block_size, (i + 1) * block_size)
    """

    inference: InferenceRequest
    token_ids: list[int]
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # found in the prefix cache at first admission
    num_preemptions: int = 0

    @property
    def request_id(self) -> int:
        return self.inference.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.inference.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.token_ids) - len(self.inference.token_ids)
