"""Carries a StepPlan out: rows of running requests to tensors, the decoder, the sampler.

Python touches a request when it is admitted, gets a block or a token, and ends; the step's tensors are gathered from
per-row arrays. Decides nothing: what runs is the scheduler's, what is drawn the sampler's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.lanes import Lanes, usable_lanes
from engine.models.decoder import Decoder
from engine.request import Request
from engine.step_plan import DoneStep, SampledTokens, ScheduledTokens, StepPlan
from engine.tensor_parallel import Ranks, RankStep
from kernels.attention_plan import SharedPrefixes
from schemas.inference import InferenceRequest


class SamplerFace(Protocol):
    """What the runner asks of a sampler."""

    def add(self, request: Request) -> None: ...

    def remove(self, request_id: int) -> None: ...

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> SampledTokens: ...


@dataclass(slots=True)
class RequestRows:
    """One row per request that has blocks: its tokens and its block table, as far as they were copied.

    token_ids     (max_running, max_model_len)           [0, num_tokens[row]) is the request's
    block_tables  (max_running, max_blocks_per_request)  [0, num_blocks[row]) is the request's; the rest stale
    """

    token_ids: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    num_tokens: list[int]
    num_blocks: list[int]
    row_of_request: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    @classmethod
    def allocate(cls, max_running: int, max_model_len: int, block_size: int) -> "RequestRows":
        # np.zeros maps memory that costs nothing until a row is written.
        return cls(
            token_ids=np.zeros((max_running, max_model_len), dtype=np.int64),
            block_tables=np.zeros((max_running, -(-max_model_len // block_size)), dtype=np.int32),
            num_tokens=[0] * max_running,
            num_blocks=[0] * max_running,
            free=list(range(max_running - 1, -1, -1)),
        )

    def update(self, request: Request) -> int:
        """The request's row, with what is new of its tokens and blocks copied in."""
        row = self.row_of_request.get(request.request_id)
        if row is None:
            assert self.free, f"more than {len(self.num_tokens)} requests have blocks"
            row = self.row_of_request[request.request_id] = self.free.pop()
            self.num_tokens[row] = self.num_blocks[row] = 0
        known, total = self.num_tokens[row], len(request.token_ids)
        if known != total:
            self.token_ids[row, known:total] = request.token_ids[known:]
            self.num_tokens[row] = total
        known, total = self.num_blocks[row], len(request.block_ids)
        if known != total:
            assert known < total, f"request {request.request_id} lost blocks while it ran"
            self.block_tables[row, known:total] = request.block_ids[known:]
            self.num_blocks[row] = total
        return row

    def forget(self, request_id: int) -> None:
        """Frees the row; nothing where there is none."""
        if (row := self.row_of_request.pop(request_id, None)) is not None:
            self.free.append(row)


