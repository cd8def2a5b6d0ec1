"""What config.json and GGUF headers say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model_config import RopeConfig, read_gguf_config, read_model_config
from engine.weights.gguf_metadata import read_gguf_metadata
from schemas.errors import ModelError
from tests.tiny_models import FAMILIES, write_tiny_gguf, write_tiny_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_is_read_whole(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert config.family.name == "llama"
    assert (config.query_size, config.kv_size, config.head_size) == (64, 32, 16)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.windows == (None, None)
    assert (config.tied_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias) == (False,) * 4


def test_rope_parameters_of_transformers_5_and_the_older_keys_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    new = read_model_config(write(tmp_path, rope_parameters={**scaling, "rope_theta": 5e5})).rope
    old = read_model_config(write(tmp_path, rope_scaling=scaling, rope_theta=5e5)).rope
    assert new == old == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 1024)


def test_the_oldest_spelling_of_linear_scaling(tmp_path: Path) -> None:
    rope = read_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})).rope
    assert rope == RopeConfig(10_000.0, "linear", 2.0)


def test_a_null_rope_scaling_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": None, "rope_theta": 1e6}))
    assert read_model_config(tmp_path).rope == RopeConfig(1e6)


def test_eos_is_the_union_of_config_and_generation_config(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[2, 7])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == {2, 7, 9}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8),
        ),
        ({"sliding_window": 8}, (None, None)),  # Llama has none
    ],
)
def test_which_layers_have_a_window(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_model_config(write(tmp_path, **changes)).windows == windows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM (mamba)"),
        ({"architectures": None}, "none named"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as refused:
        read_model_config(write(tmp_path, **changes))
    assert said in str(refused.value)


def test_an_unsupported_architecture_is_told_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM"):
        read_model_config(write(tmp_path, architectures=["GPT2LMHeadModel"]))


def test_a_config_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_header_says_the_same_as_the_folder(tmp_path: Path, family: str) -> None:
    folder = read_model_config(write_tiny_model(tmp_path / "model", family))
    gguf = read_gguf_config(read_gguf_metadata(write_tiny_gguf(tmp_path / "tiny.gguf", family)))
    same = (
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_size tied_embeddings "
        "max_position_embeddings qkv_bias output_bias mlp_bias windows eos_token_ids"
    )
    for name in same.split():
        assert getattr(gguf, name) == getattr(folder, name), name
    assert gguf.rms_norm_eps == pytest.approx(folder.rms_norm_eps)
    assert gguf.rope.theta == folder.rope.theta
    assert gguf.rope.scaling == folder.rope.scaling.replace("llama3", "factors")
