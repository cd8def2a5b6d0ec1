"""One decoder for all families: what they differ in is data of ModelConfig.

    embedding -> layers of [norm, qkv, (q/k norm), rope, KV write, attention, output, norm, gate_up, SiLU, down] -> norm
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.models.heads import LanguageModelHead
from engine.models.linear import Linear
from engine.models.rope import inverse_frequencies, rope_tables
from kernels.activation import silu_and_multiply
from kernels.attention import select_attention
from kernels.attention_plan import AttentionPlan
from kernels.kv_cache import write_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor  # (hidden_size,)
    qkv: Linear
    query_norm: torch.Tensor | None  # (head_size,)
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """Weights and the way through them. Holds no state of requests: what a step needs, `forward` is given."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Iterable[tuple[str, torch.Tensor]],
        num_tokens: int,
        num_positions: int,
        device: torch.device,
    ) -> None:
        """`parameters`: all of `expected_parameters(config)`, layer by layer, so that each layer is packed, and its
        plain weights freed, before the next is read. `num_tokens`: the tokenizer's ids, at most the vocabulary's.
        `num_positions`: the longest sequence that will come.
        """
        self.config = config
        self.device = device
        self._attention = select_attention(device)
        self._scale = config.head_size**-0.5
        self._layers: list[_Layer] = []
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in parameters:
            pending[name] = tensor
            del tensor
            if name == f"layers.{len(self._layers)}.{_last_of_layer(config)}":
                self._layers.append(self._take_layer(pending))
        assert len(self._layers) == config.num_layers, f"{len(self._layers)} of {config.num_layers} layers"

        frequencies = inverse_frequencies(config.rope, config.head_size, pending.pop("rope.factors", None))
        self._cos, self._sin = rope_tables(frequencies, num_positions, device)
        self._embedding = pending.pop("embedding.weight")
        self._final_norm = pending.pop("final_norm.weight")
        head = self._embedding if config.tied_embeddings else pending.pop("head.weight")
        self._head = LanguageModelHead(head, num_tokens)
        assert not pending, f"parameters without a use: {sorted(pending)}"
        self.dtype = self._embedding.dtype

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """(num_sampling_rows, hidden_size): the hidden states at `batch.logits_indices`; the cache gets every token's
        keys and values. The last layer computes no more than those rows behind its attention.
        """
        plan = self._attention.prepare(
            batch.block_tables,
            batch.query_starts,
            batch.sequence_lengths,
            batch.max_query_length,
            batch.max_sequence_length,
        )
        eps = self.config.rms_norm_eps
        residual = functional.embedding(batch.token_ids, self._embedding)
        hidden = rms_norm(residual, self._layers[0].attention_norm, eps)
        last = len(self._layers) - 1
        for layer_id, layer in enumerate(self._layers):
            if layer_id:
                hidden, residual = add_rms_norm(hidden, residual, layer.attention_norm, eps)
            hidden = self._attend(layer, layer_id, hidden, batch, cache, plan)
            if layer_id == last:
                hidden, residual = hidden[batch.logits_indices], residual[batch.logits_indices]
            hidden, residual = add_rms_norm(layer.output(hidden), residual, layer.mlp_norm, eps)
            hidden = layer.down(silu_and_multiply(layer.gate_up(hidden)))
        hidden, _ = add_rms_norm(hidden, residual, self._final_norm, eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size) float32; padding of the vocabulary is -inf."""
        return self._head(hidden)

    def _attend(
        self, layer: _Layer, layer_id: int, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: AttentionPlan
    ) -> torch.Tensor:
        config = self.config
        num_kv_heads = config.num_kv_heads
        heads = layer.qkv(hidden).view(hidden.shape[0], config.num_heads + 2 * num_kv_heads, config.head_size)
        query, key, value = heads.split((config.num_heads, num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.key_norm, config.rms_norm_eps)
        apply_rope(query, key, batch.positions, self._cos, self._sin)
        keys, values = cache.layer(layer_id)
        # All of the step's keys and values are written before any is read: a run may read an earlier run's blocks.
        write_kv(key, value, keys, values, batch.slot_mapping)
        attended = self._attention(query, keys, values, plan, self._scale, layer.window)
        return attended.view(hidden.shape[0], config.query_size)

    def _take_layer(self, pending: dict[str, torch.Tensor]) -> _Layer:
        layer_id = len(self._layers)

        def vector(name: str) -> torch.Tensor | None:
            return pending.pop(f"layers.{layer_id}.{name}", None)

        def linear(name: str) -> Linear:
            return Linear(pending.pop(f"layers.{layer_id}.{name}.weight"), vector(f"{name}.bias"))

        return _Layer(
            attention_norm=pending.pop(f"layers.{layer_id}.attention_norm.weight"),
            qkv=linear("qkv"),
            query_norm=vector("query_norm.weight"),
            key_norm=vector("key_norm.weight"),
            output=linear("output"),
            mlp_norm=pending.pop(f"layers.{layer_id}.mlp_norm.weight"),
            gate_up=linear("gate_up"),
            down=linear("down"),
            window=self.config.windows[layer_id],
        )


def _last_of_layer(config: ModelConfig) -> str:
    return "down.bias" if config.mlp_bias else "down.weight"
