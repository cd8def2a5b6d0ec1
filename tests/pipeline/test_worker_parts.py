"""The worker's parts where they go wrong, without servers."""

import gc
import os
import signal
import threading
import weakref

import pytest

import pipeline.worker
from engine.client import EngineClient
from pipeline.http import StatusServer
from pipeline.supervisor import EngineSupervisor
from pipeline.suspects import Loss
from pipeline.worker import Worker
from schemas.errors import EngineError, SinkError
from schemas.inference import EngineInfo
from schemas.settings_reader import load_settings
from tests.fakes import fake_engine_command
from tests.pipeline.parts import ByteTokenizer


def test_an_engine_that_does_not_answer_its_first_request_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process_ids: list[int | None] = []

    class NotedClient(EngineClient):
        def submit(self, requests: object) -> None:
            process_ids.append(self.process_id)
            super().submit(requests)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline.worker, "EngineClient", NotedClient)
    monkeypatch.setattr(pipeline.worker, "PROOF_TIMEOUT_SECONDS", 0.1)
    worker = Worker(load_settings(None, {}, {}), engine_command=fake_engine_command(hang_after=0))
    with pytest.raises(EngineError, match="no answer to its first request"):
        worker._start_engine()
    (process_id,) = process_ids
    assert process_id is not None
    with pytest.raises(ProcessLookupError):  # or the next one would not find its memory
        os.kill(process_id, 0)


def test_of_engines_that_were_lost_nothing_is_kept() -> None:
    """Not their clients, descriptors or threads: a worker may lose one a day for a year."""
    worker = Worker(load_settings(None, {}, {}), engine_command=fake_engine_command())
    clients: list[weakref.ref[EngineClient]] = []

    def start() -> tuple[EngineClient, EngineInfo]:
        client, info = worker._start_engine()
        clients.append(weakref.ref(client))
        return client, info

    supervisor = EngineSupervisor(start, max_restarts=10, backoff_seconds=0.0)
    supervisor.open()
    gc.collect()  # of what ran before
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        supervisor.reopen(EngineError("lost"), lambda: False, Loss())
    gc.collect()
    assert [client() is not None for client in clients] == [False, False, False, True]
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    supervisor.close()
    supervisor.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before[0] - 1, before[1] - 1)


def test_signals_are_the_workers_until_all_of_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    while_closing: list[object] = []
    close = StatusServer.close

    def note_and_close(server: StatusServer) -> None:
        while_closing.append(signal.getsignal(signal.SIGTERM))
        close(server)

    monkeypatch.setattr(StatusServer, "close", note_and_close)
    settings = load_settings(
        None,
        {
            "kafka.bootstrap_servers": "127.0.0.1:1",
            "elasticsearch.urls": "http://127.0.0.1:1",
            "elasticsearch.connect_timeout_seconds": 0.1,
            "worker.http_port": 0,
        },
        {},
    )
    with pytest.raises(SinkError):
        Worker(settings, tokenizer=ByteTokenizer()).run()
    assert len(while_closing) == 1
    assert while_closing[0] is not before  # or a signal would end the last commit half way
    assert signal.getsignal(signal.SIGTERM) is before