class ModelRunner:
    """One decoder, its KV cache and its sampler."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: SamplerFace,
        max_running: int,
        max_model_len: int,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: those that compute every step along with this one."""
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._ranks = ranks or Ranks()
        self._rows = RequestRows.allocate(max_running, max_model_len, cache.block_size)
        # Ranks add their parts up in the middle of a layer, all in one order: no lanes there.
        self._lanes = Lanes(usable_lanes(decoder.dtype) if decoder.group.size == 1 else 1)
        self._sampling: set[int] = set()  # request ids that the sampler knows
        # Totals. A device's work counts where it is waited for.
        self._step_seconds = dict.fromkeys(("prepare", "forward", "sample"), 0.0)

    @property
    def step_seconds(self) -> Mapping[str, float]:
        """Totals of a step's parts."""
        return self._step_seconds

    @property
    def runs_ahead(self) -> bool:
        """Each step is done when `launch` returns."""
        return False

    def needs_known_tokens(self, inference: InferenceRequest) -> bool:
        """Every request's next step reads its last token from the host."""
        return True

    def launch(self, plan: StepPlan) -> DoneStep:
        """`execute`, in the engine's form of it."""
        with self._ranks.explaining():
            return DoneStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> SampledTokens:
        """Computes the plan's runs and samples for those that reach their last known token, in the plan's order."""
        started = time.perf_counter()
        for request in plan.preempted:
            self._rows.forget(request.request_id)
        batch = self._prepare(plan.scheduled) if plan.scheduled else None
        self._ranks.tell(RankStep(plan.scrub, batch, whole_logits=True))
        if plan.scrub:
            self._cache.zero_blocks(plan.scrub)
        if batch is None:
            return SampledTokens()
        prepared = time.perf_counter()
        hidden = self._lanes.forward(self._decoder, batch, self._cache)
        sampling = [run.request for run in plan.scheduled if run.samples]
        logits = self._decoder.gather_logits(self._decoder.logits(hidden))
        computed = time.perf_counter()
        sampled = self._sampler.sample(logits, sampling) if sampling else SampledTokens()
        ended = time.perf_counter()
        self._step_seconds["prepare"] += prepared - started
        self._step_seconds["forward"] += computed - prepared
        self._step_seconds["sample"] += ended - computed
        return sampled

    @torch.inference_mode()
    def follow(self, step: RankStep) -> None:
        """What `execute` computes, on a rank that is told of it."""
        if step.scrub:
            self._cache.zero_blocks(step.scrub)
        if step.inputs is not None:
            hidden = self._decoder.forward(received_batch(step.inputs), self._cache)
            self._decoder.gather_logits(self._decoder.logits(hidden))

    def release(self, request: Request) -> None:
        """The request ended: its row and its sampling state go. Idempotent."""
        self._rows.forget(request.request_id)
        if request.request_id in self._sampling:
            self._sampling.discard(request.request_id)
            self._sampler.remove(request.request_id)

    def _prepare(self, scheduled: Sequence[ScheduledTokens]) -> ForwardBatch:
        rows_of_runs = []
        for run in scheduled:
            request = run.request
            if request.request_id not in self._sampling:
                self._sampling.add(request.request_id)
                self._sampler.add(request)
            rows_of_runs.append(self._rows.update(request))
        rows = np.array(rows_of_runs, dtype=np.int64)
        starts = np.array([run.start for run in scheduled], dtype=np.int64)
        counts = np.array([run.count for run in scheduled], dtype=np.int64)
        samples = np.array([run.samples for run in scheduled], dtype=np.bool_)
        return gather_batch(self._rows, rows, starts, counts, samples, self._cache.block_size, self._decoder.device)


def received_batch(tree: Mapping[str, Any]) -> ForwardBatch:
    """From the fields of one that another process gathered."""

    def tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in fields.items()}

    shared = tree["shared"]
    return ForwardBatch(
        **{**tensors(tree), "shared": SharedPrefixes(**tensors(shared)) if shared is not None else None}
    )


def gather_batch(
    request_rows: RequestRows,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    samples: npt.NDArray[np.bool_],
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    """The step's tensors. rows, starts, counts (1 or more), samples: one entry per run, in the plan's order."""
    ends = starts + counts
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    row_of_token = np.repeat(rows, counts)
    # Token t of run r is at starts[r] + (t - query_starts[r]).
    positions = np.arange(query_starts[-1], dtype=np.int64) + np.repeat(starts - query_starts[:-1], counts)
    blocks = request_rows.block_tables[row_of_token, positions // block_size].astype(np.int64)
    max_sequence_length = int(ends.max())
    block_tables = request_rows.block_tables[rows, : -(-max_sequence_length // block_size)]
    # What lies past a row's length is another request's, or nobody's.
    num_blocks = -(-ends // block_size)
    block_tables[np.arange(block_tables.shape[1])[None, :] >= num_blocks[:, None]] = 0

    def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=to_device(request_rows.token_ids[row_of_token, positions]),
        positions=to_device(positions),
        slot_mapping=to_device(blocks * block_size + positions % block_size),
        block_tables=to_device(block_tables),
        query_starts=to_device(query_starts),
        sequence_lengths=to_device(ends.astype(np.int32)),
        logits_indices=to_device(query_starts[1:][samples].astype(np.int64) - 1),
        max_query_length=int(counts.max()),
        max_sequence_length=max_sequence_length,
    )
