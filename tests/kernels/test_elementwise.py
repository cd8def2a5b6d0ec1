"""RMS norm, rope and SiLU-and-multiply: Triton kernel and CPU path equal the truth on odd, strided and empty input."""

import math

import pytest
import torch

from kernels.activation import (
    silu_and_multiply,
    silu_and_multiply_interleaved,
    silu_and_multiply_interleaved_reference,
    silu_and_multiply_reference,
    silu_and_multiply_triton,
)
from kernels.gated_product import fill_of, interleave_gate_up
from kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)
from kernels.rope import apply_rope, apply_rope_reference, apply_rope_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One rounding of the result more or less: 2 units in the last place, relative.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    relative = RELATIVE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=relative)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (5, 896), (2, 1025), (0, 64), (4, 3, 80), (0, 3, 64)])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, weight_offset: float) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    expected = rms_norm_reference(x, weight, 1e-6, weight_offset)
    assert_close(rms_norm(x, weight, 1e-6, weight_offset), expected)
    assert_close(rms_norm_triton(x, weight, 1e-6, weight_offset), expected)


def test_rms_norm_of_a_known_row() -> None:
    x, weight = torch.tensor([[3.0, 4.0]], device=DEVICE), torch.tensor([1.0, 2.0], device=DEVICE)
    rms = math.sqrt(12.5)
    for normed in (rms_norm_reference(x, weight, 0.0), rms_norm(x, weight, 0.0), rms_norm_triton(x, weight, 0.0)):
        torch.testing.assert_close(normed, torch.tensor([[3 / rms, 8 / rms]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_rows_and_of_heads_within_a_wider_projection(dtype: torch.dtype) -> None:
    qkv = random(5, 6, 80, dtype=dtype)
    for x in (qkv[:, 2], qkv[:, 1:4], qkv.flatten(1)[:, 7:87]):
        weight = random(80, dtype=dtype, seed=1)
        expected = rms_norm_reference(x, weight, 1e-6)
        assert_close(rms_norm(x, weight, 1e-6), expected)
        assert_close(rms_norm_triton(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (5, 896), (0, 64)])
def test_add_rms_norm_returns_the_normed_sum_and_the_sum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(shape[0], shape[1] + 8, dtype=dtype, seed=1)[:, 4:-4]
    kept = x.clone(), residual.clone()
    weight = random(shape[-1], dtype=dtype, seed=2)
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-6, 1.0)
    for normed, new_residual in (
        add_rms_norm(x, residual, weight, 1e-6, 1.0),
        add_rms_norm_triton(x, residual, weight, 1e-6, 1.0),
    ):
        assert_close(normed, expected)
        if dtype == torch.bfloat16 and DEVICE.type == "cpu":
            assert_close(new_residual, total)  # the interpreter cuts bf16 off instead of rounding it
        else:
            assert torch.equal(new_residual, total)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 160), (2, 9728), (0, 64), (2, 3, 64)])
def test_silu_and_multiply(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wide = random(*shape[:-1], shape[-1] + 16, dtype=dtype) * 3
    for gate_up in (wide[..., : shape[-1]].contiguous(), wide[..., 8:-8]):
        expected = silu_and_multiply_reference(gate_up)
        assert expected.shape == (*shape[:-1], shape[-1] // 2)
        assert_close(silu_and_multiply(gate_up), expected)
        assert_close(silu_and_multiply_triton(gate_up), expected)


def test_silu_and_multiply_takes_the_first_half_as_the_gate() -> None:
    gate_up = torch.tensor([[0.0, 100.0, 7.0, 2.0]], device=DEVICE)
    for out in (silu_and_multiply(gate_up), silu_and_multiply_triton(gate_up)):
        assert out.tolist() == [[0.0, 200.0]]


def angles(num_positions: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    table = torch.arange(num_positions, device=DEVICE)[:, None] * frequencies
    return table.cos(), table.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotary_dim"),
    [(14, 2, 64, 64), (3, 1, 80, 32), (1, 1, 96, 96), (2, 2, 128, 64), (4, 1, 256, 256)],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rope_in_place_on_slices_of_a_fused_projection(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    positions = torch.tensor([0, 63, 7, 7, 1], device=DEVICE)[:num_tokens]
    cos, sin = angles(64, rotary_dim)
    expected = qkv.clone()
    expected[:, :num_heads] = apply_rope_reference(qkv[:, :num_heads], positions, cos, sin)
    expected[:, num_heads:-num_kv_heads] = apply_rope_reference(qkv[:, num_heads:-num_kv_heads], positions, cos, sin)
    for rotate in (apply_rope, apply_rope_triton):
        fused = qkv.clone()
        query, key = fused[:, :num_heads], fused[:, num_heads:-num_kv_heads]
        rotated_query, rotated_key = rotate(query, key, positions, cos, sin)
        assert_close(fused, expected)  # the values behind the keys, too, are as they were
        assert rotated_query is query
        assert rotated_key is key


def test_rope_at_position_0_changes_nothing_and_turns_the_halves_elsewhere() -> None:
    cos = torch.tensor([[1.0], [0.0]], device=DEVICE)
    sin = torch.tensor([[0.0], [1.0]], device=DEVICE)  # position 1 is a quarter turn
    for rotate in (apply_rope, apply_rope_triton):
        query = torch.tensor([[[3.0, 5.0]], [[3.0, 5.0]]], device=DEVICE)
        rotate(query, query.clone(), torch.tensor([0, 1], device=DEVICE), cos, sin)
        assert query.tolist() == [[[3.0, 5.0]], [[-5.0, 3.0]]]


def test_scores_of_rotated_heads_depend_on_the_distance_only() -> None:
    cos, sin = angles(64, 64)
    query, key = random(1, 1, 64), random(1, 1, 64, seed=1)

    def score(query_position: int, key_position: int) -> float:
        turned_query = apply_rope_reference(query, torch.tensor([query_position], device=DEVICE), cos, sin)
        turned_key = apply_rope_reference(key, torch.tensor([key_position], device=DEVICE), cos, sin)
        return float((turned_query * turned_key).sum())

    assert score(9, 4) == pytest.approx(score(60, 55), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 80), (2, 2050), (0, 64)])
def test_silu_and_multiply_of_alternating_columns(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = random(shape[0], shape[1] + 6, dtype=dtype)
    for gate_up in (random(*shape, dtype=dtype), wide[:, : shape[1]]):
        assert_close(silu_and_multiply_interleaved(gate_up), silu_and_multiply_interleaved_reference(gate_up))


def test_alternating_rows_give_the_same_as_one_half_behind_the_other() -> None:
    x, weight = random(3, 8), random(10, 8, seed=1)
    halves = silu_and_multiply_reference(x @ weight.t())
    assert_close(silu_and_multiply_interleaved_reference(x @ interleave_gate_up(weight).t()), halves)


def test_a_tile_waves_fill_counts_what_is_computed_for_nothing() -> None:
    assert fill_of(256, 192 * 66, 132) == 1.0  # two rows of 66 tiles: one wave
    assert fill_of(128, 192 * 66, 132) == 0.5
    assert fill_of(257, 192 * 66, 132) == pytest.approx(257 / 512)  # a second wave for one row
    assert fill_of(0, 192, 132) == 0.0
