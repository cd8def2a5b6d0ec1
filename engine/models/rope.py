"""The rope's tables of angles, for every family and scaling."""

import math

import torch

from engine.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """(rotary_dim / 2,) float32, in radians per position; `factors` (the same shape) only where the scaling says so."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "factors":
        assert factors is not None, "a rope scaled by the checkpoint's factors, and no factors"
        return frequencies / factors.float().cpu()
    assert factors is None, f"rope scaling {rope.scaling} takes no factors"
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def rope_tables(
    frequencies: torch.Tensor, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (num_positions, rotary_dim / 2) float32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1 (meta-llama/llama-models, `apply_scaling`): by how often a wavelength fits the trained context."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: long wavelengths, divided; 1: short ones, as they are
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
