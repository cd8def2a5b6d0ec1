"""Two attentions over disjoint keys, merged by their log-sum-exp into the attention over both.

The way a shared prefix is read once: all its readers' queries attend to it as one product, each attends to its private
keys alone, and this merges the halves (the arithmetic is flash-decoding's: each half weighs exp(its lse)).
"""

import torch
import triton
import triton.language as tl


def merge_attention_reference(
    shared: torch.Tensor, shared_lse: torch.Tensor, private: torch.Tensor, private_lse: torch.Tensor, num_shared: int
) -> torch.Tensor:
    """shared, private (num_rows, num_heads, head_size); lse (num_rows, num_heads) float32, natural logarithm.

    Only the first `num_shared` rows have a shared half; of the others `shared` and `shared_lse` are not read.
    """
    out = private.clone()
    first, first_lse = shared[:num_shared].float(), shared_lse[:num_shared]
    second, second_lse = private[:num_shared].float(), private_lse[:num_shared]
    weight = torch.sigmoid(first_lse - second_lse)[..., None]
    out[:num_shared] = (first * weight + second * (1 - weight)).to(private.dtype)
    return out


@triton.jit
def _merge_attention_kernel(
    shared_ptr, shared_lse_ptr, private_ptr, private_lse_ptr, num_shared_ptr,
    shared_lse_row, shared_lse_head, private_lse_row, private_lse_head,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(num_shared_ptr):
        heads = tl.arange(0, HEADS_BLOCK)
        sizes = tl.arange(0, SIZE_BLOCK)
        head_mask = heads < NUM_HEADS
        mask = head_mask[:, None] & (sizes < HEAD_SIZE)[None, :]
        offsets = row * (NUM_HEADS * HEAD_SIZE) + heads[:, None] * HEAD_SIZE + sizes[None, :]
        first_lse = tl.load(shared_lse_ptr + row * shared_lse_row + heads * shared_lse_head, mask=head_mask, other=0.0)
        second_lse = tl.load(
            private_lse_ptr + row * private_lse_row + heads * private_lse_head, mask=head_mask, other=0.0
        )
        weight = tl.sigmoid(first_lse - second_lse)[:, None]
        first = tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(private_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        merged = first * weight + second * (1.0 - weight)
        tl.store(private_ptr + offsets, merged.to(private_ptr.dtype.element_ty), mask=mask)


def merge_attention_(
    shared: torch.Tensor,
    shared_lse: torch.Tensor,
    private: torch.Tensor,
    private_lse: torch.Tensor,
    num_shared: torch.Tensor,
) -> None:
    """Merges into `private`, in place; as `merge_attention_reference`, but num_shared is an int32 tensor (1,) on the
    device, so that a captured graph can change it. One program a row."""
    num_rows, num_heads, head_size = private.shape
    assert shared.is_contiguous(), "the shared half must be contiguous"
    assert private.is_contiguous(), "the private half must be contiguous"
    if num_rows:
        _merge_attention_kernel[(num_rows,)](
            shared, shared_lse, private, private_lse, num_shared,
            shared_lse.stride(0), shared_lse.stride(1), private_lse.stride(0), private_lse.stride(1),
            NUM_HEADS=num_heads, HEAD_SIZE=head_size,
            HEADS_BLOCK=triton.next_power_of_2(num_heads), SIZE_BLOCK=triton.next_power_of_2(head_size),
        )  # fmt: skip
