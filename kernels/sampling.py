"""Choosing tokens: the greedy argmax (truth, Triton kernel, launcher), filtered draws, and their random numbers.

Draws do not depend on the batch: each row's uniform number comes from its own seed and position (Philox4x32-10, Salmon
et al. 2011, https://doi.org/10.1145/2063384.2063405), and is carried through the row's own cumulative probabilities.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

CANDIDATES = (1024, 16384)  # looked at, in turn, before a whole row is sorted
RUN = 512  # neighbouring ids whose weights are summed first
SMALLEST_TEMPERATURE = 1e-37  # the smallest normal float32, about


def greedy_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (rows, vocab) -> (token_ids (rows,) int64, finite (rows,) bool). Of equal logits the lowest id wins.

    `finite` is False where a row holds NaN or +inf, or nothing but -inf; its token means nothing.
    """
    token_ids = logits.argmax(dim=-1)  # the first of equal ones; NaN counts as the largest
    return token_ids, logits.gather(-1, token_ids[:, None]).squeeze(-1).isfinite()


@triton.jit
def _greedy_kernel(logits_ptr, token_ids_ptr, finite_ptr, largest_ptr, row_stride, num_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: row * row_stride passes 2^31 at 14,200 rows of 151,936
    base = logits_ptr + row * row_stride
    # Per lane: the largest so far and where it stood. A lane keeps the earlier one of equals.
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_col = tl.zeros((BLOCK,), tl.int32) + lanes
    has_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_cols, BLOCK):
        cols = start + lanes
        x = tl.load(base + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
        has_nan = has_nan | (x != x).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        best_col = tl.where(larger, cols, best_col)
    largest = tl.max(best, axis=0)
    candidate = tl.where(best == largest, best_col, 2147483647)
    token_id = tl.min(candidate, axis=0)
    finite = (tl.max(has_nan, axis=0) == 0) & (largest < float("inf")) & (largest > float("-inf"))
    tl.store(token_ids_ptr + row, tl.where(finite, token_id, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.int8))
    tl.store(largest_ptr + row, tl.where(tl.max(has_nan, axis=0) == 0, largest, float("nan")))


def greedy_triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy_reference` in one pass: one program per row; (rows, vocab) with unit stride in the last dimension."""
    return _launch_greedy(logits)[:2]


def _launch_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """And the rows' largest logits, (rows,) float32; NaN where a row holds one."""
    num_rows, num_cols = logits.shape
    assert logits.stride(-1) == 1, f"last dimension has stride {logits.stride(-1)}"
    assert num_cols > 0, "no logits"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    largest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        # Of 1,024 to 16,384 columns and 4 to 16 warps the fastest on an H200: 143 us for 1,024 rows of 151,936 float32
        # logits, 4.35 TB/s (torch.argmax alone takes 188 us with its gather), 21 us for 8 rows (torch 75 us).
        _greedy_kernel[(num_rows,)](
            logits, token_ids, finite, largest, logits.stride(0), num_cols, BLOCK=1024, num_warps=16
        )
    return token_ids, finite.view(torch.bool), largest


def greedy_cpu(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy_reference` in two steps: torch's argmax on a CPU takes 5 times as long as the maxima of parts."""
    num_cols = logits.shape[1]
    width = max(1, math.isqrt(num_cols))
    num_whole = num_cols // width
    maxima = logits[:, : num_whole * width].unflatten(1, (num_whole, width)).amax(-1)
    if num_whole * width < num_cols:
        maxima = torch.cat((maxima, logits[:, num_whole * width :].amax(-1, keepdim=True)), 1)
    # The last part begins early: with columns smaller than its largest, or it were not the first to have it.
    starts = (maxima.argmax(-1) * width).clamp_(max=num_cols - width)
    cols = starts[:, None] + torch.arange(width, device=logits.device)
    values = logits.gather(1, cols)
    places = values.argmax(-1, keepdim=True)
    return starts + places[:, 0], values.gather(1, places)[:, 0].isfinite()


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy_reference`'s contract, by the fastest way on the logits' device."""
    return greedy_triton(logits) if logits.is_cuda else greedy_cpu(logits)


def greedy_of_part(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a part of the vocabulary: (token_ids (rows,) int64 within it, largest (rows,) float32, NaN where there is)."""
    if logits.is_cuda:
        return greedy_of_part_triton(logits)
    token_ids = logits.argmax(dim=-1)
    return token_ids, logits.gather(-1, token_ids[:, None]).squeeze(-1).float()


def greedy_of_part_triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy_of_part` by the same kernel as `greedy_triton`; where a row's largest is not finite its id is 0."""
    token_ids, _, largest = _launch_greedy(logits)
    return token_ids, largest


def greedy_of_parts(token_ids: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy_reference`'s result from each part's ids, in the whole vocabulary, and largest logits: (parts, rows)."""
    best = largest.amax(dim=0)  # NaN counts as the largest
    finite = best.isfinite()
    lowest = torch.where(largest == best, token_ids, torch.iinfo(torch.int64).max).amin(dim=0)
    return torch.where(finite, lowest, 0), finite


@dataclass(frozen=True, slots=True)
class Filters:
    """One row each, on the logits' device: temperature above 0; top_k 0, top_p 1, min_p 0 are off."""

    temperature: torch.Tensor  # (rows,) float32
    top_k: torch.Tensor  # (rows,) int64
    top_p: torch.Tensor  # (rows,) float64
    min_p: torch.Tensor  # (rows,) float64

    def rows(self, index: torch.Tensor) -> "Filters":
        return Filters(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def filtered_probabilities_reference(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The distribution that is drawn from, (rows, vocab) float64: temperature, then min-p, top-k, top-p, renormalised.

    min-p keeps what is at least min_p times as likely as the likeliest; top-k keeps the k largest and all that tie with
    the last of them; top-p keeps, in descending order and by id among equals, what begins before the mass top_p.
    """
    logits = logits.double()
    weights = ((logits - logits.amax(-1, keepdim=True)) / _divisor(filters.temperature.double())).exp()
    weights = torch.where(weights >= filters.min_p[:, None], weights, 0.0)
    order = torch.sort(weights, dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    kth = torch.where(filters.top_k > 0, filters.top_k, vocab).clamp(max=vocab) - 1
    smallest = order.values.gather(-1, kth[:, None])
    kept = torch.where(order.values >= smallest, order.values, 0.0)
    before = kept.cumsum(-1) - kept
    kept = torch.where(before < filters.top_p[:, None] * kept.sum(-1, keepdim=True), kept, 0.0)
    out = torch.zeros_like(weights).scatter_(-1, order.indices, kept)
    return out / out.sum(-1, keepdim=True)


def draw(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row, (rows,) int64, from `filtered_probabilities_reference`'s distribution; logits finite.

    `uniform` (rows,) float64 in [0, 1). The token is the first whose cumulative weight exceeds uniform * total: over
    ids in ascending order where no filter is on, else over the kept tokens from the likeliest down (by id among
    equals). Weights are float32 exponentials, summed in float64 (of 512 neighbouring ids first in float32).
    """
    num_rows, vocab = logits.shape
    is_filtered = (filters.top_p < 1.0) | (filters.min_p > 0.0) | ((filters.top_k > 0) & (filters.top_k < vocab))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    rows = (~is_filtered).nonzero().squeeze(-1)
    if len(rows):
        tokens[rows] = _draw_plain(_take(logits, rows), filters.temperature[rows], uniform[rows])
    rows = is_filtered.nonzero().squeeze(-1)
    if len(rows):
        scaled, filters, uniform = _take(logits, rows).float(), filters.rows(rows), uniform[rows]
        scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(_divisor(filters.temperature))
    for count in (*(n for n in CANDIDATES if n < vocab), vocab):
        if not len(rows):
            break
        drawn, settled = _draw_filtered(scaled, filters, uniform, count)
        tokens[rows] = drawn
        left = (~settled).nonzero().squeeze(-1)
        rows, scaled, filters, uniform = rows[left], scaled[left], filters.rows(left), uniform[left]
    return tokens


def _take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Those rows; no copy where they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _divisor(temperature: torch.Tensor) -> torch.Tensor:
    """(rows, 1). Logits are divided once their largest is 0, so that the smallest temperatures overflow nothing."""
    return temperature.clamp(min=SMALLEST_TEMPERATURE)[:, None]


def _draw_plain(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """In two levels, since a float64 running sum of whole rows is most of the time that a draw takes."""
    num_rows, vocab = logits.shape
    num_runs = -(-vocab // RUN)
    weights = torch.full((num_rows, num_runs * RUN), -torch.inf, device=logits.device)
    torch.sub(logits, logits.amax(-1, keepdim=True), out=weights[:, :vocab])
    weights.div_(_divisor(temperature)).exp_()
    runs = weights.view(num_rows, num_runs, RUN)
    cumulative = runs.sum(-1).double().cumsum(-1)
    run = _invert(cumulative, uniform * cumulative[:, -1])[:, None]
    before = torch.where(run > 0, cumulative.gather(-1, (run - 1).clamp(min=0)), 0.0).squeeze(-1)
    inner = runs.gather(1, run[:, :, None].expand(-1, -1, RUN)).squeeze(1).double().cumsum(-1)
    return run.squeeze(-1) * RUN + _invert(inner, uniform * cumulative[:, -1] - before)


def _draw_filtered(
    scaled: torch.Tensor, filters: Filters, uniform: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks at the `count` largest only. (tokens, settled): not settled where the filters may keep more than these."""
    vocab = scaled.shape[-1]
    values, ids = _largest(scaled, count)
    weights = values.exp().double()
    is_kept = weights >= filters.min_p[:, None]
    has_top_k = (filters.top_k > 0) & (filters.top_k < vocab)
    kth = torch.where(has_top_k, filters.top_k, count).clamp(max=count) - 1
    is_kept &= (values >= values.gather(-1, kth[:, None])) | ~has_top_k[:, None]
    weights = torch.where(is_kept, weights, 0.0)
    cumulative = weights.cumsum(-1)
    # Whether min-p or top-k have ended within these; else top-p's mass is of the whole row.
    ended = ~is_kept[:, -1]
    whole = torch.where(ended, cumulative[:, -1], scaled.exp().sum(-1, dtype=torch.float64))
    is_kept &= (cumulative - weights) < (filters.top_p * whole)[:, None]
    last = is_kept.sum(-1) - 1  # what is kept comes first
    # Of those that tie with the last candidate, others may have been left out.
    settled = (values.gather(-1, last[:, None]).squeeze(-1) > values[:, -1]) | (count == vocab)
    cumulative = torch.minimum(cumulative, cumulative.gather(-1, last[:, None]))
    places = _invert(cumulative, uniform * cumulative[:, -1])
    return ids.gather(-1, places[:, None]).squeeze(-1), settled


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row in descending order, by id among equals."""
    if count == values.shape[-1]:
        order = torch.sort(values, dim=-1, descending=True, stable=True)
        return order.values, order.indices
    ids = torch.topk(values, count, dim=-1, sorted=False).indices.sort(dim=-1).values
    order = torch.sort(values.gather(-1, ids), dim=-1, descending=True, stable=True)
    return order.values, ids.gather(-1, order.indices)


def _invert(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds the target, per row."""
    total = cumulative[:, -1:].contiguous()
    cumulative = cumulative.contiguous()
    places = torch.searchsorted(cumulative, target[:, None].contiguous(), right=True)
    # Rounding may bring the target to the total itself: the last place that has weight.
    return torch.minimum(places, torch.searchsorted(cumulative, total)).squeeze(-1)


_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HIGH_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox_4x32(
    counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64], num_rounds: int = 10
) -> npt.NDArray[np.uint64]:
    """Philox4x32: counter (4, n) and key (2, n), 32-bit words in uint64 -> (4, n) likewise."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(num_rounds):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HIGH_SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HIGH_SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniform_numbers(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), of 53 random bits: the seed is the key, the position the counter."""
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    zeros = np.zeros_like(seed)
    words = philox_4x32(
        np.stack([position & _LOW, position >> _HIGH_SHIFT, zeros, zeros]), np.stack([seed & _LOW, seed >> _HIGH_SHIFT])
    )
    bits = (words[0] << _HIGH_SHIFT | words[1]) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
