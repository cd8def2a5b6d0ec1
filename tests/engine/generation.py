"""Tokens from our engine beside those of transformers: the driver of one and the truth of the other.

The truth is teacher-forced: transformers reads prompt and answer in one pass, and each of the answer's tokens must be
the largest logit at its place. By induction that is greedy decoding, without a pass per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.loading import LoadedModel, allocate_cache, build_engine
from engine.models.decoder import Decoder
from engine.tensor_parallel import Ranks
from schemas.inference import EngineSettings, InferenceOutput, InferenceRequest, SamplingParams


@dataclass(frozen=True)
class Trial:
    """One way to run requests: what a step and the cache hold, and who arrives late."""

    max_tokens_per_step: int = 8192
    max_running: int = 64
    block_size: int = 16
    kv_cache_tokens: int = 16384
    prefix_caching: bool = True
    urgent: frozenset[int] = frozenset()  # these come with a higher priority after `steps_before_urgent` steps
    steps_before_urgent: int = 0


def engine_for(files: LoadedModel, decoder: Decoder, trial: Trial, ranks: Ranks | None = None) -> Engine:
    """A fresh engine over the decoder, with an empty cache."""
    settings, max_model_len = settings_of(trial), min(decoder.num_positions, trial.kv_cache_tokens)
    return build_engine(files, decoder, cache_for(decoder, trial), settings, max_model_len, b"a test", ranks)


def cache_for(decoder: Decoder, trial: Trial) -> KVCache:
    return allocate_cache(decoder, trial.kv_cache_tokens // trial.block_size, trial.block_size)


def settings_of(trial: Trial) -> EngineSettings:
    return EngineSettings(
        max_tokens_per_step=trial.max_tokens_per_step,
        max_running=trial.max_running,
        block_size=trial.block_size,
        prefix_caching=trial.prefix_caching,
    )


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, trial: Trial | None = None
) -> list[InferenceOutput]:
    """Every prompt's output, in the prompts' order; the engine is drained and its blocks are all free again."""
    trial = trial or Trial()
    requests = [
        InferenceRequest(index, tuple(prompt), sampling, seed=index, priority=int(index in trial.urgent))
        for index, prompt in enumerate(prompts)
    ]
    outputs: dict[int, InferenceOutput] = {}
    for request in requests:
        if request.request_id not in trial.urgent:
            engine.add_request(request)
    for _ in range(trial.steps_before_urgent):
        outputs |= {output.request_id: output for output in engine.step()}
    for request in requests:
        if request.request_id in trial.urgent:
            engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks >= stats.num_blocks
    assert all(output.failure is None for output in outputs.values())
    return [outputs[index] for index in range(len(prompts))]


@torch.inference_mode()
def reference_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], num_tokens: int) -> torch.Tensor:
    """(len(answer), vocab) float32: transformers' log-probabilities before each of the answer's tokens.

    Ids from `num_tokens` on are a checkpoint's padding; they take no part.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    logits[:, num_tokens:] = float("-inf")
    return torch.log_softmax(logits, dim=-1)


def assert_greedy(model: Any, prompt: Sequence[int], answer: Sequence[int], num_tokens: int) -> torch.Tensor:
    """The answer is transformers' greedy one, token for token. Returns the log-probabilities."""
    logprobs = reference_logprobs(model, prompt, answer, num_tokens)
    assert logprobs.argmax(dim=-1).tolist() == list(answer)
    return logprobs


def assert_logprobs(output: InferenceOutput, logprobs: torch.Tensor, num_top: int, tolerance: float = 1e-4) -> None:
    """Chosen and top log-probabilities, against transformers' at the same places; the top ids by their own values."""
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == len(logprobs)
    for place, ours in enumerate(output.logprobs):
        truth = logprobs[place]
        assert ours.token_id == output.token_ids[place]
        assert abs(ours.logprob - truth[ours.token_id].item()) < tolerance
        best = truth.topk(num_top).values
        assert len(ours.top_token_ids) == num_top
        assert torch.allclose(torch.tensor(ours.top_logprobs), best, rtol=0, atol=tolerance)
        assert torch.allclose(truth[list(ours.top_token_ids)], best, rtol=0, atol=tolerance)
