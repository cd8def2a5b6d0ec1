"""Greedy tokens of every family equal transformers', exactly, in float32, from safetensors and from GGUF."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import ForwardBatch
from engine.loading import LoadedModel, load_decoder, open_model
from engine.model_runner import gather_batch
from engine.models.decoder import Decoder
from schemas.inference import SamplingParams
from tests.engine.generation import Trial, assert_greedy, assert_logprobs, engine_for, generate, reference_logprobs
from tests.tiny_models import FAMILIES, num_tiny_tokens, tiny_transformers_model, write_tiny_gguf, write_tiny_model

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LoadedPair = tuple[LoadedModel, Decoder]


def prompts(seed: int = 0) -> list[list[int]]:
    """Two groups that begin alike, and lengths around the block's: 1, 15, 16, 17, 33, and a long one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(0, num_tiny_tokens(), (count,), generator=generator).tolist()

    first, second = draw(48), draw(37)
    return [
        draw(1), draw(15), draw(16), draw(17), draw(33), draw(141),
        first + draw(5), first + draw(30), first, first[:40] + draw(9), second + draw(3), second + draw(2),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedPair]:
    @cache
    def loaded(family: str, file_format: str = "safetensors", tied: bool = False) -> LoadedPair:
        folder = tmp_path_factory.mktemp(family)
        if file_format == "safetensors":
            path = write_tiny_model(folder, family, tied=tied)
        else:
            path = write_tiny_gguf(folder / "tiny.gguf", family, tied=tied)
        return open_and_load(path)

    return loaded


def open_and_load(path: Path) -> LoadedPair:
    files = open_model(path)
    return files, load_decoder(files, torch.float32, torch.device("cpu"), num_positions=512)


@cache
def reference(family: str, tied: bool = False) -> Any:
    return tiny_transformers_model(family, tied=tied)


