"""Attention over a prefix and over the rest, merged, is attention over both."""

import torch

from kernels.attention_merge import merge_attention_, merge_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """query (rows, heads, size), key and value (keys, heads, size) -> (rows, heads, size), lse (rows, heads)."""
    scores = torch.einsum("rhd,khd->rhk", query, key)
    return torch.einsum("rhk,khd->rhd", scores.softmax(-1), value).contiguous(), scores.logsumexp(-1)


def test_the_merged_halves_equal_the_whole_and_rows_without_a_prefix_stay() -> None:
    torch.manual_seed(0)
    rows, heads, size, num_shared = 6, 3, 24, 4
    query = torch.randn(rows, heads, size, device=DEVICE)
    key, value = torch.randn(2, 11, heads, size, device=DEVICE) * 2
    shared, shared_lse = attend(query, key[:7], value[:7])
    private, private_lse = attend(query, key[7:], value[7:])
    whole, _ = attend(query, key, value)
    shared[num_shared:] = float("nan")  # rows without a shared half must not read it
    shared_lse[num_shared:] = float("nan")
    reference = merge_attention_reference(shared, shared_lse, private, private_lse, num_shared)
    torch.testing.assert_close(reference[:num_shared], whole[:num_shared], rtol=1e-5, atol=1e-5)
    assert torch.equal(reference[num_shared:], private[num_shared:])
    merged = private.clone()
    lse_by_head = shared_lse.t().contiguous().t()  # heads outermost in memory, as varlen attention returns it
    merge_attention_(
        shared, lse_by_head, merged, private_lse, torch.tensor([num_shared], dtype=torch.int32, device=DEVICE)
    )
    torch.testing.assert_close(merged, reference, rtol=1e-5, atol=1e-6)


def test_a_half_that_outweighs_the_other_wholly_is_the_answer_without_overflow() -> None:
    shared = torch.ones(1, 1, 16, device=DEVICE)
    private = torch.zeros(1, 1, 16, device=DEVICE)
    for lse, expected in ((1e4, 1.0), (-1e4, 0.0)):
        merged = private.clone()
        merge_attention_(
            shared, torch.full((1, 1), lse, device=DEVICE), merged, torch.zeros(1, 1, device=DEVICE),
            torch.ones(1, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        assert (merged == expected).all()
