"""Counts what became of every document, and where its time went. One thread's; others read plain numbers."""

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Account:
    """Every delivered document ends in exactly one of these, or is in flight:

    delivered = indexed + already_done + superseded + failed + handed_back + in flight
    """

    delivered: int = 0
    indexed: int = 0  # answered rows stored
    already_done: int = 0  # this very delivery's row was there before
    superseded: int = 0  # a newer delivery's row is there
    failed: int = 0  # failed rows stored
    handed_back: int = 0  # the partition went to another worker, or we stopped: its next owner does it

    @property
    def ended(self) -> int:
        return self.indexed + self.already_done + self.superseded + self.failed + self.handed_back

    def imbalance(self, num_in_flight: int) -> int:
        """Documents that were lost (positive) or counted twice (negative); 0 is what must be.

        `num_in_flight` is counted in the queues, not worked out from these numbers.
        """
        return self.delivered - self.ended - num_in_flight

    def sentence(self, num_in_flight: int) -> str:
        """The account as one line."""
        return (
            f"delivered {self.delivered} = indexed {self.indexed} + already done {self.already_done} + superseded "
            f"{self.superseded} + failed {self.failed} + handed back {self.handed_back} + in flight {num_in_flight}"
        )


@dataclass(slots=True)
class TimeParts:
    """Seconds, summed over documents, of each part of the way; and of the pipeline thread itself, by what it did."""

    waiting: float = 0.0  # delivered to handed to the engine
    engine: float = 0.0  # handed to the engine to its output, of which:
    engine_queue: float = 0.0
    engine_prefill: float = 0.0
    engine_decode: float = 0.0
    storing: float = 0.0  # output to the row's acknowledgement
    first_delivered: float | None = None  # by the flow's clock, like `last_stored`
    last_stored: float | None = None
    num_answered: int = 0
    num_stored: int = 0
    thread: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("waiting for documents", "tokenising", "ordering", "waiting for the engine", "making rows", "storing"), 0.0
        )
    )

    @property
    def span(self) -> float:
        """Seconds from the first document's delivery to the last row's acknowledgement; 0 where there was none."""
        if self.first_delivered is None or self.last_stored is None:
            return 0.0
        return self.last_stored - self.first_delivered

    def means(self) -> dict[str, float]:
        """Mean seconds a document, by part; empty before the first output."""
        if not self.num_answered:
            return {}
        plain = asdict(self)
        parts = ("waiting", "engine", "engine_queue", "engine_prefill", "engine_decode")
        means = {part: plain[part] / self.num_answered for part in parts}
        means["storing"] = self.storing / max(self.num_stored, 1)
        return means


@dataclass(slots=True)
class Totals:
    """Counters of one run, for its summary and the metrics."""

    account: Account = field(default_factory=Account)
    time: TimeParts = field(default_factory=TimeParts)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0  # a second run with another seed
    engine_restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # failure code -> failed rows stored

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had; 0 before the first output."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
