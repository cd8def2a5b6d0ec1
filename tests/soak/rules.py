"""What a soak is judged by: pure functions from samples and closed books to findings, and the table of the samples.

A trend is judged without its warm-up, the first quarter. Memory that grows is told from memory that is noisy by a
robust line (Theil and Sen's: the median of the slopes of all pairs), and by what that line leaves unexplained.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

MIB = 2**20
WARM_UP_SHARE = 0.25
MAX_FIT_POINTS = 240  # a fit looks at all their pairs
MAX_GROWTH_PER_HOUR = 2 * MIB
MAX_BLOCKS_PER_HOUR = 40_000  # of Python's allocator, 50 bytes or so each: about the same
NOISE_SPREADS = 3.0  # growth within so many median deviations from the line is noise
MAX_TENTHS_RATIO = 1.05  # memory: the last tenth's median to that of the first tenth after the warm-up
MAX_MORE_HANDLES = 3  # descriptors and threads: as above, difference of the medians
MAX_LATENCY_RATIO = 1.5  # the last minutes' median to the first ones'
MAX_CPU_RATIO = 1.25
NUM_MINUTES = 10


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one moment, as /proc has it. Sizes in bytes."""

    rss: int
    pss: int
    anonymous: int
    num_descriptors: int
    num_threads: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment; what the worker counts is summed since its start."""

    seconds: float  # since the soak's start
    worker: ProcessSample
    engine: ProcessSample
    num_blocks: int  # that the worker's Python holds
    num_ended: int
    waiting_seconds: float  # of all ended documents: taken from the source to handed to the engine
    engine_seconds: float  # to its output
    storing_seconds: float  # to the acknowledgement of its row
    num_steps: int
    step_seconds: float
    num_in_flight: int
    num_outbox: int  # rows not yet settled
    lag: int  # records acknowledged by the broker and not yet committed by the worker's group
    other_cores: float  # CPU seconds a second that the rest of the machine used since the last sample
    load_average: float  # of a minute
    disk_bytes: int  # of broker and node


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two samples."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.seconds - self.first.seconds

    @property
    def num_documents(self) -> int:
        return self.last.num_ended - self.first.num_ended

    @property
    def documents_per_second(self) -> float:
        return self.num_documents / self.seconds

    @property
    def latency_ms(self) -> float:
        """A document's mean time from the source to the acknowledgement of its row; nan where none ended."""
        return sum(self._ms_a_document(part) for part in ("waiting_seconds", "engine_seconds", "storing_seconds"))

    @property
    def storing_ms(self) -> float:
        return self._ms_a_document("storing_seconds")

    @property
    def step_ms(self) -> float:
        """The engine's mean step; nan where there was none."""
        num_steps = self.last.num_steps - self.first.num_steps
        return 1000 * (self.last.step_seconds - self.first.step_seconds) / num_steps if num_steps else math.nan

    @property
    def worker_cpu_ms(self) -> float:
        """CPU time of the worker's process a document."""
        seconds = self.last.worker.cpu_seconds - self.first.worker.cpu_seconds
        return 1000 * seconds / self.num_documents if self.num_documents else math.nan

    def _ms_a_document(self, part: str) -> float:
        seconds: float = getattr(self.last, part) - getattr(self.first, part)
        return 1000 * seconds / self.num_documents if self.num_documents else math.nan


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, whether it holds, and the figures that it was judged by."""

    rule: str
    holds: bool
    said: str

    def __str__(self) -> str:
        return f"{'holds ' if self.holds else 'FAILED'}  {self.rule}: {self.said}"


@dataclass(frozen=True, slots=True)
class Books:
    """What there is once the backlog is drained and the worker has ended."""

    num_produced: int  # by the log's ends
    num_failing: int  # among them: documents that must fail
    num_ids: int  # different documents among them
    num_committed: int
    num_rows: int
    audit_is_complete: bool
    audit_stored: int  # messages still in the log whose own row is there
    audit_said: str
    exit_code: int | None
    account: Mapping[str, float] | None  # the event with which the worker ends


def judge_books(books: Books) -> list[Finding]:
    """Every produced document ended once and has its row. No timing is judged."""
    end = dict(books.account or {})
    taken = [int(end.get(name, -1)) for name in ("indexed", "already_done", "superseded", "failed", "handed_back")]
    indexed, already_done, superseded, failed, handed_back = taken
    balances = bool(end) and not end["imbalance"] and not end["in_flight"] and not handed_back
    every_one = indexed + already_done + superseded == books.num_produced - books.num_failing
    return [
        Finding("the worker ends well", books.exit_code == 0, f"exit code {books.exit_code}"),
        Finding(
            "the account balances",
            balances and every_one and failed == books.num_failing,
            f"{books.num_produced} produced, {books.num_failing} of them to fail; indexed {indexed} + already done "
            f"{already_done} + superseded {superseded} + failed {failed} + handed back {handed_back}",
        ),
        Finding("everything is committed", books.num_committed == books.num_produced, f"{books.num_committed} records"),
        Finding(
            "every document has its one row", books.num_rows == books.num_ids, f"{books.num_rows} of {books.num_ids}"
        ),
        Finding(
            "the audit finds each one's last delivery",
            books.audit_is_complete and books.audit_stored == books.num_ids,
            books.audit_said,
        ),
        Finding(
            "one engine all along",
            bool(end) and not end["engine_restarts"],
            f"{int(end.get('engine_restarts', -1))} restarts",
        ),
    ]


def judge_trends(samples: Sequence[Sample], least_lag: int) -> list[Finding]:
    """Memory, descriptors, threads, latency and CPU time over the run; `least_lag` is a backlog that is never empty."""
    settled = without_warm_up(samples)
    findings = []
    for name, read in _PROCESSES.items():
        memory = [(one.seconds, read(one).rss / MIB) for one in settled]
        findings.append(judge_growth(f"{name} memory", memory, MAX_GROWTH_PER_HOUR / MIB, "MiB"))
        for what in ("num_descriptors", "num_threads"):
            first, last = _tenths([float(getattr(read(one), what)) for one in settled])
            rule = f"{name} {what.removeprefix('num_')}"
            findings.append(Finding(rule, last - first <= MAX_MORE_HANDLES, f"{first:g} to {last:g}"))
    blocks = [(one.seconds, one.num_blocks / 1000) for one in settled]
    findings.append(judge_growth("worker objects", blocks, MAX_BLOCKS_PER_HOUR / 1000, "thousand blocks"))
    latencies = minute_medians(settled, lambda interval: interval.latency_ms)
    findings.append(judge_ratio("latency", latencies, MAX_LATENCY_RATIO, "ms"))
    cpu = minute_medians(settled, lambda interval: interval.worker_cpu_ms)
    findings.append(judge_ratio("worker CPU time a document", cpu, MAX_CPU_RATIO, "ms"))
    lag = min(one.lag for one in settled)
    findings.append(Finding("the backlog is never empty", lag >= least_lag, f"at least {lag}, of {least_lag} asked"))
    return findings


def judge_growth(rule: str, points: Sequence[tuple[float, float]], max_per_hour: float, unit: str) -> Finding:
    """Points are (seconds, size). It grows where a robust line rises by more than `max_per_hour`, and over the points
    by more than noise; or where the last tenth is over 5% above the first."""
    slope, noise = robust_line(points)
    growth = slope * (points[-1][0] - points[0][0])
    first, last = _tenths([size for _, size in points])
    grows = slope * 3600 > max_per_hour and growth > noise
    return Finding(
        rule,
        not grows and last <= MAX_TENTHS_RATIO * first,
        f"{first:.1f} to {last:.1f} {unit}, {slope * 3600:+.2f} an hour by a robust line (at most {max_per_hour:g}); "
        f"{growth:+.2f} over it, noise {noise:.2f}",
    )


def judge_ratio(rule: str, minutes: Sequence[float], max_ratio: float, unit: str) -> Finding:
    """The median of the last ten minutes' medians, of a third where there are fewer than thirty, to the first ones'."""
    number = max(1, min(NUM_MINUTES, len(minutes) // 3))
    first, last = median(minutes[:number]), median(minutes[-number:])
    said = (
        f"{first:.3g} to {last:.3g} {unit}, {last / first:.2f} times; at most {max_ratio:g} "
        f"(per minute {min(minutes):.3g} to {max(minutes):.3g})"
    )
    return Finding(rule, last <= max_ratio * first, said)


def robust_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, noise): the median of the slopes of all pairs, and three median deviations from that line.

    Long series are thinned to the medians of equal parts first.
    """
    thinned = _thinned(points)
    slope = median((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(thinned, 2))
    offset = median(y - slope * x for x, y in points)
    return slope, NOISE_SPREADS * median(abs(y - slope * x - offset) for x, y in points)


def without_warm_up(samples: Sequence[Sample]) -> list[Sample]:
    begin = samples[0].seconds + WARM_UP_SHARE * (samples[-1].seconds - samples[0].seconds)
    return [one for one in samples if one.seconds >= begin]


def minute_medians(samples: Sequence[Sample], read: Callable[[Interval], float]) -> list[float]:
    """The median over the intervals of each minute, in order; of shorter parts where it is all over in minutes."""
    begin, span = samples[0].seconds, samples[-1].seconds - samples[0].seconds
    part_seconds = min(60.0, span / 6)
    parts: dict[int, list[float]] = {}
    for first, last in pairwise(samples):
        value = read(Interval(first, last))
        if not math.isnan(value):
            parts.setdefault(int((first.seconds - begin) // part_seconds), []).append(value)
    return [median(values) for _, values in sorted(parts.items())]


HEADINGS = (
    ("minutes", 11), ("docs/s", 7), ("latency ms", 11), ("storing", 8), ("step ms", 8), ("CPU ms/doc", 11),
    ("blocks k", 9), ("worker MiB", 11), ("anon", 6), ("fds", 5), ("thr", 4),
    ("engine MiB", 11), ("anon", 6), ("fds", 5), ("thr", 4),
    ("in flight", 10), ("outbox", 7), ("lag min", 8), ("others", 7), ("load", 6), ("disk MiB", 9),
)  # fmt: skip


def heading() -> str:
    return "".join(name.rjust(width) for name, width in HEADINGS)


def row(samples: Sequence[Sample]) -> str:
    """A line of the table: medians over its samples; rates from the first to the last."""
    whole, last = Interval(samples[0], samples[-1]), samples[-1]
    parts = [Interval(*pair) for pair in pairwise(samples)]

    def middle(read: Callable[[Interval], float]) -> float:
        return median([value for part in parts if not math.isnan(value := read(part))] or [math.nan])

    cells = [
        f"{samples[0].seconds / 60:.1f}-{last.seconds / 60:.1f}",
        f"{whole.documents_per_second:.0f}",
        f"{middle(lambda part: part.latency_ms):.0f}",
        f"{middle(lambda part: part.storing_ms):.0f}",
        f"{middle(lambda part: part.step_ms):.3f}",
        f"{whole.worker_cpu_ms:.3f}",
        f"{median(one.num_blocks for one in samples) / 1000:.0f}",
    ]
    for read in _PROCESSES.values():
        cells += [
            f"{median(read(one).rss for one in samples) / MIB:.1f}",
            f"{median(read(one).anonymous for one in samples) / MIB:.0f}",
            f"{median(read(one).num_descriptors for one in samples):.0f}",
            f"{median(read(one).num_threads for one in samples):.0f}",
        ]
    cells += [
        f"{median(one.num_in_flight for one in samples):.0f}",
        f"{median(one.num_outbox for one in samples):.0f}",
        f"{min(one.lag for one in samples)}",
        f"{median(one.other_cores for one in samples):.2f}",
        f"{median(one.load_average for one in samples):.1f}",
        f"{last.disk_bytes / MIB:.0f}",
    ]
    return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, HEADINGS, strict=True))


_PROCESSES: dict[str, Callable[[Sample], ProcessSample]] = {
    "worker": lambda sample: sample.worker,
    "engine": lambda sample: sample.engine,
}


def _tenths(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and of the last tenth."""
    number = max(1, len(values) // 10)
    return median(values[:number]), median(values[-number:])


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / MAX_FIT_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(median(x for x, _ in part), median(y for _, y in part)) for part in parts]
