"""The worker: builds the parts, starts them in an order that tells mistakes before anything is consumed, ends them."""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import structlog

from consumers.kafka import KafkaSource
from consumers.source import Source
from consumers.topics import ensure_topics
from engine.client import EngineClient
from engine.tokenizer import Tokenizer
from pipeline.connection import connect
from pipeline.failure_limits import FailureLimits
from pipeline.flow import Flow
from pipeline.health import ElasticsearchHealth
from pipeline.http import StatusServer
from pipeline.metrics import Readings, WorkerMetrics
from pipeline.prompts import PromptBuilder, PromptTokenizer, compile_tasks
from pipeline.results import WorkerIdentity
from pipeline.rows import RowBuilder
from pipeline.sink import ElasticsearchSink
from pipeline.summary import RunSummary
from pipeline.supervisor import EngineSupervisor
from schemas.errors import (
    AccountError,
    EngineError,
    FailureLimitError,
    ModelError,
    PagemillError,
    SettingsError,
    SinkError,
    SourceError,
)
from schemas.inference import EngineInfo, InferenceRequest, SamplingParams
from schemas.settings import Settings, require_addresses

logger = structlog.get_logger(__name__)

PROOF_TIMEOUT_SECONDS = 300.0  # for the first inference, which may compile kernels
STUCK_SECONDS = 60.0  # without a turn of the pipeline's thread: not alive
PROGRESS_SECONDS = 10.0  # between two log lines of a worker that goes on
STORE_SECONDS = 5.0  # at the least, for rows of computed answers at the end


