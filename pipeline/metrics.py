"""The one owner of metrics: counters are kept by those who count, and read here when Prometheus asks.

No document, job or key is ever a label: labels come from our own enumerations, so their number is bounded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.account import Totals
from pipeline.sink_stats import SinkStats
from schemas.inference import EngineStats


@dataclass(frozen=True, slots=True)
class Readings:
    """What one scrape reads. Each part is a snapshot, or only ever grows."""

    readiness: Mapping[str, str | None]
    totals: Totals = field(default_factory=Totals)
    held: Mapping[str, int] = field(default_factory=dict)  # place -> documents
    waiting_tokens: int = 0
    engine: EngineStats = field(default_factory=EngineStats)
    sink: SinkStats = field(default_factory=SinkStats)
    num_in_source: int = 0
    is_source_paused: bool = False
    engine_start_seconds: Mapping[str, float] = field(default_factory=dict)  # part -> seconds


class WorkerMetrics(Collector):
    """Reads the worker on every scrape. `read` may be called from any thread."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        readings = self._read()
        yield from _documents(readings)
        yield from _times(readings.totals)
        yield from _engine(readings.engine, readings.totals.engine_restarts)
        yield _by_label(
            GaugeMetricFamily, "pagemill_engine_start_seconds",
            "The present engine's start, by part; total: from its process's start to its first token", "part",
            readings.engine_start_seconds,
        )  # fmt: skip
        yield from _sink(readings.sink)
        yield _by_label(
            GaugeMetricFamily, "pagemill_ready", "1 where the part is ready", "part",
            {part: float(lack is None) for part, lack in readings.readiness.items()},
        )  # fmt: skip

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when read, and reading before the worker runs would fail."""
        return ()


def _documents(readings: Readings) -> Iterable[Metric]:
    totals = readings.totals
    account = totals.account
    yield CounterMetricFamily("pagemill_documents_delivered", "Documents taken from Kafka", value=account.delivered)
    yield _by_label(
        CounterMetricFamily, "pagemill_documents_ended", "Documents by what became of them", "outcome",
        account.outcomes(),
    )  # fmt: skip
    yield _by_label(
        CounterMetricFamily, "pagemill_documents_failed", "Failed rows by cause", "code", dict(totals.failures)
    )
    yield _by_label(
        GaugeMetricFamily, "pagemill_documents_in_flight", "Documents by where they are", "place", readings.held
    )
    yield _by_label(
        GaugeMetricFamily, "pagemill_account_imbalance",
        "Documents that one count has and another has not; anything but 0 that lasts for 20 s is a bug", "count",
        {"queues": account.imbalance(sum(readings.held.values())), "source": totals.disagreement},
    )  # fmt: skip
    yield GaugeMetricFamily(
        "pagemill_source_documents_in_flight",
        "Polled and not completed, as the source counts",
        value=readings.num_in_source,
    )
    yield GaugeMetricFamily(
        "pagemill_source_paused",
        "1 where as much is in flight as may be, and nothing more is read until some of it is complete",
        value=float(readings.is_source_paused),
    )
    yield GaugeMetricFamily("pagemill_waiting_tokens", "Prompt tokens in the batcher", value=readings.waiting_tokens)
    yield _by_label(
        CounterMetricFamily, "pagemill_tokens", "Tokens of answered documents", "kind",
        {
            "prompt": totals.prompt_tokens,
            "cached": totals.cached_tokens,
            "completion": totals.completion_tokens,
        },
    )  # fmt: skip
    yield CounterMetricFamily("pagemill_retries", "Second runs with another seed", value=totals.retries)


def _times(totals: Totals) -> Iterable[Metric]:
    parts = totals.time
    yield _by_label(
        CounterMetricFamily, "pagemill_document_seconds", "Seconds of documents' lives, summed, by part", "part",
        {
            "waiting": parts.waiting,
            "engine": parts.engine,
            "engine_queue": parts.engine_queue,
            "engine_prefill": parts.engine_prefill,
            "engine_decode": parts.engine_decode,
            "storing": parts.storing,
        },
    )  # fmt: skip
    yield _by_label(
        CounterMetricFamily, "pagemill_pipeline_thread_seconds", "Seconds of the pipeline's thread, by what it did",
        "part", {part.replace(" ", "_"): seconds for part, seconds in parts.thread.items()},
    )  # fmt: skip


def _engine(stats: EngineStats, restarts: int) -> Iterable[Metric]:
    yield CounterMetricFamily("pagemill_engine_restarts", "Engine processes started after a lost one", value=restarts)
    yield CounterMetricFamily("pagemill_engine_steps", "Steps of the present engine process", value=stats.num_steps)
    yield CounterMetricFamily("pagemill_engine_preemptions", "Requests sent back to wait", value=stats.num_preemptions)
    yield CounterMetricFamily(
        "pagemill_engine_recomputed_tokens",
        "Computed tokens of requests that were sent back: computed again but for what the prefix cache still has",
        value=stats.num_recomputed_tokens,
    )
    yield _by_label(
        CounterMetricFamily, "pagemill_engine_tokens", "Tokens of the present engine process", "kind",
        {
            "prompt": stats.num_prompt_tokens,
            "cached": stats.num_cached_tokens,
            "sampled": stats.num_sampled_tokens,
            "computed": stats.num_computed_tokens,
        },
    )  # fmt: skip
    yield _by_label(
        GaugeMetricFamily, "pagemill_engine_requests", "Requests in the engine", "state",
        {"waiting": stats.num_waiting, "running": stats.num_running},
    )  # fmt: skip
    yield _by_label(
        GaugeMetricFamily, "pagemill_engine_blocks", "Blocks of the KV cache", "state",
        {
            "free": stats.num_free_blocks,
            "cached": stats.num_cached_blocks,
            "used": max(0, stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks),
        },
    )  # fmt: skip
    yield _by_label(
        CounterMetricFamily, "pagemill_engine_step_seconds", "Seconds of the engine's steps, by part", "part",
        stats.step_seconds,
    )  # fmt: skip


def _sink(stats: SinkStats) -> Iterable[Metric]:
    yield CounterMetricFamily("pagemill_sink_bulks", "Bulk calls", value=stats.num_bulks)
    yield CounterMetricFamily("pagemill_sink_bytes", "Bytes of bulk calls", value=stats.num_bytes)
    yield CounterMetricFamily("pagemill_sink_retries", "Bulk calls that were refused for now", value=stats.num_retries)
    yield CounterMetricFamily("pagemill_sink_rejected", "Rows that were refused for good", value=stats.num_rejected)
    yield CounterMetricFamily(
        "pagemill_sink_breaker_openings", "Times that the breaker opened", value=stats.num_breaker_openings
    )
    yield GaugeMetricFamily("pagemill_sink_calls", "Bulk calls under way", value=stats.num_calling)
    yield GaugeMetricFamily("pagemill_sink_pending", "Rows not yet settled", value=stats.num_pending)
    yield GaugeMetricFamily("pagemill_sink_pending_bytes", "Bytes of these rows", value=stats.pending_bytes)
    yield CounterMetricFamily("pagemill_sink_bulk_seconds", "Seconds of bulk calls, summed", value=stats.bulk_seconds)
    yield GaugeMetricFamily("pagemill_sink_bulk_documents", "What a bulk may hold now", value=stats.bulk_documents)
    yield GaugeMetricFamily("pagemill_sink_bulk_calls", "Bulk calls that may be under way now", value=stats.bulk_calls)


def _by_label(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    metric = family(name, help_text, labels=[label])
    for value_of_label, value in values.items():
        metric.add_metric([value_of_label], value)
    return metric
