"""The documents that the engine is fed from: those that wait, in prefix order, and those that it has. Decides what goes
next and keeps the books; who submits, and what becomes of an output, is the flow's.

    wait ──> batcher ──> next_batch ──> start ──> running ──> end
                                          └─ <── lost ──┘      suspects wait for their turn (pipeline/suspects.py)
"""

from collections.abc import Callable, Sequence

from pipeline.batcher import PrefixBatcher
from pipeline.rows import Work
from pipeline.suspects import Loss, Suspects
from schemas.inference import InferenceRequest

FIRST_REQUEST_ID = 1  # 0 is the worker's own, of the inference that proves a started engine
STEPS_AHEAD = 2  # steps' worth of tokens that wait in the engine beyond what can run
MAX_HIT_RATE = 0.95  # cached tokens fill no step, so more are sent; beyond this rate the estimate is not followed
CRASHES_TO_ISOLATE = 3  # workers that died with a document in flight: from then on it runs alone


class EngineWindow:
    """Owned by the pipeline's thread; what only reads is anybody's. Times are monotonic seconds."""

    def __init__(self, *, max_running: int, max_tokens_per_step: int, urgent_after_seconds: float) -> None:
        self._max_running = max_running
        self._max_tokens_per_step = max_tokens_per_step
        self._batcher: PrefixBatcher[Work] = PrefixBatcher(urgent_after_seconds)
        self._suspects = Suspects()
        self._running: dict[int, Work] = {}  # request id -> its work; what the engine has, and the suspects that wait
        self._running_tokens = 0
        self._next_request_id = FIRST_REQUEST_ID

    @property
    def num_waiting(self) -> int:
        return len(self._batcher) + self._suspects.num_waiting

    @property
    def num_running(self) -> int:
        """What the engine has, begun or not."""
        return len(self._running) - self._suspects.num_waiting

    @property
    def is_searching(self) -> bool:
        """Whether the engine is for `next_suspects` alone, until it has been seen who kills it."""
        return self._suspects.is_active

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of what waits: the backlog that is known, in the unit that the engine works in."""
        return self._batcher.num_tokens

    @property
    def is_hungry(self) -> bool:
        """Whether the engine could run more than it has."""
        return len(self._running) < self._max_running

    def wait(self, work: Work, now: float, deadline: float | None = None) -> None:
        """Puts work where it waits for its turn; `deadline` is when it must have started."""
        prepared = work.prepared
        self._batcher.add(
            work,
            block_hashes=prepared.block_hashes,
            num_tokens=len(prepared.token_ids),
            num_outputs=prepared.sampling.max_tokens,
            now=now,
            priority=prepared.document.message.priority,
            deadline=deadline,
        )

    def next_batch(self, hit_rate: float, now: float) -> list[Work]:
        """Takes out what the engine should have now: two steps' worth of tokens beyond what can run, and no more, for
        order is late."""
        if not len(self._batcher):
            return []
        num_queued = max(0, len(self._running) - self._max_running)
        queued_tokens = num_queued * self._running_tokens / max(len(self._running), 1)
        fresh = 1.0 - min(hit_rate, MAX_HIT_RATE)
        budget = int(STEPS_AHEAD * self._max_tokens_per_step / fresh - queued_tokens)
        return self._batcher.next_batch(budget, now) if budget > 0 else []

    def start(self, works: Sequence[Work], now: float) -> list[InferenceRequest]:
        """These are the engine's from now on; the requests to submit. Those that may have killed workers wait, to run
        alone."""
        requests = []
        isolated = []
        for work in works:
            work.submitted = now
            request_id = self._next_request_id
            self._next_request_id += 1
            self._running[request_id] = work
            self._running_tokens += len(work.prepared.token_ids)
            if work.prepared.document.crash_count >= CRASHES_TO_ISOLATE:
                isolated.append(request_id)
            else:
                requests.append(_request(request_id, work))
        if isolated:
            self._suspects.isolate(isolated)
        return requests

    def next_suspects(self, now: float) -> list[InferenceRequest]:
        """The group of suspects that runs now; none while one does, nor once nobody is suspected any more."""
        request_ids = self._suspects.next_group(self.num_running)
        for request_id in request_ids:
            self._running[request_id].submitted = now
        return [_request(request_id, self._running[request_id]) for request_id in request_ids]

    def lost(self) -> tuple[Loss, Work | None]:
        """The engine is lost: what it had is suspected. What that taught; and the convicted's work, which has ended."""
        waiting = self._suspects.waiting()
        loss = self._suspects.lost([request_id for request_id in self._running if request_id not in waiting])
        return loss, None if loss.convicted is None else self.end(loss.convicted)

    def end(self, request_id: int) -> Work | None:
        """The work of an output, which runs no longer; None where it was dropped before."""
        work = self._running.pop(request_id, None)
        if work is not None:
            self._running_tokens -= len(work.prepared.token_ids)
        return work

    def drop_where(self, is_unwanted: Callable[[Work], bool]) -> tuple[list[Work], list[int]]:
        """Drops work wherever it is: that work, and the ids of the requests that the engine should abort."""
        stale_ids = [request_id for request_id, work in self._running.items() if is_unwanted(work)]
        return self._batcher.remove_where(is_unwanted) + self._drop(stale_ids), stale_ids

    def drop_waiting(self) -> list[Work]:
        """Drops all that waits, and returns it."""
        return self._batcher.clear() + self._drop(sorted(self._suspects.waiting()))

    def drop_running(self) -> list[Work]:
        """Drops all that the engine has or had, and returns it."""
        dropped = self._drop(list(self._running))
        self._suspects.clear()
        return dropped

    def _drop(self, request_ids: Sequence[int]) -> list[Work]:
        works = [self.end(request_id) for request_id in request_ids]
        self._suspects.forget(request_ids)
        return [work for work in works if work is not None]


def _request(request_id: int, work: Work) -> InferenceRequest:
    prepared = work.prepared
    return InferenceRequest(
        request_id,
        prepared.token_ids,
        prepared.sampling,
        prepared.seed,
        prepared.task.task.kind,
        prepared.block_hashes,
        prepared.task.label_token_ids,
        prepared.document.message.priority,
    )
