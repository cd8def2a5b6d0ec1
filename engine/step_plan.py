"""What one step computes: decided by the scheduler, carried out by the model runner. No torch."""

from dataclasses import dataclass, field

from engine.request import Request
from schemas.inference import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """A run of one request's tokens, [start, start + count), computed in one step.

    Where the run reaches the last known token (`samples`), the step samples the request's next one.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step. Empty is legal: everything waits for a block.

    Order matters: a run may read blocks that an earlier run of the same plan writes.
    """

    scheduled: list[ScheduledTokens] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # blocks are gone; the runner forgets their rows
    scrub: list[int] = field(default_factory=list)  # blocks to zero first: their NaN would reach whoever is next there
    void: set[int] = field(default_factory=set)  # request ids whose rows mean nothing any more: they begin again

    @property
    def num_tokens(self) -> int:
        return sum(run.count for run in self.scheduled)


@dataclass(slots=True)
class SampledTokens:
    """What a step sampled: one entry per scheduled run with `samples`, in the plan's order."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # None where the request did not ask
    finite: list[bool] = field(default_factory=list)  # False: the row held NaN or infinity; its token means nothing


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A launched step that was done at once."""

    sampled: SampledTokens

    def collect(self) -> SampledTokens:
        return self.sampled
