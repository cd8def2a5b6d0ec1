"""One decoder for all families: what they differ in is data of ModelConfig.

embedding -> layers of [norm, qkv, (q/k norm), rope, KV write, attention, output, norm, gate_up, SiLU, down] -> norm
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.group import Group
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.models.heads import Embedding, LanguageModelHead
from engine.models.precision import Gated, PartialProduct, PlainPrecision, Precision, Product
from engine.models.rope import inverse_frequencies, rope_tables
from kernels.attention import select_attention
from kernels.attention_plan import AttentionPlan, AttentionRows
from kernels.fp8 import ProductScales
from kernels.kv_cache import Places, place_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import Rotation, rotate
from kernels.rope_kv import rope_kv

# A layer's activations of so many tokens stay in a CPU's caches from product to product; widened ones are larger. An
# Intel Xeon's first step of tests/bench/cpu_engine.py took 22.2 s with 512, and 23.1 and 23.4 with 2,048.
CPU_ROWS, WIDENED_CPU_ROWS = 2048, 512


def _nothing() -> None:
    """Nobody else writes to the cache in this step."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor  # (hidden_size,)
    qkv: Product[Any]
    query_norm: torch.Tensor | None  # (head_size,)
    key_norm: torch.Tensor | None
    output: Product[Any]
    mlp_norm: torch.Tensor
    gate_up: Gated[Any]
    down: Product[Any]
    window: int | None


@dataclass(frozen=True, slots=True)
class _PreparedOnCpu:
    """What all layers of a step on a CPU need of its tokens."""

    rotation: Rotation
    places: Places


