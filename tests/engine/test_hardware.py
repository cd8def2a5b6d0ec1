"""Devices by name, and in what formats a CPU computes."""

from pathlib import Path

import pytest
import torch

from engine.hardware import choose_device, choose_dtype, choose_precision, multiplies_bfloat16_slowly
from engine.loading import load_engine
from engine.model_config import ModelConfig, read_model_config
from schemas.errors import SettingsError
from schemas.inference import EngineSettings, InferenceRequest, ModelSettings, SamplingParams
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")
INTEL = {"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(tiny: Path) -> ModelConfig:
    return read_model_config(tiny)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "mps", "first"])
def test_a_device_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        choose_device(name)


def test_a_cpu_computes_in_bfloat16_only_where_it_can() -> None:
    assert choose_dtype("float32", CPU) == torch.float32
    assert choose_dtype("bfloat16", CPU) in (torch.bfloat16, torch.float32)
    assert choose_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16


def test_which_cpus_multiply_bfloat16_slowly() -> None:
    assert multiplies_bfloat16_slowly(INTEL)
    assert not multiplies_bfloat16_slowly({**INTEL, "amx_bf16": True})
    assert not multiplies_bfloat16_slowly({**INTEL, "cpu_name": "AMD EPYC"})
    assert not multiplies_bfloat16_slowly({"architecture": "aarch64"})


def test_weights_are_widened_where_that_is_faster_and_fits(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: INTEL)
    of_layer = 128 * 64 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64  # qkv with a bias, output, the MLP, norms
    num_weights = 2 * config.vocab_size * 64 + 3 * of_layer + 64

    def widens(dtype: torch.dtype, device: str = "cpu") -> bool:
        return choose_precision("none", dtype, torch.device(device), config).widens

    monkeypatch.setattr("engine.hardware.total_ram_bytes", lambda: 8 * num_weights)
    assert widens(torch.bfloat16)
    assert not widens(torch.float32)
    assert not widens(torch.bfloat16, "cuda")
    monkeypatch.setattr("engine.hardware.total_ram_bytes", lambda: 8 * num_weights - 8)
    assert not widens(torch.bfloat16)


def answers(tiny: Path, monkeypatch: pytest.MonkeyPatch, cpu: dict[str, object]) -> list[tuple[int, ...]]:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: cpu)
    settings = ModelSettings(path=str(tiny), dtype="bfloat16", device="cpu")
    engine, _ = load_engine(settings, EngineSettings(kv_cache_tokens=640, max_running=4), lambda part, fraction: None)
    for seed in range(4):
        prompt = tuple(range(seed, seed + 40))
        engine.add_request(InferenceRequest(seed, prompt, SamplingParams(max_tokens=6, ignore_eos=True), seed=0))
    outputs: dict[int, tuple[int, ...]] = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output.token_ids) for output in engine.step())
    return [outputs[seed] for seed in range(4)]


def test_a_widened_model_answers_alike_by_few_rows_at_a_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answers(tiny, monkeypatch, INTEL)
    assert all(len(tokens) == 6 for tokens in whole)
    monkeypatch.setattr("engine.models.decoder.WIDENED_CPU_ROWS", 3)
    assert answers(tiny, monkeypatch, INTEL) == whole
