"""From a path to a started engine, and every way in which that is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.loading import check_vocabulary, load_engine
from schemas.errors import ModelError, SettingsError
from schemas.inference import EngineInfo, EngineSettings, InferenceRequest, ModelSettings, SamplingParams
from tests.tiny_models import num_tiny_tokens, write_tiny_gguf, write_tiny_model

SETTINGS = EngineSettings(max_running=4, kv_cache_tokens=512)
COUNT_DENORMALS = """
import threading, torch
from engine.loading import prepare_for_cpu
torch.set_num_threads(2)
if {flush}:
    prepare_for_cpu()
counts = []
def count():  # large enough for torch to share it among its threads
    counts.append(int(torch.full((1 << 20,), 1e-30).mul_(1e-10).count_nonzero()))
count()
lane = threading.Thread(target=count)
lane.start()
lane.join()
print(*counts)
"""


def model_settings(path: Path, max_model_len: int = 0) -> ModelSettings:
    return ModelSettings(path=str(path), dtype="float32", device="cpu", max_model_len=max_model_len)


def info_of(path: Path, settings: EngineSettings = SETTINGS, max_model_len: int = 0) -> EngineInfo:
    return load_engine(model_settings(path, max_model_len), settings, lambda part, fraction: None)[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen2")


def test_a_started_engine_answers_and_says_what_it_is(tiny: Path) -> None:
    told: list[tuple[str, float]] = []
    engine, info = load_engine(
        model_settings(tiny, max_model_len=300), SETTINGS, lambda part, done: told.append((part, done))
    )
    engine.add_request(InferenceRequest(1, (1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True), seed=0))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [len(output.token_ids) for output in outputs] == [5]
    assert (info.model, info.device, info.block_size) == ("tiny-qwen2", "cpu", 16)
    assert (info.vocab_size, info.max_model_len, info.kv_cache_tokens) == (num_tiny_tokens(), 300, 512)
    assert set(info.start_seconds) == {"tokenizer", "weights", "memory", "cache", "canary", "runner"}
    assert {part for part, _ in told} == set(info.start_seconds)
    assert len(info.identity) == 16


def test_the_context_is_the_models_own_or_what_the_cache_holds(tiny: Path) -> None:
    assert info_of(tiny, EngineSettings(max_running=1)).max_model_len == 1024
    assert info_of(tiny).max_model_len == 512


def test_a_gguf_file_is_called_by_its_name(tmp_path: Path) -> None:
    assert info_of(write_tiny_gguf(tmp_path / "tiny-q8_0.gguf", tensor_type="Q8_0")).model == "tiny-q8_0"


def test_other_weights_or_another_config_have_another_identity(tiny: Path, tmp_path: Path) -> None:
    other_weights = write_tiny_model(tmp_path / "weights", seed=1)
    other_config = Path(shutil.copytree(tiny, tmp_path / "config"))
    config = json.loads((other_config / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 77_000.0
    (other_config / "config.json").write_text(json.dumps(config))
    again, first = info_of(tiny), info_of(tiny)
    second, third = info_of(other_weights), info_of(other_config)
    assert (again.identity, again.weights) == (first.identity, first.weights)
    assert len({first.identity, second.identity, third.identity}) == 3
    assert first.weights == third.weights != second.weights


def test_eos_of_the_tokenizer_ends_an_answer_too(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    from engine.loading import open_model

    files = open_model(folder)
    end_of_turn = files.tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert files.eos_token_ids == {3, 4} | files.tokenizer.eos_token_ids
    assert files.tokenizer.eos_token_ids & set(end_of_turn)


@pytest.mark.parametrize("tokenizer_size", [1000, 1001, 2024])
def test_a_vocabulary_may_be_padded_a_little(tokenizer_size: int) -> None:
    check_vocabulary(tokenizer_size, 2024, Path("model"))


@pytest.mark.parametrize("tokenizer_size", [999, 2025, 0])
def test_a_tokenizer_of_another_size_is_refused_with_both_sizes(tokenizer_size: int) -> None:
    with pytest.raises(ModelError, match=f"{tokenizer_size:,} tokens .* 2,024"):
        check_vocabulary(tokenizer_size, 2024, Path("model"))


def test_weights_that_are_not_finite_are_noticed_before_serving(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="first logits are not finite in float32"):
        info_of(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [("nowhere", "there is no model"), ("letter.txt", "neither a Hugging Face folder nor a GGUF file")],
)
def test_a_path_that_is_no_model(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "letter.txt").write_text("Dear model,")
    with pytest.raises(ModelError, match=said):
        info_of(tmp_path / name)


def test_a_context_longer_than_the_models_is_refused(tiny: Path) -> None:
    with pytest.raises(SettingsError, match=r"max_model_len is 1,025; the model's context is 1,024"):
        info_of(tiny, max_model_len=1025)


def test_bfloat16_answers_too(tiny: Path) -> None:
    settings = ModelSettings(path=str(tiny), dtype="bfloat16", device="cpu")
    engine, _ = load_engine(settings, SETTINGS, lambda part, fraction: None)
    engine.add_request(InferenceRequest(1, tuple(range(40)), SamplingParams(max_tokens=4, ignore_eos=True), seed=0))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[0].failure is None
    assert len(outputs[0].token_ids) == 4


LARGE_PAGES = """
import os
from pathlib import Path
from engine.loading import prepare_for_cpu
prepare_for_cpu()
import torch
kept = [torch.ones(1 << 21) for _ in range(4)]  # 8 MB each
memory = Path("/proc/self/smaps_rollup")
rows = memory.read_text().splitlines() if memory.exists() else []
print(os.environ["THP_MEM_ALLOC_ENABLE"], any(row.split()[1] != "0" for row in rows if row.startswith("AnonHugePages")))
"""
LARGE_PAGES_OF_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("set_by_user", [None, "0"])
def test_large_tensors_lie_in_large_pages_unless_the_user_says_otherwise(set_by_user: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {"THP_MEM_ALLOC_ENABLE": set_by_user} if set_by_user else {}
    command = [sys.executable, "-c", LARGE_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    # Who gets them is the system's choice: "always" all that is large enough, "madvise" who asks, "never" nobody.
    choice = LARGE_PAGES_OF_SYSTEM.read_text() if LARGE_PAGES_OF_SYSTEM.exists() else "[never]"
    has_pages = "[always]" in choice or ("[madvise]" in choice and set_by_user is None)
    assert done.stdout.strip() == f"{set_by_user or 1} {has_pages}"


@pytest.mark.parametrize(("flush", "expected"), [(True, "0 0"), (False, "1048576 1048576")])
def test_denormals_are_flushed_on_every_thread_of_the_process(flush: bool, expected: str) -> None:
    # In a process of its own: it holds for good.
    command = [sys.executable, "-c", COUNT_DENORMALS.format(flush=flush)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected
