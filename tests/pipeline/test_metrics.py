"""Metrics say what was counted: a value that never moves is a lie, so each is moved and looked at."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from pipeline.account import Account, Totals
from pipeline.metrics import Readings, WorkerMetrics
from pipeline.sink_stats import SinkStats
from schemas.inference import EngineStats


def values(readings: Readings) -> dict[str, float]:
    text = WorkerMetrics(lambda: readings).text().decode()
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def moved() -> Readings:
    """Every number differs from every other and from 0."""
    totals = Totals(
        Account(delivered=1000, indexed=1, already_done=2, superseded=3, failed=4, handed_back=5, cancelled=6),
        prompt_tokens=6,
        cached_tokens=7,
        completion_tokens=8,
        retries=9,
        engine_restarts=10,
        failures={"BAD_MESSAGE": 11},
        disagreement=12,
    )
    totals.time.waiting, totals.time.engine, totals.time.storing = 12.5, 13.5, 14.5
    totals.time.engine_queue, totals.time.engine_prefill, totals.time.engine_decode = 15.5, 16.5, 17.5
    for number, part in enumerate(totals.time.thread):
        totals.time.thread[part] = 20.5 + number
    engine = EngineStats(
        num_steps=31, num_waiting=32, num_running=33, num_prompt_tokens=34, num_cached_tokens=35,
        num_sampled_tokens=36, num_computed_tokens=37, num_preemptions=38, num_blocks=300, num_free_blocks=39,
        num_cached_blocks=40, step_seconds={"forward": 41.5}, num_recomputed_tokens=42,
    )  # fmt: skip
    sink = SinkStats(
        num_bulks=51, num_retries=52, num_bytes=53, num_stored=54, num_already_done=55, num_superseded=56,
        num_rejected=57, num_pending=58, pending_bytes=4096, num_waiting=59, num_breaker_openings=60, bulk_documents=61,
        num_calling=62, bulk_seconds=63.5, bulk_calls=64,
    )  # fmt: skip
    held = {"arrived": 70, "batcher": 71}
    return Readings({"engine": None, "kafka": "not yet"}, totals, held, 72, engine, sink, 73, True, {"weights": 74.5})


def test_every_metric_moves_with_what_it_counts() -> None:
    still, after = values(Readings({"engine": "not yet", "kafka": "not yet"})), values(moved())
    unmoved = {name for name, value in after.items() if value == still.get(name, 0.0)}
    assert unmoved == {"pagemill_ready{part=kafka}"}


def test_the_names_that_dashboards_rely_on() -> None:
    after = values(moved())
    assert after["pagemill_documents_delivered_total"] == 1000
    assert after["pagemill_documents_ended_total{outcome=indexed}"] == 1
    assert after["pagemill_documents_failed_total{code=BAD_MESSAGE}"] == 11
    assert after["pagemill_documents_in_flight{place=batcher}"] == 71
    assert after["pagemill_account_imbalance{count=queues}"] == 1000 - 21 - 141
    assert after["pagemill_account_imbalance{count=source}"] == 12
    assert after["pagemill_source_paused"] == 1
    assert after["pagemill_engine_recomputed_tokens_total"] == 42
    assert after["pagemill_engine_step_seconds_total{part=forward}"] == 41.5
    assert after["pagemill_engine_start_seconds{part=weights}"] == 74.5
    assert after["pagemill_ready{part=engine}"] == 1
    assert all(name.startswith("pagemill_") for name in after)


def test_a_scrape_reads_the_present() -> None:
    readings = [moved()]
    metrics = WorkerMetrics(lambda: readings[0])
    assert b"pagemill_waiting_tokens 72.0" in metrics.text()
    readings[0] = replace(readings[0], waiting_tokens=5)
    assert b"pagemill_waiting_tokens 5.0" in metrics.text()
