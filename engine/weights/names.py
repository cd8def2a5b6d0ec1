"""One table from checkpoint names, Hugging Face's and GGUF's, to the decoder's parameters.

q, k and v become one fused parameter, gate and up another: parts of it, one below the other, in the table's order.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from engine.model_config import ModelConfig
from schemas.errors import ModelError

Naming = Literal["huggingface", "gguf"]

# parameter, then its parts in a layer of a Hugging Face checkpoint and of a GGUF file
_LAYER_TABLE = (
    ("attention_norm.weight", ("input_layernorm",), ("attn_norm",)),
    ("qkv.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("attn_q", "attn_k", "attn_v")),
    ("qkv.bias", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("attn_q", "attn_k", "attn_v")),
    ("query_norm.weight", ("self_attn.q_norm",), ("attn_q_norm",)),
    ("key_norm.weight", ("self_attn.k_norm",), ("attn_k_norm",)),
    ("output.weight", ("self_attn.o_proj",), ("attn_output",)),
    ("output.bias", ("self_attn.o_proj",), ("attn_output",)),
    ("mlp_norm.weight", ("post_attention_layernorm",), ("ffn_norm",)),
    ("gate_up.weight", ("mlp.gate_proj", "mlp.up_proj"), ("ffn_gate", "ffn_up")),
    ("gate_up.bias", ("mlp.gate_proj", "mlp.up_proj"), ("ffn_gate", "ffn_up")),
    ("down.weight", ("mlp.down_proj",), ("ffn_down",)),
    ("down.bias", ("mlp.down_proj",), ("ffn_down",)),
)
_TOP_TABLE = (
    ("embedding.weight", "model.embed_tokens.weight", "token_embd.weight"),
    ("final_norm.weight", "model.norm.weight", "output_norm.weight"),
    ("head.weight", "lm_head.weight", "output.weight"),
    ("rope.factors", None, "rope_freqs.weight"),
)
# Old checkpoints carry the rope's frequencies, which follow from the config: not parameters.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_MAX_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of the decoder's tensors and the checkpoint tensors that are its parts, stacked along the first dimension."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    part_rows: tuple[int, ...]
    permuted_heads: tuple[int, ...]  # per part: heads whose rows a GGUF file holds interleaved; 0: rows as they are


def expected_parameters(config: ModelConfig, naming: Naming) -> list[Parameter]:
    """Every parameter that this model has, in the order of use."""
    top = {name: (huggingface if naming == "huggingface" else gguf) for name, huggingface, gguf in _TOP_TABLE}

    def whole(name: str, *shape: int) -> Parameter:
        checkpoint_name = top[name]
        assert checkpoint_name is not None
        return Parameter(name, shape, (checkpoint_name,), (shape[0],), (0,))

    parameters = [whole("embedding.weight", config.vocab_size, config.hidden_size)]
    if config.rope.scaling == "factors":
        parameters.append(whole("rope.factors", config.head_size // 2))
    for layer_id in range(config.num_layers):
        parameters += _layer_parameters(config, naming, layer_id)
    parameters.append(whole("final_norm.weight", config.hidden_size))
    if not config.tied_embeddings:
        parameters.append(whole("head.weight", config.vocab_size, config.hidden_size))
    return parameters


def check_names(parameters: list[Parameter], found: Collection[str], where: str, tied_head: str | None) -> None:
    """Every checkpoint tensor has exactly one use, and every part is there; otherwise a ModelError lists the names.

    `tied_head`: the head's name in a model that declares it tied; the loader compares such a tensor with the embedding.
    """
    wanted = [part for parameter in parameters for part in parameter.parts]
    assert len(wanted) == len(set(wanted)), "a checkpoint tensor with two uses"
    missing = sorted(set(wanted) - set(found))
    unused = sorted(name for name in set(found) - set(wanted) if name != tied_head and not _DERIVED.search(name))
    if missing or unused:
        lists = [f"{kind} {_shown(names)}" for kind, names in (("missing:", missing), ("not used:", unused)) if names]
        raise ModelError(f"the tensors of {where} are not this model's: {'; '.join(lists)}")


def tied_head_name(config: ModelConfig, naming: Naming) -> str | None:
    """What a checkpoint of a tied model may hold besides, for files that store the head twice."""
    if not config.tied_embeddings:
        return None
    return "lm_head.weight" if naming == "huggingface" else "output.weight"


def _layer_parameters(config: ModelConfig, naming: Naming, layer_id: int) -> list[Parameter]:
    hidden, head, mlp = config.hidden_size, config.head_size, config.intermediate_size
    # parameter -> rows of its parts, columns (None: a vector)
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "attention_norm.weight": ((hidden,), None),
        "qkv.weight": ((config.query_size, config.kv_size, config.kv_size), hidden),
        "output.weight": ((hidden,), config.query_size),
        "mlp_norm.weight": ((hidden,), None),
        "gate_up.weight": ((mlp, mlp), hidden),
        "down.weight": ((hidden,), mlp),
    }
    if config.qkv_bias:
        shapes["qkv.bias"] = (shapes["qkv.weight"][0], None)
    if config.family.qk_norm:
        shapes["query_norm.weight"] = shapes["key_norm.weight"] = ((head,), None)
    if config.output_bias:
        shapes["output.bias"] = ((hidden,), None)
    if config.mlp_bias:
        shapes["gate_up.bias"], shapes["down.bias"] = ((mlp, mlp), None), ((hidden,), None)

    parameters = []
    for name, huggingface, gguf in _LAYER_TABLE:
        if name not in shapes:
            continue
        part_rows, columns = shapes[name]
        suffix = name.rpartition(".")[2]
        prefix, stems = ("model.layers", huggingface) if naming == "huggingface" else ("blk", gguf)
        parts = tuple(f"{prefix}.{layer_id}.{stem}.{suffix}" for stem in stems)
        permuted = naming == "gguf" and config.family.gguf_permutes_qk and name.startswith("qkv.")
        heads = (config.num_heads, config.num_kv_heads, 0) if permuted else (0,) * len(parts)
        shape = (sum(part_rows),) if columns is None else (sum(part_rows), columns)
        parameters.append(Parameter(f"layers.{layer_id}.{name}", shape, parts, part_rows, heads))
    return parameters


def _shown(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
