"""Decides what each step computes: which requests, how many of their tokens, in which blocks. No torch.

There is no prefill phase and no decode phase. A request has tokens known and tokens computed; a step closes the gap,
within a budget of tokens. The next step may be planned before the tokens of the one under way are known: a request that
waits for its token has none left to compute, and is planned one token ahead of what is known of it.

Blocks for all known tokens are taken at admission, one more whenever decoding crosses into it, and all are given back
in one place.
"""

from bisect import insort
from collections.abc import Mapping

from engine.block_pool import BlockPool
from engine.pace import BacklogPace
from engine.prefix_cache import PrefixCache
from engine.request import Request, RequestState
from engine.step_plan import SampledTokens, ScheduledTokens, StepPlan
from engine.waiting import WaitingRequests
from schemas.errors import DocumentError, EngineError, FailureCode, Stage
from schemas.inference import InferenceRequest

MAX_EMPTY_PLANS = 8  # in a row with work to do; then nothing will ever move
# Outputs are expected to be as long, against their max_tokens, as those so far; at first as long as allowed. So many
# tokens' worth of that first belief is mixed in.
BELIEF_TOKENS = 4096


class Scheduler:
    """One model's waiting and running requests.

    waiting  engine/waiting.py: by priority, then arrival; a preempted one is the first of its priority
    running  by priority, then admission; the last is the first to be preempted
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_model_len: int,
        max_tokens_per_step: int,
        max_running: int,
        identity: bytes = b"",
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # computed, then lost to preemption
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_tokens_per_step = max_tokens_per_step
        self._max_running = max_running
        self._prefix_cache = PrefixCache(pool, block_size, identity) if prefix_caching else None
        self._pace = BacklogPace()
        self._waiting = WaitingRequests(self._num_outputs_left)
        self._running: list[Request] = []
        self._admission: dict[int, int] = {}  # running request's id -> its place in the order of admission
        self._num_admissions = 0
        self._published: list[int] = []  # blocks published by the latest plan
        self._latest = StepPlan()  # where a step runs ahead, one more than `update` has seen
        self._scrub: list[int] = []  # blocks for the next plan to zero
        self._poisoned: set[int] = set()  # blocks that may hold NaN, as long as others hold them
        self._private: set[int] = set()  # requests that have begun again, and neither find blocks nor let them be found
        self._returned: list[Request] = []  # of an abandoned plan, for the next one to call preempted
        self._num_empty_plans = 0
        self._num_allowed_tokens = BELIEF_TOKENS  # of ended requests
        self._num_sampled_tokens = BELIEF_TOKENS

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        return self.num_waiting > 0 or bool(self._running)

    def check(self, inference: InferenceRequest) -> None:
        """Raises DocumentError for a request that could never run.

        The prompt must leave room for one token in the context, where any is asked for; beyond that the output is cut
        off at the context's end.
        At its longest the request must fit into the pool alone.
        """
        num_prompt_tokens = len(inference.token_ids)
        if num_prompt_tokens == 0:
            raise DocumentError(FailureCode.EMPTY_PROMPT, Stage.ENGINE, "the prompt has no tokens")
        if num_prompt_tokens + min(inference.sampling.max_tokens, 1) > self._max_model_len:
            raise DocumentError(
                FailureCode.PROMPT_TOO_LONG,
                Stage.ENGINE,
                f"the prompt has {num_prompt_tokens} tokens; the context of {self._max_model_len} tokens "
                f"takes at most {self._max_model_len - 1} and one of output",
            )
        # The last token of the output is never an input, so it needs no place.
        num_places = max(num_prompt_tokens, self._max_length(inference) - 1)
        if self._num_blocks(num_places) > self.pool.num_blocks:
            raise DocumentError(
                FailureCode.PROMPT_TOO_LONG,
                Stage.ENGINE,
                f"prompt and output need {num_places} tokens of KV cache; it has "
                f"{self.pool.num_blocks * self._block_size} (engine.kv_cache_tokens)",
            )

    def add(self, inference: InferenceRequest) -> Request:
        """Take in a request that `check` lets pass and that samples at least one token."""
        assert inference.sampling.max_tokens > 0, "nothing to do: it ends where it is taken in"
        request = Request(inference, list(inference.token_ids))
        if self._prefix_cache is not None:
            self._prefix_cache.open(request)
        self._waiting.append(request)
        return request

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        """What will be added besides the requests that are here: longest output -> prompt tokens.

        None: that is not known, and more may always come. Where it is known, and be it nothing, prompts are spread over
        the steps that outputs take (engine/pace.py); until this is called again, so with every `add` that follows.
        """
        self._pace.expect(beyond)

    def check_idle(self) -> None:
        """Raises EngineError where a block is held though no request is there, or is free twice. O(1)."""
        assert not self.has_unfinished(), "not idle"
        pool = self.pool
        if pool.num_used:
            raise EngineError(
                f"no request is left, and {pool.num_free} free and {pool.num_cached} cached blocks of the KV cache are "
                f"not all {pool.num_blocks}: one has leaked, or is free twice"
            )

    def schedule(self) -> StepPlan:
        """The next step. Its runs count as computed from now on: carry it out, then `update`, or else `abandon`."""
        plan = self._latest = StepPlan(preempted=self._returned, scrub=self._scrub)
        num_returned = len(plan.preempted)
        self._returned, self._scrub, self._published = [], [], []
        self._make_way_for_priority(plan)
        num_preempted = len(plan.preempted)
        budget = self._continue_running(plan, self._max_tokens_per_step)
        if len(plan.preempted) == num_preempted:  # else blocks are short: what was just preempted would come back
            # One preempted just now may have a token on its way, and cannot start again before it is there.
            not_yet = {request.request_id for request in plan.preempted[num_returned:]}
            self._admit_waiting(plan, budget, not_yet)
        plan.scrub += self._scrub  # of those preempted just now: their blocks may be somebody else's in this plan
        self._scrub = []
        self._watch_progress(plan)
        return plan

    def update(self, plan: StepPlan, sampled: SampledTokens) -> list[Request]:
        """Append what the step sampled; returns requests that ended by it.

        These have reached their longest length, or their row was not finite, twice: then the token is not appended, and
        what they computed is withdrawn from the cache. Their blocks are released. Whether a token stops its request is
        the engine's to say: `finish`.

        Not finite once may be another's doing: a step's attention multiplies what a query must not see by zero, which
        leaves NaN, so one token may spoil blocks before it that others share. Such a request begins again, by itself.
        """
        ended = []
        rows = iter(zip(sampled.token_ids, sampled.finite, strict=True))
        for run in plan.scheduled:
            if not run.samples:
                continue
            token_id, finite = next(rows)
            request = run.request
            if request.state is RequestState.FINISHED or request.request_id in plan.void:
                continue
            if not finite:
                self._withdraw(request)
                if request.request_id in self._private:
                    self.finish(request)
                    ended.append(request)
                else:
                    self._begin_again(request, plan)
                continue
            if request.state is RequestState.WAITING:  # preempted while its token was on its way
                self._waiting.grow(request, token_id)
            else:
                request.token_ids.append(token_id)
            if len(request.token_ids) >= self._max_length(request.inference):
                self.finish(request)
                ended.append(request)
            elif (len(request.token_ids) - 1) % self._block_size == 0 and request.state is RequestState.RUNNING:
                self._publish(request)  # the block before the new token has just been filled
        assert next(rows, None) is None, "more sampled tokens than runs that sample"
        self._published = []
        return ended

    def abandon(self, plan: StepPlan) -> None:
        """The step failed: nothing it was to compute exists. Its requests wait again, and may be scheduled anew."""
        for block_id in self._published:
            self.pool.withdraw(block_id)
        self._published = []
        self._scrub, self._returned = plan.scrub + self._scrub, list(plan.preempted)
        for run in reversed(plan.scheduled):  # each goes to the head of its class: the first comes to stand first
            if run.request.state is RequestState.RUNNING:
                self._to_waiting(run.request)
                self._returned.append(run.request)

    def finish(self, request: Request) -> None:
        """End a request, at any moment and in any state; its blocks are released. Idempotent."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is RequestState.WAITING:
            self._waiting.end(request)
        else:
            self._num_allowed_tokens += self._max_length(request.inference) - request.num_prompt_tokens
            self._num_sampled_tokens += request.num_sampled_tokens
            self._publish(request)
            self._leave_running(request)
        request.state = RequestState.FINISHED
        self._private.discard(request.request_id)
        if self._prefix_cache is not None:
            self._prefix_cache.close(request)

    # ---- the steps of schedule()

    def _make_way_for_priority(self, plan: StepPlan) -> None:
        """Preempt the last of the running where it alone keeps a request of higher priority waiting."""
        head = self._waiting.head()
        while head is not None and self._running and self._running[-1].inference.priority < head.inference.priority:
            has_slot = len(self._running) < self._max_running
            if has_slot and self._fits(head, self._match(head), self._expected_growth()):
                return
            self._preempt(self._running[-1], plan)

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        """Decodes first: they are short and end requests. Then prefills that are under way. Returns what is left."""
        prefilling = []
        for request in tuple(self._running):
            if request.state is not RequestState.RUNNING:
                continue  # preempted for one before it
            num_left = len(request.token_ids) - request.num_computed_tokens
            if num_left > 1:
                prefilling.append(request)
            elif num_left == 0 and len(request.token_ids) + 1 >= self._max_length(request.inference):
                continue  # the token that ends it is on its way
            elif budget > 0 and self._grow(request, plan):
                self._run(request, 1, plan)
                budget -= 1
        if self._pace.is_kept:
            rows = [
                (len(one.token_ids) - one.num_computed_tokens, self._num_outputs_left(one)) for one in self._running
            ]
            budget = min(budget, self._pace.next_chunk(self._waiting.tokens_by_output, rows, plan.num_tokens, budget))
        for request in prefilling:
            if budget <= 0:
                break
            if request.state is RequestState.RUNNING:
                count = min(budget, len(request.token_ids) - request.num_computed_tokens)
                self._run(request, count, plan)
                budget -= count
        return budget

    def _admit_waiting(self, plan: StepPlan, budget: int, not_yet: set[int]) -> None:
        """In order; one that does not fit holds back those behind it, so that it is not passed by for ever."""
        growth: int | None = None
        while budget > 0 and len(self._running) < self._max_running and (request := self._waiting.head()) is not None:
            if request.request_id in not_yet:
                return
            growth = self._expected_growth() if growth is None else growth
            cached = self._match(request)
            if not self._fits(request, cached, growth):
                return
            self._admit(request, cached)
            growth += self._expected_blocks(request) - len(request.block_ids)
            count = min(budget, len(request.token_ids) - request.num_computed_tokens)
            self._run(request, count, plan)
            budget -= count

    def _watch_progress(self, plan: StepPlan) -> None:
        if plan.scheduled or not self.has_unfinished():
            self._num_empty_plans = 0
            return
        self._num_empty_plans += 1
        if self._num_empty_plans >= MAX_EMPTY_PLANS:
            blocked = self._running[0] if self._running else self._waiting.head()
            assert blocked is not None
            raise EngineError(
                f"no progress in {MAX_EMPTY_PLANS} steps: request {blocked.request_id} has "
                f"{len(blocked.token_ids)} tokens and needs {self._num_blocks(len(blocked.token_ids))} blocks; of "
                f"{self.pool.num_blocks} blocks {self.pool.num_available} are available, {len(self._running)} requests "
                f"are running, {self.num_waiting} waiting"
            )

    # ---- what they are made of

    def _match(self, request: Request) -> list[int]:
        if self._prefix_cache is None or request.request_id in self._private:
            return []
        return self._prefix_cache.match(request)

    def _fits(self, request: Request, cached: list[int], growth: int) -> bool:
        """Room for all its known tokens; where others run, for its expected output and for their growth as well."""
        num_available = self.pool.num_available - self.pool.num_idle(cached)
        if not self._running:
            return self._num_blocks(len(request.token_ids)) - len(cached) <= num_available
        return self._expected_blocks(request) - len(cached) + growth <= num_available

    def _expected_growth(self) -> int:
        """Blocks that the running requests are expected to take yet."""
        return sum(max(0, self._expected_blocks(request) - len(request.block_ids)) for request in self._running)

    def _expected_blocks(self, request: Request) -> int:
        """At the request's end; at least those of its known tokens."""
        allowed = self._max_length(request.inference) - request.num_prompt_tokens
        expected = -(-allowed * self._num_sampled_tokens // self._num_allowed_tokens)
        expected = min(allowed, max(expected, request.num_sampled_tokens + self._block_size))
        return self._num_blocks(request.num_prompt_tokens + expected - 1)

    def _admit(self, request: Request, cached: list[int]) -> None:
        self._waiting.take_head(request)
        self.pool.share(cached)
        new = self.pool.allocate(self._num_blocks(len(request.token_ids)) - len(cached))
        assert new is not None, "it fitted"
        request.state = RequestState.RUNNING
        request.block_ids = cached
        request.num_computed_tokens = len(cached) * self._block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        if self._prefix_cache is not None:
            self._prefix_cache.runs(request)
        request.block_ids += new
        self._num_admissions += 1
        self._admission[request.request_id] = self._num_admissions
        insort(self._running, request, key=self._order)

    def _order(self, request: Request) -> tuple[int, int]:
        return -request.inference.priority, self._admission[request.request_id]

    def _run(self, request: Request, count: int, plan: StepPlan) -> None:
        start = request.num_computed_tokens
        samples = start + count >= len(request.token_ids)
        plan.scheduled.append(ScheduledTokens(request, start, count, samples))
        request.num_computed_tokens += count
        if start < request.num_prompt_tokens or count > 1:
            # Prompt tokens are known, so whoever comes after in this plan may already share them. A decode's block is
            # published by `update`.
            self._publish(request)

    def _publish(self, request: Request) -> None:
        if self._prefix_cache is not None and request.request_id not in self._private:
            self._published += self._prefix_cache.publish(request)

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        """A block for the next token, taken from the last of the running if need be; False: it was the last itself."""
        while len(request.block_ids) * self._block_size <= request.num_computed_tokens:
            new = self.pool.allocate(1)
            if new is not None:
                request.block_ids += new
                continue
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self.num_preemptions += 1
        self.num_recomputed_tokens += request.num_computed_tokens
        request.num_preemptions += 1
        plan.preempted.append(request)
        self._to_waiting(request)

    def _to_waiting(self, request: Request) -> None:
        """A running request waits again as the first of its priority: it keeps its sampled tokens, not its blocks."""
        self._leave_running(request)
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        self._waiting.put_first(request)
        if self._prefix_cache is not None:
            self._prefix_cache.waits(request)

    def _leave_running(self, request: Request) -> None:
        """The one place where blocks are given back; those that may hold NaN are zeroed before somebody else's use."""
        self._running.remove(request)
        del self._admission[request.request_id]
        freed = self.pool.release(request.block_ids)
        if self._poisoned:
            self._scrub += [block_id for block_id in freed if block_id in self._poisoned]
            self._poisoned.difference_update(freed)

    def _withdraw(self, request: Request) -> None:
        """Its keys and values may not be finite: nobody is to find them."""
        for block_id in request.block_ids:
            self.pool.withdraw(block_id)
        self._poisoned.update(request.block_ids)

    def _begin_again(self, request: Request, plan: StepPlan) -> None:
        """Once more from its first token, in blocks of its own. What a step under way samples for it is of no use."""
        self._private.add(request.request_id)
        plan.void.add(request.request_id)
        self._latest.void.add(request.request_id)
        if request.state is RequestState.RUNNING:
            self.num_recomputed_tokens += request.num_computed_tokens
            self._to_waiting(request)
            self._returned.append(request)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _max_length(self, inference: InferenceRequest) -> int:
        """Tokens of prompt and output at most."""
        return min(len(inference.token_ids) + inference.sampling.max_tokens, self._max_model_len)

    def _num_outputs_left(self, request: Request) -> int:
        return self._max_length(request.inference) - len(request.token_ids)
