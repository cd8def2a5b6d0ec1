"""The flow with a real engine process: every document ends once, and the account says so."""

import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest

from engine.client import DEFAULT_COMMAND, EngineClient
from pipeline.account import Outcome
from pipeline.arrivals import LULL_SECONDS
from pipeline.failure_limits import FailureLimits
from pipeline.flow import WAIT_SECONDS, Flow
from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.reconciliation import PATIENCE_SECONDS
from pipeline.redelivery import LookUp
from pipeline.results import WorkerIdentity, row_version
from pipeline.retry import Verdict
from pipeline.rows import Row, RowBuilder
from pipeline.sink import RejectedRow
from pipeline.stored_rows import StoredRow
from pipeline.supervisor import EngineSupervisor
from schemas.document import Document, DocumentResult, SourcePosition, Suspicion
from schemas.errors import (
    AccountError,
    EngineError,
    Failure,
    FailureCode,
    FailureLimitError,
    SettingsError,
    SinkError,
    SourceError,
    Stage,
)
from schemas.inference import EngineInfo, EngineSettings, InferenceOutput, InferenceRequest, ModelSettings
from schemas.task import Task
from tests.fakes import FakeClock, fake_engine_command
from tests.pipeline.parts import ByteTokenizer, MemorySource, make_document, make_rejected
from tests.tiny_models import write_tiny_model

TASKS = {
    "default": Task(),
    "kind": Task(kind="classify", labels=("good", "bad"), template="{{ text }}"),
    "json": Task(template="{{ text }}", output_schema={"type": "object"}),
}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOON, LATER = NOW + timedelta(seconds=5), NOW + timedelta(seconds=60)
ENGINE = EngineSettings(kv_cache_tokens=4096, num_threads=1)


class MemorySink:
    """What the flow sees of a sink. Acknowledges at once, refuses rows by document id, and can be full."""

    def __init__(self) -> None:
        self.rows: dict[str, DocumentResult] = {}
        self.refused: set[str] = set()
        self.verdict = Verdict.STORED
        self.has_room = True
        self.holds = False
        self.num_flushes = 0
        self.held: list[Row] = []
        self.error: SinkError | None = None
        self.acknowledged: Callable[[Sequence[SourcePosition], Verdict], None]
        self.rejected: Callable[[list[RejectedRow]], None]

    def put_many(self, rows: Sequence[Row]) -> None:
        if self.holds:
            self.held += rows
            return
        for result, version, position, index in rows:
            if result.id in self.refused and result.status == "answered":
                failure = Failure(FailureCode.SINK_REJECTED, Stage.SINK, "the mapping refuses it")
                self.rejected([RejectedRow(result, position, index or "results", version, failure)])
            else:
                self.rows[result.id] = result
                self.acknowledged([position], self.verdict)

    def flush(self) -> None:
        self.num_flushes += 1

    def release(self) -> None:
        self.holds = False
        held, self.held = self.held, []
        self.put_many(held)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Bench:
    """A flow with everything around it. `engines` are the command lines of the engine processes, one after another."""

    def __init__(
        self,
        engines: Sequence[tuple[str, ...]],
        source: MemorySource,
        restarts: int = 3,
        limits: FailureLimits | None = None,
        model: ModelSettings | None = None,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = NOW  # of the wall
        self.source = source
        self.sink = MemorySink()
        self.started: list[EngineClient] = []
        self._commands = iter(engines)
        self._model = model or ModelSettings(name="model")
        tasks = compile_tasks(TASKS, ByteTokenizer())
        self.flow = Flow(
            source,
            self.sink,
            EngineSupervisor(self._start, restarts, backoff_seconds=0.0),
            lambda info: PromptBuilder(tasks, ByteTokenizer(), info, clock=lambda: self.now),
            RowBuilder(tasks, WorkerIdentity("worker", "model"), "tokenizer", receipts=True),
            max_running=8,
            max_tokens_per_step=64,
            urgent_after_seconds=300.0,
            limits=limits,
            look_up=look_up,
            clock=clock,
            wall_clock=lambda: self.now,
        )
        self.sink.acknowledged = self.flow.outgoing.acknowledged
        self.sink.rejected = self.flow.outgoing.rejected

    def _start(self) -> tuple[EngineClient, EngineInfo]:
        client = EngineClient(self._model, ENGINE, next(self._commands))
        self.started.append(client)
        return client, client.start(60.0, None, lambda: self.flow.is_asked_to_drain)

    def run(self) -> None:
        self.flow.open_engine()
        self.flow.run(until_drained=True)

    def balance(self) -> tuple[int, int]:
        return self.flow.num_in_flight, self.flow.totals.account.imbalance(self.flow.num_in_flight)


MakeStage = Callable[..., Bench]


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    made: list[Bench] = []

    def make(source: MemorySource, *engines: dict[str, float | str], restarts: int = 3, **options: Any) -> Bench:
        commands = [fake_engine_command(**behaviour) for behaviour in engines or ({},)]
        made.append(Bench(commands, source, restarts, **options))
        return made[-1]

    yield make
    for stage in made:
        stage.flow.close()
        for client in stage.started:
            client.close()


def test_every_document_ends_in_one_row(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"number {offset}") for offset in range(300)])
    stage = make_stage(source)
    stage.run()
    assert {row.status for row in stage.sink.rows.values()} == {"answered"}
    assert len(stage.sink.rows) == 300
    assert sorted(source.completed) == list(range(300))
    account = stage.flow.totals.account
    assert (account.delivered, account.indexed, account.failed) == (300, 300, 0)
    assert stage.balance() == (0, 0)


