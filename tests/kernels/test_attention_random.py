"""Over random mixed steps, CPU path, truth and Triton kernel say the same."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.paged import TOLERANCE, largest_difference, make_step

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    steps = []
    for _ in range(draw(st.integers(0, 6))):
        num_queries = draw(st.sampled_from([0, 1, 1, 1, 2, 5, 17]))
        past = draw(st.integers(0, 50)) if num_queries else 0
        steps.append((num_queries, past + num_queries))
    return steps


@settings(max_examples=25, deadline=None)
@given(
    rows=rows(),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 2)]),
    block_size=st.sampled_from([8, 16]),
    shared_blocks=st.integers(0, 3),
    window=st.sampled_from([None, None, 1, 7, 16, 33]),
    seed=st.integers(0, 2**31),
)
def test_all_paths_agree(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    shared_blocks: int,
    window: int | None,
    seed: int,
) -> None:
    step = make_step(rows, *heads, 16, block_size, shared_blocks=shared_blocks, peak=3.0, seed=seed)
    truth = step.reference(window)
    assert largest_difference(step.cpu(window), truth) < TOLERANCE[torch.float32]
    assert largest_difference(step.triton(window), truth) < TOLERANCE[torch.float32]


@settings(max_examples=60, deadline=None)
@given(
    pasts=st.lists(st.integers(0, 600), min_size=1, max_size=24),
    chunks=st.lists(st.sampled_from([1, 1, 1, 3, 20, 90]), min_size=24, max_size=24),
    shared_blocks=st.integers(0, 30),
    in_pairs=st.booleans(),
    contiguous=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_cpu_path_agrees_on_steps_with_shared_prefixes(
    pasts: list[int], chunks: list[int], shared_blocks: int, in_pairs: bool, contiguous: bool, seed: int
) -> None:
    rows = [(chunk, past + chunk) for past, chunk in zip(pasts, chunks, strict=False)]
    step = make_step(rows, 4, 2, 16, 16, shared_blocks=shared_blocks, peak=3.0, seed=seed)
    for row in range(1, len(rows)) if in_pairs else ():
        if row % 2:
            num_shared = min((length - chunk) // 16 for chunk, length in rows[row - 1 : row + 1])
            step.block_tables[row, :num_shared] = step.block_tables[row - 1, :num_shared]
    if contiguous:
        step = replace(step, key_cache=step.key_cache.contiguous(), value_cache=step.value_cache.contiguous())
    assert largest_difference(step.cpu(), step.reference()) < TOLERANCE[torch.float32]
