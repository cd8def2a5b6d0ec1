"""A workload on its way to an engine as in the worker: prepared slice by slice while the engine computes, ordered by
the worker's own batcher, and given in the portions that the engine has room for. Needs neither torch nor the worker's
packages.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from engine.block_hash import BlockHasher
from engine.engine import Engine
from pipeline.appetite import EngineAppetite
from pipeline.batcher import PrefixBatcher
from schemas.inference import EngineStats, InferenceOutput, InferenceRequest, SamplingParams

Requests: TypeAlias = Sequence[tuple[list[int], int]]  # prompt, tokens of output

# As the worker's settings and flow have them.
MAX_IN_FLIGHT = 4096  # documents
URGENT_AFTER_SECONDS = 300.0
PREPARE_SECONDS = 0.02

PREPARED_PER_SECOND = 6_000_000  # tokens, where prompts have nothing in common; a fixed rate, so that runs are alike


class Backlog:
    """Requests 0 to n - 1, which arrive at once and are prepared in this order."""

    def __init__(
        self, requests: Requests, block_size: int, max_tokens_per_step: int, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        """`max_in_flight`: requests that are prepared and have not ended, at most."""
        self._requests = requests
        self._max_in_flight = max_in_flight
        self._num_prepared = 0
        self._hasher = BlockHasher(block_size, b"")
        self._batcher: PrefixBatcher[InferenceRequest] = PrefixBatcher(URGENT_AFTER_SECONDS)
        self._appetite = EngineAppetite(max_tokens_per_step)

    @property
    def num_left(self) -> int:
        """Requests that the engine was not given."""
        return self._num_unprepared() + len(self._batcher)

    @property
    def beyond(self) -> Mapping[int, int] | None:
        """As Engine.expect takes it: what is to come besides what the engine has, once all of it is known."""
        return None if self._num_unprepared() else self._batcher.tokens_by_output

    def prepare(self, seconds: float, num_ended: int = 0) -> None:
        """Prepares for about so long, and for PREPARE_SECONDS at least. `num_ended`: requests that have."""
        if not self._num_unprepared():
            return
        num_tokens = int(max(seconds, PREPARE_SECONDS) * PREPARED_PER_SECOND)
        now = time.monotonic()
        for request in self._prepared(num_tokens, num_ended):
            self._batcher.add(
                request,
                block_hashes=request.block_hashes,
                num_tokens=len(request.token_ids),
                num_outputs=request.sampling.max_tokens,
                now=now,
            )
        if not self._num_unprepared():
            self._batcher.begin_laps()

    def next_requests(self, stats: EngineStats) -> list[InferenceRequest]:
        """Takes out what the engine should have now."""
        wanted = self._appetite.num_wanted(stats.num_begun_tokens, stats.num_begun_cached_tokens)
        requests = self._batcher.next_batch(wanted, time.monotonic())
        self._appetite.gave(sum([len(request.token_ids) for request in requests]))
        return requests

    def _num_unprepared(self) -> int:
        return len(self._requests) - self._num_prepared

    def _prepared(self, num_tokens: int, num_ended: int) -> Iterator[InferenceRequest]:
        while num_tokens > 0 and self._num_unprepared() and self._num_prepared - num_ended < self._max_in_flight:
            request_id = self._num_prepared
            prompt, num_outputs = self._requests[request_id]
            self._num_prepared += 1
            num_tokens -= len(prompt)
            sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
            hashes = self._hasher.hash_blocks(prompt)
            yield InferenceRequest(request_id, tuple(prompt), sampling, seed=0, block_hashes=hashes)


def steps(
    engine: Engine,
    requests: Requests,
    block_size: int,
    max_tokens_per_step: int = 8192,
    *,
    max_in_flight: int = MAX_IN_FLIGHT,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[list[InferenceOutput]]:
    """The engine's steps until every request has ended, what comes being prepared while the device computes."""
    backlog = Backlog(requests, block_size, max_tokens_per_step, max_in_flight)
    num_ended, seconds = 0, 0.0
    while backlog.num_left or engine.has_unfinished():
        backlog.prepare(seconds / 2, num_ended)
        for inference in backlog.next_requests(engine.stats()):
            engine.add_request(inference)
        engine.expect(backlog.beyond)
        began = clock()
        outputs = engine.step()
        seconds = clock() - began  # of the device's step before: the one just launched takes about as long
        num_ended += len(outputs)
        yield outputs