def test_bad_documents_fail_alone_dead_letter_first(make_stage: MakeStage) -> None:
    source = MemorySource(
        [
            make_rejected(0),
            make_document(1, task="unknown"),
            make_document(2, prompt=""),
            make_document(3, prompt="good"),
            make_document(4, task="json", fields={"text": "x"}),
        ]
    )
    stage = make_stage(source)
    stage.run()
    codes = {position.offset: failure.code for position, failure in source.dead_letters}
    assert codes == {
        0: FailureCode.BAD_MESSAGE,
        1: FailureCode.UNKNOWN_TASK,
        2: FailureCode.EMPTY_PROMPT,
        4: FailureCode.INVALID_OUTPUT,
    }
    statuses = {name: row.status for name, row in stage.sink.rows.items()}
    assert statuses == {
        "documents/0/0": "failed", "d1": "failed", "d2": "failed", "d3": "answered", "d4": "failed",
    }  # fmt: skip
    assert stage.sink.rows["d4"].text is not None  # what the model said is kept
    assert sorted(source.completed) == [0, 1, 2, 3, 4]
    assert stage.flow.totals.account.failed == 4
    assert stage.flow.totals.failures == {
        "BAD_MESSAGE": 1, "UNKNOWN_TASK": 1, "EMPTY_PROMPT": 1, "INVALID_OUTPUT": 1,
    }  # fmt: skip
    assert stage.balance() == (0, 0)


def test_a_failed_row_waits_for_its_dead_letter(make_stage: MakeStage) -> None:
    source = MemorySource([make_rejected(0)])
    source.holds_dead_letters = True
    stage = make_stage(source)
    stage.flow.open_engine()
    for _ in range(3):
        stage.flow.turn()
    assert stage.sink.rows == {}
    assert stage.flow.held()["dead_letters"] == 1
    assert stage.balance() == (1, 0)
    source.held[0]()
    stage.flow.turn()
    assert [row.status for row in stage.sink.rows.values()] == ["failed"]
    assert source.completed == [0]


def test_a_label_and_a_receipt_are_in_the_row(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0, task="kind", fields={"text": "hm"}, metadata={"a": [1]})]))
    stage.run()
    row = stage.sink.rows["d0"]
    assert row.label in ("good", "bad")
    assert row.kind == "classify"
    assert row.metadata == {"a": [1]}
    assert (row.attempts, row.worker, row.model) == (1, "worker", "model")
    assert row.receipt is not None
    assert row.receipt.sampling["temperature"] == 0.0
    assert row.receipt.prompt_token_ids is not None


def test_an_invalid_output_is_tried_once_more_with_another_seed_where_sampling_is_random(
    make_stage: MakeStage,
) -> None:
    source = MemorySource([make_document(0, task="json", fields={"text": "x"}, sampling={"temperature": 1.0})])
    stage = make_stage(source)
    stage.run()
    row = stage.sink.rows["d0"]
    assert (row.status, row.attempts, stage.flow.totals.retries) == ("failed", 2, 1)
    assert [failure.code for _, failure in source.dead_letters] == [FailureCode.INVALID_OUTPUT]


def test_a_row_that_elasticsearch_refuses_becomes_a_failed_row(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0), make_document(1)])
    stage = make_stage(source)
    stage.sink.refused = {"d0"}
    stage.run()
    failure = stage.sink.rows["d0"].failure
    assert failure is not None
    assert failure.code is FailureCode.SINK_REJECTED
    assert [position.offset for position, _ in source.dead_letters] == [0]
    assert sorted(source.completed) == [0, 1]
    assert stage.balance() == (0, 0)


@pytest.mark.parametrize("verdict", [Verdict.ALREADY_DONE, Verdict.SUPERSEDED])
def test_what_was_there_already_completes_and_is_counted_apart(make_stage: MakeStage, verdict: Verdict) -> None:
    source = MemorySource([make_document(0)])
    stage = make_stage(source)
    stage.sink.verdict = verdict
    stage.run()
    account = stage.flow.totals.account
    assert (account.indexed, account.already_done + account.superseded) == (0, 1)
    assert source.completed == [0]


def test_a_full_outbox_stops_the_feeding_and_loses_nothing(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt="x" * 60) for offset in range(200)])
    stage = make_stage(source)
    stage.sink.has_room = False
    stage.flow.open_engine()
    while stage.flow.held()["rows"] == 0 or stage.flow.held()["engine"]:
        stage.flow.turn()
    held = stage.flow.held()
    assert held["storing"] == 0
    assert held["batcher"] > 0
    for _ in range(5):
        stage.flow.turn()
    assert stage.flow.held() == held
    stage.sink.has_room = True
    stage.flow.run(until_drained=True)
    assert len(stage.sink.rows) == 200
    assert stage.balance() == (0, 0)


def test_the_engine_gets_three_steps_of_tokens_and_no_more(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt="x" * 16) for offset in range(100)])
    stage = make_stage(source, {"step_seconds": 60.0})
    stage.flow.open_engine()
    for _ in range(4):
        stage.flow.turn()
    # 3 steps x 64 tokens / 16 a prompt = 12 are there; the other 88 can still be put in order.
    assert stage.flow.held()["engine"] == 12
    assert stage.flow.held()["batcher"] == 88


