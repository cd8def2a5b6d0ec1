"""Chooses each row's next token from its logits, as its request's sampling parameters say.

Order: repetition, presence and frequency penalties; the mask of a label set; temperature; min-p; top-k; top-p; draw.
Log-probabilities are of the model's own distribution, before all of these. What it remembers of a request's tokens
stays here, keyed by request id, and is read off `Request.token_ids`, so that a preempted request resumes as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.grammar import LabelSets
from engine.request import Request
from engine.step_plan import SampledTokens
from kernels.sampling import Filters, draw, greedy, uniform_numbers
from schemas.inference import InferenceRequest, SamplingParams, TokenLogprobs

# Rows that are copied at a time. On a CPU a copy of 16 rows of 151,936 float32 logits (10 MB) is memory that the
# allocator still keeps; larger ones are mapped anew each time, which takes longer than the arithmetic.
ROWS_AT_A_TIME = {"cpu": 16, "cuda": 128}  # cuda: about 320 MB with the copies that a draw makes


@dataclass(slots=True)
class _TokenCounts:
    """A request's distinct tokens. Sampled ones with their counts, in order of first appearance."""

    prompt_ids: npt.NDArray[np.int64]
    sampled_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    place_of: dict[int, int] = field(default_factory=dict)  # token id -> index into the two lists
    num_read: int = 0  # sampled tokens that are counted

    def read(self, request: Request) -> None:
        """Counts what has been sampled since the last time."""
        for token_id in request.token_ids[request.num_prompt_tokens + self.num_read :]:
            place = self.place_of.setdefault(token_id, len(self.counts))
            if place == len(self.counts):
                self.sampled_ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
            self.num_read += 1


