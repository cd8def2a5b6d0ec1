"""What a run came to: the account, the rates, and where the time went, for a person and as an event."""

from dataclasses import dataclass
from typing import Any

from pipeline.account import Totals
from schemas.inference import EngineStats

NUM_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`num_in_flight` is 0 after a clean end."""

    totals: Totals
    engine: EngineStats
    num_in_flight: int

    @property
    def seconds(self) -> float:
        """From the first document's delivery to the last row's acknowledgement."""
        return self.totals.time.span

    @property
    def num_ended(self) -> int:
        return self.totals.account.ended - self.totals.account.handed_back

    @property
    def documents_per_second(self) -> float:
        return self.num_ended / self.seconds if self.seconds > 0 else 0.0

    @property
    def imbalance(self) -> int:
        """Anything but 0 is a bug of ours, and the run must not be called good."""
        return self.totals.account.imbalance(self.num_in_flight) or self.totals.disagreement

    def event(self) -> dict[str, Any]:
        """The numbers, flat, for one log line."""
        account, totals = self.totals.account, self.totals
        return {
            "delivered": account.delivered,
            **account.outcomes(),
            "in_flight": self.num_in_flight,
            "imbalance": self.imbalance,
            "seconds": round(self.seconds, 3),
            "documents_per_second": round(self.documents_per_second, 2),
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.completion_tokens,
            "engine_restarts": totals.engine_restarts,
        }

    def lines(self) -> list[str]:
        """For a person."""
        totals, account = self.totals, self.totals.account
        lines = [
            f"{account.indexed} answered, {account.failed} failed in {self.seconds:.1f} s: "
            f"{self.documents_per_second:.1f} documents/s",
            f"tokens: {totals.prompt_tokens} of prompts ({totals.hit_rate:.0%} found in the prefix cache), "
            f"{totals.completion_tokens} of answers",
            f"account: {account.sentence(self.num_in_flight)}",
        ]
        if totals.failures:
            causes = ", ".join(f"{code} {number}" for code, number in sorted(totals.failures.items()))
            lines.append(f"failures: {causes}")
        means = totals.time.means()
        if means:
            lines.append(
                f"a document's mean time: waiting {_seconds(means['waiting'])}, engine {_seconds(means['engine'])} "
                f"(queue {_seconds(means['engine_queue'])}, prefill {_seconds(means['engine_prefill'])}, "
                f"decode {_seconds(means['engine_decode'])}), storing {_seconds(means['storing'])}"
            )
        shares = sorted(totals.time.thread.items(), key=lambda part: -part[1])
        lines.append("the pipeline's thread: " + ", ".join(f"{part} {spent:.2f} s" for part, spent in shares))
        if self.engine.step_seconds:
            steps = sorted(self.engine.step_seconds.items(), key=lambda part: -part[1])
            lines.append("the engine's steps: " + ", ".join(f"{part} {spent:.2f} s" for part, spent in steps))
        if self.imbalance:
            lines.append(f"the account does not balance: {self.imbalance} documents are unaccounted for")
            ledger = totals.ledger
            lines += [f"  {book}: {number}" for book, number in sorted(ledger.unbalanced().items())]
            lines += [f"  such as {position}" for position in ledger.examples(NUM_EXAMPLES)]
        return lines


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