def test_after_a_lull_the_engine_is_told_what_is_left_and_a_new_document_takes_that_back(make_stage: MakeStage) -> None:
    clock = FakeClock(100.0)
    source = MemorySource([make_document(offset, prompt="x" * 16, sampling={"max_tokens": 4}) for offset in range(16)])
    stage = make_stage(source, {"step_seconds": 60.0}, clock=clock)
    stage.flow.open_engine()
    told: list[dict[int, int] | None] = []

    def note(beyond: Mapping[int, int] | None) -> None:
        told.append(None if beyond is None else dict(beyond))

    stage.started[0].expect = note  # type: ignore[method-assign]

    def turn_after(seconds: float) -> None:
        clock.advance(seconds)
        stage.flow.turn()

    turn_after(0.0)
    turn_after(LULL_SECONDS - 0.1)
    assert told == []
    turn_after(0.2)
    turn_after(60.0)
    assert told == [{4: 64}]  # four documents, told once
    source.add([make_document(16)])
    turn_after(0.1)
    assert told == [{4: 64}, None]
    source.is_paused = True
    turn_after(60.0)
    assert told == [{4: 64}, None]  # nothing comes because nothing is read
    source.is_paused = False
    turn_after(LULL_SECONDS)
    assert told[2:] == [{4: 64, 256: 1}]
    stage.flow.request_drain(0.0)
    stage.flow.run()
    assert told[3:] == [None]  # while it drains nothing is put off


def test_a_lost_engine_is_started_again_and_gets_what_it_had(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"number {offset}") for offset in range(100)])
    stage = make_stage(source, {"die_after": 30}, {"fail_after": 40}, {})
    stage.run()
    assert len(stage.sink.rows) == 100
    assert sorted(source.completed) == list(range(100))
    assert stage.flow.totals.engine_restarts == 2
    assert stage.flow.engine_is_ready
    assert stage.balance() == (0, 0)


def test_a_drain_does_not_wait_for_another_engine_to_load(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0)]), {"die_after": 0}, {"load_seconds": 600.0}, restarts=1)
    stage.flow.open_engine()
    start = stage._start

    def start_and_drain_meanwhile() -> tuple[EngineClient, EngineInfo]:
        threading.Timer(0.3, stage.flow.request_drain, [20.0]).start()
        return start()

    stage.flow._engine._start = start_and_drain_meanwhile
    stage.flow.run()
    assert stage.flow.totals.account.handed_back == 1
    assert stage.balance() == (0, 0)
    assert len(stage.started) == 2


def test_an_engine_that_is_lost_again_and_again_stops_the_worker(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource(), restarts=2)
    stage.flow.open_engine()
    stage._commands = repeat((sys.executable, "-c", "raise SystemExit(3)"))
    stage.started[0].kill()
    with pytest.raises(EngineError, match=r"lost 3 times without an output between.*worker\.engine_restarts = 2"):
        stage.flow.turn()
    assert not stage.flow.engine_is_ready


def test_no_restart_allowed_means_none(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0)]), {"die_after": 0}, restarts=0)
    with pytest.raises(EngineError, match=r"lost once.*died of SIGKILL.*engine_restarts = 0 allows no more"):
        stage.run()
    assert stage.flow.totals.account.handed_back == 1
    assert stage.balance() == (0, 0)


@pytest.mark.parametrize("killers", [{7}, {7, 8, 30}])
def test_documents_that_kill_the_engine_are_found_and_failed_by_name_and_all_others_answered(
    make_stage: MakeStage, killers: set[int]
) -> None:
    prompts = [f"{'#' if offset in killers else '.'} number {offset}" for offset in range(40)]
    source = MemorySource([make_document(offset, prompt=prompt) for offset, prompt in enumerate(prompts)])
    stage = make_stage(source, *[{"die_on_token": ord("#")}] * 30)
    stage.run()
    failed = {name for name, row in stage.sink.rows.items() if row.status == "failed"}
    assert failed == {f"d{offset}" for offset in killers}
    assert len(stage.sink.rows) == 40
    assert sorted(position.offset for position, _ in source.dead_letters) == sorted(killers)
    code, message = source.dead_letters[0][1].code, source.dead_letters[0][1].message
    assert code is FailureCode.ENGINE_LOST
    assert re.match(
        r"the engine was lost 2 times while it ran this document and nothing else .*died of SIGKILL", message
    )
    # At most 40 in the engine: 6 halvings and two losses alone for each.
    assert stage.flow.totals.engine_restarts <= 8 * len(killers)
    assert stage.balance() == (0, 0)


def test_an_engine_that_every_document_kills_stops_the_worker_before_it_fails_many(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"# {offset}") for offset in range(8)])
    stage = make_stage(source, *[{"die_on_token": ord("#")}] * 20, restarts=2)
    with pytest.raises(EngineError, match=r"3 documents in a row were each alone.*it is the engine that is broken"):
        stage.run()
    assert len(source.dead_letters) == 3
    stage.flow.request_drain(30.0)
    stage.flow.run()
    assert sorted(source.completed) == sorted(position.offset for position, _ in source.dead_letters)
    assert stage.flow.totals.account.handed_back == 5
    assert stage.balance() == (0, 0)


