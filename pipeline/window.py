"""The documents that the engine is fed from: those that wait, in prefix order, and those that it has. Decides what goes
next and keeps the books; who submits, and what becomes of an output, is the flow's.

    wait ──> batcher ──> next_batch ──> start ──> running ──> end
                                          └─ <── lost ──┘      suspects wait for their turn (pipeline/suspects.py)
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.appetite import EngineAppetite
from pipeline.batcher import PrefixBatcher
from pipeline.rows import Work
from pipeline.suspects import Loss, Suspects
from schemas.inference import EngineStats, InferenceRequest

FIRST_REQUEST_ID = 1  # 0 is the worker's own, of the inference that proves a started engine


class EngineWindow:
    """Owned by the pipeline's thread; what only reads is anybody's. Times are monotonic seconds."""

    def __init__(self, *, max_running: int, max_tokens_per_step: int, urgent_after_seconds: float) -> None:
        self._max_running = max_running
        self._appetite = EngineAppetite(max_tokens_per_step)
        self._batcher: PrefixBatcher[Work] = PrefixBatcher(urgent_after_seconds)
        self._suspects = Suspects()
        self._running: dict[int, Work] = {}  # request id -> its work; what the engine has, and the suspects that wait
        self._knows_all = False
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
        """Whether the engine may want more any moment: some waits for its word, or it could run more than it has."""
        return len(self._batcher) > 0 or len(self._running) < self._max_running

    @property
    def beyond(self) -> Mapping[int, int] | None:
        """Longest output -> prompt tokens of what the engine is yet to get; None where more may come than is here."""
        return self._batcher.tokens_by_output if self._knows_all else None

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

    def next_batch(self, stats: EngineStats, now: float, knows_all: bool = False) -> list[Work]:
        """Takes out what the engine should have now: what its next steps take, and no more, for order is late.

        `knows_all`: nothing comes for now besides what is here. The walk then begins anew, with the longest outputs.
        """
        if knows_all and not self._knows_all:
            self._batcher.begin_laps()
        self._knows_all = knows_all
        wanted = self._appetite.num_wanted(stats.num_begun_tokens, stats.num_begun_cached_tokens)
        return self._batcher.next_batch(wanted, now)

    def start(self, works: Sequence[Work], now: float) -> list[InferenceRequest]:
        """These are the engine's from now on; the requests to submit."""
        requests = []
        for work in works:
            work.submitted = now
            request_id = self._next_request_id
            self._next_request_id += 1
            self._running[request_id] = work
            requests.append(_request(request_id, work))
        return self._given(requests)

    def next_suspects(self, now: float) -> list[InferenceRequest]:
        """The group of suspects that runs now; none while one does, nor once nobody is suspected any more."""
        request_ids = self._suspects.next_group(self.num_running)
        for request_id in request_ids:
            self._running[request_id].submitted = now
        return self._given([_request(request_id, self._running[request_id]) for request_id in request_ids])

    def _given(self, requests: list[InferenceRequest]) -> list[InferenceRequest]:
        self._appetite.gave(sum([len(request.token_ids) for request in requests]))
        return requests

    def lost(self) -> tuple[Loss, Work | None]:
        """The engine is lost: what it had is suspected. What that taught; and the convicted's work, which has ended."""
        self._appetite.starts_anew()
        waiting = self._suspects.waiting()
        loss = self._suspects.lost([request_id for request_id in self._running if request_id not in waiting])
        return loss, None if loss.convicted is None else self.end(loss.convicted)

    def end(self, request_id: int) -> Work | None:
        """The work of an output, which runs no longer; None where it was dropped before."""
        return self._running.pop(request_id, None)

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
