"""What every attention implementation shares: a step's index tensors, and the face that layers call."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode rows whose block tables begin alike; group g is rows [query_starts[g], query_starts[g + 1]).

    Unused entries are empty: no rows, length 0. Rows from num_rows[0] on belong to no group. The private tables and
    lengths are of what lies behind the prefix, for every decode row.
    """

    block_tables: torch.Tensor  # (num_groups, max_blocks) int32
    lengths: torch.Tensor  # (num_groups,) int32, in tokens, whole blocks
    query_starts: torch.Tensor  # (num_groups + 1,) int32
    num_rows: torch.Tensor  # (1,) int32, on the device, so that a captured graph can change it
    private_block_tables: torch.Tensor  # (num_decode_rows, max_blocks) int32
    private_lengths: torch.Tensor  # (num_decode_rows,) int32


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """One step's rows.

    Row r's queries are tokens [query_starts[r], query_starts[r + 1]): the last ones of its sequence, whose
    sequence_lengths[r] keys, the step's own included, lie in the pages that block_tables[r] names in order.
    A row without queries is legal and is not looked at.
    """

    block_tables: torch.Tensor  # (num_rows, max_blocks) int32; entries past a row's length are never used
    query_starts: torch.Tensor  # (num_rows + 1,) int32
    sequence_lengths: torch.Tensor  # (num_rows,) int32
    max_query_length: int  # host integers: a launch must not wait for the device
    max_sequence_length: int
    # Both help implementations that cannot find them out without waiting for the device: the first rows that are known
    # to have one query each, and which of them begin alike.
    num_decode_rows: int = 0
    shared: SharedPrefixes | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's rows, and what an implementation adds to them once for all layers."""

    rows: AttentionRows


class Attention(Protocol):
    """Causal attention over pages, prefill and decode rows in one call."""

    def prepare(self, rows: AttentionRows) -> AttentionPlan:
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