def test_an_engine_that_dies_while_idle_is_started_again_before_a_document_needs_it(make_stage: MakeStage) -> None:
    source = MemorySource()
    stage = make_stage(source, {}, {})
    stage.flow.open_engine()
    stage.flow.turn()
    stage.started[0].kill()
    stage.flow.turn()
    assert stage.flow.totals.engine_restarts == 1
    source.add([make_document(0)])
    stage.flow.run(until_drained=True)
    assert [row.status for row in stage.sink.rows.values()] == ["answered"]
    assert stage.flow.totals.engine_restarts == 1


def test_a_real_engine_that_is_killed_by_a_signal_costs_its_documents_another_run_and_no_answer(
    tmp_path: Path,
) -> None:
    documents = [make_document(i, prompt=f"number {i}", sampling={"max_tokens": 100}) for i in range(12)]
    source = MemorySource(documents)
    model = ModelSettings(path=str(write_tiny_model(tmp_path)), dtype="float32", device="cpu")
    stage = Bench([DEFAULT_COMMAND] * 2, source, model=model)
    try:
        stage.flow.open_engine()
        while not stage.started[0].stats.num_steps:
            stage.flow.turn()
        assert stage.started[0].process_id is not None
        os.kill(stage.started[0].process_id, signal.SIGSEGV)
        while not stage.flow.totals.engine_restarts:
            stage.flow.turn()
        stage.flow.run(until_drained=True)
    finally:
        for client in stage.started:
            client.close()
    assert [stage.sink.rows[f"d{i}"].status for i in range(12)] == ["answered"] * 12
    assert source.dead_letters == []
    assert stage.balance() == (0, 0)


def test_suspects_that_wait_are_handed_back_when_draining(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"number {offset}") for offset in range(8)])
    stage = make_stage(source, {"hang_after": 0}, {})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.started[0].kill()
    while not stage.flow.totals.engine_restarts:
        stage.flow.turn()
    stage.flow.turn()
    assert stage.flow.held()["batcher"] == 4
    stage.flow.request_drain(30.0)
    stage.flow.run()
    account = stage.flow.totals.account
    assert (account.indexed, account.handed_back) == (4, 4)
    assert stage.balance() == (0, 0)


def test_once_the_engine_is_given_up_what_was_computed_is_still_stored(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"number {offset}") for offset in range(20)])
    stage = make_stage(source, {"die_after": 12, "requests_per_step": 4}, restarts=0)
    stage.sink.has_room = False
    with pytest.raises(EngineError, match="died of SIGKILL"):
        stage.run()
    assert stage.flow.held()["rows"] == 12
    stage.sink.has_room = True
    stage.flow.request_drain(30.0)
    stage.flow.run()
    assert len(stage.sink.rows) == len(source.completed) == 12
    assert stage.flow.totals.account.handed_back == 8
    assert stage.balance() == (0, 0)


def test_the_suspects_of_a_revoked_partition_are_dropped(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt=f"number {offset}") for offset in range(8)])
    stage = make_stage(source, {"hang_after": 0}, {"hang_after": 0})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.started[0].kill()
    while stage.flow.held()["engine"] != 4:
        stage.flow.turn()
    source.epoch = 2
    stage.flow.drop_what_is_not_ours()
    assert stage.flow.totals.account.handed_back == 8
    assert stage.balance() == (0, 0)


def test_documents_that_workers_died_over_run_in_their_groups_with_nothing_else(make_stage: MakeStage) -> None:
    documents = [make_document(offset, prompt=f"number {offset}") for offset in range(7)]
    groups = {1: range(3), 2: range(3), 5: range(5, 6)}
    suspicions = {offset: Suspicion(4, group) for offset, group in groups.items()}
    source = MemorySource([one._replace(suspicion=suspicions.get(one.position.offset)) for one in documents[:6]])
    source.add([documents[6]._replace(suspicion=Suspicion(2))])  # two deaths are not enough
    stage = make_stage(source)
    submitted: list[tuple[list[int], list[list[int]]]] = []
    stage.flow.open_engine()
    engine = stage.started[0]
    submit = engine.submit

    def note(requests: Sequence[InferenceRequest]) -> None:
        numbers = [int(bytes(list(request.token_ids)).decode().removeprefix("number ")) for request in requests]
        submitted.append((sorted(numbers), list(source.isolated)))
        submit(requests)

    engine.submit = note  # type: ignore[method-assign]
    stage.flow.turn()
    assert (stage.flow.held()["isolated"], stage.flow.held()["batcher"], stage.balance()[1]) == (1, 4, 0)
    stage.flow.run(until_drained=True)
    assert submitted == [([1, 2], [[1, 2]]), ([5], [[1, 2], [5]]), ([0, 3, 4, 6], [[1, 2], [5], []])]
    assert len(stage.sink.rows) == 7
    assert stage.balance() == (0, 0)


def test_a_group_runs_only_once_the_rows_of_the_one_before_are_stored(make_stage: MakeStage) -> None:
    documents = [make_document(offset, prompt=f"number {offset}") for offset in range(2)]
    source = MemorySource(
        [one._replace(suspicion=Suspicion(3, range(offset, offset + 1))) for offset, one in enumerate(documents)]
    )
    stage = make_stage(source)
    stage.sink.holds = True
    stage.flow.open_engine()
    while not stage.sink.held:
        stage.flow.turn()
    for _ in range(3):
        stage.flow.turn()
    assert (source.isolated, stage.flow.held()["isolated"]) == ([[0]], 1)
    assert stage.sink.num_flushes >= 3, "nothing else will fill the bulk"
    stage.sink.release()
    stage.flow.run(until_drained=True)
    assert source.isolated == [[0], [1]]
    assert source.completed == [0, 1]


