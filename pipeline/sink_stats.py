"""What the sink has done so far, and what it holds now."""

from dataclasses import dataclass, replace

from pipeline.breaker import BreakerState
from pipeline.bulk import BulkOutcome


@dataclass(frozen=True, slots=True)
class SinkStats:
    """Counters since the start, and gauges of now."""

    num_bulks: int = 0
    num_retries: int = 0
    num_bytes: int = 0  # sent, again included
    num_stored: int = 0
    num_already_done: int = 0
    num_superseded: int = 0
    num_rejected: int = 0
    num_pending: int = 0
    pending_bytes: int = 0
    num_waiting: int = 0  # of these, not in a writer's hands
    num_breaker_openings: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    num_calling: int = 0
    bulk_seconds: float = 0.0  # of calls, summed
    bulk_documents: int = 0  # what a call may hold now
    bulk_calls: int = 0  # how many may be under way now

    def with_outcome(self, outcome: BulkOutcome) -> "SinkStats":
        """What a bulk has come to counted too, but for its rejected rows."""
        return replace(
            self,
            num_bulks=self.num_bulks + outcome.num_calls,
            num_bytes=self.num_bytes + outcome.num_bytes,
            num_stored=self.num_stored + len(outcome.stored),
            num_already_done=self.num_already_done + len(outcome.already_done),
            num_superseded=self.num_superseded + len(outcome.superseded),
        )