class Sampler:
    """One per engine. `sample` is given rows of several requests; rows do not influence one another."""

    def __init__(self, label_sets: LabelSets) -> None:
        self._label_sets = label_sets
        self._counts: dict[int, _TokenCounts] = {}  # request_id -> counts; requests with penalties only

    def add(self, request: Request) -> None:
        """To be called once, before the request's first `sample`."""
        if _has_penalties(request.inference.sampling):
            prompt_ids = np.unique(np.asarray(request.inference.token_ids, dtype=np.int64))
            self._counts[request.request_id] = _TokenCounts(prompt_ids)

    def remove(self, request_id: int) -> None:
        """Forgets the request. Idempotent."""
        self._counts.pop(request_id, None)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> SampledTokens:
        """logits (rows, vocab), any floating type, left as they are; one request per row."""
        assert len(logits) == len(requests), f"{len(logits)} rows of logits for {len(requests)} requests"
        if not requests:
            return SampledTokens()
        greedy_ids, is_finite = greedy(logits)
        token_ids: list[int] = greedy_ids.tolist()
        finite: list[bool] = is_finite.tolist()
        sampled = SampledTokens(token_ids, [None] * len(requests), finite)
        special = [row for row, request in enumerate(requests) if finite[row] and not is_plain(request.inference)]
        labelled = [row for row in special if _is_greedy_label(requests[row])]
        if labelled:
            self._choose_labels(logits, requests, labelled, sampled)
            special = [row for row in special if not _is_greedy_label(requests[row])]
        step = ROWS_AT_A_TIME.get(logits.device.type, 16)
        for start in range(0, len(special), step):
            self._sample_rows(logits, requests, special[start : start + step], sampled)
        return sampled

    def _choose_labels(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: list[int], sampled: SampledTokens
    ) -> None:
        """Greedy classification reads the allowed tokens' logits alone."""
        allowed = [np.asarray(self._allowed(requests[row]), dtype=np.int64) for row in rows]
        row_index = np.repeat(np.asarray(rows, dtype=np.int64), [len(ids) for ids in allowed])
        values = logits[
            torch.from_numpy(row_index).to(logits.device),
            torch.from_numpy(np.concatenate(allowed)).to(logits.device),
        ].float()
        ends = np.cumsum([len(ids) for ids in allowed])
        for row, ids, of_row in zip(rows, allowed, np.split(values.cpu().numpy(), ends[:-1]), strict=True):
            best = int(of_row.argmax())  # ids ascend, so the lowest wins
            sampled.token_ids[row] = int(ids[best])
            sampled.finite[row] = bool(np.isfinite(of_row[best]))

    def _sample_rows(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: list[int], sampled: SampledTokens
    ) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        raw = logits[index].float()  # a copy: the caller's stay as they are
        chosen_from = [requests[row] for row in rows]
        logprobs_of = [i for i, request in enumerate(chosen_from) if request.inference.sampling.logprobs is not None]
        before = raw[torch.tensor(logprobs_of, device=raw.device)] if logprobs_of else None

        self._apply_penalties(raw, chosen_from)
        self._apply_label_masks(raw, chosen_from)
        best, is_finite = greedy(raw)
        tokens: list[int] = best.tolist()
        finite: list[bool] = is_finite.tolist()
        random = [i for i, r in enumerate(chosen_from) if finite[i] and not r.inference.sampling.is_greedy]
        if random:
            for i, token_id in zip(random, _draw_rows(raw, chosen_from, random), strict=True):
                tokens[i] = token_id
        for i, row in enumerate(rows):
            sampled.token_ids[row] = tokens[i]
            sampled.finite[row] = finite[i]
        if before is not None:
            asked = [chosen_from[i].inference.sampling.logprobs or 0 for i in logprobs_of]
            results = token_logprobs(before, [tokens[i] for i in logprobs_of], asked)
            for i, result in zip(logprobs_of, results, strict=True):
                sampled.logprobs[rows[i]] = result if finite[i] else None

    def _allowed(self, request: Request) -> tuple[int, ...]:
        sampled = request.token_ids[request.num_prompt_tokens :]
        return self._label_sets.state(request.inference.label_token_ids, sampled).allowed()

    def _apply_label_masks(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        for i, request in enumerate(requests):
            if request.inference.label_token_ids:
                allowed = torch.tensor(self._allowed(request), dtype=torch.int64, device=logits.device)
                values = logits[i, allowed]
                logits[i].fill_(float("-inf"))
                logits[i, allowed] = values

    def _apply_penalties(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """In place. Repetition (https://arxiv.org/abs/1909.05858) counts the prompt too, the others do not."""
        repeated: list[npt.NDArray[np.int64]] = []
        repeated_rows: list[tuple[int, float, int]] = []  # row, penalty, number of tokens
        ids: list[int] = []
        offsets: list[float] = []
        offset_rows: list[tuple[int, int]] = []  # row, number of tokens
        for i, request in enumerate(requests):
            params = request.inference.sampling
            if not _has_penalties(params):
                continue
            counts = self._counts[request.request_id]
            counts.read(request)
            if params.repetition_penalty != 1.0:
                fresh = np.asarray(counts.sampled_ids, dtype=np.int64)
                seen = np.concatenate([counts.prompt_ids, fresh[~np.isin(fresh, counts.prompt_ids)]])
                repeated.append(seen)
                repeated_rows.append((i, params.repetition_penalty, len(seen)))
            if (params.presence_penalty or params.frequency_penalty) and counts.counts:
                ids += counts.sampled_ids
                offsets += [params.frequency_penalty * n + params.presence_penalty for n in counts.counts]
                offset_rows.append((i, len(counts.counts)))
        if repeated_rows:
            lengths = [n for *_, n in repeated_rows]
            rows = _tensor(np.repeat([i for i, *_ in repeated_rows], lengths), logits)
            cols = _tensor(np.concatenate(repeated), logits)
            penalty = _tensor(
                np.repeat(np.asarray([p for _, p, _ in repeated_rows], dtype=np.float32), lengths), logits
            )
            values = logits[rows, cols]
            logits[rows, cols] = torch.where(values > 0, values / penalty, values * penalty)
        if offset_rows:
            rows = _tensor(np.repeat([i for i, _ in offset_rows], [n for _, n in offset_rows]), logits)
            cols = _tensor(np.asarray(ids, dtype=np.int64), logits)
            logits[rows, cols] -= _tensor(np.asarray(offsets, dtype=np.float32), logits)


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """logits (rows, vocab) float32, unprocessed; per row the chosen token's log-probability and the top ones'."""
    chosen_ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    sums = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = (logits.gather(-1, chosen_ids[:, None]) - sums).squeeze(-1).tolist()
    count = min(max(num_top), logits.shape[-1])
    top = torch.topk(logits, count, dim=-1)
    top_ids, top_values = top.indices.tolist(), (top.values - sums).tolist()
    results = []
    for row, (token_id, wanted) in enumerate(zip(token_ids, num_top, strict=True)):
        pairs = sorted(zip(top_values[row], top_ids[row], strict=True), key=lambda pair: (-pair[0], pair[1]))[:wanted]
        results.append(
            TokenLogprobs(token_id, chosen[row], tuple(i for _, i in pairs), tuple(value for value, _ in pairs))
        )
    return results


def _draw_rows(logits: torch.Tensor, requests: Sequence[Request], rows: list[int]) -> list[int]:
    drawing = [requests[i] for i in rows]
    params = [request.inference.sampling for request in drawing]
    uniform = uniform_numbers([r.inference.seed for r in drawing], [r.num_sampled_tokens for r in drawing])
    device = logits.device
    filters = Filters(
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
    )
    if len(rows) < len(logits):
        logits = logits[torch.tensor(rows, dtype=torch.int64, device=device)]
    tokens: list[int] = draw(logits, filters, torch.from_numpy(uniform).to(device)).tolist()
    return tokens


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def is_plain(inference: InferenceRequest) -> bool:
    """Its token is the raw argmax, and nothing else is asked."""
    params = inference.sampling
    is_bound = bool(inference.label_token_ids)
    return params.is_greedy and params.logprobs is None and not is_bound and not _has_penalties(params)


def _is_greedy_label(request: Request) -> bool:
    params = request.inference.sampling
    is_bound = bool(request.inference.label_token_ids)
    return is_bound and params.is_greedy and params.logprobs is None and not _has_penalties(params)


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
