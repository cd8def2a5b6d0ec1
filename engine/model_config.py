"""What a model is: its shape, its rope, its family. Read from a Hugging Face config.json or a GGUF header.

Knows the families (one row each) and nothing of weights or devices. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.weights.gguf_metadata import GGUFMetadata
from schemas.errors import ModelError

RopeScaling = Literal["none", "linear", "llama3", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotation's frequencies: theta^(-2i / rotary_dim), then scaled.

    none      as they are
    linear    divided by `factor`
    llama3    long wavelengths divided by `factor`, short ones kept, a blend between (Llama 3.1)
    factors   divided by one number each, which the checkpoint holds (GGUF's `rope_freqs.weight`)
    """

    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: what a family is called and how its decoder differs from the others'."""

    name: str
    architecture: str  # in config.json's `architectures`
    gguf_architecture: str | None  # in `general.architecture`; None: its GGUF files call themselves another family
    qkv_bias: bool = False  # always; where config.json has `attention_bias`, that decides
    has_attention_bias_key: bool = False  # its `attention_bias` is for q, k, v and o alike
    has_mlp_bias_key: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before rope
    window: Literal["none", "all_layers", "upper_layers"] = "none"  # which layers `sliding_window` is for
    default_head_size: int | None = None  # None: hidden_size / num_heads
    default_theta: float = 10_000.0
    gguf_permutes_qk: bool = False  # its GGUF files hold q and k in the order of interleaved rope


FAMILIES = (
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="upper_layers"),
    Family(
        "qwen3", "Qwen3ForCausalLM", "qwen3",
        has_attention_bias_key=True, qk_norm=True, window="upper_layers", default_head_size=128,
    ),
    Family(
        "llama", "LlamaForCausalLM", "llama",
        has_attention_bias_key=True, has_mlp_bias_key=True, gguf_permutes_qk=True,
    ),
    Family("mistral", "MistralForCausalLM", None, window="all_layers", gguf_permutes_qk=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. `windows[layer]`: a query sees that many keys, its own included; None: all of them."""

    family: Family
    vocab_size: int  # rows of the embedding: the tokenizer's size, or more where the checkpoint pads it
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    eos_token_ids: frozenset[int]  # of config and generation config; the tokenizer's are joined at load

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size


def read_model_config(folder: Path) -> ModelConfig:
    """Of a Hugging Face folder: config.json, and generation_config.json where there is one. Raises ModelError."""
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    architectures = config.get("architectures") or ["none named"]
    family = next((row for row in FAMILIES if row.architecture in architectures), None)
    if family is None:
        kind = config.get("model_type", "no model_type")
        raise _unsupported(f"{folder / 'config.json'} is of the architecture {', '.join(architectures)} ({kind})")
    fields = _Fields(config, str(folder / "config.json"))
    _refuse_unread(fields)

    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings")
    attention_bias = bool(family.has_attention_bias_key and config.get("attention_bias"))
    return _checked(
        ModelConfig(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_size=fields.integer("head_dim", family.default_head_size or hidden_size // num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=_rope_of_config(fields, family, max_positions),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(family.has_mlp_bias_key and config.get("mlp_bias")),
            windows=_windows_of_config(fields, family, num_layers),
            eos_token_ids=_token_ids(config.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
        ),
        fields.where,
    )


def read_gguf_config(metadata: GGUFMetadata) -> ModelConfig:
    """Of a GGUF header. Raises ModelError where a key is missing or the architecture is not supported."""
    architecture = str(metadata.fields.get("general.architecture", "none named"))
    family = next((row for row in FAMILIES if row.gguf_architecture == architecture), None)
    if family is None:
        raise _unsupported(f"{metadata.path} is of the architecture {architecture}")
    shapes = {tensor.name: tensor.shape for tensor in metadata.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{metadata.path} holds no token_embd.weight: it is not a whole model")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.fields.items() if key.startswith(prefix)}
    fields = _Fields(own, f"{metadata.path} ({architecture})")

    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    num_layers = fields.integer("block_count")
    head_size = fields.integer("attention.key_length", hidden_size // num_heads)
    rotary_dim = fields.integer("rope.dimension_count", head_size)
    if rotary_dim != head_size:
        raise ModelError(f"{fields.where} rotates {rotary_dim} of {head_size} dimensions; whole heads are supported")
    window = fields.integer("attention.sliding_window", 0) or None
    eos = _token_ids(metadata.fields.get("tokenizer.ggml.eos_token_id"))
    return _checked(
        ModelConfig(
            family=family,
            vocab_size=shapes["token_embd.weight"][-1],
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_size=head_size,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=fields.integer("context_length"),
            rope=_rope_of_gguf(fields, family, has_factors="rope_freqs.weight" in shapes),
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            windows=(window,) * num_layers,
            eos_token_ids=eos | _token_ids(metadata.fields.get("tokenizer.ggml.eot_token_id")),
        ),
        fields.where,
    )


class _Fields:
    """A mapping whose missing or mistyped values are ModelErrors that name the key and the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {key} is {value!r}; a number is needed")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.where}: {key} is {value!r}; an integer is needed")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; an object is needed")
    return value


