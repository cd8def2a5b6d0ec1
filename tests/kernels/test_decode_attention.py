"""Decode attention equals its truth at every split and layout, and the truth notices what would be wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.attention_merge import merge_attention_reference
from kernels.decode_attention import DecodeLaunch, decode_attention, decode_attention_reference, plan_decode
from tests.kernels.paged import DEVICE, TOLERANCE, Step, largest_difference, make_step

# The interpreter multiplies the bits of bf16 tiles as integers (triton 3.6): there float16 stands for both.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
WHOLE = DecodeLaunch(num_splits=1, min_split_tiles=1, tile_keys=16, heads_per_program=1, num_warps=4, num_stages=3)
SPLIT = DecodeLaunch(num_splits=4, min_split_tiles=2, tile_keys=16, heads_per_program=2, num_warps=4, num_stages=3)
LENGTHS = [0, 1, 15, 16, 17, 31, 33, 64, 65, 130, 300]


def rows_of(lengths: list[int]) -> list[tuple[int, int]]:
    """A page for a row of length 0 too; its length is set to 0 afterwards."""
    return [(1, max(length, 1)) for length in lengths]


def step_of(
    lengths: list[int], num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 16, **options: object
) -> Step:
    step = make_step(rows_of(lengths), num_heads, num_kv_heads, head_size, **options)  # type: ignore[arg-type]
    return replace(step, sequence_lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


def attend(
    step: Step, launch: DecodeLaunch, window: int | None = None, arrivals: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(step.query.shape, float("nan"), dtype=step.query.dtype, device=DEVICE)
    lse = decode_attention(
        step.query, step.key_cache, step.value_cache, step.block_tables, step.sequence_lengths, step.scale, launch,
        out, no_arrivals() if arrivals is None else arrivals, window,
    )  # fmt: skip
    return out, lse


def no_arrivals(count: int = 10_000) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


def truth(step: Step, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_attention_reference(
        step.query, step.key_cache, step.value_cache, step.block_tables, step.sequence_lengths, step.scale, window
    )


def assert_equals_the_truth(step: Step, launch: DecodeLaunch, window: int | None = None) -> None:
    arrivals = no_arrivals()
    out, lse = attend(step, launch, window, arrivals)
    assert not arrivals.any(), "the next launch would count on"
    true_out, true_lse = truth(step, window)
    assert largest_difference(out, true_out) < TOLERANCE[step.query.dtype]
    torch.testing.assert_close(lse, true_lse, rtol=1e-5, atol=1e-4)


def test_the_truth_is_paged_attentions_and_its_lse_merges_two_halves_into_the_whole() -> None:
    step = step_of([40, 300, 64])
    out, _ = truth(step)
    assert largest_difference(out, step.reference()) < 1e-6
    first = replace(step, sequence_lengths=torch.full((3,), 32, dtype=torch.int32, device=DEVICE))
    rest = replace(step, block_tables=step.block_tables[:, 2:], sequence_lengths=step.sequence_lengths - 32)
    for halves in ((truth(first), truth(rest)), (attend(first, WHOLE), attend(rest, SPLIT))):
        (prefix, prefix_lse), (private, private_lse) = halves
        merged = merge_attention_reference(prefix, prefix_lse, private, private_lse, 3)
        assert largest_difference(merged, out) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_lengths_around_a_block_and_long_ones(launch: DecodeLaunch, dtype: torch.dtype) -> None:
    assert_equals_the_truth(step_of(LENGTHS, dtype=dtype), launch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    step = step_of([18, 0, 70], 4, 2, head_size, dtype=dtype)
    assert_equals_the_truth(step, WHOLE)
    assert_equals_the_truth(step, replace(SPLIT, num_stages=2))


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_per_key_head(group: int) -> None:
    for launch in (WHOLE, SPLIT, replace(SPLIT, heads_per_program=4)):
        assert_equals_the_truth(step_of([18, 0, 70], 4 * group, 4), launch)


def test_few_rows_are_split_to_fill_the_chip_and_of_many_only_long_ones() -> None:
    def parts(num_rows: int, length: int) -> int:
        launch = plan_decode(num_rows, 28, 4, 132)
        num_tiles = -(-length // launch.tile_keys)
        return -(-num_tiles // max(-(-num_tiles // launch.num_splits), launch.min_split_tiles))

    shapes = (
        (1, 100), (1, 8192), (8, 8192), (64, 8192), (128, 8192), (128, 512), (256, 2048), (1024, 1024), (1024, 4096),
    )  # fmt: skip
    assert [parts(*shape) for shape in shapes] == [1, 64, 32, 4, 8, 1, 4, 1, 4]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (14, 2), (12, 12), (16, 1), (32, 2), (9, 3)])
@pytest.mark.parametrize("num_multiprocessors", [1, 132])
def test_the_planned_launch(num_heads: int, num_kv_heads: int, num_multiprocessors: int) -> None:
    launch = plan_decode(5, num_heads, num_kv_heads, num_multiprocessors)
    assert_equals_the_truth(step_of([0, 1, 32, 33, 300], num_heads, num_kv_heads), launch)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("min_split_tiles", [1, 3])
def test_splits(num_splits: int, min_split_tiles: int) -> None:
    assert_equals_the_truth(step_of(LENGTHS), replace(SPLIT, num_splits=num_splits, min_split_tiles=min_split_tiles))


def test_parts_are_merged_alike_by_the_last_program_and_by_a_kernel_of_their_own() -> None:
    step = step_of(LENGTHS)
    for first, second in zip(attend(step, SPLIT), attend(step, SPLIT, arrivals=no_arrivals(0)), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("tile_keys", [16, 32, 64])
def test_tiles_smaller_and_larger_than_a_block(tile_keys: int, block_size: int) -> None:
    for launch in (WHOLE, SPLIT):
        assert_equals_the_truth(step_of(LENGTHS, block_size=block_size), replace(launch, tile_keys=tile_keys))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_sliding_window(launch: DecodeLaunch, window: int) -> None:
    assert_equals_the_truth(step_of(LENGTHS), launch, window)


@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_a_row_of_length_0_is_zeros_and_minus_infinity_over_whatever_its_table_names(launch: DecodeLaunch) -> None:
    step = step_of([0, 40])
    step.key_cache[int(step.block_tables[0, 0])] = float("nan")
    step.value_cache[int(step.block_tables[0, 0])] = float("nan")
    out, lse = attend(step, launch)
    assert not out[0].any()
    assert lse[0].tolist() == [float("-inf")] * 4
    assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_no_rows_are_no_work(launch: DecodeLaunch) -> None:
    step = step_of([3])
    nothing = replace(
        step, query=step.query[:0], block_tables=step.block_tables[:0], sequence_lengths=step.sequence_lengths[:0]
    )
    out, lse = attend(nothing, launch)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_stale_numbers_behind_a_sequences_end_and_before_its_window_change_nothing(launch: DecodeLaunch) -> None:
    step = step_of([18, 5, 100])
    for window in (None, 3):
        expected, _ = truth(step, window)
        for row, length in enumerate((18, 5, 100)):
            last_page = int(step.block_tables[row, (length - 1) // 16])
            for cache in (step.key_cache, step.value_cache):
                cache[last_page, length % 16 or 16 :] = float("nan")
                if window is not None:
                    cache[int(step.block_tables[row, 0]), : min(length - window, 16)] = float("nan")
        assert largest_difference(attend(step, launch, window)[0], expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_graph_follows_lengths_and_tables_that_change_under_it() -> None:
    step = step_of(LENGTHS, 28, 4, 128, dtype=torch.bfloat16)
    attend(step, SPLIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(step, SPLIT)
    step.sequence_lengths.copy_(torch.tensor([1, 0, 2, *LENGTHS[3:]], device=DEVICE).flip(0))
    step.block_tables.copy_(step.block_tables[-1:].expand(len(LENGTHS), -1).clone())
    graph.replay()
    true_out, true_lse = truth(step)
    assert largest_difference(out, true_out) < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse, true_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs 9 GiB of a CUDA device")
def test_pages_beyond_2_to_the_31_elements_are_read() -> None:
    caches = torch.zeros(2, 270_000, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    caches[:, -3:] = torch.randn(2, 3, 16, 4, 128, device=DEVICE).bfloat16()
    query = torch.randn(1, 28, 128, device=DEVICE).bfloat16()
    table = torch.tensor([[269_999, 269_997, 269_998]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([45], dtype=torch.int32, device=DEVICE)
    step = Step(query, caches[0], caches[1], table, lengths, lengths, 128**-0.5)
    assert_equals_the_truth(step, replace(SPLIT, heads_per_program=4))


# What must not pass: with peaked attention one wrong key among many shows.


def wrong_block(step: Step) -> Step:
    tables = step.block_tables.clone()
    tables[0, 1] = (set(range(step.key_cache.shape[0])) - set(tables[0].tolist())).pop()
    return replace(step, block_tables=tables)


def position_off_by_one(step: Step) -> Step:
    return replace(step, key_cache=step.key_cache.roll(1, dims=1))


def heads_swapped(step: Step) -> Step:
    return replace(step, key_cache=step.key_cache.flip(2), value_cache=step.value_cache.flip(2))


def last_key_dropped(step: Step) -> Step:
    return replace(step, sequence_lengths=step.sequence_lengths - 1)


def wrong_scale(step: Step) -> Step:
    return replace(step, scale=step.scale * 1.05)


@pytest.mark.parametrize("mutate", [wrong_block, position_off_by_one, heads_swapped, last_key_dropped, wrong_scale])
@pytest.mark.parametrize("launch", [WHOLE, SPLIT])
def test_a_mutation_is_seen(mutate: Callable[[Step], Step], launch: DecodeLaunch) -> None:
    step = step_of([64] * 16, 8, 2, peak=8.0)
    # Every row's last key is the one its first query looks at.
    for row in range(16):
        last_page = int(step.block_tables[row, 3])
        step.key_cache[last_page, 15] = step.query[row, ::4] / 2
    true_out, true_lse = truth(step)
    out, lse = attend(step, launch)
    assert largest_difference(out, true_out) < 2e-5
    torch.testing.assert_close(lse, true_lse, rtol=1e-5, atol=1e-4)
    wrong_out, wrong_lse = attend(mutate(step), launch)
    assert largest_difference(wrong_out, true_out) > 1e-2
    if mutate is not position_off_by_one:  # which permutes a page's keys: their sum is the same
        assert largest_difference(wrong_lse, true_lse) > 1e-2
