"""Words are read where every tensor can be, and a copy of them is a copy of the numbers."""

import pytest
import torch

from kernels.cpu_words import as_words

BF16 = torch.arange(48, dtype=torch.bfloat16).view(4, 12)


@pytest.mark.parametrize(
    ("x", "shape"),
    [(BF16, (4, 3)), (BF16[1:3], (2, 3)), (BF16[:, 4:], (4, 2)), (BF16.float(), (4, 6)), (BF16.double(), (4, 12))],
)
def test_the_last_dimension_becomes_words(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    target = torch.zeros_like(x)
    words, source = as_words(target, x)
    assert words.dtype == source.dtype == torch.int64
    assert words.shape == source.shape == shape
    words.copy_(source)
    assert torch.equal(target, x)


@pytest.mark.parametrize(
    "x",
    [BF16[:, 2:10], BF16[:, :10], BF16.T, BF16[:, :6].contiguous(), BF16.flatten()[1:].unfold(0, 4, 5)],
    ids=["offset", "width", "transposed", "stride", "rows"],
)
def test_what_cannot_be_read_in_words_stays_as_it_is(x: torch.Tensor) -> None:
    left, right = as_words(BF16, x)
    assert left is BF16
    assert right is x