class Decoder:
    """Weights and the way through them. Holds no state of requests: what a step needs, `forward` is given."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Iterable[tuple[str, torch.Tensor]],
        num_tokens: int,
        num_positions: int,
        device: torch.device,
        precision: Precision[Any] | None = None,
        group: Group | None = None,
    ) -> None:
        """`parameters`: all of `expected_parameters(config)`, layer by layer, so that each layer is packed, and its
        plain weights freed, before the next is read. `num_tokens`: the tokenizer's ids, at most the vocabulary's.
        `num_positions`: the longest sequence that will come. `precision`: of the layers' products; plain where None.
        `group`: of several ranks with a part each; `config` and `parameters` are then this rank's (weights.sharding).
        """
        self.config = config
        self.device = device
        self.group = group or Group()
        self.num_tokens = num_tokens
        self.num_positions = num_positions
        self._precision: Precision[Any] = precision or PlainPrecision()
        self._rows_at_a_time = WIDENED_CPU_ROWS if self._precision.widens else CPU_ROWS
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
        embedding = pending.pop("embedding.weight")
        self._embedding = Embedding(embedding, self.group)
        self._final_norm = pending.pop("final_norm.weight")
        head = embedding if config.tied_embeddings else pending.pop("head.weight")
        self._head = LanguageModelHead(head, num_tokens, self.group, self._precision.widens)
        assert not pending, f"parameters without a use: {sorted(pending)}"
        self.dtype = embedding.dtype
        self._attention = select_attention(device, self.dtype, config.head_size)

    def forward(
        self, batch: ForwardBatch, cache: KVCache, all_written: Callable[[], object] = _nothing
    ) -> torch.Tensor:
        """(num_sampling_rows, hidden_size): the hidden states at `batch.logits_indices`; the cache gets every token's
        keys and values. `all_written`: called in each layer once the batch's are there, before any are read.
        """
        return self.finish(*self.attend_all(batch, cache, all_written), batch.logits_indices)

    def attend_all(
        self, batch: ForwardBatch, cache: KVCache, all_written: Callable[[], object] = _nothing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to the last layer's attention, behind which only sampling rows matter: (what it attended, the residual)
        of every token. The cache gets all keys and values; `all_written` as `forward`'s.
        """
        rows = AttentionRows(
            batch.block_tables, batch.query_starts, batch.sequence_lengths, batch.max_query_length,
            batch.max_sequence_length, batch.num_decode_rows, batch.shared,
        )  # fmt: skip
        plan = self._attention.prepare(rows)
        # A GPU works these out layer by layer.
        prepared = self._prepare_on_cpu(batch, cache) if self.device.type == "cpu" else None
        residual = self._embedding(batch.token_ids)
        hidden = self._precision.norm(residual, self._layers[0].attention_norm, self.config.rms_norm_eps)
        for layer_id, layer in enumerate(self._layers[:-1]):
            attended = self._attend(layer, layer_id, hidden, batch, cache, plan, prepared, all_written)
            following = self._layers[layer_id + 1].attention_norm
            hidden, residual = self._to_next_layer(layer, attended, residual, following)
        last = len(self._layers) - 1
        return self._attend(self._layers[last], last, hidden, batch, cache, plan, prepared, all_written), residual

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, logits_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """(num_sampling_rows, hidden_size) from `attend_all`'s result; None: of every token."""
        if logits_indices is not None:
            attended, residual = attended[logits_indices], residual[logits_indices]
        gated, residual = self._feed_forward(self._layers[-1], attended, residual)
        down = self._layers[-1].down(gated)
        hidden, _ = add_rms_norm(down, residual, self._final_norm, self.config.rms_norm_eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, vocab_size), float32 but on a CPU; padding of the vocabulary is -inf.

        Of several ranks each has the columns of its own ids; `gather_logits` puts all of them side by side.
        """
        return self._head(hidden)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`' result over the whole vocabulary."""
        return self._head.gather(logits)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From `logits`' result, over the whole vocabulary: (token_ids (num_rows,) int64, finite (num_rows,) bool)."""
        return self._head.greedy(logits)

    def _attend(
        self,
        layer: _Layer,
        layer_id: int,
        hidden: Any,
        batch: ForwardBatch,
        cache: KVCache,
        plan: AttentionPlan,
        prepared: _PreparedOnCpu | None,
        all_written: Callable[[], object],
    ) -> torch.Tensor:
        """From a layer's normed input to what its queries attended, (num_tokens, query_size)."""
        qkv, scales = self._precision.project(layer.qkv, hidden)
        query = self._rotate_and_write(layer, qkv, scales, batch, prepared, *cache.layer(layer_id))
        all_written()
        # All of the step's keys and values are written before any is read: a run may read an earlier run's blocks.
        attended: torch.Tensor = self._attention(query, *cache.layer(layer_id), plan, self._scale, layer.window)
        return attended.view(qkv.shape[0], self.config.query_size)

    def _to_next_layer(
        self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor, following: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """From a layer's attention to the next layer's normed input and the residual."""
        at_a_time = self._rows_at_a_time
        if self.device.type == "cpu" and len(attended) > at_a_time:
            rows = zip(torch.split(attended, at_a_time), torch.split(residual, at_a_time), strict=True)
            parts = [self._to_next_layer(layer, *part, following) for part in rows]
            hidden, residual = (torch.cat(part) for part in zip(*parts, strict=True))
            return hidden, residual
        gated, residual = self._feed_forward(layer, attended, residual)
        return self._precision.add_norm(layer.down, gated, residual, following, self.config.rms_norm_eps)

    def _feed_forward(self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """From a layer's attention to its last product, which is left to what follows: (its input, the residual)."""
        precision = self._precision
        hidden, residual = precision.add_norm(
            layer.output, precision.enter(attended), residual, layer.mlp_norm, self.config.rms_norm_eps
        )
        return layer.gate_up(hidden), residual

    def _rotate_and_write(
        self,
        layer: _Layer,
        qkv: torch.Tensor,
        scales: ProductScales | None,
        batch: ForwardBatch,
        prepared: _PreparedOnCpu | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """qkv (num_tokens, query_size + 2 * kv_size) -> queries; keys and values go to the layer's pages."""
        config = self.config
        if qkv.is_cuda:
            return rope_kv(
                qkv, batch.positions, self._cos, self._sin, keys, values, batch.slot_mapping, config.num_heads,
                layer.query_norm, layer.key_norm, config.rms_norm_eps, scales,
            )  # fmt: skip
        assert scales is None, "only CUDA devices leave products unscaled"
        assert prepared is not None, "what all layers of a CPU's step need is worked out before the first"
        num_kv_heads = config.num_kv_heads
        heads = qkv.view(qkv.shape[0], config.num_heads + 2 * num_kv_heads, config.head_size)
        query, key, value = torch.split(heads, [config.num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.key_norm, config.rms_norm_eps)
        rotate(query, key, prepared.rotation)
        place_kv(key, value, keys, values, prepared.places)
        return query

    def _prepare_on_cpu(self, batch: ForwardBatch, cache: KVCache) -> _PreparedOnCpu:
        return _PreparedOnCpu(
            Rotation.of(batch.positions, self._cos, self._sin),
            Places.of(batch.slot_mapping, cache.block_size, self.config.num_kv_heads),
        )

    def _take_layer(self, pending: dict[str, torch.Tensor]) -> _Layer:
        layer_id = len(self._layers)

        def vector(name: str) -> torch.Tensor | None:
            return pending.pop(f"layers.{layer_id}.{name}", None)

        def product(name: str) -> Product[Any]:
            return self._precision.product(pending.pop(f"layers.{layer_id}.{name}.weight"), vector(f"{name}.bias"))

        def summed(product: Product[Any]) -> Product[Any]:
            return product if self.group.size == 1 else PartialProduct(product, self.group)

        return _Layer(
            attention_norm=pending.pop(f"layers.{layer_id}.attention_norm.weight"),
            qkv=product("qkv"),
            query_norm=vector("query_norm.weight"),
            key_norm=vector("key_norm.weight"),
            output=summed(product("output")),
            mlp_norm=pending.pop(f"layers.{layer_id}.mlp_norm.weight"),
            gate_up=self._precision.gated(pending.pop(f"layers.{layer_id}.gate_up.weight"), vector("gate_up.bias")),
            down=summed(product("down")),
            window=self.config.windows[layer_id],
        )


def _last_of_layer(config: ModelConfig) -> str:
    return "down.bias" if config.mlp_bias else "down.weight"
