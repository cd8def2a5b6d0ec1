"""What follows the last layer's attention, as CUDA graphs: of the rows that sample alone, at their number rounded up.

A mixed step's graph ends by putting those rows into the buffers that these graphs read, so the two are launched one
after the other, and a graph of any number of tokens goes with one of any number of sampling rows.
"""

import torch

from engine.cuda_graph import Captured, TakeGraph, choose, row_buckets
from engine.models.decoder import Decoder


class FinishGraphs:
    """Graphs of one decoder's last feed-forward, head and choice, captured at start."""

    def __init__(
        self,
        decoder: Decoder,
        last_token_ids: torch.Tensor,
        max_rows: int,
        take_graph: TakeGraph,
        largest_only: bool = False,
    ) -> None:
        """`max_rows`: sampling rows of a step; otherwise as DecodeGraphs."""
        self._decoder = decoder
        self._last_token_ids = last_token_ids
        self.buckets = row_buckets(max_rows)
        num_rows, config, dtype, device = self.buckets[-1], decoder.config, decoder.dtype, decoder.device
        self._attended = torch.zeros(num_rows, config.query_size, dtype=dtype, device=device)
        self._residual = torch.zeros(num_rows, config.hidden_size, dtype=dtype, device=device)
        self._rows = torch.full((num_rows,), last_token_ids.shape[0] - 1, dtype=torch.int32, device=device)
        self.num_graphs = len(self.buckets)
        buckets = self.buckets[-1:] if largest_only else reversed(self.buckets)
        self._captured = {bucket: self._capture(bucket, take_graph) for bucket in buckets}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def take(
        self, attended: torch.Tensor, residual: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last operations of another graph: (num_tokens, ...) at `indices` (num_rows,) to where `replay` reads.

        `rows`: whose tokens these choose; of padding, the last one. A `replay` must not read beyond `num_rows`.
        """
        num_rows = min(len(indices), self.buckets[-1])
        torch.index_select(attended, 0, indices[:num_rows], out=self._attended[:num_rows])
        torch.index_select(residual, 0, indices[:num_rows], out=self._residual[:num_rows])
        self._rows[:num_rows].copy_(rows[:num_rows])
        return self._attended, self._residual

    def bucket_of(self, num_rows: int) -> int:
        """How many rows `replay` reads."""
        return next(bucket for bucket in self.buckets if bucket >= num_rows)

    def replay(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (num_rows, vocab_size), chosen (2, num_rows) int32) of what was taken; good until the next replay."""
        captured = self._captured[self.bucket_of(num_rows)]
        captured.graph.replay()
        return captured.logits[:num_rows], captured.chosen[:, :num_rows]

    def _capture(self, bucket: int, take_graph: TakeGraph) -> Captured:
        attended, residual, rows = self._attended[:bucket], self._residual[:bucket], self._rows[:bucket]

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._decoder.logits(self._decoder.finish(attended, residual, None))
            return logits, choose(self._decoder, logits, self._last_token_ids, rows)

        graph, (logits, chosen) = take_graph(step)
        return Captured(graph, logits, chosen)
