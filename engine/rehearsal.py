"""Compiles a model's kernels while its weights are read: a decoder of its shapes, without weights, does its steps.

What a kernel is compiled for are dtypes, sizes of heads and layers, strides and how many rows a step has; not how many
layers there are, nor what the weights are.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from engine.cuda_graph import Rehearsal
from engine.cuda_runner import CudaRunner
from engine.grammar import LabelSets
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.precision import Precision
from engine.sampler import Sampler
from engine.weights.names import expected_parameters
from schemas.inference import EngineSettings

_NUM_BLOCKS = 2
_VOCABULARY = 4096  # at most about so many rows of embedding and head
_DIVISOR = 16  # a kernel knows of a size whether this divides it


def stand_in(
    config: ModelConfig,
    dtype: torch.dtype,
    num_positions: int,
    device: torch.device,
    precision: Precision[Any] | None = None,
) -> Decoder:
    """Two layers of the model's (`config`: of one rank), or one of each window that its layers have; all weights 0."""
    windows = tuple(dict.fromkeys(config.windows))
    windows = windows if len(windows) > 1 else windows * 2  # the last layer's end is another than the others'
    vocabulary = min(config.vocab_size, _VOCABULARY + config.vocab_size % _DIVISOR)
    small = replace(config, num_layers=len(windows), windows=windows, vocab_size=vocabulary)

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in expected_parameters(small, "huggingface"):
            yield parameter.name, torch.zeros(parameter.shape, dtype=dtype, device=device)

    with torch.inference_mode():
        return Decoder(small, parameters(), vocabulary, num_positions, device, precision)


def start_rehearsal(decoder: Decoder, settings: EngineSettings, max_model_len: int) -> threading.Thread:
    """Does one of each of the steps that will have a graph, and those of a warm-up, on a thread of its own.

    It captures nothing, and hands its memory back where the caller keeps no reference. Where it fails, which it tells
    standard error, kernels are compiled when they are first needed.
    """

    def rehearse() -> None:
        try:
            with torch.cuda.device(decoder.device), torch.inference_mode():
                config = decoder.config
                cache = KVCache.allocate(
                    config.num_layers, _NUM_BLOCKS, settings.block_size, config.num_kv_heads, config.head_size,
                    decoder.dtype, decoder.device,
                )  # fmt: skip
                CudaRunner(
                    decoder, cache, Sampler(LabelSets(frozenset(), lambda: ())), settings.max_running, max_model_len,
                    settings.max_tokens_per_step, take_graph=Rehearsal(),
                )  # fmt: skip
                torch.cuda.synchronize(decoder.device)
        except Exception as error:
            print(f"kernels were not compiled ahead: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            gc.collect()

    # The process does not wait for it where a weight file turns out to be damaged.
    thread = threading.Thread(target=rehearse, name="rehearsal", daemon=True)
    thread.start()
    return thread
