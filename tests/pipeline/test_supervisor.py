"""The supervisor: when another engine is started, after which wait, and when no more."""

from collections.abc import Iterable, Mapping, Sequence

import pytest

from pipeline.supervisor import MAX_BACKOFF_SECONDS, STEADY_SECONDS, EngineSupervisor
from pipeline.suspects import Loss
from schemas.errors import EngineError
from schemas.inference import EngineInfo, EngineStats, InferenceOutput, InferenceRequest
from tests.fakes import FakeClock
from tests.pipeline.parts import engine_info

CAUSE = EngineError("the engine process died of SIGKILL")


class ScriptedEngine:
    """Polls give what was put there."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.outputs: list[InferenceOutput] = []
        self.is_closed = False

    def submit(self, requests: Sequence[InferenceRequest]) -> None: ...
    def expect(self, beyond: Mapping[int, int] | None) -> None: ...
    def abort(self, request_ids: Iterable[int]) -> None: ...

    def poll(self, timeout_seconds: float) -> list[InferenceOutput]:
        assert not self.is_closed
        return self.outputs

    def close(self) -> None:
        self.is_closed = True


class Scene:
    """A supervisor over scripted engines; `waits` are the seconds between a loss and the start after it."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.clock = FakeClock()
        self.engines: list[ScriptedEngine] = []
        self.refused = 0  # starts that fail before one works
        self.waits: list[float] = []
        self.lost_at = 0.0
        self.supervisor = EngineSupervisor(self._start, max_restarts, clock=self.clock, sleep=self.clock.advance)
        self.supervisor.open()
        self.waits.clear()

    def _start(self) -> tuple[ScriptedEngine, EngineInfo]:
        self.waits.append(round(self.clock.now - self.lost_at))
        self.lost_at = self.clock.now
        if self.refused:
            self.refused -= 1
            raise EngineError("out of memory")
        self.engines.append(ScriptedEngine())
        return self.engines[-1], engine_info()

    def lose(self, loss: Loss | None = None) -> None:
        self.lost_at = self.clock.now
        assert self.supervisor.reopen(CAUSE, lambda: False, loss or Loss()) is not None

    def answer(self) -> None:
        self.engines[-1].outputs = [InferenceOutput(1)]
        self.supervisor.poll(0.0)


def test_waits_double_until_an_output_comes_and_are_bounded() -> None:
    scene = Scene(max_restarts=100)
    for _ in range(7):
        scene.lose()
    scene.answer()
    scene.lose()
    assert scene.waits == [1, 2, 4, 8, 16, 30, MAX_BACKOFF_SECONDS, 1]
    assert scene.supervisor.num_restarts == 8
    assert [engine.is_closed for engine in scene.engines] == [True] * 8 + [False]


def test_starts_that_fail_count_like_losses() -> None:
    scene = Scene(max_restarts=2)
    scene.refused = 5
    with pytest.raises(EngineError, match=r"lost 3 times without an output between, the last time because out of mem"):
        scene.lose()
    assert scene.waits == [1, 2]
    assert not scene.supervisor.is_ready


def test_what_the_search_for_a_killer_loses_neither_counts_nor_waits() -> None:
    scene = Scene(max_restarts=1)
    scene.lose()
    for _ in range(9):
        scene.lose(Loss(is_of_suspects=True))
    scene.lose(Loss(convicted=7, is_of_suspects=True))
    assert scene.waits == [1] + [0] * 10


def test_more_convicted_in_a_row_than_restarts_means_that_the_engine_is_broken() -> None:
    scene = Scene(max_restarts=2)
    convicted = Loss(convicted=7, is_of_suspects=True)
    for _ in range(2):
        scene.lose(convicted)
    scene.answer()
    for _ in range(2):
        scene.lose(convicted)
    with pytest.raises(EngineError, match=r"3 documents in a row were each alone in an engine that was lost"):
        scene.lose(convicted)


def test_engines_that_stood_for_long_are_not_lost_in_a_row() -> None:
    scene = Scene(max_restarts=1)
    for _ in range(4):
        scene.clock.advance(STEADY_SECONDS)
        scene.lose()
    assert scene.waits == [1, 1, 1, 1]


def test_where_another_engine_is_not_wanted_there_is_none_and_polls_give_nothing() -> None:
    scene = Scene()
    assert scene.supervisor.reopen(CAUSE, lambda: True, Loss()) is None
    assert scene.engines[0].is_closed
    assert scene.supervisor.poll(0.0) == []
    assert not scene.supervisor.is_ready