def test_a_document_that_two_workers_died_with_alone_is_convicted_and_never_runs(make_stage: MakeStage) -> None:
    killer = make_document(0, prompt="killer")._replace(suspicion=Suspicion(5, range(1), losses_alone=2))
    stage = make_stage(MemorySource([killer, make_document(1, prompt="harmless")]))
    stage.run()
    assert stage.started[0].stats.num_prompt_tokens == len("harmless")
    failure = stage.sink.rows["d0"].failure
    assert failure is not None
    assert (failure.code, stage.sink.rows["d0"].attempts) == (FailureCode.ENGINE_LOST, 2)
    assert failure.message.startswith("5 workers in a row died with this document in flight, the last 2 ")
    assert stage.sink.rows["d1"].status == "answered"
    assert [position.offset for position, _ in stage.source.dead_letters] == [0]
    assert stage.balance() == (0, 0)


def test_an_engine_that_is_lost_with_an_isolated_group_is_searched_within_it_and_a_drain_hands_the_others_back(
    make_stage: MakeStage,
) -> None:
    documents = [make_document(offset, prompt=f"number {offset}") for offset in range(3)]
    groups = (range(2), range(2), range(2, 3))
    source = MemorySource(
        [one._replace(suspicion=Suspicion(3, group)) for one, group in zip(documents, groups, strict=True)]
    )
    stage = make_stage(source, {"die_after": 0}, {"hang_after": 1})
    stage.flow.open_engine()
    while not stage.sink.rows:
        stage.flow.turn()
    assert source.isolated == [[0, 1]], "halves of what is noted need no note of their own"
    assert stage.flow.held()["isolated"] == 1
    source.epoch = 2
    stage.flow.drop_what_is_not_ours()
    assert stage.flow.held()["isolated"] == 0
    assert stage.balance() == (0, 0)


def test_isolated_documents_that_wait_are_handed_back_when_draining(make_stage: MakeStage) -> None:
    documents = [make_document(offset)._replace(suspicion=Suspicion(3, range(offset, 9))) for offset in range(3)]
    source = MemorySource(documents)
    stage = make_stage(source, {"step_seconds": 0.3})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.flow.request_drain(30.0)
    stage.flow.run()
    assert sorted(source.handed_back) == [1, 2]
    assert source.completed == [0]
    assert stage.balance() == (0, 0)


def test_what_came_before_a_loss_was_found_is_stored_before_another_engine_is_waited_for(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(MemorySource([make_document(0), make_document(1)]), {"die_after": 1, "requests_per_step": 1})
    stage.flow.open_engine()
    stored: list[int] = []

    def start() -> tuple[EngineClient, EngineInfo]:
        stored.append(len(stage.sink.rows))
        raise SettingsError("seen")

    stage.flow._engine._start = start
    with pytest.raises(SettingsError, match="seen"):
        stage.flow.run()
    assert stored == [1]


def test_what_came_before_a_loss_that_sending_finds_is_stored_too(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemorySource([make_document(0), make_document(1)])
    stage = make_stage(source, {"die_after": 1, "requests_per_step": 1, "step_seconds": 0.2}, {})
    stage.flow.open_engine()
    with monkeypatch.context() as patched:
        patched.setattr(stage.flow._engine, "poll", lambda _: [])
        while stage.flow.held()["engine"] < 2:
            stage.flow.turn()
    assert stage.started[0]._reaper is not None
    stage.started[0]._reaper.join(30.0)  # it has answered the first, and died
    source.add([make_document(2)])
    stage.flow.turn()
    assert stage.flow.totals.engine_restarts == 1
    assert len(stage.sink.rows) == 1
    stage.flow.run(until_drained=True)
    assert len(stage.sink.rows) == 3
    assert stage.balance() == (0, 0)


def test_the_work_of_a_revoked_partition_is_dropped_wherever_it_is(make_stage: MakeStage) -> None:
    source = MemorySource([make_rejected(0), *(make_document(offset, prompt="x" * 16) for offset in range(1, 100))])
    source.holds_dead_letters = True
    stage = make_stage(source, {"step_seconds": 60.0})
    stage.flow.open_engine()
    for _ in range(4):
        stage.flow.turn()
    source.epoch = 2
    stage.flow.drop_what_is_not_ours()
    assert stage.balance() == (0, 0)
    assert stage.flow.totals.account.handed_back == 100
    assert source.completed == []


def test_rows_of_a_revoked_partition_may_be_stored_and_do_not_complete(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0)])
    stage = make_stage(source)
    stage.sink.holds = True
    stage.flow.open_engine()
    while not stage.sink.held:
        stage.flow.turn()
    source.epoch = 2
    stage.sink.release()
    stage.flow.turn()
    assert stage.balance() == (0, 0)
    assert source.completed == []


