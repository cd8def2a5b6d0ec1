"""A plan becomes tensors: exact ids, positions, slots and tables on tiny cases."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.loading import allocate_cache, load_decoder, open_model
from engine.model_runner import ModelRunner, RequestRows, gather_batch
from engine.models.decoder import Decoder
from engine.request import Request
from engine.step_plan import SampledTokens, ScheduledTokens, StepPlan
from schemas.inference import InferenceRequest, SamplingParams
from tests.tiny_models import write_tiny_model

BLOCK = 4


def request(request_id: int, token_ids: Sequence[int], block_ids: Sequence[int]) -> Request:
    inference = InferenceRequest(request_id, tuple(token_ids), SamplingParams(), seed=0)
    return Request(inference, list(token_ids), block_ids=list(block_ids))


def gather(rows: RequestRows, runs: Sequence[ScheduledTokens]) -> ForwardBatch:
    return gather_batch(
        rows,
        np.array([rows.update(run.request) for run in runs]),
        np.array([run.start for run in runs]),
        np.array([run.count for run in runs]),
        np.array([run.samples for run in runs]),
        BLOCK,
        torch.device("cpu"),
    )


def test_a_chunk_and_a_decode_row_in_one_batch() -> None:
    rows = RequestRows.allocate(max_running=2, max_model_len=12, block_size=BLOCK)
    prefill = request(1, [10, 11, 12, 13, 14, 15, 16], [5, 2])
    decode = request(2, [20, 21, 22], [7])
    batch = gather(rows, [ScheduledTokens(prefill, 2, 4, False), ScheduledTokens(decode, 2, 1, True)])
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 22]
    assert batch.positions.tolist() == [2, 3, 4, 5, 2]
    assert batch.slot_mapping.tolist() == [22, 23, 8, 9, 30]
    assert batch.block_tables.tolist() == [[5, 2], [7, 0]]
    assert batch.query_starts.tolist() == [0, 4, 5]
    assert batch.sequence_lengths.tolist() == [6, 3]
    assert batch.logits_indices is not None
    assert batch.logits_indices.tolist() == [4]
    assert (batch.max_query_length, batch.max_sequence_length) == (4, 6)


def test_a_table_ends_where_its_row_does() -> None:
    rows = RequestRows.allocate(2, 16, BLOCK)
    short, long = request(1, list(range(4)), [9, 8, 7]), request(2, list(range(9)), [1, 2, 3])
    batch = gather(rows, [ScheduledTokens(short, 0, 4, True), ScheduledTokens(long, 0, 9, True)])
    assert batch.block_tables.tolist() == [[9, 0, 0], [1, 2, 3]]


def test_new_tokens_and_blocks_of_a_running_request_are_appended() -> None:
    rows = RequestRows.allocate(1, 16, BLOCK)
    running = request(1, [1, 2, 3, 4], [6])
    assert rows.update(running) == 0
    running.token_ids.append(5)
    running.block_ids.append(3)
    batch = gather(rows, [ScheduledTokens(running, 4, 1, True)])
    assert (batch.token_ids.tolist(), batch.slot_mapping.tolist()) == ([5], [12])


def test_a_forgotten_row_is_taken_again_with_other_blocks() -> None:
    rows = RequestRows.allocate(1, 16, BLOCK)
    first = request(1, [1, 2, 3, 4, 5], [6, 7])
    rows.update(first)
    rows.forget(1)
    rows.forget(1)
    first.block_ids = [2, 0]
    batch = gather(rows, [ScheduledTokens(first, 0, 5, True)])
    assert batch.block_tables.tolist() == [[2, 0]]
    with pytest.raises(AssertionError, match="more than 1 requests"):
        rows.update(request(2, [1], [1]))


class Recorder:
    """A sampler that answers 7 and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def add(self, request: Request) -> None:
        self.told.append(("add", request.request_id))

    def remove(self, request_id: int) -> None:
        self.told.append(("remove", request_id))

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> SampledTokens:
        self.told += [("sample", request.request_id) for request in requests]
        assert logits.shape[0] == len(requests)
        return SampledTokens([7] * len(requests), [None] * len(requests), [True] * len(requests))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    files = open_model(write_tiny_model(Path(tmp_path_factory.mktemp("tiny"))))
    return load_decoder(files, torch.float32, torch.device("cpu"), num_positions=64)


