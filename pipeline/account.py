"""Counts what became of every document, and where its time went. One thread's; others read plain numbers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple

from schemas.document import Assignment, SourcePosition

MIN_LOOKS = 10  # that an Agreement's patience takes
MAX_BOOKS = 4096  # of (assignment, job) that balance; then they are closed, and only the total keeps their counts


class Outcome(StrEnum):
    """What a delivered document can end in: the name of its count in an Account."""

    INDEXED = "indexed"
    ALREADY_DONE = "already_done"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"


@dataclass(slots=True)
class Account:
    """Every delivered document ends in exactly one of these, or is in flight:

    delivered = indexed + already_done + superseded + failed + cancelled + handed_back + in flight
    """

    delivered: int = 0
    indexed: int = 0  # answered rows stored
    already_done: int = 0  # this very delivery's row was there before
    superseded: int = 0  # a newer delivery's row is there
    failed: int = 0  # failed rows stored, without the cancelled
    cancelled: int = 0
    handed_back: int = 0  # the partition went to another worker, or we stopped: its next owner does it

    @property
    def ended(self) -> int:
        return sum(self.outcomes().values())

    def outcomes(self) -> dict[str, int]:
        return {outcome.value: getattr(self, outcome.value) for outcome in Outcome}

    def add(self, outcome: Outcome, number: int = 1) -> None:
        name = outcome.value
        setattr(self, name, getattr(self, name) + number)

    def imbalance(self, num_in_flight: int) -> int:
        """Documents that were lost (positive) or counted twice (negative); 0 is what must be.

        `num_in_flight` is counted in the queues, not worked out from these numbers.
        """
        return self.delivered - self.ended - num_in_flight

    def sentence(self, num_in_flight: int) -> str:
        """The account as one line."""
        ended = " + ".join(f"{name.replace('_', ' ')} {number}" for name, number in self.outcomes().items())
        return f"delivered {self.delivered} = {ended} + in flight {num_in_flight}"


class Book(NamedTuple):
    """What an account is kept for: one job in one epoch of one partition. Job "": passed over without being decoded."""

    topic: str
    partition: int
    epoch: int
    job: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}, epoch {self.epoch}, job {self.job or '(not decoded)'}"

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.topic, self.partition, self.epoch)


class Ledger:
    """The accounts by book, and every open document by its position: who is delivered must end, and only once.

    The pipeline's thread owns it. Its `num_open` is neither what the trackers have nor what stands in the queues: the
    three are compared (pipeline/reconciliation.py).
    """

    def __init__(self, total: Account) -> None:
        self.total = total
        self.books: dict[Book, Account] = {}
        self.num_twice = 0  # endings of documents that were not open
        self._open: dict[SourcePosition, Account] = {}  # -> the book's, which is kept while it does not balance

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_open_in(self, is_wanted: Callable[[Assignment], bool]) -> int:
        """Open documents of these assignments."""
        return sum(number for book, number in self.unbalanced().items() if is_wanted(book.assignment))

    def deliver(self, position: SourcePosition, job: str) -> None:
        account = self._account(Book(position.topic, position.partition, position.epoch, job))
        self._open[position] = account
        account.delivered += 1
        self.total.delivered += 1

    def end(self, positions: Sequence[SourcePosition], outcome: Outcome) -> None:
        """A document that ends twice unbalances the total for good, as it must."""
        self.total.add(outcome, len(positions))
        for position in positions:
            account = self._open.pop(position, None)
            if account is None:
                self.num_twice += 1
            else:
                account.add(outcome)

    def skip(self, assignment: Assignment, num_documents: int) -> None:
        """Delivered, complete before this assignment, and not looked at."""
        for account in (self._account(Book(*assignment, "")), self.total):
            account.delivered += num_documents
            account.already_done += num_documents

    def unbalanced(self) -> dict[Book, int]:
        """The books with documents that have not ended, and how many; once nothing is in flight, that never will."""
        left = {book: account.imbalance(0) for book, account in self.books.items()}
        return {book: number for book, number in left.items() if number}

    def examples(self, number: int) -> list[SourcePosition]:
        """Some of the open documents."""
        return [position for position, _ in zip(self._open, range(number), strict=False)]

    def _account(self, book: Book) -> Account:
        account = self.books.get(book)
        if account is None:
            if len(self.books) >= MAX_BOOKS:
                self.books = {one: account for one, account in self.books.items() if account.imbalance(0)}
            account = self.books[book] = Account()
        return account


class Agreement:
    """Whether two counts of the same documents agree, each of which may be ahead of the other for a moment."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._seen_at: float | None = None
        self._least = 0
        self._lasted = 0.0  # seconds

    def observe(self, difference: int, now: float) -> int:
        """The least that they have differed by for all of the patience; 0 where they agreed meanwhile.

        A gap between two looks counts as a tenth of the patience at the most: a process that was frozen in the moment
        in which one count was ahead has not differed all that time.
        """
        if self._seen_at is None or difference * self._least <= 0:
            self._least, self._lasted = difference, 0.0
        else:
            self._least = difference if abs(difference) < abs(self._least) else self._least
            self._lasted += min(now - self._seen_at, self._patience_seconds / MIN_LOOKS)
        self._seen_at = now
        return self._least if self._lasted >= self._patience_seconds else 0


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
    disagreement: int = 0  # what the source holds more (or less) than the account has open, if that lasts
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.account)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had; 0 before the first output."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
