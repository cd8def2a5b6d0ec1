"""The decoder without weights that kernels are compiled with: the model's shapes, in two layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.loading import allocate_cache
from engine.memory import worst_step_batch
from engine.model_config import read_model_config
from engine.rehearsal import stand_in
from tests.tiny_models import FAMILIES, write_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_does_the_models_steps(family: str, tmp_path: Path) -> None:
    config = read_model_config(write_tiny_model(tmp_path, family))
    decoder = stand_in(config, torch.float32, 256, CPU)
    assert decoder.config.num_layers == 2
    assert (decoder.config.head_size, decoder.config.hidden_size) == (config.head_size, config.hidden_size)
    batch, num_blocks = worst_step_batch(20, 4, 256, 16, CPU)
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(batch, allocate_cache(decoder, num_blocks, 16)))
    assert logits.shape == (4, config.vocab_size)
    assert bool(torch.isfinite(logits).all())


def test_a_large_vocabulary_is_cut_without_a_change_to_how_it_divides(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_model(tmp_path, vocab_size=8201))
    assert stand_in(config, torch.float32, 64, CPU).config.vocab_size == 4096 + 9


def test_layers_of_several_windows_are_all_there(tmp_path: Path) -> None:
    config = replace(read_model_config(write_tiny_model(tmp_path)), windows=(None, 24, None))
    assert stand_in(config, torch.float32, 64, CPU).config.windows == (None, 24)