def test_draining_ends_what_the_engine_has_and_hands_the_rest_back(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt="x" * 16) for offset in range(100)])
    stage = make_stage(source, {"step_seconds": 0.2, "requests_per_step": 4})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    num_in_engine = stage.flow.held()["engine"]
    stage.flow.request_drain(30.0)
    stage.flow.run()
    account = stage.flow.totals.account
    assert source.is_draining
    assert len(source.handed_back) == account.handed_back
    assert account.indexed == len(stage.sink.rows) >= num_in_engine
    assert account.handed_back == 100 - account.indexed > 0
    assert stage.balance() == (0, 0)


def test_a_second_try_is_not_waited_for_while_draining(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0, task="json", fields={"text": "x"}, sampling={"temperature": 1.0})])
    stage = make_stage(source, {"step_seconds": 0.3})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.flow.request_drain(2.0)
    stage.flow.run()
    assert stage.flow.totals.account.handed_back == 1
    assert source.dead_letters == []
    assert stage.balance() == (0, 0)


def test_an_engine_that_is_lost_while_its_work_is_dropped_keeps_the_account(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset, prompt="x" * 16) for offset in range(100)])
    stage = make_stage(source, {"step_seconds": 60.0})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    source.epoch = 2
    stage.started[0].kill()
    assert stage.started[0]._reaper is not None
    stage.started[0]._reaper.join(30.0)  # until then its socket takes what is sent
    with pytest.raises(EngineError):
        stage.flow.drop_what_is_not_ours()
    assert stage.flow.totals.account.handed_back == 100
    assert stage.balance() == (0, 0)


def test_waiting_for_elasticsearch_alone_is_waiting_and_not_turning(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0), make_document(1)])
    stage = make_stage(source)
    stage.sink.has_room = False
    stage.flow.open_engine()
    while stage.flow.held()["rows"] < 2:
        stage.flow.turn()
    started = time.monotonic()
    stage.flow.turn()
    assert time.monotonic() - started >= WAIT_SECONDS  # blocked: nothing can be fed
    stage.sink.has_room = stage.sink.holds = True
    stage.flow.turn()
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1

    stage.flow.request_drain(4 * WAIT_SECONDS)
    stage.flow.run(on_turn=count)
    assert num_turns <= 6


def test_a_grace_of_nothing_hands_back_what_runs(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset) for offset in range(10)])
    stage = make_stage(source, {"step_seconds": 60.0})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.flow.request_drain(0.0)
    stage.flow.run()
    assert stage.flow.totals.account.handed_back == 10
    assert stage.balance() == (0, 0)


def test_a_row_that_is_rejected_behind_the_grace_is_handed_back_with_those_that_were_not_stored(
    make_stage: MakeStage,
) -> None:
    source = MemorySource([make_document(offset) for offset in range(3)])
    stage = make_stage(source)
    stage.sink.holds = True
    stage.sink.refused = {"d1"}
    stage.flow.open_engine()
    while len(stage.sink.held) < 3:
        stage.flow.turn()
    stage.flow.request_drain(0.0)
    stage.flow.run()
    stage.sink.held = [row for row in stage.sink.held if row[0].id != "d2"]  # which gets no answer
    stage.sink.release()  # one is stored, one rejected: its dead letter comes too late to be waited for
    stage.flow.hand_back_storing()
    assert stage.flow.totals.account.indexed == 1
    assert (source.completed, sorted(source.handed_back)) == ([0], [1, 2])
    assert stage.balance() == (0, 0)


def test_what_stops_the_sink_stops_the_flow(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0)]))
    stage.sink.error = SinkError("the alias is gone")
    with pytest.raises(SinkError, match="the alias is gone"):
        stage.run()


def test_documents_that_share_a_prefix_reach_the_engine_side_by_side(make_stage: MakeStage) -> None:
    prompts = [f"{'ab'[offset % 2] * 32}{offset:04}" for offset in range(60)]
    stage = make_stage(MemorySource([make_document(offset, prompt=prompt) for offset, prompt in enumerate(prompts)]))
    seen: list[str] = []
    stage.flow.open_engine()
    engine = stage.started[0]
    submit = engine.submit

    def note(requests: Sequence[InferenceRequest]) -> None:
        seen.extend(chr(request.token_ids[0]) for request in requests)
        submit(requests)

    engine.submit = note  # type: ignore[method-assign]
    stage.flow.run(until_drained=True)
    assert Counter(seen) == {"a": 30, "b": 30}
    assert sum(one != other for one, other in pairwise(seen)) == 1


def test_a_deadline_that_passes_while_waiting_fails_instead_of_starting(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0)])
    stage = make_stage(source)
    stage.sink.has_room = False
    stage.flow.open_engine()
    while not stage.flow.held()["rows"]:
        stage.flow.turn()
    source.add([make_document(1, deadline=SOON.isoformat()), make_document(2, deadline=LATER.isoformat())])
    while stage.flow.held()["batcher"] < 2:
        stage.flow.turn()
    stage.now = SOON
    stage.sink.has_room = True
    stage.flow.run(until_drained=True)
    assert {name: row.status for name, row in stage.sink.rows.items()} == {
        "d0": "answered", "d1": "failed", "d2": "answered",
    }  # fmt: skip
    assert [failure.code for _, failure in source.dead_letters] == [FailureCode.DEADLINE_PASSED]


def invalid_until(deadline: datetime) -> Document:
    """Whose output is no JSON, and may be tried again."""
    keys: dict[str, Any] = {"task": "json", "fields": {"text": "x"}, "sampling": {"temperature": 1.0}}
    return make_document(deadline=deadline.isoformat(), **keys)


