"""A GPU's attention: decode rows, prefill rows and shared prefixes by different kernels are one attention.

On a CPU the kernels run under Triton's interpreter; on Hopper flash-attn is tested as well, where it is installed.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from kernels.attention import TritonPrefill
from kernels.attention_plan import AttentionRows, SharedPrefixes
from kernels.decode_attention import decode_attention_reference
from kernels.flash_attention import FlashPrefill
from kernels.gpu_attention import GpuAttention, Prefill
from tests.kernels.paged import DEVICE, TOLERANCE, Step, largest_difference, make_step

HAS_FLASH = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0) and find_spec("flash_attn")
KINDS = [(TritonPrefill, torch.float32), *([(FlashPrefill, torch.bfloat16)] if HAS_FLASH else [])]
MIXED = [(1, 1), (1, 17), (1, 16), (1, 300), (0, 0), (3, 3), (5, 20), (40, 70)]
NUM_DECODE = 4


def attend(step: Step, prefill: Prefill, num_decode: int, window: int | None = None) -> torch.Tensor:
    attention = GpuAttention(prefill, num_multiprocessors=4, device=DEVICE)
    plan = attention.prepare(
        AttentionRows(
            step.block_tables, step.query_starts, step.sequence_lengths, *step.maxima(), num_decode_rows=num_decode
        )
    )
    return attention(step.query, step.key_cache, step.value_cache, plan, step.scale, window)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("prefill", "dtype"), KINDS)
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("num_decode", [0, NUM_DECODE])
def test_decode_and_prefill_rows_in_one_call(
    prefill: type[Prefill], dtype: torch.dtype, window: int | None, num_decode: int
) -> None:
    step = make_step(MIXED, 4, 2, 64, dtype=dtype)
    out = attend(step, prefill(), num_decode, window)
    assert largest_difference(out, step.reference(window)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("prefill", "dtype"), KINDS)
def test_decode_rows_alone_and_prefill_rows_alone(prefill: type[Prefill], dtype: torch.dtype) -> None:
    for rows, num_decode in (([(1, 5), (1, 33)], 2), ([(3, 5), (33, 33)], 0)):
        step = make_step(rows, 4, 2, 64, dtype=dtype)
        assert largest_difference(attend(step, prefill(), num_decode), step.reference()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("prefill", "dtype"), KINDS)
def test_places_of_decode_rows_that_are_padding_are_prefill_rows_places_too(
    prefill: type[Prefill], dtype: torch.dtype
) -> None:
    """As a captured mixed step has it: seven places for decode rows, two in use, the rest under the prompts' tokens."""
    step = make_step([(1, 40), (1, 17), (9, 30), (4, 4)], 4, 2, 64, dtype=dtype)
    columns = step.block_tables.shape[1]
    tables = torch.cat((step.block_tables[:2], step.block_tables.new_zeros(5, columns), step.block_tables[2:],
                        step.block_tables.new_zeros(2, columns)))  # fmt: skip
    graphed = replace(
        step,
        block_tables=tables,
        sequence_lengths=int32([40, 17, 0, 0, 0, 0, 0, 30, 4, 0, 0]),
        query_starts=int32([0, 0, 0, 0, 0, 0, 0, 2, 11, 15, 15, 15]),
    )
    attention = GpuAttention(prefill(), num_multiprocessors=4, device=DEVICE)
    plan = attention.prepare(
        AttentionRows(graphed.block_tables, graphed.query_starts, graphed.sequence_lengths, 9, 40, num_decode_rows=7)
    )
    out = attention(step.query, step.key_cache, step.value_cache, plan, step.scale)
    assert largest_difference(out, step.reference()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("prefill", "dtype"), KINDS)
@pytest.mark.parametrize("window", [None, 13])
def test_prefixes_of_two_groups_are_read_once_and_rows_without_one_are_as_before(
    prefill: type[Prefill], dtype: torch.dtype, window: int | None
) -> None:
    step = make_step([(1, 70), (1, 65), (1, 97), (1, 50), (1, 9), (3, 5)], 4, 2, 64, dtype=dtype, shared_blocks=4)
    tables = step.block_tables.clone()
    tables[3, :2] = tables[2, 4:6]  # of a prefix of its own, which the next row begins with as well
    tables[2, :2] = tables[3, :2]
    step = replace(step, block_tables=tables)
    private = torch.zeros_like(tables[:5])
    private[:2, :-4], private[2:4, :-2], private[4] = tables[:2, 4:], tables[2:4, 2:], tables[4]
    groups = torch.zeros(3, tables.shape[1], dtype=torch.int32, device=DEVICE)
    groups[0, :4], groups[1, :2] = tables[0, :4], tables[2, :2]
    shared = SharedPrefixes(
        groups, int32([64, 32, 0]), int32([0, 2, 4, 4]), int32([4]), private, int32([6, 1, 65, 18, 9])
    )
    attention = GpuAttention(prefill(), num_multiprocessors=4, device=DEVICE)
    plan = attention.prepare(AttentionRows(tables, step.query_starts, step.sequence_lengths, *step.maxima(), 5, shared))
    out = attention(step.query, step.key_cache, step.value_cache, plan, step.scale, window)
    assert largest_difference(out, step.reference(window)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("prefill", "dtype"), KINDS)
def test_every_query_sees_all_keys_of_its_row_and_their_log_sum_exp_is_the_truths(
    prefill: type[Prefill], dtype: torch.dtype
) -> None:
    """A query that sees all keys is a decode row's: the truth is decode attention's, row by row."""
    counts, lengths = [3, 0, 70, 1], [16, 0, 90, 200]
    step = make_step([(max(count, 1), max(length, 1)) for count, length in zip(counts, lengths, strict=True)], 4, 2, 64,
                     dtype=dtype)  # fmt: skip
    query = step.query[: sum(counts)]
    step = replace(step, query=query, query_starts=int32([0, 3, 3, 73, 74]), sequence_lengths=int32(lengths))
    attention = GpuAttention(prefill(), num_multiprocessors=4, device=DEVICE)
    plan = attention.prepare(AttentionRows(step.block_tables, step.query_starts, step.sequence_lengths, 70, 200))
    assert plan.prefill is not None
    out, lse = prefill().attend_to_all(step.query, step.key_cache, step.value_cache, plan.prefill, step.scale)
    rows = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)], device=DEVICE)
    true_out, true_lse = decode_attention_reference(
        query, step.key_cache, step.value_cache, step.block_tables[rows], step.sequence_lengths[rows], step.scale
    )
    assert largest_difference(out, true_out) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, true_lse, rtol=1e-5, atol=1e-3 if dtype == torch.bfloat16 else 1e-5)


def test_tokens_before_the_first_row_are_left_as_they_are() -> None:
    step = make_step([(1, 5), (1, 6), (1, 7), (9, 20), (2, 2)], 4, 2, 16)
    out = torch.full_like(step.query, 7.0, memory_format=torch.contiguous_format)
    plan = GpuAttention(TritonPrefill(), 4, DEVICE).prepare(
        AttentionRows(step.block_tables, step.query_starts, step.sequence_lengths, *step.maxima(), num_decode_rows=3)
    )
    assert plan.prefill is not None
    TritonPrefill().attend(step.query, step.key_cache, step.value_cache, plan.prefill, out, step.scale, None)
    assert bool((out[:3] == 7.0).all())
    assert largest_difference(out[3:], step.reference()[3:]) < TOLERANCE[torch.float32]