@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, file_format: str, load: Callable[..., LoadedPair]) -> None:
    files, decoder = load(family, file_format)
    engine = engine_for(files, decoder, Trial())
    outputs = generate(engine, prompts(), GREEDY)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output.token_ids) == 24
        assert_greedy(reference(family), prompt, output.token_ids, num_tiny_tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_chunks_and_hits_change_nothing(family: str, load: Callable[..., LoadedPair]) -> None:
    files, decoder = load(family)
    for chunk, block_size in ((7, 8), (23, 16), (61, 32)):
        trial = Trial(max_tokens_per_step=chunk, block_size=block_size)
        engine = engine_for(files, decoder, trial)
        for _ in range(2):  # the second time everything but the last tokens is in the cache
            outputs = generate(engine, prompts(), GREEDY, trial)
            for prompt, output in zip(prompts(), outputs, strict=True):
                assert_greedy(reference(family), prompt, output.token_ids, num_tiny_tokens())
        assert [output.num_cached_tokens for output in outputs] == [
            (len(prompt) - 1) // block_size * block_size for prompt in prompts()
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preempted_request_resumes_where_it_was(family: str, load: Callable[..., LoadedPair]) -> None:
    files, decoder = load(family)
    for prefix_caching in (True, False):
        trial = Trial(
            max_tokens_per_step=97,
            max_running=3,
            block_size=8,
            kv_cache_tokens=400,
            prefix_caching=prefix_caching,
            urgent=frozenset({0, 4, 5, 9}),
            steps_before_urgent=9,
        )
        engine = engine_for(files, decoder, trial)
        outputs = generate(engine, prompts(), GREEDY, trial)
        assert engine.stats().num_preemptions > 0
        assert any(output.num_preemptions > 0 and output.token_ids for output in outputs)
        for prompt, output in zip(prompts(), outputs, strict=True):
            assert_greedy(reference(family), prompt, output.token_ids, num_tiny_tokens())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
def test_a_tied_head_is_the_embedding(family: str, file_format: str, load: Callable[..., LoadedPair]) -> None:
    files, decoder = load(family, file_format, tied=True)
    assert decoder.config.tied_embeddings
    outputs = generate(engine_for(files, decoder, Trial()), prompts(), GREEDY)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert_greedy(reference(family, tied=True), prompt, output.token_ids, num_tiny_tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_transformers(family: str, load: Callable[..., LoadedPair]) -> None:
    files, decoder = load(family)
    trial = Trial(max_tokens_per_step=31)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=20)
    outputs = generate(engine_for(files, decoder, trial), prompts(), sampling, trial)
    for prompt, output in zip(prompts(), outputs, strict=True):
        logprobs = assert_greedy(reference(family), prompt, output.token_ids, num_tiny_tokens())
        assert_logprobs(output, logprobs, num_top=20)


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_quantised_file_answers_as_transformers_reads_it(family: str, tensor_type: str, tmp_path: Path) -> None:
    files, decoder = open_and_load(write_tiny_gguf(tmp_path / "tiny.gguf", family, tensor_type=tensor_type))
    model = tiny_transformers_model(family)
    read_with_transformers(model, files.path)
    outputs = generate(engine_for(files, decoder, Trial()), prompts(), GREEDY)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert_greedy(model, prompt, output.token_ids, num_tiny_tokens())


def read_with_transformers(model: Any, path: Path) -> None:
    """Gives the model the file's weights by transformers' own reader."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model.load_state_dict(load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_chooses_tokens_near_the_largest_logit(family: str, load: Callable[..., LoadedPair]) -> None:
    """Exact equality would be luck in 16 bits. Largest distances seen over the families: 0.1 to 0.5 nats."""
    files, _ = load(family)
    decoder = load_decoder(files, torch.bfloat16, torch.device("cpu"), num_positions=512)
    trial = Trial(max_tokens_per_step=61)
    outputs = generate(engine_for(files, decoder, trial), prompts(), GREEDY, trial)
    for prompt, output in zip(prompts(), outputs, strict=True):
        logprobs = reference_logprobs(reference(family), prompt, output.token_ids, num_tiny_tokens())
        chosen = logprobs[range(len(output.token_ids)), list(output.token_ids)]
        assert (logprobs.max(dim=-1).values - chosen).max().item() < 1.0


def wrong_block(batch: ForwardBatch) -> ForwardBatch:
    tables = batch.block_tables.clone()
    tables[:, 1:2] = tables[:, :1]
    return replace(batch, block_tables=tables)


def wrong_position(batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, positions=batch.positions + (batch.positions == 17))


def wrong_slot(batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, slot_mapping=torch.where(batch.positions == 9, batch.slot_mapping - 1, batch.slot_mapping))


@pytest.mark.parametrize("mutate", [wrong_block, wrong_position, wrong_slot])
def test_one_wrong_index_would_show(
    mutate: Callable[[ForwardBatch], ForwardBatch], load: Callable[..., LoadedPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons above are worth what they can tell apart: each of these changes some answer."""
    files, decoder = load("qwen2")
    right = generate(engine_for(files, decoder, Trial()), prompts(), GREEDY)
    monkeypatch.setattr("engine.model_runner.gather_batch", lambda *given: mutate(gather_batch(*given)))
    wrong = generate(engine_for(files, decoder, Trial()), prompts(), GREEDY)
    assert [output.token_ids for output in wrong] != [output.token_ids for output in right]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "mistral"])
def test_a_gpu_gives_the_same_tokens(family: str, load: Callable[..., LoadedPair]) -> None:
    files, _ = load(family)
    decoder = load_decoder(files, torch.float32, torch.device("cuda", 0), num_positions=512)
    for trial in (Trial(), Trial(max_tokens_per_step=23)):
        outputs = generate(engine_for(files, decoder, trial), prompts(), GREEDY, trial)
        for prompt, output in zip(prompts(), outputs, strict=True):
            assert_greedy(reference(family), prompt, output.token_ids, num_tiny_tokens())