def _unsupported(what: str) -> ModelError:
    known = ", ".join(f"{row.architecture}" for row in FAMILIES)
    gguf = ", ".join(row.gguf_architecture for row in FAMILIES if row.gguf_architecture)
    return ModelError(f"{what}; supported are {known} (GGUF: {gguf})")


def _refuse_unread(fields: _Fields) -> None:
    """What would change every answer and is not built: better refused than ignored."""
    if fields.values.get("quantization_config"):
        method = fields.values["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{fields.where}: quantised weights ({method}) in safetensors are not read; a GGUF file is")
    if (activation := fields.values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{fields.where}: hidden_act is {activation!r}; silu is supported")


def _rope_of_config(fields: _Fields, family: Family, max_positions: int) -> RopeConfig:
    # transformers 5 writes `rope_parameters` with the theta inside; older ones `rope_theta` and `rope_scaling` apart.
    old = {"rope_theta": fields.values.get("rope_theta"), **(fields.values.get("rope_scaling") or {})}
    rope = _Fields(fields.values.get("rope_parameters") or old, f"{fields.where}, rope")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", family.default_theta))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        share = rope.values["partial_rotary_factor"]
        raise ModelError(f"{rope.where}: partial_rotary_factor is {share}; 1 is supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings", max_positions),
        )
    raise ModelError(f"{rope.where}: rope scaling {kind!r} is not supported; default, linear and llama3 are")


def _rope_of_gguf(fields: _Fields, family: Family, has_factors: bool) -> RopeConfig:
    theta = fields.number("rope.freq_base", family.default_theta)
    kind = fields.values.get("rope.scaling.type", "none")
    if has_factors:  # Llama 3.1's scaling, worked out by whoever made the file
        return RopeConfig(theta, "factors")
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", fields.number("rope.scaling.factor"))
    raise ModelError(f"{fields.where}: rope scaling {kind!r} is not supported; linear is, and rope_freqs.weight")


def _windows_of_config(fields: _Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.window == "none" or fields.values.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if family.window == "all_layers":
        return (window,) * num_layers
    if not fields.values.get("use_sliding_window"):
        return (None,) * num_layers
    first = fields.integer("max_window_layers", 28)
    layer_types: Sequence[str] = fields.values.get("layer_types") or [
        "sliding_attention" if layer_id >= first else "full_attention" for layer_id in range(num_layers)
    ]
    if len(layer_types) != num_layers:
        raise ModelError(f"{fields.where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _token_ids(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    sizes = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_size"
    for name in (*sizes.split(), "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise ModelError(f"{where}: {name} is {getattr(config, name)}; 1 or more is needed")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} heads do not share {config.num_kv_heads} key-value heads evenly")
    if config.head_size % 2:
        raise ModelError(f"{where}: head size {config.head_size} is odd; rope needs pairs")
    return config
