"""Tiny random models of every family on disk, as Hugging Face folders and as GGUF files, with a real small tokenizer.

Weights are drawn so that a wrong key or position shows: scores of attention have a deviation of about 4, so that few
keys matter, and logits one of about 4, so that the largest stands apart.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.engine.tiny_tokenizers import CHAT_TEMPLATE, SPECIAL, train_byte_level

NUM_LAYERS = 3
HEAD_SIZE = 16
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
VOCABULARY_MULTIPLE = 64  # as checkpoints pad theirs


@dataclass(frozen=True)
class TinyFamily:
    """What a family's tiny model is called in transformers and in GGUF, and what its config has besides the shape."""

    config_class: str
    gguf_architecture: str
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen2": TinyFamily("Qwen2Config", "qwen2"),
    "qwen3": TinyFamily("Qwen3Config", "qwen3"),
    "llama": TinyFamily("LlamaConfig", "llama"),
    "llama3": TinyFamily(
        "LlamaConfig",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": TinyFamily(
        "LlamaConfig",
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": TinyFamily("MistralConfig", "llama", {"sliding_window": 24}),
}


def write_tiny_model(
    folder: Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **config: Any,
) -> Path:
    """A Hugging Face folder, weights in float32; `config` overrides keys of config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_transformers_model(family, tied=tied, seed=seed, **config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": model.config.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder


def write_tiny_gguf(
    path: Path, family: str = "qwen2", *, tensor_type: str = "F32", tied: bool = False, seed: int = 0, **config: Any
) -> Path:
    """The same model as a GGUF file: matrices in `tensor_type` (one that gguf can quantise to), vectors in F32."""
    import gguf

    model = tiny_transformers_model(family, tied=tied, seed=seed, **config)
    row = FAMILIES[family]
    writer = gguf.GGUFWriter(str(path), row.gguf_architecture)
    _add_shape(writer, family, model.config)
    _add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[tensor_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[row.gguf_architecture.upper()], NUM_LAYERS)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weights = tensor.float().numpy()
        if row.gguf_architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            weights = interleave_heads(weights, heads)
        matrix = weights.ndim > 1
        quantised = gguf.quants.quantize(np.ascontiguousarray(weights), kind) if matrix else weights
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, quantised, raw_dtype=kind if matrix else gguf.GGMLQuantizationType.F32)
    if (factors := _rope_factors(model.config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_transformers_model(family: str, *, tied: bool = False, seed: int = 0, **config: Any) -> Any:
    """The model itself, in transformers' own class; the same arguments give the same weights."""
    import transformers

    row = FAMILIES[family]
    num_tokens = _tokenizer().get_vocab_size(with_added_tokens=True)
    eos = _tokenizer().token_to_id("<|im_end|>")
    given = {
        **_SHAPE,
        "vocab_size": -(-num_tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        "bos_token_id": _tokenizer().token_to_id("<|endoftext|>"),
        "attn_implementation": "eager",
        **row.config,
        **config,
    }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, row.config_class)(**given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, tuple(parameter.shape), generator))
        if not tied:
            model.lm_head.weight[num_tokens:] = 0.0  # padding
    model.generation_config.eos_token_id = eos
    return model.float().eval()


def num_tiny_tokens() -> int:
    """The tokenizer's ids; the vocabulary has some more, which are padding."""
    return int(_tokenizer().get_vocab_size(with_added_tokens=True))


def interleave_heads(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The order of rows that llama.cpp's converter gives q and k: halves of a head to neighbours."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


@cache
def _tokenizer() -> Any:
    return train_byte_level()


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * noise
    if "q_norm" in name or "k_norm" in name:
        return 2.0 + 0.2 * noise  # unit heads, dot products of deviation 4
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    if "lm_head" in name:
        return 0.5 * noise
    if "q_proj" in name or "k_proj" in name:
        return 0.25 * noise
    scale: float = shape[1] ** -0.5
    return noise * scale


def _add_shape(writer: Any, family: str, config: Any) -> None:
    writer.add_name(f"tiny {family}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.rope_parameters["rope_type"] == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if family == "mistral":
        writer.add_sliding_window(config.sliding_window)


def _add_tokenizer(writer: Any) -> None:
    backend = _tokenizer()
    state = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])  # 3: control, 1: normal
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_bos_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _rope_factors(config: Any) -> npt.NDArray[np.float32] | None:
    """What divides each frequency, as llama.cpp's converter works it out for Llama 3.1's scaling."""
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for index in range(0, HEAD_SIZE, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / HEAD_SIZE)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (low * rope["low_freq_factor"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
