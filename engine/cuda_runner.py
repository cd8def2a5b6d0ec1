"""Carries plans out on a CUDA device, one step ahead: a launched step is waited for only when its tokens are needed.

Sampled tokens stay on the device as the next step's input; the host learns them by a copy that it waits for one step
later. Decode steps and small mixed ones replay CUDA graphs; large ones are launched kernel by kernel.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.cuda_graph import Capture, DecodeGraphs, TakeGraph, choose
from engine.kv_cache import KVCache
from engine.mixed_graph import MAX_PREFILL_ROWS, MixedGraphs
from engine.model_runner import RequestRows
from engine.models.decoder import Decoder
from engine.request import Request
from engine.sampler import Sampler, is_plain
from engine.staging import Staging
from engine.step_arrays import MAX_SHARED_GROUPS, MIN_TOKENS_SAVED, StepArrays, gather_step, received_step
from engine.step_plan import DoneStep, SampledTokens, StepPlan
from engine.tensor_parallel import Ranks, RankStep
from kernels.attention_plan import SharedPrefixes
from schemas.inference import InferenceRequest

_DEPTH = 3


@dataclass(frozen=True, slots=True)
class _Launched:
    """Greedy tokens on their way to the host."""

    chosen: torch.Tensor  # (2, num_sampling) int32, pinned
    arrived: torch.cuda.Event
    plan_order: list[int]  # entry i of the plan's sampling runs is column plan_order[i]

    def collect(self) -> SampledTokens:
        self.arrived.synchronize()
        token_ids, finite = self.chosen[:, self.plan_order].tolist()
        return SampledTokens(token_ids, [None] * len(token_ids), [bool(flag) for flag in finite])


class CudaRunner:
    """One decoder, its KV cache and its sampler on one CUDA device."""

    runs_ahead = True

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        max_running: int,
        max_model_len: int,
        max_tokens_per_step: int,
        with_graphs: bool = True,
        min_tokens_saved: int | None = MIN_TOKENS_SAVED,
        ranks: Ranks | None = None,
        take_graph: TakeGraph | None = None,
        largest_only: bool = False,
    ) -> None:
        """`min_tokens_saved`: keys, in tokens a layer, that reading a shared prefix once must save; None: never.

        `ranks`: those that compute every step along with this one. `take_graph`: a Capture where None.
        `largest_only`: captures the graphs that need the most memory and no other; such a runner launches nothing.
        """
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._ranks = ranks or Ranks()
        self._min_tokens_saved = min_tokens_saved
        self._rows = RequestRows.allocate(max_running, max_model_len, cache.block_size)
        self._sampling: set[int] = set()  # request ids that the sampler knows
        self._last_token_ids = torch.zeros(max_running + 1, dtype=torch.int32, device=decoder.device)
        num_columns = self._rows.block_tables.shape[1]
        num_rows = max_running + MAX_SHARED_GROUPS
        num_ints = 4 * max_tokens_per_step + 2 * (num_rows + MAX_PREFILL_ROWS) * (num_columns + 16) + 4096
        self._staging = Staging(decoder.device, num_ints)
        self._chosen = [torch.empty(2 * max_running, dtype=torch.int32, pin_memory=True) for _ in range(_DEPTH)]
        self._turn = 0
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        if with_graphs:
            take_graph = take_graph or Capture()
            common = decoder, cache, self._staging, self._last_token_ids, max_running, num_columns
            with torch.inference_mode():
                self._mixed_graphs = MixedGraphs(*common, max_tokens_per_step, take_graph, largest_only)
                self._decode_graphs = DecodeGraphs(
                    *common, self._min_tokens_saved is not None, take_graph, largest_only
                )
        self._warm_up()
        self.step_seconds = dict.fromkeys(("gather", "launch"), 0.0)
        self.num_replays = 0
        self.num_mixed_replays = 0
        self.num_shared_steps = 0

    @property
    def graph_counts(self) -> tuple[int, int]:
        """(those captured, those that a runner has which captures all)."""
        kinds = [graphs for graphs in (self._mixed_graphs, self._decode_graphs) if graphs is not None]
        return sum(each.num_captured for each in kinds), sum(each.num_graphs for each in kinds)

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        return not is_plain(inference)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DoneStep | _Launched:
        started = time.perf_counter()
        for request in plan.preempted:
            self._rows.forget(request.request_id)
        arrays = self._gather(plan) if plan.scheduled else None
        sampling = [plan.scheduled[run].request for run in arrays.sampling_runs] if arrays is not None else []
        is_plain_step = all(is_plain(request.inference) for request in sampling)
        self._ranks.tell(RankStep(plan.scrub, arrays, whole_logits=not is_plain_step))
        if plan.scrub:
            self._cache.zero_blocks(plan.scrub)
        if arrays is None:
            return DoneStep(SampledTokens())
        gathered = time.perf_counter()
        logits, chosen = self._compute(arrays)
        if is_plain_step:
            launched: DoneStep | _Launched = self._hand_over(arrays, chosen)
        else:
            sampled = self._sampler.sample(self._decoder.gather_logits(logits), sampling)
            launched = DoneStep(_reordered(sampled, np.argsort(arrays.sampling_runs).tolist()))
        self.step_seconds["gather"] += gathered - started
        self.step_seconds["launch"] += time.perf_counter() - gathered
        return launched

    @torch.inference_mode()
    def follow(self, step: RankStep) -> None:
        """What `launch` computes, on a rank that is told of it."""
        if step.scrub:
            self._cache.zero_blocks(step.scrub)
        if step.inputs is not None:
            logits, _ = self._compute(received_step(step.inputs))
            if step.whole_logits:
                self._decoder.gather_logits(logits)

    def _compute(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (num_sampling, vocab_size), chosen (2, num_sampling)), on their way."""
        if self._decode_graphs is not None and self._decode_graphs.takes(arrays):
            logits, chosen = self._decode_graphs.replay(arrays)
            self.num_replays += 1
        elif self._mixed_graphs is not None and self._mixed_graphs.takes(arrays):
            logits, chosen = self._mixed_graphs.replay(arrays)
            self.num_mixed_replays += 1
        else:
            logits, chosen = self._run(arrays)
        self.num_shared_steps += arrays.shared is not None
        return logits, chosen

    def release(self, request: Request) -> None:
        """The request ended: its row and its sampling state go. Idempotent."""
        self._rows.forget(request.request_id)
        if request.request_id in self._sampling:
            self._sampling.discard(request.request_id)
            self._sampler.remove(request.request_id)

    def _gather(self, plan: StepPlan) -> StepArrays:
        for run in plan.scheduled:
            if run.request.request_id not in self._sampling:
                self._sampling.add(run.request.request_id)
                self._sampler.add(run.request)
        rows = self._rows
        return gather_step(
            rows.token_ids,
            rows.block_tables,
            rows.num_tokens,
            np.array([rows.update(run.request) for run in plan.scheduled], dtype=np.int64),
            np.array([run.start for run in plan.scheduled], dtype=np.int64),
            np.array([run.count for run in plan.scheduled], dtype=np.int64),
            np.array([run.samples for run in plan.scheduled], dtype=np.bool_),
            self._cache.block_size,
            self._min_tokens_saved,
        )

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Steps kernel by kernel that write nowhere, so that what they compile is compiled before the first request."""
        block_size = self._cache.block_size
        num_rows = min(3, len(self._rows.num_tokens))
        if self._rows.token_ids.shape[1] < 2 * block_size:
            return  # too short for a prefix and what comes behind it
        for min_tokens_saved in (None, 1) if self._min_tokens_saved is not None else (None,):
            arrays = gather_step(
                self._rows.token_ids,
                self._rows.block_tables,
                self._rows.num_tokens,
                np.arange(num_rows),
                np.array([block_size + 1, block_size + 1, 0][:num_rows]),
                np.array([1, 1, 2 * block_size][:num_rows]),
                np.ones(num_rows, dtype=np.bool_),
                block_size,
                min_tokens_saved,
            )
            self._run(replace(arrays, slot_mapping=np.full_like(arrays.slot_mapping, -1)))

    def _run(self, arrays: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernel by kernel; (logits (num_sampling, vocab_size), chosen (2, num_sampling))."""
        host = [
            arrays.rows, arrays.token_ids, arrays.positions, arrays.slot_mapping, arrays.block_tables,
            arrays.query_starts, arrays.sequence_lengths, arrays.logits_indices, arrays.sampling_rows,
        ]  # fmt: skip
        if arrays.shared is not None:
            shared = arrays.shared
            num_rows = np.array([shared.num_rows], dtype=np.int32)
            host += [
                shared.block_tables, shared.lengths, shared.query_starts, num_rows, shared.private_block_tables,
                shared.private_lengths,
            ]  # fmt: skip
        rows, token_ids, positions, slots, tables, starts, lengths, indices, sampling_rows, *of_shared = (
            self._staging.upload(host)
        )
        num_decode = arrays.num_decode_rows
        if num_decode:
            decodes = token_ids[:num_decode]
            decodes.copy_(torch.where(decodes < 0, self._last_token_ids[rows[:num_decode]], decodes))
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            query_starts=starts,
            sequence_lengths=lengths,
            logits_indices=indices,
            max_query_length=arrays.max_query_length,
            max_sequence_length=arrays.max_sequence_length,
            num_decode_rows=num_decode,
            shared=SharedPrefixes(*of_shared) if of_shared else None,
        )
        hidden = self._decoder.forward(batch, self._cache)
        logits = self._decoder.logits(hidden)
        return logits, choose(self._decoder, logits, self._last_token_ids, sampling_rows)

    def _hand_over(self, arrays: StepArrays, chosen: torch.Tensor) -> _Launched:
        """Starts the copy of greedy tokens to the host."""
        turn, self._turn = self._turn, (self._turn + 1) % _DEPTH
        pinned = self._chosen[turn][: chosen.numel()].view(chosen.shape)
        pinned.copy_(chosen.contiguous(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Launched(pinned, arrived, np.argsort(arrays.sampling_runs).tolist())


def _reordered(sampled: SampledTokens, order: Sequence[int]) -> SampledTokens:
    return SampledTokens(
        [sampled.token_ids[i] for i in order],
        [sampled.logprobs[i] for i in order],
        [sampled.finite[i] for i in order],
    )
