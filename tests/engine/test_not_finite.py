"""A model whose output is not finite for some prompts: those fail by name, and nobody else notices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.loading import load_engine
from schemas.errors import FailureCode
from schemas.inference import EngineSettings, InferenceOutput, InferenceRequest, ModelSettings, SamplingParams
from tests.tiny_models import num_tiny_tokens, write_tiny_model

# The embeddings of these two tokens make everything after them NaN or infinite.
NAN_TOKEN, INFINITE_TOKEN = 201, 202
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SETTINGS = EngineSettings(max_tokens_per_step=48, max_running=8, block_size=8, kv_cache_tokens=512, num_threads=1)


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    tensors["model.embed_tokens.weight"][INFINITE_TOKEN] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine_of(model: Path) -> Engine:
    settings = ModelSettings(path=str(model), dtype="float32", device="cpu")
    engine, _ = load_engine(settings, SETTINGS, lambda part, fraction: None)
    assert isinstance(engine, Engine)
    return engine


def run(engine: Engine, requests: Sequence[InferenceRequest]) -> Mapping[int, InferenceOutput]:
    for request in requests:
        engine.add_request(request)
    outputs: list[InferenceOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert len({output.request_id for output in outputs}) == len(outputs) == len(requests)
    return {output.request_id: output for output in outputs}


def what_it_says(output: InferenceOutput) -> tuple[object, ...]:
    return output.token_ids, output.text, output.finish_reason, output.label_id, output.failure


SHARED = tuple(range(20, 44))  # three whole blocks that all prompts begin with
PARAMS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9),
    "penalised": SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
}


@pytest.mark.parametrize("token_id", [NAN_TOKEN, INFINITE_TOKEN])
@pytest.mark.parametrize("kind", [*PARAMS, "label"])
def test_a_prompt_that_is_not_finite_fails_alone_and_its_neighbours_answer_as_they_would_without_it(
    broken_model: Path, kind: str, token_id: int
) -> None:
    params = PARAMS.get(kind, GREEDY)
    labels = ((50, 51), (60,)) if kind == "label" else ()
    own = [(*SHARED, 100 + number, 110 + number) for number in range(4)]
    good = [InferenceRequest(i, ids, params, seed=i, label_token_ids=labels) for i, ids in enumerate(own)]
    broken = [
        # Ends in it, begins with it, and shares blocks with the others up to it; the last one's chunks take two steps.
        InferenceRequest(10, (*SHARED, token_id), params, seed=0, label_token_ids=labels),
        InferenceRequest(11, (token_id, *SHARED), params, seed=0, label_token_ids=labels),
        InferenceRequest(12, (*SHARED, token_id, *range(100, 130)), params, seed=0, label_token_ids=labels),
    ]
    alone = {i: what_it_says(output) for i, output in run(engine_of(broken_model), good).items()}
    engine = engine_of(broken_model)
    outputs = run(engine, [broken[0], *good[:2], broken[1], *good[2:], broken[2]])
    assert {i: what_it_says(outputs[i]) for i in alone} == alone
    failures = [outputs[request.request_id].failure for request in broken]
    assert [failure and failure.code for failure in failures] == [FailureCode.NUMERIC_ERROR] * 3
    assert failures[0] is not None
    assert failures[0].message == "the model's output after 25 tokens is not finite (NaN or infinity)"
    # Nor does anything of it stay behind: in the same blocks, and through the prefix cache.
    assert {i: what_it_says(output) for i, output in run(engine, good).items()} == alone
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_the_broken_tokens_are_the_vocabularys() -> None:
    assert num_tiny_tokens() > INFINITE_TOKEN