def test_no_second_try_is_made_once_the_deadline_has_passed_and_the_first_text_is_kept(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([invalid_until(SOON)]))
    stage.flow.open_engine()
    [engine] = stage.started
    poll = engine.poll

    def poll_for_long(timeout_seconds: float) -> list[InferenceOutput]:
        if outputs := poll(timeout_seconds):
            stage.now = SOON
        return outputs

    engine.poll = poll_for_long  # type: ignore[method-assign]
    stage.flow.run(until_drained=True)
    row = stage.sink.rows["d0"]
    assert row.failure is not None
    assert (row.failure.code, row.attempts, stage.flow.totals.retries) == (FailureCode.INVALID_OUTPUT, 1, 0)
    assert row.text is not None


def test_a_second_try_that_waits_is_made_though_the_deadline_passes_meanwhile(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([invalid_until(SOON)]))
    stage.flow.open_engine()
    while not stage.flow.totals.retries:
        stage.flow.turn()
    stage.now = SOON
    stage.flow.run(until_drained=True)
    row = stage.sink.rows["d0"]
    assert row.failure is not None
    assert (row.failure.code, row.attempts) == (FailureCode.INVALID_OUTPUT, 2)
    assert row.text is not None


def test_time_and_tokens_are_counted(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(offset, prompt="12345") for offset in range(10)]))
    stage.run()
    totals = stage.flow.totals
    assert totals.prompt_tokens == 50
    assert totals.completion_tokens == 40
    assert totals.time.num_answered == totals.time.num_stored == 10
    means = totals.time.means()
    assert means["engine"] > 0
    assert set(means) == {"waiting", "engine", "engine_queue", "engine_prefill", "engine_decode", "storing"}


def test_the_last_rows_do_not_wait_for_a_bulk_to_fill(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0)]))
    stage.sink.holds = True
    stage.flow.open_engine()
    while not stage.sink.held:
        stage.flow.turn()
    assert stage.sink.num_flushes == 0  # more may come
    flush = stage.sink.flush

    def flush_and_release() -> None:
        flush()
        stage.sink.release()

    stage.sink.flush = flush_and_release  # type: ignore[method-assign]
    stage.flow.run(until_drained=True)
    assert stage.sink.num_flushes == 1
    assert len(stage.sink.rows) == 1


def test_outputs_of_nobody_are_ignored(make_stage: MakeStage) -> None:
    stage = make_stage(MemorySource([make_document(0)]))
    stage.flow.open_engine()
    stage.flow.take_outputs([InferenceOutput(999, text="late")], 0.0)
    stage.flow.run(until_drained=True)
    assert list(stage.sink.rows) == ["d0"]
    assert stage.balance() == (0, 0)


def test_when_the_source_fails_what_was_computed_is_still_stored(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(offset) for offset in range(20)])
    stage = make_stage(source)
    stage.sink.has_room = False
    stage.flow.open_engine()
    while stage.flow.held()["rows"] == 0:
        stage.flow.turn()
    source.failure = SourceError("the topic was made again")
    with pytest.raises(SourceError, match="the topic was made again"):
        stage.flow.run()
    stage.sink.has_room = True
    stage.flow.request_drain(30.0)
    stage.flow.run()
    assert len(stage.sink.rows) == len(source.completed) > 0
    assert stage.balance() == (0, 0)


def test_an_engine_lost_while_draining_is_not_started_again(make_stage: MakeStage) -> None:
    source = MemorySource([make_rejected(0), *(make_document(offset) for offset in range(1, 20))])
    source.holds_dead_letters = True
    stage = make_stage(source, {"hang_after": 0})
    stage.flow.open_engine()
    while not stage.flow.held()["engine"]:
        stage.flow.turn()
    stage.flow.request_drain(30.0)
    stage.started[0].kill()
    source.held[0]()
    stage.flow.run()
    assert len(stage.started) == 1
    account = stage.flow.totals.account
    assert (account.failed, account.handed_back, account.indexed) == (1, 19, 0)
    assert stage.balance() == (0, 0)


def test_too_many_failures_in_a_row_stop_the_flow_and_what_had_not_begun_is_handed_back(make_stage: MakeStage) -> None:
    documents = [make_document(offset) if offset < 5 else make_rejected(offset) for offset in range(50)]
    stage = make_stage(MemorySource(documents), limits=FailureLimits(1.0, 1000, 10))
    with pytest.raises(FailureLimitError, match="the last 10 documents that arrived failed, all in a row"):
        stage.run()
    stage.flow.request_drain(30.0)
    stage.flow.run()
    account = stage.flow.totals.account
    assert (account.delivered, account.indexed, account.failed, account.handed_back) == (50, 5, 10, 35)
    assert stage.balance() == (0, 0)


def test_answers_that_are_no_answers_stop_the_flow(make_stage: MakeStage) -> None:
    documents = [make_document(offset, task="json", fields={"text": "x"}) for offset in range(60)]
    stage = make_stage(MemorySource(documents), limits=FailureLimits(0.25, 40, 0))
    with pytest.raises(FailureLimitError, match=r"11 of the last 11 answers failed.*11 of them with INVALID_OUTPUT"):
        stage.run()


