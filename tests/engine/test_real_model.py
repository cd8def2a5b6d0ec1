"""The real 0.5B model, out of its GGUF file: our tokens and log-probabilities are transformers', in float32.

transformers reads the same file with its own reader. Prompts are code and prose that the standard library carries.
"""

import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import LoadedModel, load_decoder, open_model
from engine.models.decoder import Decoder
from schemas.inference import InferenceOutput, SamplingParams
from tests.engine.generation import Trial, assert_greedy, assert_logprobs, engine_for, generate

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]  # on a machine with other work to do

NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SOURCE = inspect.getsource(json) + inspect.getsource(textwrap)
TASKS = [
    "Name the main idea in one sentence.", "Which words does it use most?", "Is it about text? Answer yes or no.",
    "Translate the first sentence to French.", "Write a title.", "What would a test for it look like?",
    "Who would read this?", "Count its functions.",
]  # fmt: skip
# Characters of a document. Four of them, so that eight prompts share four documents; from one line to half a page.
LENGTHS = [60, 250, 600, 1100]

LoadedPair = tuple[LoadedModel, Decoder]


@pytest.fixture(scope="session")
def loaded(real_model: Path) -> LoadedPair:
    files = open_model(real_model)
    return files, load_decoder(files, torch.float32, torch.device("cpu"), num_positions=2048)


@pytest.fixture(scope="session")
def reference(real_model: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(real_model.parent, gguf_file=real_model.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(real_model), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # not in the file, so still without memory
    return model.eval()


def prompts_of(files: LoadedModel, count: int) -> list[list[int]]:
    """Chats about documents of mixed length; every second one asks about the document before it."""
    prompts = []
    for index in range(count):
        pair = index // 2
        start = 211 * pair
        document = SOURCE[start : start + LENGTHS[pair % len(LENGTHS)]]
        content = f"Here is a document:\n\n{document}\n\n{TASKS[index % len(TASKS)]}"
        prompts.append(files.tokenizer.encode_chat([{"role": "user", "content": content}]))
    return prompts


def assert_all_greedy(
    reference: Any, files: LoadedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[InferenceOutput]
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == NUM_TOKENS
        assert_greedy(reference, prompt, output.token_ids, files.tokenizer.vocab_size)


# Batched, with hits, chunks of 97 tokens, and a fourth of the requests arriving late with a priority that preempts.
FORCED = Trial(
    max_tokens_per_step=97, max_running=6, kv_cache_tokens=4096, urgent=frozenset({1, 6}), steps_before_urgent=14
)


def test_eight_prompts_batched_chunked_hit_and_preempted(loaded: LoadedPair, reference: Any) -> None:
    files, decoder = loaded
    prompts = prompts_of(files, 8)
    engine = engine_for(files, decoder, FORCED)
    outputs = generate(engine, prompts, GREEDY, FORCED)
    assert engine.stats().num_preemptions > 0
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 3
    assert_all_greedy(reference, files, prompts, outputs)


@pytest.mark.slow
def test_thirty_two_prompts_batched_chunked_hit_and_preempted(loaded: LoadedPair, reference: Any) -> None:
    files, decoder = loaded
    prompts = prompts_of(files, 32)
    trial = Trial(
        max_tokens_per_step=211,
        max_running=20,
        kv_cache_tokens=8192,
        urgent=frozenset(range(1, 32, 4)),
        steps_before_urgent=30,
    )
    engine = engine_for(files, decoder, trial)
    outputs = generate(engine, prompts, GREEDY, trial)
    assert engine.stats().num_preemptions > 0
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 12
    assert_all_greedy(reference, files, prompts, outputs)


def test_log_probabilities_of_the_real_model(loaded: LoadedPair, reference: Any) -> None:
    files, decoder = loaded
    prompts = prompts_of(files, 3)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=20)
    outputs = generate(engine_for(files, decoder, Trial()), prompts, sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        logprobs = assert_greedy(reference, prompt, output.token_ids, files.tokenizer.vocab_size)
        assert_logprobs(output, logprobs, num_top=20)


def test_transformers_generates_the_same_token_by_token(loaded: LoadedPair, reference: Any) -> None:
    """The truth of the other tests is one pass over prompt and answer; this is `generate` itself."""
    files, decoder = loaded
    (prompt,) = prompts_of(files, 1)
    (output,) = generate(engine_for(files, decoder, Trial()), [prompt], SamplingParams(max_tokens=24, ignore_eos=True))
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert list(output.token_ids) == generated[0, len(prompt) :].tolist()


def test_a_request_has_one_answer_however_it_is_run(loaded: LoadedPair) -> None:
    """A miss, a hit, a hit within its own step, preempted and resumed, and among 31 others."""
    files, decoder = loaded
    prompt = prompts_of(files, 4)[3]
    others = [p[: 40 + 3 * i] for i, p in enumerate(prompts_of(files, 31))]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)

    engine = engine_for(files, decoder, Trial())
    (miss,) = generate(engine, [prompt], sampling)
    (hit,) = generate(engine, [prompt], sampling)
    assert miss.num_cached_tokens == 0
    assert hit.num_cached_tokens == (len(prompt) - 1) // 16 * 16

    first, same_step = generate(engine_for(files, decoder, Trial()), [prompt, prompt], sampling)
    assert first.num_cached_tokens == 0
    assert same_step.num_cached_tokens == (len(prompt) - 1) // 16 * 16

    late = Trial(max_running=1, urgent=frozenset({1}), steps_before_urgent=5, prefix_caching=False)
    preempted, _ = generate(engine_for(files, decoder, late), [prompt, others[0]], sampling, late)
    assert preempted.num_preemptions == 1

    among = generate(engine_for(files, decoder, Trial()), [*others[:17], prompt, *others[17:]], sampling)[17]

    for output in (hit, first, same_step, preempted, among):
        assert output.token_ids == miss.token_ids