class StoppedAtOnce(BaseException):
    """A signal before anything was consumed: there is nothing to drain.

    No Exception: it comes out of a signal handler in the middle of anything, and whoever catches those there, as
    logging does, would go on as if there had been no signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} while starting")
        self.signal_number = signal_number


class Worker:
    """One worker process's parts. `run` is called once, from the thread that becomes the pipeline's.

    `engine_command` puts another engine process in the real one's place; `tokenizer` another tokenizer.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        engine_command: Sequence[str] | None = None,
        tokenizer: PromptTokenizer | None = None,
        on_turn: Callable[["Flow"], None] | None = None,
        on_engine_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._settings = settings
        self._engine_command = engine_command
        self._tokenizer = tokenizer
        self._on_turn = on_turn
        self._on_engine_progress = on_engine_progress
        self._name = settings.worker.name or f"{socket.gethostname()}-{os.getpid()}"
        self._flow: Flow | None = None
        self._source: Source | None = None
        self._sink: ElasticsearchSink | None = None
        self._elasticsearch_health: ElasticsearchHealth | None = None
        self._http_port = 0
        self._next_progress = time.monotonic() + PROGRESS_SECONDS
        self._told: dict[str, int] = {}  # in the last line of progress
        self._engine_part = ""
        self._stop_signal: int | None = None  # that came while starting
        self._start_seconds: dict[str, float] = {}  # of the present engine, by part

    def run(self, until_drained: bool = False) -> RunSummary:
        """Serves until a signal, or until the backlog is done. Raises PagemillError for what stops it otherwise.

        SIGTERM and SIGINT drain within worker.grace_seconds and commit; a second one ends the process at once.
        """
        settings = self._settings
        require_addresses(settings, model=self._tokenizer is None)
        with self._signals(), ExitStack() as parts:
            tokenizer, model_name = self._load_tokenizer()
            tasks = compile_tasks(settings.tasks, tokenizer)
            fingerprint = tokenizer.fingerprint if isinstance(tokenizer, Tokenizer) else "test"
            rows = RowBuilder(
                tasks, WorkerIdentity(self._name, model_name), fingerprint, receipts=settings.worker.receipts
            )
            self._start_http(parts)
            sink = self._start_sink(parts, [task.index for task in settings.tasks.values()])
            ensure_topics(settings.kafka, wait_seconds=settings.kafka.connect_timeout_seconds)
            source = self._source = KafkaSource(settings.kafka, worker=self._name)
            self._heed_stop()
            engine = EngineSupervisor(self._start_engine, settings.worker.engine_restarts)
            parts.callback(engine.close)
            flow = Flow(
                source,
                sink,
                engine,
                lambda info: PromptBuilder(tasks, tokenizer, info),
                rows,
                max_running=settings.engine.max_running,
                max_tokens_per_step=settings.engine.max_tokens_per_step,
                urgent_after_seconds=settings.worker.urgent_after_seconds,
                limits=FailureLimits(
                    settings.worker.max_failed_ratio,
                    settings.worker.failed_window_documents,
                    settings.worker.max_consecutive_failures,
                ),
                look_up=sink.look_up,
            )
            info = flow.open_engine()
            seconds = {part: round(seconds, 2) for part, seconds in info.start_seconds.items()}
            logger.info("engine started", model=info.model, device=info.device, seconds=seconds)
            parts.callback(source.close)
            source.start()
            self._flow = flow  # from here on a signal drains
            self._heed_stop()
            parts.enter_context(_rare_collections())
            logger.info("worker started", worker=self._name, topics=settings.kafka.topics, group=settings.kafka.group)
            stopped_by = self._run_flow(flow, source, until_drained)
            if not isinstance(stopped_by, SinkError):
                try:
                    sink.drain(max(STORE_SECONDS, flow.grace_left()))
                except SinkError as error:
                    stopped_by = _first(stopped_by, error)
            sink.close()
            flow.close()
            flow.hand_back_storing()
            if stopped_by is None or isinstance(stopped_by, PagemillError):
                flow.reconciliation.close()  # otherwise what failed may hold documents, of which no queue knows
            summary = RunSummary(flow.totals, flow.engine_stats, flow.num_in_flight)
        logger.info("worker ended", **summary.event())
        if stopped_by is not None:
            raise stopped_by
        return summary

    def _run_flow(self, flow: Flow, source: Source, until_drained: bool) -> Exception | None:
        """What stopped it before its time, once all that can be stored all the same is on its way: nothing computed is
        thrown away."""
        try:
            flow.run(until_drained, lambda: self._tell_turn(flow))
        except SinkError as error:
            flow.give_up()
            return error
        except (SourceError, FailureLimitError, AccountError, EngineError, ModelError, SettingsError) as error:
            # ModelError and SettingsError: of an engine that was started again.
            if isinstance(error, EngineError):
                source.expect_no_clean_end()
            return self._end_flow(flow, source, error)
        except Exception as error:
            # A bug, or no memory: a document may be behind it, and would end the next worker too.
            logger.exception("the pipeline failed")
            source.expect_no_clean_end()
            return self._end_flow(flow, source, error)
        return None

    def _end_flow(self, flow: Flow, source: Source, error: Exception) -> Exception:
        """Drains as after a signal, where that still goes. `error` is why."""
        try:
            flow.request_drain(self._settings.worker.grace_seconds)
            flow.run()
        except Exception as another:
            if not isinstance(another, PagemillError):
                source.expect_no_clean_end()
            flow.give_up()
            return _first(error, another)
        return error

    @property
    def http_port(self) -> int:
        """Where /livez, /readyz and /metrics are; 0 before `run` has bound it."""
        return self._http_port

    def readiness(self) -> Mapping[str, str | None]:
        """Part -> what it lacks, None where it is ready. From any thread."""
        flow, source, health = self._flow, self._source, self._elasticsearch_health
        has_assignment = flow is not None and source is not None and source.has_assignment
        return {
            "engine": None if flow is not None and flow.engine_is_ready else "no inference has passed since its start",
            "kafka": None if has_assignment else "no assignment received from the group yet",
            "elasticsearch": "not connected yet" if health is None else health.lacks(),
        }

    def is_alive(self) -> bool:
        """Whether the pipeline's thread turns; starting, also of a new engine, counts as alive."""
        flow = self._flow
        return flow is None or not flow.engine_is_ready or time.monotonic() - flow.last_turn < STUCK_SECONDS

    def _load_tokenizer(self) -> tuple[PromptTokenizer, str]:
        model = self._settings.model
        if self._tokenizer is not None:
            return self._tokenizer, model.name or "test"
        path = Path(model.path)
        if not path.exists():
            raise SettingsError(
                f"model.path = {model.path!r} does not exist; give a Hugging Face folder or a GGUF file"
            )
        return Tokenizer.from_path(path), model.name or (path.stem if path.is_file() else path.resolve().name)

    def _start_http(self, parts: ExitStack) -> None:
        settings = self._settings.worker
        metrics = WorkerMetrics(self._read)
        server = StatusServer(
            settings.http_host,
            settings.http_port,
            is_alive=self.is_alive,
            readiness=self.readiness,
            metrics=metrics.text,
        )
        server.start()
        parts.callback(server.close)
        self._http_port = server.port
        logger.info("http started", host=settings.http_host, port=server.port)

    def _start_sink(self, parts: ExitStack, task_indices: Sequence[str | None]) -> ElasticsearchSink:
        settings = self._settings.elasticsearch
        client = connect(settings)
        parts.callback(client.close)
        sink = ElasticsearchSink(
            settings,
            on_acknowledged=lambda positions, verdict: self._running_flow().outgoing.acknowledged(positions, verdict),
            on_rejected=lambda rows: self._running_flow().outgoing.rejected(rows),
            indices=[index for index in task_indices if index is not None],
            client=client,
        )
        sink.start()
        parts.callback(sink.close)
        self._elasticsearch_health, self._sink = ElasticsearchHealth(client), sink
        return sink

    def _start_engine(self) -> tuple[EngineClient, EngineInfo]:
        """A started engine that has answered one request: a model that loads may still not compute.

        One that has not is ended before the error leaves, so that the next finds its memory free.
        """
        settings = self._settings
        client = EngineClient(
            settings.model,
            settings.engine,
            self._engine_command,
            silence_seconds=settings.worker.engine_silence_seconds,
            step_seconds=settings.worker.engine_step_seconds,
        )
        started = time.monotonic()
        info = client.start(
            settings.worker.engine_start_timeout_seconds, self._tell_engine_progress, self._is_asked_to_drain
        )
        ready = time.monotonic()
        try:
            self._prove(client)
        except BaseException:
            client.close()
            raise
        proven = time.monotonic()
        self._start_seconds = {**info.start_seconds, "first_token": proven - ready, "total": proven - started}
        return client, replace(info, start_seconds=self._start_seconds)

    def _prove(self, client: EngineClient) -> None:
        client.submit([InferenceRequest(0, (0,), SamplingParams(max_tokens=1, ignore_eos=True), seed=0)])
        deadline = time.monotonic() + PROOF_TIMEOUT_SECONDS
        while not (outputs := client.poll(1.0)):
            if self._is_asked_to_drain():
                raise EngineError("the engine's start was given up before it answered its first request")
            if time.monotonic() > deadline:
                raise EngineError(f"the engine gave no answer to its first request within {PROOF_TIMEOUT_SECONDS:g} s")
        if (failure := outputs[0].failure) is not None:
            raise EngineError(f"the engine cannot answer: {failure.code.value}: {failure.message}")

    def _tell_engine_progress(self, part: str, fraction: float) -> None:
        if part != self._engine_part:
            self._engine_part = part
            logger.info("engine starting", part=part)
        if self._on_engine_progress is not None:
            self._on_engine_progress(part, fraction)

    def _is_asked_to_drain(self) -> bool:
        """Then another engine is not waited for."""
        return self._flow is not None and self._flow.is_asked_to_drain

    def _running_flow(self) -> Flow:
        assert self._flow is not None, "no row is put before the flow runs"
        return self._flow

    def _tell_turn(self, flow: Flow) -> None:
        if flow.last_turn >= self._next_progress:
            self._next_progress = flow.last_turn + PROGRESS_SECONDS
            held = flow.held()
            progress = {"answered": flow.totals.account.indexed, "failed": flow.totals.account.failed, **held}
            if any(held.values()) or progress != self._told:  # with nothing to do it is said once
                logger.info("progress", **progress)
            self._told = progress
        if self._on_turn is not None:
            self._on_turn(flow)

    def _read(self) -> Readings:
        flow, source, sink = self._flow, self._source, self._sink
        if flow is None or source is None or sink is None:
            return Readings(self.readiness())
        return Readings(
            self.readiness(),
            flow.totals,
            flow.held(),
            flow.waiting_tokens,
            flow.engine_stats,
            sink.stats(),
            source.num_in_flight,
            source.is_paused,
            self._start_seconds,
        )

    def _heed_stop(self) -> None:
        """Raises StoppedAtOnce for a signal that did so in vain: kafka-python takes whatever is raised while it sends
        for a connection's failure, and connects again.
        """
        if self._stop_signal is not None:
            raise StoppedAtOnce(self._stop_signal)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT, where this is the process's main thread; elsewhere they are the caller's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        num_received = 0

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal num_received
            num_received += 1
            if num_received > 1:
                os._exit(128 + number)  # the engine process goes when its socket closes
            if self._flow is None:
                self._stop_signal = number
                raise StoppedAtOnce(number)
            self._flow.request_drain(self._settings.worker.grace_seconds)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _first(error: Exception | None, another: Exception) -> Exception:
    """What stopped the worker; what went wrong behind that is but logged."""
    if error is None:
        return another
    has_traceback = None if isinstance(another, PagemillError) else another
    logger.error("stopping met another failure", reason=f"{type(another).__name__}: {another}", exc_info=has_traceback)
    return error


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Looks for reference cycles seldom. Thousands of documents live for a second each and none is part of a cycle, so
    that looking at them again and again found nothing and took a sixth of the pipeline thread's time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