def test_the_sampler_knows_a_request_from_its_first_step_to_its_end(decoder: Decoder) -> None:
    sampler = Recorder()
    runner = ModelRunner(decoder, allocate_cache(decoder, 8, BLOCK), sampler, max_running=2, max_model_len=16)
    first, second = request(1, [1, 2, 3, 4, 5], [0, 1]), request(2, [6, 7], [2])
    runner.execute(StepPlan([ScheduledTokens(first, 0, 3, False)]))
    sampled = runner.execute(StepPlan([ScheduledTokens(first, 3, 2, True), ScheduledTokens(second, 0, 2, True)]))
    assert sampled.token_ids == [7, 7]
    runner.execute(StepPlan(preempted=[second]))
    runner.execute(StepPlan([ScheduledTokens(second, 0, 2, True)]))
    runner.release(second)
    runner.release(second)
    expected = [("add", 1), ("add", 2), ("sample", 1), ("sample", 2), ("sample", 2), ("remove", 2)]
    assert sampler.told == expected


def test_parts_of_a_step_are_timed(decoder: Decoder) -> None:
    runner = ModelRunner(decoder, allocate_cache(decoder, 8, BLOCK), Recorder(), max_running=1, max_model_len=16)
    runner.execute(StepPlan([ScheduledTokens(request(1, [1, 2], [0]), 0, 2, True)]))
    assert set(runner.step_seconds) == {"prepare", "forward", "sample"}
    assert all(seconds > 0 for seconds in runner.step_seconds.values())


def test_an_empty_plan_computes_nothing(decoder: Decoder) -> None:
    runner = ModelRunner(decoder, allocate_cache(decoder, 8, BLOCK), Recorder(), max_running=1, max_model_len=16)
    assert runner.execute(StepPlan()) == SampledTokens()
    assert set(runner.step_seconds.values()) == {0.0}


def test_blocks_to_scrub_are_zeroed_before_the_step(decoder: Decoder) -> None:
    cache = allocate_cache(decoder, 8, BLOCK)
    cache.keys[:, 3], cache.values[:, 3], cache.keys[:, 4] = float("nan"), float("inf"), 1.0
    runner = ModelRunner(decoder, cache, Recorder(), max_running=1, max_model_len=16)
    runner.execute(StepPlan(scrub=[3]))
    assert not cache.keys[:, 3].any()
    assert not cache.values[:, 3].any()
    assert bool((cache.keys[:, 4] == 1.0).all())


def test_a_cache_starts_with_zeros_in_its_shape() -> None:
    cache = KVCache.allocate(2, 3, BLOCK, 1, 8, torch.bfloat16, torch.device("cpu"))
    assert cache.keys.shape == cache.values.shape == (2, 3, BLOCK, 1, 8)
    assert (cache.keys.dtype, cache.num_blocks, cache.block_size) == (torch.bfloat16, 3, BLOCK)
    assert not cache.keys.any()


def test_padding_of_the_vocabulary_is_never_likely(decoder: Decoder) -> None:
    hidden = torch.randn(3, decoder.config.hidden_size)
    logits = decoder.logits(hidden)
    assert logits.shape == (3, decoder.config.vocab_size)
    assert logits.dtype == torch.float32
    assert decoder.num_tokens < decoder.config.vocab_size
    assert bool(torch.isneginf(logits[:, decoder.num_tokens :]).all())
    assert bool(torch.isfinite(logits[:, : decoder.num_tokens]).all())
