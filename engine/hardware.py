"""What of the hardware a model uses: the device, and the formats that its numbers have there."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.memory import total_ram_bytes
from engine.model_config import ModelConfig
from engine.models.precision import Fp8Precision, PlainPrecision, Precision
from engine.weights.names import expected_parameters
from schemas.errors import SettingsError

MAX_WIDENED_SHARE = 0.5  # of a machine's memory, for weights in float32


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, otherwise the CPU. Raises SettingsError for one not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f'model.device is {name!r}; "auto", "cpu", "cuda" or "cuda:1" is expected') from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"model.device is {name!r}; cpu and cuda are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"model.device is {name!r}; there are {torch.cuda.device_count()} CUDA devices here")
    return device


def rank_device(first: torch.device, rank: int) -> torch.device:
    """Rank 0 is on `first`, the others on those behind it; on a CPU all are. Raises SettingsError past the last."""
    if first.type == "cpu":
        return first
    index, count = (first.index or 0) + rank, torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"engine.tensor_parallel asks for cuda:{index}, counted from model.device; there are {count} CUDA devices"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The settings' dtype; float32 for bfloat16 on a CPU that would have to emulate it."""
    dtype: torch.dtype = getattr(torch, name)
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_has_bfloat16():
        return torch.float32
    return dtype


def choose_precision(
    quantization: str, dtype: torch.dtype, device: torch.device, config: ModelConfig
) -> Precision[Any]:
    """Of the products of a model of that shape. Raises SettingsError where the device has no FP8."""
    if quantization == "none":
        return PlainPrecision(widens=device.type == "cpu" and _widens(dtype, config))
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise SettingsError(f'model.quantization is "fp8"; {device} has no FP8 (Ada, Hopper and later do): set "none"')
    if dtype != torch.bfloat16:
        raise SettingsError(f'model.quantization "fp8" goes with model.dtype "bfloat16", not {str(dtype)[6:]!r}')
    return Fp8Precision()


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _widens(dtype: torch.dtype, config: ModelConfig) -> bool:
    """Whether a CPU holds bfloat16 weights in float32: where it multiplies so faster, and has the memory."""
    if dtype != torch.bfloat16 or not multiplies_bfloat16_slowly(torch.cpu.get_capabilities()):
        return False
    num_weights = sum(math.prod(parameter.shape) for parameter in expected_parameters(config, "huggingface"))
    return num_weights * torch.float32.itemsize <= total_ram_bytes() * MAX_WIDENED_SHARE


def multiplies_bfloat16_slowly(capabilities: Mapping[str, Any]) -> bool:
    """By `torch.cpu.get_capabilities()`. Intel's AVX-512 does bfloat16 products at half the rate of float32 ones (83
    against 150 GFLOP/s on a core, tests/bench/cpu_linear.py); its tiles (AMX) and AMD's AVX-512 do them faster.
    """
    return str(capabilities.get("cpu_name", "")).startswith("Intel") and not capabilities.get("amx_bf16", False)
