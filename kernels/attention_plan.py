"""What every attention implementation shares: a step's index tensors, and the face that layers call."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's rows, prepared once and read by every layer.

    Row r's queries are tokens [query_starts[r], query_starts[r + 1]): the last ones of its sequence, whose
    sequence_lengths[r] keys, the step's own included, lie in the pages that block_tables[r] names in order.
    A row without queries is legal and is not looked at.
    """

    block_tables: torch.Tensor  # (num_rows, max_blocks) int32; entries past a row's length are never used
    query_starts: torch.Tensor  # (num_rows + 1,) int32
    sequence_lengths: torch.Tensor  # (num_rows,) int32
    max_query_length: int  # host integers: a launch must not wait for the device
    max_sequence_length: int


class Attention(Protocol):
    """Causal attention over pages, prefill and decode rows in one call."""

    def prepare(
        self,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_lengths: torch.Tensor,
        max_query_length: int,
        max_sequence_length: int,
    ) -> AttentionPlan:
        """Called once a step; the plan holds for all layers, with and without a window."""
        ...

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """query (num_tokens, num_heads, head_size) -> the same shape and dtype, contiguous.

        Caches are (num_blocks, block_size, num_kv_heads, head_size), views of a larger pool allowed; query head h reads
        key head h // (num_heads / num_kv_heads). With a window, a query at position p sees keys (p - window, p].
        """
        ...
