"""What rounds came to, in lines for a person."""

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.rounds import FaultKind, Round, ways

MAX_SHARE_AGAIN = 0.02  # of the documents, of those that were computed again
ROUNDS_TO_JUDGE = 100  # that by: a few rounds may hold nothing but crashes


@dataclass(slots=True)
class Outcome:
    """What a round came to."""

    made: Round
    seconds: float = 0.0
    num_again: int = 0  # answers computed beyond the first one of a document
    num_lost: int = 0  # documents that retention took and the workers named
    num_dead_letters_again: int = 0
    num_killed: int = 0  # workers, by a document
    came: list[FaultKind] = field(default_factory=list)  # a round that is done does not wait for what is left
    findings: list[str] = field(default_factory=list)  # none: all held
    ended: list[str] = field(default_factory=list)  # last words of workers that ended by themselves

    def line(self) -> str:
        num_documents = len(self.made.every)
        lost = f", {self.num_lost} lost as said" if self.num_lost else ""
        lost += f", {self.num_killed} workers killed by a document" if self.num_killed else ""
        return (
            f"seed {self.made.seed}: {'FAILED' if self.findings else 'holds'} in {self.seconds:.1f} s; "
            f"{num_documents} documents, {self.num_again} computed again ({self.num_again / num_documents:.1%}){lost}; "
            f"{ways(self.made)}; {', '.join(kind.name for kind in self.came)}"
        )


@dataclass(slots=True)
class Books:
    """The sums of all rounds. Holds no round: an hour's have as many documents as memory has room for."""

    began: float = field(default_factory=time.monotonic)
    num_rounds: int = 0
    num_documents: int = 0
    num_again: int = 0
    num_lost: int = 0
    num_dead_letters_again: int = 0
    num_ended: int = 0
    kinds: Counter[FaultKind] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by the node, what its own counters say
    failed: list[int] = field(default_factory=list)  # seeds

    def add(self, outcome: Outcome) -> None:
        self.num_rounds += 1
        self.num_documents += len(outcome.made.every)
        self.num_again += outcome.num_again
        self.num_lost += outcome.num_lost
        self.num_dead_letters_again += outcome.num_dead_letters_again
        self.num_ended += len(outcome.ended)
        self.kinds.update(outcome.came)
        self.ways[ways(outcome.made)] += 1
        if outcome.findings:
            self.failed.append(outcome.made.seed)

    def running_line(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self.began), 60)
        return (
            f"    so far {self.num_rounds} rounds in {minutes}:{seconds:02}, {self.num_documents} documents, "
            f"{self._again()}, {len(self.failed)} did not hold"
        )

    def summary(self) -> list[str]:
        lines = [f"{number:5} x {kind}" for kind, number in self.kinds.most_common()]
        lines += [f"{number:5} rounds with {way}" for way, number in self.ways.most_common()]
        lines += [f"{number:5} x {refusal}" for refusal, number in self.refusals.most_common()]
        seconds = time.monotonic() - self.began
        lines.append(
            f"{self.num_rounds} rounds in {seconds / 60:.1f} minutes, {self.num_documents} documents, "
            f"{self.kinds.total()} faults; {self._again()}, {self.num_lost} lost to retention and named, "
            f"{self.num_dead_letters_again} dead letters sent again, {self.num_ended} workers ended by themselves"
        )
        lines.append(
            f"{len(self.failed)} rounds did not hold: " + ", ".join(f"make chaos SEED={seed}" for seed in self.failed)
            if self.failed
            else "every round held"
        )
        if self.is_costly:
            lines.append(f"more than {MAX_SHARE_AGAIN:.0%} of the documents were computed again")
        return lines

    @property
    def is_costly(self) -> bool:
        """Whether too much was computed twice, over rounds enough to say so."""
        return self.num_rounds >= ROUNDS_TO_JUDGE and self._share_again > MAX_SHARE_AGAIN

    @property
    def _share_again(self) -> float:
        return self.num_again / max(self.num_documents, 1)

    def _again(self) -> str:
        return f"{self.num_again} computed again ({self._share_again:.2%})"