def test_rows_that_elasticsearch_rejects_stop_the_flow_though_their_failed_rows_are_stored(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(MemorySource([make_document(n) for n in range(60)]), limits=FailureLimits(1.0, 1000, 20))
    stage.sink.refused = {f"d{offset}" for offset in range(60)}
    with pytest.raises(FailureLimitError, match="the last 20 rows failed, all in a row"):
        stage.run()


def test_what_has_a_row_already_is_completed_without_being_computed(make_stage: MakeStage) -> None:
    source = MemorySource([make_rejected(0), *(make_document(offset) for offset in range(1, 100))])
    source.started = 100
    names = {"default:default:documents/0/0": 0, **{f"default:default:d{offset}": offset for offset in range(1, 60)}}

    def look_up(wanted: Sequence[tuple[str | None, str]]) -> list[StoredRow | None]:
        stored = [names.get(name) for _, name in wanted]
        return [None if at is None else StoredRow(row_version(1000 + at, at, 0), "documents", 0, at) for at in stored]

    stage = make_stage(source, look_up=look_up)
    stage.run()
    account = stage.flow.totals.account
    assert (account.delivered, account.already_done, account.indexed, account.failed) == (100, 60, 40, 0)
    assert sorted(stage.sink.rows) == sorted(f"d{offset}" for offset in range(60, 100))
    assert sorted(source.completed) == list(range(100))
    assert source.dead_letters == []
    assert stage.balance() == (0, 0)


def test_while_elasticsearch_is_away_what_may_have_a_row_is_held_and_a_drain_hands_it_back(
    make_stage: MakeStage,
) -> None:
    source = MemorySource([make_document(offset) for offset in range(10)])
    is_back = threading.Event()

    def look_up(wanted: Sequence[tuple[str | None, str]]) -> list[StoredRow | None]:
        is_back.wait(30.0)
        return [None] * len(wanted)

    stage = make_stage(source, look_up=look_up)
    stage.flow.open_engine()
    for _ in range(5):
        stage.flow.turn()
    assert stage.flow.held()["looked_up"] == 10
    assert stage.balance() == (10, 0)
    stage.flow.request_drain(10.0)
    stage.flow.run()
    is_back.set()
    assert stage.flow.totals.account.handed_back == 10
    assert sorted(source.handed_back) == list(range(10))
    assert stage.balance() == (0, 0)


def test_a_look_up_that_fails_by_a_bug_stops_the_worker_and_what_was_held_is_handed_back(
    make_stage: MakeStage,
) -> None:
    source = MemorySource([make_document(offset) for offset in range(10)])

    def look_up(wanted: Sequence[tuple[str | None, str]]) -> list[StoredRow | None]:
        return []

    stage = make_stage(source, look_up=look_up)
    with pytest.raises(ValueError, match="zip"):
        stage.run()
    stage.flow.request_drain(10.0)
    stage.flow.run()
    assert sorted(source.handed_back) == list(range(10))
    assert stage.balance() == (0, 0)


def test_what_the_source_passed_over_is_delivered_and_already_done(make_stage: MakeStage) -> None:
    first = make_document(0)
    source = MemorySource([first])
    source.skipped[first.position.assignment] = 7
    stage = make_stage(source)
    stage.run()
    account = stage.flow.totals.account
    assert (account.delivered, account.already_done, account.indexed) == (8, 7, 1)
    assert stage.balance() == (0, 0)


def test_a_document_that_is_in_no_queue_stops_the_worker_once_that_lasts(make_stage: MakeStage) -> None:
    clock = FakeClock()
    stage = make_stage(
        MemorySource([make_document(offset) for offset in range(3)]), {"step_seconds": 60.0}, clock=clock
    )
    stage.flow.open_engine()
    stage.flow.turn()
    stage.flow._window._running.popitem()
    for _ in range(int(PATIENCE_SECONDS) - 1):
        clock.advance(1.0)
        stage.flow.reconciliation.check()
    clock.advance(2.0)
    with pytest.raises(AccountError, match=r"delivered 3 = indexed 0 .* in flight 2, and the source has handed out 3"):
        stage.flow.reconciliation.check()


def test_a_document_that_the_source_never_hears_of_is_an_imbalance_of_the_run(make_stage: MakeStage) -> None:
    clock = FakeClock()
    stage = make_stage(
        MemorySource([make_document(offset) for offset in range(3)]), {"step_seconds": 60.0}, clock=clock
    )
    stage.flow.open_engine()
    stage.flow.turn()
    lost = stage.flow._window._running.popitem()[1]
    stage.flow.totals.ledger.end([lost.prepared.document.position], Outcome.INDEXED)
    assert stage.balance() == (2, 0), "the account alone does not show it"
    for _ in range(int(PATIENCE_SECONDS)):
        stage.flow.reconciliation.check()
        clock.advance(1.0)
    with pytest.raises(AccountError, match="handed out 3 of which 2 are open here"):
        stage.flow.reconciliation.check()
    stage.flow.reconciliation.close(timeout_seconds=0.0)
    assert stage.flow.totals.disagreement == 1


def test_documents_of_a_lost_assignment_are_no_disagreement(make_stage: MakeStage) -> None:
    source = MemorySource([make_document(0), make_document(1)])
    stage = make_stage(source)
    stage.sink.holds = True
    stage.flow.open_engine()
    while len(stage.sink.held) < 2:
        stage.flow.turn()
    source.epoch = 2
    stage.flow.reconciliation.close(timeout_seconds=0.0)
    assert stage.flow.totals.disagreement == 0
