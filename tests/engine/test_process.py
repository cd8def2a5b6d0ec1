"""What the engine process does of itself: where its kernels are kept, and what its start took."""

import errno
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine import process, protocol
from engine.block_pool import BlockPool
from engine.client import EngineClient
from engine.detokenizer import TextStream
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.process import WorkerConnection, keep_compiled_kernels, seconds_since_start
from engine.protocol import MessageKind
from engine.scheduler import Scheduler
from schemas.errors import EngineError
from schemas.inference import EngineSettings, InferenceRequest, ModelSettings, SamplingParams
from tests.engine.test_expected import Connection, Done
from tests.fakes import FakeRunner, LetterTokenizer
from tests.tiny_models import write_tiny_model


def test_compiled_kernels_are_kept_in_a_folder_that_is_ours_alone(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled_kernels(environment)
    folder = tmp_path / "pagemill" / "flash-attention"
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert environment["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_users_word_on_it_stands_and_no_home_is_no_harm(tmp_path: Path) -> None:
    off = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    keep_compiled_kernels(off)
    assert off == {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    (tmp_path / "file").touch()
    no_home = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    keep_compiled_kernels(no_home)
    assert no_home == {"XDG_CACHE_HOME": str(tmp_path / "file")}


def test_a_started_process_says_what_each_part_of_its_start_took(tmp_path: Path) -> None:
    model = ModelSettings(path=str(write_tiny_model(tmp_path)), dtype="float32", device="cpu")
    with EngineClient(model, EngineSettings(max_running=4, kv_cache_tokens=512)) as client:
        info = client.start(60.0)
    assert list(info.start_seconds) == ["libraries", "tokenizer", "weights", "memory", "cache", "canary", "runner"]
    assert 0 < info.start_seconds["libraries"] < seconds_since_start()  # this process is the elder one


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_standard_error_does_not_keep_the_worker_from_hearing_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process._tell_why(WorkerConnection(theirs), RuntimeError("the cause"))
        [frame] = protocol.FrameReader().feed(ours.recv(protocol.RECEIVE_BYTES))
    assert list(protocol.decode_message(frame)) == [MessageKind.FATAL, "EngineError", "RuntimeError: the cause"]


ANSWERS_NOBODY = """
import socket
from engine.process import WorkerConnection
from engine.protocol import MessageKind
ours, theirs = socket.socketpair()
ours.close()
WorkerConnection(theirs).send((MessageKind.PROGRESS, "weights", 0.5))
print("went on")
"""


def test_an_answer_to_a_worker_that_is_gone_ends_the_process_without_a_word() -> None:
    ended = subprocess.run([sys.executable, "-c", ANSWERS_NOBODY], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_block_that_leaks_ends_the_engine_once_it_is_idle_and_has_given_out_what_it_answered() -> None:
    pool = BlockPool(8)
    engine = Engine(
        FakeRunner(8, 4),
        Scheduler(pool, 4, 32, 32, 2),
        text_factory=lambda stop: TextStream(LetterTokenizer(), stop),
        label_sets=LabelSets([]),
        eos_token_ids=[],
    )
    first, second, third = (
        protocol.decode_message(
            protocol.encode_frame(
                protocol.encode_requests([InferenceRequest(request_id, (1, 2), SamplingParams(max_tokens=1), seed=0)])
            )[4:]
        )
        for request_id in range(3)
    )
    connection = Connection([[first], [second]])
    with pytest.raises(Done):
        process.serve(connection, engine)  # type: ignore[arg-type]
    pool.allocate(1)
    connection = Connection([[third], []])
    with pytest.raises(EngineError, match="7 free and 0 cached blocks of the KV cache are not all 8: one has leaked"):
        process.serve(connection, engine)  # type: ignore[arg-type]
    assert [message[0] for message in connection.sent] == [MessageKind.STATS, MessageKind.OUTPUTS]
