"""Two ranks answer as one does, and end together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from engine.client import EngineClient
from engine.group import Group, join, leave, open_store
from engine.loading import LoadedModel, load_decoder, load_engine, open_model
from engine.model_config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.tensor_parallel import Ranks, RankStep, pack, unpack
from engine.weights.checkpoint import stream_parameters
from engine.weights.sharding import check_divisible, shard_config, shard_parameters
from schemas.errors import EngineError, ModelError, PagemillError, SettingsError
from schemas.inference import EngineSettings, InferenceOutput, InferenceRequest, ModelSettings, SamplingParams
from tests.engine.generation import Trial, engine_for, generate
from tests.tiny_models import num_tiny_tokens, write_tiny_model

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PAIR_COMMAND = (sys.executable, "-m", "tests.engine.second_rank")
CHUNKS = Trial(max_tokens_per_step=61, block_size=8)
PREEMPTED = Trial(
    max_tokens_per_step=97, max_running=3, block_size=8, kv_cache_tokens=400, urgent=frozenset({0, 4, 5}),
    steps_before_urgent=9,
)  # fmt: skip


def prompts() -> list[list[int]]:
    """Two groups that begin alike, and lengths around the block's."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(0, num_tiny_tokens(), (count,), generator=generator).tolist()

    first, second = draw(48), draw(37)
    return [
        draw(1), draw(15), draw(16), draw(17), draw(33), draw(141),
        first + draw(5), first + draw(30), first, second + draw(3), second + draw(2),
    ]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Rank 0 of two, here, and what it needs to drive the other."""

    group: Group
    ranks: Ranks

    def generate(self, path: Path, sampling: SamplingParams, trial: Trial) -> tuple[list[InferenceOutput], int]:
        """The outputs, and how many preemptions there were."""
        files, decoder = loaded(path, self.group)
        self.ranks.tell({"path": str(path), "trial": {**asdict(trial), "urgent": []}})
        engine = engine_for(files, decoder, trial, self.ranks)
        return generate(engine, prompts(), sampling, trial), engine.stats().num_preemptions


@cache
def loaded(path: Path, group: Group) -> tuple[LoadedModel, Decoder]:
    files = open_model(path)
    return files, load_decoder(files, torch.float32, CPU, num_positions=512, group=group)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    ranks, store = Ranks(), open_store()
    ranks.start({"port": store.port, "size": 2}, 1, PAIR_COMMAND)
    group = join(store, 0, 2, CPU)
    yield Pair(group, ranks)
    leave()
    ranks.close()


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def written(family: str, **config: Any) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp(family), family, **config)

    return written


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama3": ("llama3", {}),
    "biases everywhere": ("llama-linear", {}),
    "mistral, tied": ("mistral", {"tied": True}),
    "one key-value head for both": ("qwen2", {"num_key_value_heads": 1}),
    "an odd vocabulary": ("qwen3", {"vocab_size": num_tiny_tokens() + 1}),
}


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_give_the_tokens_of_one(model: str, pair: Pair, write: Callable[..., Path]) -> None:
    family, config = MODELS[model]
    path = write(family, **config)
    alone = generate(engine_for(*loaded(path, Group()), CHUNKS), prompts(), GREEDY, CHUNKS)
    both, _ = pair.generate(path, GREEDY, CHUNKS)
    assert [output.token_ids for output in both] == [output.token_ids for output in alone]
    assert [output.num_cached_tokens for output in both] == [output.num_cached_tokens for output in alone]
    assert sum(output.num_cached_tokens for output in both) > 0


def test_preempted_requests_resume_on_all_ranks(pair: Pair, write: Callable[..., Path]) -> None:
    path = write("qwen2")
    alone = generate(engine_for(*loaded(path, Group()), Trial()), prompts(), GREEDY)
    both, num_preemptions = pair.generate(path, GREEDY, PREEMPTED)
    assert num_preemptions > 0
    assert [output.token_ids for output in both] == [output.token_ids for output in alone]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.3, logprobs=5),
    ],
    ids=["drawn", "penalties and log-probabilities"],
)
def test_what_the_sampler_reads_is_the_whole_vocabulary(
    sampling: SamplingParams, pair: Pair, write: Callable[..., Path]
) -> None:
    path = write("qwen2")
    alone = generate(engine_for(*loaded(path, Group()), Trial()), prompts(), sampling)
    both, _ = pair.generate(path, sampling, Trial())
    for ours, theirs in zip(both, alone, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, its in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert mine.top_token_ids == its.top_token_ids
            assert np.allclose(mine.top_logprobs, its.top_logprobs, atol=1e-4)


@torch.inference_mode()
def test_the_greedy_choice_is_made_of_pairs(pair: Pair, write: Callable[..., Path]) -> None:
    """What a GPU does in place of gathering logits: here the other rank answers with the same steps' exchanges."""
    path = write("qwen2")
    _, decoder = loaded(path, pair.group)
    pair.ranks.tell({"path": str(path), "trial": {**asdict(Trial()), "urgent": []}})
    hidden = torch.randn(5, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    pair.ranks.tell({"hidden": hidden})
    token_ids, finite = decoder.greedy(decoder.logits(hidden))
    _, alone = loaded(path, Group())
    assert token_ids.tolist() == alone.logits(hidden).argmax(dim=-1).tolist()
    assert finite.all()


# ---- parts


def parts_of(path: Path, size: int) -> tuple[ModelConfig, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    config, checkpoint = read_model_config(path), open_model(path).checkpoint

    def whole() -> Iterator[tuple[str, torch.Tensor]]:
        return stream_parameters(config, checkpoint, torch.float32, CPU, lambda fraction: None)

    return config, dict(whole()), [dict(shard_parameters(whole(), config, Group(r, size))) for r in range(size)]


def test_the_parts_of_a_layer_add_up_to_it(write: Callable[..., Path]) -> None:
    config, whole, parts = parts_of(write("llama-linear"), 2)
    local = shard_config(config, Group(0, 2))
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (2, 1, 64)
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    middle = torch.randn(3, config.intermediate_size, generator=torch.Generator().manual_seed(2))

    def linear(of: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, of[f"layers.1.{name}.weight"], of[f"layers.1.{name}.bias"])

    query, key, value = torch.split(linear(whole, "qkv", x), [64, 32, 32], dim=1)
    for rank, part in enumerate(parts):
        of_rank = [each.chunk(2, dim=1)[rank] for each in (query, key, value)]
        torch.testing.assert_close(linear(part, "qkv", x), torch.cat(of_rank, dim=1))
        of_rank = [half.chunk(2, dim=1)[rank] for half in linear(whole, "gate_up", x).chunk(2, dim=1)]
        torch.testing.assert_close(linear(part, "gate_up", x), torch.cat(of_rank, dim=1))
    total = sum(linear(part, "down", middle.chunk(2, dim=1)[rank]) for rank, part in enumerate(parts))
    torch.testing.assert_close(total, linear(whole, "down", middle))
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_of_fewer_key_value_heads_than_ranks_neighbours_hold_the_same(write: Callable[..., Path]) -> None:
    config, whole, parts = parts_of(write("qwen2"), 4)  # 4 heads of 16, 2 key-value heads
    keys = whole["layers.0.qkv.weight"][64:96]
    assert shard_config(config, Group(3, 4)).num_kv_heads == 1
    for rank, part in enumerate(parts):
        assert torch.equal(part["layers.0.qkv.weight"][16:32], keys.chunk(2)[rank // 2])


def test_what_cannot_be_divided_is_refused_with_the_models_shape(write: Callable[..., Path]) -> None:
    config = read_model_config(write("qwen2"))
    check_divisible(config, 4)
    for size in (3, 8):
        with pytest.raises(SettingsError, match=f"tensor_parallel is {size}, .* 4 heads, 2 key-value heads"):
            check_divisible(config, size)
    with pytest.raises(SettingsError, match="an MLP of 129"):
        check_divisible(replace(config, intermediate_size=129), 2)


def test_an_engine_that_cannot_be_divided_starts_no_process(write: Callable[..., Path]) -> None:
    settings = EngineSettings(max_running=4, kv_cache_tokens=512, tensor_parallel=3)
    with pytest.raises(SettingsError, match="tensor_parallel is 3"):
        load_engine(model_settings(write("qwen2")), settings, lambda part, fraction: None)


# ---- what is told


def test_a_step_arrives_as_it_was_sent() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "ids": np.arange(5, dtype=np.int32),
        "none": np.zeros((0, 3), dtype=np.int64),
        "flags": np.array([True, False]),
        "columns": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    }
    inputs = {**arrays, "count": 7, "shared": None, "nested": {"tensor": torch.ones(2, 3)}}
    sent = RankStep([3, 1], inputs, whole_logits=True)
    received = unpack(bytearray(pack(sent)[8:]))
    assert (received["scrub"], received["whole_logits"]) == ([3, 1], True)
    inputs = received["inputs"]
    assert (inputs["count"], inputs["shared"]) == (7, None)
    for name, array in arrays.items():
        assert inputs[name].dtype == array.dtype
        assert np.array_equal(inputs[name], array)
    assert np.array_equal(inputs["nested"]["tensor"], np.ones((2, 3)))


# ---- how ranks end


def test_an_error_that_no_lost_rank_explains_stays_itself() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), Ranks().explaining():
        raise RuntimeError("out of memory")


def model_settings(path: Path) -> ModelSettings:
    return ModelSettings(path=str(path), dtype="float32", device="cpu", max_model_len=256)


def children_of(process_id: int) -> list[int]:
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(child) for child in text.split()]


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for_end(process_id: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(process_id):
        assert time.monotonic() < deadline, f"process {process_id} lives on"
        time.sleep(0.02)


def started_client(path: Path) -> tuple[EngineClient, int]:
    """An engine of two processes, and the other rank's process."""
    settings = EngineSettings(max_running=4, kv_cache_tokens=512, tensor_parallel=2)
    client = EngineClient(model_settings(path), settings)
    client.start(timeout_seconds=120)
    assert client.process_id is not None
    (other,) = children_of(client.process_id)
    return client, other


def request(request_id: int, max_tokens: int) -> InferenceRequest:
    return InferenceRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_engine_of_two_processes_answers_and_fails_as_one(write: Callable[..., Path]) -> None:
    path = write("qwen2")
    client, other = started_client(path)
    with client:
        client.submit([request(0, 12)])
        (output,) = client.poll(60)
        prompt_alone = engine_for(*loaded(path, Group()), Trial())
        prompt_alone.add_request(request(0, 12))
        alone = [o for _ in range(12) for o in prompt_alone.step()]
        assert [output.token_ids] == [o.token_ids for o in alone]

        client.submit([request(1, 200)])
        os.kill(other, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 of the engine died of SIGKILL"):
            client.poll(60)


RANK_THAT_WAITS = """
import sys
from engine.tensor_parallel import RankConnection
connection = RankConnection(int(sys.argv[1]))
while True:
    connection.receive()
"""
RANK_THAT_FAILS = """
import sys
from engine.tensor_parallel import RankConnection
from schemas.errors import ModelError
RankConnection(int(sys.argv[1])).fail(ModelError("its weights are damaged"))
"""
PARENT_THAT_WAITS = f"""
import sys, time
from engine.tensor_parallel import Ranks
Ranks().start({{}}, 2, [sys.executable, "-c", {RANK_THAT_WAITS!r}])
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_rank_outlives_rank_0() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT_THAT_WAITS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        others = children_of(parent.pid)
        assert len(others) == 2
        assert all(is_running(other) for other in others)
        parent.kill()
        for other in others:
            wait_for_end(other)


def test_a_rank_that_fails_says_why() -> None:
    lost: SimpleQueue[PagemillError] = SimpleQueue()
    ranks = Ranks(lost.put)
    ranks.start({}, 1, [sys.executable, "-c", RANK_THAT_FAILS])
    error = lost.get(timeout=60)
    assert isinstance(error, ModelError)
    assert str(error) == "rank 1 of the engine failed: its weights are damaged"
    with pytest.raises(ModelError, match="damaged"), ranks.explaining():
        raise RuntimeError("what an exchange with it ends in")
    ranks.close()
