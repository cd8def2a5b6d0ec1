"""A step's tensors: what the decoder reads besides its weights and the KV cache."""

from dataclasses import dataclass

import torch

from kernels.attention_plan import SharedPrefixes


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One row per scheduled request, rows' tokens one after the other.

    All index tensors live on the model's device. Row r's tokens are [query_starts[r], query_starts[r + 1]); it
    attends to positions [0, sequence_lengths[r]) of its own, its queries being the last of these.
    """

    token_ids: torch.Tensor  # (num_tokens,) int64
    positions: torch.Tensor  # (num_tokens,) int64
    slot_mapping: torch.Tensor  # (num_tokens,) int64: block_id * block_size + offset, where keys and values go
    block_tables: torch.Tensor  # (num_rows, max_blocks) int32; entries past a row's length are 0 and never used
    query_starts: torch.Tensor  # (num_rows + 1,) int32
    sequence_lengths: torch.Tensor  # (num_rows,) int32, the step's tokens included
    logits_indices: (
        torch.Tensor | None
    )  # (num_sampling_rows,) into tokens: the rows' last tokens that sample; None: all
    max_query_length: int  # host integers: the kernels' launch sizes must not wait for the device
    max_sequence_length: int
    num_decode_rows: int = 0  # the first rows, known to have one query each
    shared: SharedPrefixes | None = None  # which of these begin alike, where that is worth knowing
