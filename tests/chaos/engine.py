"""An engine process that records which prompts it has answered: `python -m tests.chaos.engine RECORD ENGINE ... FD`.

ENGINE is `real`, or `fake` with that one's options. What is computed twice is seen here and nowhere else.
"""

import hashlib
import os
import resource
import signal
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine import process
from engine.process import Progress, ServedEngine
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
)
from tests import fake_engine

_PROOF_TOKEN_IDS = (0,)  # of the worker's own first request, which belongs to no document
_DIGEST_BYTES = 8

STEP_FAILS_SIGNAL = signal.SIGUSR1  # the next step then raises, as by a CUDA error
TOLD_TO_FAIL = "told to fail"


class RecordingEngine:
    """Passes everything on to an engine, and appends a line to the record for each prompt that it has answered."""

    def __init__(self, engine: ServedEngine, record: Path) -> None:
        self._engine = engine
        self._lines: dict[int, bytes] = {}  # request id -> its line
        self._descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._step_fails = False
        signal.signal(STEP_FAILS_SIGNAL, self._let_step_fail)

    def add_request(self, request: InferenceRequest) -> None:
        if tuple(request.token_ids) != _PROOF_TOKEN_IDS:
            prompt = array("i", request.token_ids).tobytes()
            self._lines[request.request_id] = hashlib.blake2b(prompt, digest_size=_DIGEST_BYTES).hexdigest().encode()
        self._engine.add_request(request)

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        self._engine.expect(beyond)

    def abort(self, request_ids: Iterable[int]) -> None:
        self._engine.abort(request_ids)

    def step(self) -> list[InferenceOutput]:
        if self._step_fails:
            raise RuntimeError(TOLD_TO_FAIL)
        outputs = self._engine.step()
        ended = [(self._lines.pop(output.request_id, None), output) for output in outputs]
        answered = [line for line, output in ended if line and not output.failure and output.finish_reason != "abort"]
        if answered:
            os.write(self._descriptor, b"\n".join([*answered, b""]))
        return outputs

    def _let_step_fail(self, *_: object) -> None:
        self._step_fails = True

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished()

    def check_idle(self) -> None:
        self._engine.check_idle()

    def stats(self) -> EngineStats:
        return self._engine.stats()


class Record:
    """The lines that all engines of a round have written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def num_answers(self) -> int:
        return self.path.stat().st_size // (2 * _DIGEST_BYTES + 1) if self.path.exists() else 0

    def num_answered_again(self) -> int:
        """Answers beyond the first one to each prompt."""
        lines = self.path.read_bytes().split() if self.path.exists() else []
        return len(lines) - len(set(lines))


def main(arguments: Sequence[str]) -> int:
    record, kind, *options, descriptor = arguments
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # a worker's full disk
    behaviour = fake_engine.parse_behaviour(options)

    def load(
        model: ModelSettings, settings: EngineSettings, progress: Progress, fail: process.Fail
    ) -> tuple[ServedEngine, EngineInfo]:
        engine: ServedEngine
        if kind == "real":
            from engine.loading import load_engine  # imports torch

            engine, info = load_engine(model, settings, progress, fail)
        else:
            engine, info = fake_engine.load(behaviour, model, settings, progress, fail)
        return RecordingEngine(engine, Path(record)), info

    return process.run(int(descriptor), load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
