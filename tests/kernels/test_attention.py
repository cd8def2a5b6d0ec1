"""Paged attention: the Triton kernel and the CPU path equal the truth, and the truth notices what would be wrong.

The Triton kernel runs on a CUDA device where there is one, and under Triton's interpreter elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.attention import select_attention
from kernels.attention_plan import AttentionRows
from kernels.cpu_attention import CpuAttention
from kernels.cpu_attention_plan import MAX_SCORES, MIN_TOKENS_SAVED, Batches, group_by_prefix
from kernels.gpu_attention import GpuAttention
from tests.kernels.paged import DEVICE, TOLERANCE, Step, largest_difference, make_step

MIXED = [(1, 1), (1, 17), (3, 3), (0, 0), (5, 20), (1, 16), (4, 33), (1, 40)]
# The interpreter multiplies the bits of bf16 tiles as integers (triton 3.6): there float16 stands for both.
TRITON_DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


def batches_of(step: Step) -> Batches:
    return step.cpu_plan().batches_for(16, 14, 2, step.query.dtype, None)


def assert_both_paths_equal_the_truth(step: Step, sliding_window: int | None = None) -> None:
    truth = step.reference(sliding_window)
    tolerance = TOLERANCE[step.query.dtype]
    assert largest_difference(step.cpu(sliding_window), truth) < tolerance
    if step.query.dtype in TRITON_DTYPES:
        assert largest_difference(step.triton(sliding_window), truth) < tolerance


def test_the_truth_is_torchs_own_attention_on_one_whole_prompt() -> None:
    step = make_step([(20, 20)], num_heads=4, num_kv_heads=4)
    pages = step.block_tables[0].long()
    keys, values = (cache[pages].flatten(0, 1)[:20] for cache in (step.key_cache, step.value_cache))
    expected = torch.nn.functional.scaled_dot_product_attention(
        step.query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True
    )
    assert largest_difference(step.reference(), expected.transpose(0, 1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_prefill_decode_and_empty_rows_in_one_call(dtype: torch.dtype) -> None:
    assert_both_paths_equal_the_truth(make_step(MIXED, dtype=dtype))


def test_contiguous_pages_as_a_layer_of_the_pool_has_them() -> None:
    step = make_step(MIXED)
    pool = torch.stack((step.key_cache, step.value_cache))
    assert_both_paths_equal_the_truth(replace(step, key_cache=pool[0], value_cache=pool[1]))
    by_head = pool.transpose(2, 3).contiguous().transpose(2, 3)  # on a CPU
    assert_both_paths_equal_the_truth(replace(step, key_cache=by_head[0], value_cache=by_head[1]))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(head_size: int) -> None:
    assert_both_paths_equal_the_truth(make_step([(1, 18), (3, 19)], 2, 1, head_size))


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_per_key_head(group: int) -> None:
    assert_both_paths_equal_the_truth(make_step([(1, 18), (7, 19)], 2 * group, 2))


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_a_block(block_size: int, offset: int) -> None:
    length = block_size + offset
    assert_both_paths_equal_the_truth(make_step([(1, length), (length, length), (2, length)], block_size=block_size))


@pytest.mark.parametrize("rows", [[], [(0, 0)], [(0, 0), (1, 1), (0, 0)], [(1, 1)]])
def test_steps_of_next_to_nothing(rows: list[tuple[int, int]]) -> None:
    assert_both_paths_equal_the_truth(make_step(rows))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 1000])
def test_sliding_window(window: int) -> None:
    assert_both_paths_equal_the_truth(make_step(MIXED, shared_blocks=1), sliding_window=window)


def test_a_window_of_one_sees_only_the_token_itself() -> None:
    step = make_step([(1, 20)], num_heads=2, num_kv_heads=2)
    own_value = step.value_cache[int(step.block_tables[0, 1]), 3]
    for out in (step.reference(1), step.cpu(1), step.triton(1)):
        torch.testing.assert_close(out[0], own_value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_shared_by_decodes_and_chunks_is_attended_once_and_equals_the_truth(dtype: torch.dtype) -> None:
    rows = [(1, 190 + 3 * i) for i in range(10)] + [(0, 0), (30, 190), (25, 160), (1, 20), (1, 300), (12, 192)]
    step = make_step(rows, 14, 2, 64, dtype=dtype, shared_blocks=10)
    assert largest_difference(step.cpu(), step.reference()) < TOLERANCE[dtype]
    batches = batches_of(step)
    # The rows of 190 to 217 and 300 tokens share 10 blocks; that of 20 has only one.
    assert [(batch.num_rows, batch.num_shared) for batch in batches.decodes] == [(11, 160), (1, 0)]
    assert [tile.tokens for row in batches.prefills for tile in row.tiles] == [
        slice(10, 40), slice(40, 65), slice(67, 79),
    ]  # fmt: skip


def test_chunked_prefill_equals_whole_prefill() -> None:
    whole = make_step([(45, 45)])
    for out_of in (Step.reference, Step.cpu, Step.triton):
        expected = out_of(whole)
        for first, last in ((0, 1), (1, 16), (16, 17), (17, 40), (40, 45)):
            chunk = replace(
                whole,
                query=whole.query[first:last],
                query_starts=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
                sequence_lengths=torch.tensor([last], dtype=torch.int32, device=DEVICE),
            )
            assert largest_difference(out_of(chunk), expected[first:last]) < 2e-6


def test_a_row_gets_the_same_answer_alone_and_among_others() -> None:
    step = make_step([(1, 200 + i) for i in range(9)] + [(17, 230)], shared_blocks=9)
    together = step.cpu()
    for row in range(10):
        first, last = step.query_starts[row : row + 2].tolist()
        alone = replace(
            step,
            query=step.query[first:last],
            block_tables=step.block_tables[row : row + 1],
            query_starts=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            sequence_lengths=step.sequence_lengths[row : row + 1],
        )
        assert largest_difference(alone.cpu(), together[first:last]) < 2e-6


@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_stale_numbers_behind_a_sequences_end_change_nothing(path: str) -> None:
    step = make_step([(1, 18), (1, 5), (3, 20)])
    expected = step.reference()
    # A CPU reads whole blocks: pages are finite in the engine (engine.kv_cache), whoever had them before.
    stale = 1e4 if path == "cpu" else float("nan")
    for row, length in enumerate((18, 5, 20)):
        last_page = int(step.block_tables[row, (length - 1) // 16])
        step.key_cache[last_page, length % 16 or 16 :] = stale
        step.value_cache[last_page, length % 16 or 16 :] = stale
    assert largest_difference(step.paths()[path], expected) < TOLERANCE[torch.float32]


def test_numbers_before_a_window_change_nothing() -> None:
    step = make_step([(1, 40), (3, 40)])
    expected = step.reference(7)
    for row, first_seen in enumerate((33, 31)):
        page = int(step.block_tables[row, first_seen // 16])
        step.key_cache[page, : first_seen % 16] = step.value_cache[page, : first_seen % 16] = 10.0
    assert largest_difference(step.cpu(7), expected) < TOLERANCE[torch.float32]


# What must not pass: with peaked attention one wrong key among many shows.


def wrong_block(step: Step) -> Step:
    tables = step.block_tables.clone()
    tables[0, 1] = (set(range(step.key_cache.shape[0])) - set(tables[0].tolist())).pop()
    return replace(step, block_tables=tables)


def position_off_by_one(step: Step) -> Step:
    return replace(step, key_cache=step.key_cache.roll(1, dims=1))


def last_key_dropped(step: Step) -> Step:
    return replace(step, sequence_lengths=step.sequence_lengths - 1)


def wrong_scale(step: Step) -> Step:
    return replace(step, scale=step.scale * 1.05)


@pytest.mark.parametrize("mutate", [wrong_block, position_off_by_one, last_key_dropped, wrong_scale])
@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_a_mutation_is_seen(mutate: Callable[[Step], Step], path: str) -> None:
    step = make_step([(16, 64)], peak=8.0)
    assert largest_difference(step.paths()[path], step.reference()) < 2e-5
    assert largest_difference(mutate(step).paths()[path], step.reference()) > 1e-2


ENOUGH = MIN_TOKENS_SAVED  # tokens; blocks of one token make the arithmetic plain
TEMPLATE = tuple(range(ENOUGH))


def groups_of(rows: list[tuple[int, ...]]) -> list[tuple[list[int], int]]:
    return [(sorted(members), shared) for members, shared in group_by_prefix(rows, 1)]


def test_groups_are_the_prefixes_that_save_the_most_keys() -> None:
    # Two rows share everything, a third only the template, a fourth nothing.
    pair = TEMPLATE + tuple(range(10_000, 10_000 + 2 * ENOUGH))
    rows = [pair, (99_999,), pair, TEMPLATE]
    assert groups_of(rows) == [([0, 2], 3 * ENOUGH)]  # saves 3 templates; all three as one group, 2
    rows += [TEMPLATE, TEMPLATE]
    assert groups_of(rows) == [([0, 2, 3, 4, 5], ENOUGH)]  # now the template saves 4 times itself
    assert groups_of([TEMPLATE[:-1], TEMPLATE[:-1]]) == []
    assert groups_of([]) == groups_of([()]) == groups_of([(), ()]) == []


def test_two_templates_are_two_groups() -> None:
    other = tuple(range(5_000, 5_000 + ENOUGH))
    assert groups_of([other, TEMPLATE, other, TEMPLATE]) == [([1, 3], ENOUGH), ([0, 2], ENOUGH)]


def test_small_groups_count_together() -> None:
    documents = [tuple(range(10_000 * i, 10_000 * i + ENOUGH // 2)) for i in range(1, 4)]
    pairs = [documents[0], documents[1], documents[0], documents[1]]
    assert groups_of(pairs) == [([0, 2], ENOUGH // 2), ([1, 3], ENOUGH // 2)]
    assert groups_of([documents[0], documents[0], documents[1]]) == []  # one alone saves too little


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_questions_on_one_document_read_it_once_each(dtype: torch.dtype) -> None:
    step = make_step([(1, 300 + 2 * i) for i in range(12)], 14, 2, 64, dtype=dtype)
    for first in range(0, 12, 2):  # rows 0 and 6, 1 and 7, ...: not neighbours
        step.block_tables[first // 2 + 6, : 18 - first] = step.block_tables[first // 2, : 18 - first]
    assert largest_difference(step.cpu(), step.reference()) < TOLERANCE[dtype]
    [batch] = batches_of(step).decodes
    # Shared blocks are 18, 16, ..., 8; own keys 16 to 300 + 22 - 128.
    assert (batch.num_rows, batch.members, batch.num_shared) == (12, 2, 288)
    assert batch.mask is not None


@pytest.mark.parametrize("rows", [[(1, 200 + i) for i in range(9)], [(1, 200), (1, 130)], [(40, 200)]])
def test_what_all_keys_have_in_common_costs_bf16_nothing(rows: list[tuple[int, int]]) -> None:
    step = make_step(rows, 14, 2, 64, dtype=torch.bfloat16, shared_blocks=9).on_cpu()
    step.key_cache.add_(torch.linspace(-60, 60, 64).bfloat16())  # as a key bias does: scores of a thousand
    assert largest_difference(step.cpu(), step.reference()) < TOLERANCE[torch.bfloat16]


def test_a_long_context_is_cut_into_batches_of_bounded_scores() -> None:
    step = make_step([(40, 6000), *((1, 3000 + i) for i in range(30))], 14, 2, 64, shared_blocks=180)
    batches = batches_of(step)
    assert [len(row.tiles) for row in batches.prefills] == [3]  # 16 queries at least
    assert [batch.num_rows for batch in batches.decodes] == [24, 6]
    assert all(14 * b.num_rows * (b.num_shared + b.num_own) <= MAX_SCORES for b in batches.decodes)
    assert largest_difference(step.cpu(), step.reference()) < TOLERANCE[torch.float32]


def test_a_plan_and_its_memory_serve_inside_and_outside_inference_mode() -> None:
    step = make_step(MIXED).on_cpu()
    keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (step.key_cache, step.value_cache))
    step = replace(step, key_cache=keys, value_cache=values)
    attention = CpuAttention()
    outs = []
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            plan = step.cpu_plan()
            outs.append(attention(step.query, step.key_cache, step.value_cache, plan, step.scale))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_plan_is_made_once_for_all_layers() -> None:
    plan = make_step(MIXED).cpu_plan()
    batches = plan.batches_for(16, 4, 2, torch.float32, None)
    assert plan.batches_for(16, 4, 2, torch.float32, None) is batches
    assert plan.batches_for(16, 4, 2, torch.float32, 1000) is batches  # hides nothing
    assert plan.batches_for(16, 4, 2, torch.float32, 5) is not batches


def test_the_device_chooses_the_implementation() -> None:
    step = make_step(MIXED)
    attention = select_attention(DEVICE, torch.float32, 16)
    assert isinstance(attention, GpuAttention if DEVICE.type == "cuda" else CpuAttention)
    plan = attention.prepare(AttentionRows(step.block_tables, step.query_starts, step.sequence_lengths, *step.maxima()))
    out = attention(step.query, step.key_cache, step.value_cache, plan, step.scale)
    assert largest_difference(out, step.reference()) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs 9 GiB of a CUDA device")
def test_pages_beyond_2_to_the_31_elements_are_found() -> None:
    num_blocks, block_size, num_kv_heads, head_size = 1100, 256, 64, 128
    assert (num_blocks - 1) * block_size * num_kv_heads * head_size > 2**31
    pool = torch.zeros(num_blocks, block_size, num_kv_heads, head_size, dtype=torch.float16, device=DEVICE)
    step = make_step([(1, 200), (5, 256)], 64, 64, head_size, block_size, torch.float16)
    for row in range(2):
        page = int(step.block_tables[row, 0])
        pool[num_blocks - 1 - row] = step.key_cache[page]
    values = torch.zeros_like(pool)
    for row in range(2):
        values[num_blocks - 1 - row] = step.value_cache[int(step.block_tables[row, 0])]
    far = torch.tensor([[num_blocks - 1], [num_blocks - 2]], dtype=torch.int32, device=DEVICE)
    moved = replace(step, key_cache=pool, value_cache=values, block_tables=far)
    assert largest_difference(moved.triton(), step.reference()) < TOLERANCE[torch.float16]
