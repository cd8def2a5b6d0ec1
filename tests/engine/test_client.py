"""The client against real processes: the fake engine, and commands that are no engine at all."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from engine.client import EngineClient
from schemas.errors import EngineError, ModelError, SettingsError
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
    SamplingParams,
)
from tests.fake_engine import answer
from tests.fakes import fake_engine_command

SAMPLING = SamplingParams(max_tokens=8)
ROOT = Path(__file__).parents[2]


def make_requests(count: int, num_tokens: int = 3) -> list[InferenceRequest]:
    return [InferenceRequest(i, tuple(range(i, i + num_tokens)), SAMPLING, seed=0) for i in range(count)]


@contextmanager
def running_client(silence_seconds: float = 60.0, **behaviour: float | str) -> Iterator[EngineClient]:
    command = fake_engine_command(**behaviour)
    client = EngineClient(ModelSettings(), EngineSettings(), command, silence_seconds=silence_seconds)
    with client:
        client.start(60.0)
        yield client


def collect(client: EngineClient, count: int) -> list[InferenceOutput]:
    outputs: list[InferenceOutput] = []
    while len(outputs) < count:
        arrived = client.poll(30.0)
        assert arrived, f"{len(outputs)} of {count} outputs, then none for 30 s"
        outputs += arrived
    return outputs


def poll_until_lost(client: EngineClient) -> NoReturn:
    """Ends by raising what the client raises."""
    while True:
        client.poll(30.0)


def submit_until_lost(client: EngineClient) -> NoReturn:
    """Ends by raising what the client raises."""
    while True:
        client.submit(make_requests(100, num_tokens=1000))


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_start_that_is_given_up_ends_the_process() -> None:
    client = EngineClient(ModelSettings(), EngineSettings(), fake_engine_command(load_seconds=600))
    with pytest.raises(EngineError, match=r"start was given up \(it was at: "):
        client.start(60.0, give_up=lambda: client.process_id is not None)
    assert client.process_id is not None
    with pytest.raises(ProcessLookupError):
        os.kill(client.process_id, 0)


def test_start_reports_progress_and_the_engine_says_what_it_serves() -> None:
    heard: list[tuple[str, float]] = []
    model = ModelSettings(name="tiny", max_model_len=99)
    with EngineClient(model, EngineSettings(block_size=8), fake_engine_command()) as client:
        info = client.start(60.0, lambda part, fraction: heard.append((part, fraction)))
    assert isinstance(info, EngineInfo)
    assert (info.model, info.max_model_len, info.block_size) == ("tiny", 99, 8)
    assert heard == [("weights", 0.0), ("weights", 1.0)]


def test_every_request_has_exactly_one_output_and_the_stats_follow() -> None:
    requests = make_requests(2000)
    with running_client() as client:
        client.submit(requests)
        outputs = collect(client, len(requests))
        assert client.poll(0.0) == []
        assert client.stats.num_waiting == 0
        assert client.stats.num_prompt_tokens == client.stats.num_begun_tokens == 6000
    assert outputs == [answer(request) for request in requests]


def test_what_is_yet_to_come_is_no_request() -> None:
    requests = make_requests(3)
    with running_client() as client:
        client.expect({64: 1000, 8: 20})
        client.submit(requests)
        client.expect(None)
        assert collect(client, 3) == [answer(request) for request in requests]
        assert client.poll(0.0) == []


def test_one_thread_submits_while_another_polls() -> None:
    requests = make_requests(5000, num_tokens=100)
    with running_client() as client:

        def submit_in_turns() -> None:
            for start in range(0, len(requests), 100):
                client.submit(requests[start : start + 100])

        submitter = threading.Thread(target=submit_in_turns)
        submitter.start()
        outputs = collect(client, len(requests))
        submitter.join()
    assert [output.request_id for output in outputs] == list(range(5000))


def test_a_submission_larger_than_the_socket_needs_no_poll_in_between() -> None:
    requests = make_requests(2000, num_tokens=2000)  # 16 MB of token ids
    with running_client() as client:
        client.submit(requests)
        assert len(collect(client, len(requests))) == 2000


def test_aborted_requests_end_once_and_the_others_are_answered() -> None:
    with running_client(step_seconds=0.2, requests_per_step=1) as client:
        client.submit(make_requests(4))
        client.abort([2, 3, 77])
        outputs = collect(client, 4)
        assert client.poll(0.0) == []
    assert sorted(output.request_id for output in outputs) == [0, 1, 2, 3]
    assert {o.request_id: o.finish_reason for o in outputs}[3] == "abort"


def test_a_dead_engine_is_an_error_after_its_last_outputs() -> None:
    with running_client(die_after=5, requests_per_step=5) as client:
        client.submit(make_requests(10))
        assert len(collect(client, 5)) == 5
        with pytest.raises(EngineError, match="died of SIGKILL"):
            poll_until_lost(client)
        with pytest.raises(EngineError, match="died of SIGKILL"):
            client.submit(make_requests(1))


def test_a_step_that_raises_is_told_by_its_last_line() -> None:
    with running_client(fail_after=0) as client:
        client.submit(make_requests(1))
        with pytest.raises(EngineError, match="the engine failed: RuntimeError: told to fail after 0 answers"):
            poll_until_lost(client)


def test_submitting_to_an_engine_that_failed_raises_its_cause() -> None:
    with running_client(fail_after=0) as client:
        client.submit(make_requests(1))
        with pytest.raises(EngineError, match="told to fail"):
            submit_until_lost(client)


def test_garbage_from_the_engine_is_an_error_and_ends_it() -> None:
    with running_client(garbage_after=0) as client:
        client.submit(make_requests(1))
        with pytest.raises(EngineError, match="sent what is not ours: a frame says it is 4294967295 bytes long"):
            poll_until_lost(client)


def test_an_engine_that_is_frozen_is_found_by_its_silence_and_killed() -> None:
    with running_client(silence_seconds=2.0) as client:
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        with pytest.raises(EngineError, match="no sign of life for 2 s"):
            poll_until_lost(client)


def test_silence_while_nobody_listened_is_not_the_engines() -> None:
    with running_client(silence_seconds=2.0) as client:
        assert client.process_id is not None
        client._last_look -= 3600.0  # as after a SIGSTOP of the worker, or of both
        os.kill(client.process_id, signal.SIGSTOP)
        assert client.poll(0.1) == []
        os.kill(client.process_id, signal.SIGCONT)
        client.submit(make_requests(1))
        assert len(collect(client, 1)) == 1


def test_a_step_may_take_longer_on_a_cpu_unless_the_settings_say_otherwise() -> None:
    with running_client() as client:
        assert client._step_seconds == 1800.0
    with EngineClient(ModelSettings(), EngineSettings(), fake_engine_command(), step_seconds=7.0) as client:
        client.start(60.0)
        assert client._step_seconds == 7.0


def test_a_step_that_does_not_end_is_found_by_its_age() -> None:
    client = EngineClient(ModelSettings(), EngineSettings(), fake_engine_command(hang_after=0), step_seconds=1.0)
    with client:
        client.start(60.0)
        client.submit(make_requests(1))
        with pytest.raises(EngineError, match="the engine hangs: its present step"):
            poll_until_lost(client)


def test_a_model_that_cannot_be_served_is_a_model_error_with_its_sentence() -> None:
    command = fake_engine_command(model_error="shard 2 of 3 is missing")
    client = EngineClient(ModelSettings(), EngineSettings(), command)
    with pytest.raises(ModelError, match=r"^shard 2 of 3 is missing$"):
        client.start(60.0)
    assert client.process_id is not None
    assert not is_running(client.process_id)


def test_settings_that_the_model_cannot_have_are_a_settings_error_with_its_sentence() -> None:
    client = EngineClient(
        ModelSettings(), EngineSettings(), fake_engine_command(settings_error="no room for the cache")
    )
    with pytest.raises(SettingsError, match=r"^no room for the cache$"):
        client.start(60.0)


def test_an_engine_that_is_not_ready_in_time_is_ended() -> None:
    client = EngineClient(ModelSettings(), EngineSettings(), fake_engine_command(load_seconds=600))
    with pytest.raises(EngineError, match=r"not ready after 2 s \(it was at: weights\)"):
        client.start(2.0)
    assert client.process_id is not None
    assert not is_running(client.process_id)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("/nonexistent/engine",), "cannot be started with '/nonexistent/engine'"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "exited with status 3"),
        ((sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), b'HTTP/1.1 200 OK')"), "not ours"),
    ],
)
def test_what_is_no_engine_is_an_error_at_start(command: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        EngineClient(ModelSettings(), EngineSettings(), command).start(30.0)


def test_the_engine_exits_by_itself_when_the_socket_closes() -> None:
    with running_client() as client:
        process = client._process
        client.close()
    assert process is not None
    assert process.returncode == 0


def test_close_and_kill_leave_no_process_and_may_be_repeated() -> None:
    with running_client() as client:
        assert client.process_id is not None
        client.close()
        client.close()
        client.kill()
        assert not is_running(client.process_id)
        with pytest.raises(EngineError, match="was closed"):
            client.poll(0.0)


def test_the_engine_goes_on_through_interrupt_and_terminate() -> None:
    with running_client() as client:
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGINT)
        os.kill(client.process_id, signal.SIGTERM)
        client.submit(make_requests(1))
        assert len(collect(client, 1)) == 1


WORKER = """
import sys, threading
from engine.client import EngineClient
from schemas.inference import *
from tests.fakes import fake_engine_command

client = EngineClient(ModelSettings(), EngineSettings(), fake_engine_command(hang_after=0))
client.start(60.0)
client.submit([InferenceRequest(0, (1,), SamplingParams(), seed=0)])
print(client.process_id, flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_outlives_its_worker_even_in_the_midst_of_a_step(fate: signal.Signals) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None
    engine_id = int(worker.stdout.readline())
    assert is_running(engine_id)
    gone = os.pidfd_open(engine_id)
    worker.send_signal(fate)
    worker.wait()
    assert select.select([gone], [], [], 10.0)[0], "the engine still runs 10 s after its worker's death"
    os.close(gone)
    worker.stdout.close()
