"""The engine process as the flow sees it: started, lost, started again. Passes requests through and reads none."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from pipeline.suspects import Loss
from schemas.errors import EngineError
from schemas.inference import EngineInfo, EngineStats, InferenceOutput, InferenceRequest

logger = structlog.get_logger(__name__)

RESTART_BACKOFF_SECONDS = 1.0  # before the first restart in a row; doubles
MAX_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 300.0  # an engine that stood for so long is no part of a row of lost ones
_WAIT_SECONDS = 0.05


class Engine(Protocol):
    """What is asked of engine.client.EngineClient."""

    stats: EngineStats

    def submit(self, requests: Sequence[InferenceRequest]) -> None: ...
    def expect(self, beyond: Mapping[int, int] | None) -> None: ...
    def abort(self, request_ids: Iterable[int]) -> None: ...
    def poll(self, timeout_seconds: float) -> list[InferenceOutput]: ...
    def close(self) -> None: ...


class EngineSupervisor:
    """One engine at a time. `start` gives a started and proven one, and is called again for each that is lost.

    Every method but `stats` and `is_ready` belongs to the pipeline's thread, and raises EngineError where the engine is
    lost; `reopen` is the answer to that.
    """

    def __init__(
        self,
        start: Callable[[], tuple[Engine, EngineInfo]],
        max_restarts: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        backoff_seconds: float = RESTART_BACKOFF_SECONDS,
    ) -> None:
        self.is_ready = False
        self.num_restarts = 0
        self._start = start
        self._max_restarts = max_restarts
        self._clock = clock
        self._sleep = sleep
        self._backoff_seconds = backoff_seconds
        self._engine: Engine | None = None
        self._opened = 0.0
        self._lost_in_a_row = 0  # without an output between, but for those that the search for a killer costs
        self._convicted_in_a_row = 0  # documents, without an output between

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats if self._engine is not None else EngineStats()

    def open(self) -> EngineInfo:
        """The first start. Raises ModelError or EngineError."""
        self._engine, info = self._start()
        self._opened = self._clock()
        self.is_ready = True
        return info

    def submit(self, requests: Sequence[InferenceRequest]) -> None:
        self._now().submit(requests)

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        self._now().expect(beyond)

    def abort(self, request_ids: Iterable[int]) -> None:
        self._now().abort(request_ids)

    def poll(self, timeout_seconds: float) -> list[InferenceOutput]:
        """Outputs; none where the engine was lost and another one is not wanted any more."""
        if not self.is_ready:
            return []
        outputs = self._now().poll(timeout_seconds)
        if outputs:
            self._lost_in_a_row = self._convicted_in_a_row = 0
        return outputs

    def reopen(self, cause: EngineError, give_up: Callable[[], bool], loss: Loss) -> EngineInfo | None:
        """Another engine in the lost one's place, after a wait; None where `give_up` says so meanwhile.

        Raises EngineError where that was in vain too often in a row, or too many documents in a row were convicted:
        then it is the engine that is broken. The search for a killer is bounded by itself: it neither counts nor waits.
        """
        self.is_ready = False
        if self._clock() - self._opened >= STEADY_SECONDS:
            self._lost_in_a_row = 0
        if loss.convicted is not None:
            self._convicted_in_a_row += 1
        counts = not loss.is_of_suspects
        while True:
            self._now().close()
            if give_up():
                return None
            self._lost_in_a_row += counts
            self._require_hope(cause)
            seconds = self._wait_seconds() if counts else 0.0
            logger.error("engine lost", cause=str(cause), restart_in_seconds=seconds)
            until = self._clock() + seconds
            while self._clock() < until and not give_up():
                self._sleep(_WAIT_SECONDS)
            if give_up():
                return None
            self.num_restarts += 1
            try:
                return self.open()
            except EngineError as error:
                cause, counts = error, True

    def close(self) -> None:
        """Ends the engine that there is, if any. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    def _wait_seconds(self) -> float:
        return min(self._backoff_seconds * 2.0 ** (self._lost_in_a_row - 1), MAX_BACKOFF_SECONDS)

    def _require_hope(self, cause: EngineError) -> None:
        limit = self._max_restarts
        if self._lost_in_a_row > limit or not limit:
            lost = f"{self._lost_in_a_row} times without an output between" if self._lost_in_a_row > 1 else "once"
            raise EngineError(
                f"the engine was lost {lost}, the last time because {cause}; worker.engine_restarts = {limit} allows "
                "no more"
            ) from cause
        if self._convicted_in_a_row > limit:
            raise EngineError(
                f"{self._convicted_in_a_row} documents in a row were each alone in an engine that was lost, the last "
                f"time because {cause}; it is the engine that is broken, or worker.engine_restarts = {limit} is to be "
                "raised"
            ) from cause

    def _now(self) -> Engine:
        assert self._engine is not None, "open() comes first"
        return self._engine
