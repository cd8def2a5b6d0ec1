"""Checkpoints: dequantised bit for bit, every tensor used once, and damage named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model_config import read_gguf_config, read_model_config
from engine.weights.checkpoint import Checkpoint, halves_from_interleaved, sampled_digest, stream_parameters
from engine.weights.gguf import GGUFCheckpoint, block_format
from engine.weights.gguf_metadata import GGUFTensor, read_gguf_metadata
from engine.weights.safetensors import SafetensorsCheckpoint
from schemas.errors import ModelError
from tests.tiny_models import interleave_heads, tiny_transformers_model, write_tiny_gguf, write_tiny_model

CPU = torch.device("cpu")
OURS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
THEIRS = ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4"]


def read_all(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    checkpoint: Checkpoint
    if path.is_dir():
        config, checkpoint = read_model_config(path), SafetensorsCheckpoint(path)
    else:
        metadata = read_gguf_metadata(path)
        config, checkpoint = read_gguf_config(metadata), GGUFCheckpoint(metadata)
    return dict(stream_parameters(config, checkpoint, dtype, CPU, lambda fraction: None))


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_blocks_become_what_gguf_makes_of_them(name: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    form = block_format(GGUFTensor("weight", (elements * 4, 16), int(kind), 0), Path("file"))
    assert (form.block_elements, form.block_bytes) == (elements, num_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, (64, num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind)
        ours = form.dequantise(torch.from_numpy(blocks)).float().numpy()
    np.testing.assert_array_equal(ours, expected.reshape(ours.shape))  # NaN where they have NaN


def test_a_type_that_nobody_reads_is_refused_by_number() -> None:
    with pytest.raises(ModelError, match="tensor type 99"):
        block_format(GGUFTensor("weight", (256,), 99, 0), Path("file"))
    with pytest.raises(ModelError, match="a multiple of 32 is needed"):
        block_format(GGUFTensor("weight", (48, 2), 8, 0), Path("file"))


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path) -> None:
    import gguf

    values = np.random.default_rng(0).standard_normal((700, 3200), dtype=np.float32)  # 2.1 pieces of 2^20
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    quantised = gguf.quants.quantize(values, kind)
    writer.add_tensor("weight", quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint.open(tmp_path / "one.gguf")
    out = torch.empty(700, 3200)
    checkpoint.read_into("weight", out)
    np.testing.assert_array_equal(out.numpy(), gguf.quants.dequantize(quantised, kind))


def test_llamas_order_of_rows_is_undone() -> None:
    rows = torch.arange(24.0).view(24, 1)
    interleaved = torch.from_numpy(interleave_heads(rows.numpy(), 3))
    assert interleaved[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(halves_from_interleaved(interleaved, 3), rows)


def test_q_k_and_v_and_gate_and_up_are_one_below_the_other(tmp_path: Path) -> None:
    state = tiny_transformers_model("qwen2").state_dict()
    parameters = read_all(write_tiny_model(tmp_path, "qwen2"))
    prefix = "model.layers.1."
    for kind in ("weight", "bias"):
        parts = [state[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(parameters[f"layers.1.qkv.{kind}"], torch.cat(parts))
    gate_up = torch.cat([state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(parameters["layers.1.gate_up.weight"], gate_up)


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    whole = read_all(write_tiny_model(tmp_path / "whole", "qwen3"))
    sharded_folder = write_tiny_model(tmp_path / "sharded", "qwen3", max_shard_size="200KB")
    assert len(list(sharded_folder.glob("model-*.safetensors"))) > 2
    sharded = read_all(sharded_folder)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_progress_grows_to_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    told: list[float] = []
    config = read_model_config(folder)
    for _ in stream_parameters(config, SafetensorsCheckpoint(folder), torch.bfloat16, CPU, told.append):
        pass
    assert told == sorted(told)
    assert told[-1] == 1.0


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_tensor_that_is_missing_and_one_without_use_are_both_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.2.mlp.up_proj.weight")

    with pytest.raises(ModelError) as refused:
        read_all(rewrite(write_tiny_model(tmp_path), change))
    assert "missing: model.layers.2.mlp.up_proj.weight" in str(refused.value)
    assert "not used: model.layers.0.extra.weight" in str(refused.value)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(63)

    with pytest.raises(ModelError, match=r"model\.norm\.weight .* \(63,\).* \(64,\)"):
        read_all(rewrite(write_tiny_model(tmp_path), change))


def test_integer_weights_are_refused_by_type(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)

    with pytest.raises(ModelError, match=r"model\.norm\.weight .* is I32"):
        read_all(rewrite(write_tiny_model(tmp_path), change))


def test_frequencies_of_old_checkpoints_are_no_parameters(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert read_all(rewrite(write_tiny_model(tmp_path), change))


def test_a_tied_head_stored_twice_must_be_the_embedding(tmp_path: Path) -> None:
    def same(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = write_tiny_model(tmp_path, tied=True)
    assert "head.weight" not in read_all(rewrite(folder, same))
    with pytest.raises(ModelError, match=r"tied .*lm_head\.weight"):
        read_all(rewrite(folder, other))


def test_an_untied_head_that_is_missing_is_not_left_random(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        read_all(rewrite(write_tiny_model(tmp_path), lambda tensors: tensors.pop("lm_head.weight")))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="200KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        SafetensorsCheckpoint(folder)


def test_an_index_that_names_more_than_the_shards_hold(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="200KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.ghost\.weight"):
        SafetensorsCheckpoint(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_safetensors_file_cut_short_says_how_much_is_missing(tmp_path: Path, kept: int) -> None:
    folder = write_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, kept if kept >= 0 else size + kept)
    with pytest.raises(ModelError, match="cut short") as refused:
        SafetensorsCheckpoint(folder)
    assert f"it has {file.stat().st_size:,}" in str(refused.value)
    if kept < 0:
        assert f"{size:,}" in str(refused.value)


def test_a_gguf_file_cut_short_says_how_much_is_missing(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    metadata = read_gguf_metadata(path)
    last = max(metadata.tensors, key=lambda tensor: tensor.offset)
    end = last.offset + 4 * int(np.prod(last.shape))
    os.truncate(path, end - 1)
    with pytest.raises(ModelError, match=f"promises {end:,} bytes, it has {end - 1:,}"):
        GGUFCheckpoint.open(path)
    os.truncate(path, end)
    GGUFCheckpoint.open(path)


def test_fingerprints_tell_weights_apart(tmp_path: Path) -> None:
    first = SafetensorsCheckpoint(write_tiny_model(tmp_path / "a")).fingerprint()
    again = SafetensorsCheckpoint(write_tiny_model(tmp_path / "b")).fingerprint()
    other = SafetensorsCheckpoint(write_tiny_model(tmp_path / "c", seed=1)).fingerprint()
    gguf = GGUFCheckpoint.open(write_tiny_gguf(tmp_path / "d.gguf")).fingerprint()
    half = GGUFCheckpoint.open(write_tiny_gguf(tmp_path / "e.gguf", tensor_type="F16")).fingerprint()
    assert first == again
    assert len({first, other, gguf, half}) == 4
    assert len(first) == 32


def test_a_fingerprint_reads_the_first_and_the_last_byte() -> None:
    content = bytearray(1_000_000)
    plain = sampled_digest([b"header"], [("weight", memoryview(content))])
    for place in (0, len(content) - 1):
        content[place] = 1
        assert sampled_digest([b"header"], [("weight", memoryview(content))]) != plain
        content[place] = 0
    assert sampled_digest([b"header"], [("weight", memoryview(content))]) == plain
    assert sampled_digest([b"another"], [("weight", memoryview(content))]) != plain
