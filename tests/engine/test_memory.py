"""How large the KV cache is made, and what becomes of freed memory on a CPU."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.memory import (
    available_ram_bytes,
    decide_kv_cache_tokens,
    explaining_memory,
    free_bytes_for_cache,
    kv_bytes_per_token,
    worst_step_batch,
)
from engine.model_config import read_model_config
from schemas.errors import SettingsError
from schemas.inference import EngineSettings
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")


def test_bytes_of_a_token(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_model(tmp_path))  # 3 layers, 2 key-value heads of 16
    assert kv_bytes_per_token(config, torch.bfloat16) == 2 * 3 * 2 * 16 * 2


def test_the_free_memory_is_used_in_whole_blocks() -> None:
    settings = EngineSettings(max_running=64)
    assert decide_kv_cache_tokens(settings, 4096, bytes_per_token=100, free_bytes=100 * 16 * 10 + 99) == 160


def test_no_more_than_every_request_at_its_longest() -> None:
    settings = EngineSettings(max_running=3, block_size=16)
    assert decide_kv_cache_tokens(settings, 100, bytes_per_token=1, free_bytes=10**9) == 3 * 112


def test_what_the_settings_ask_is_given_in_whole_blocks_even_past_that() -> None:
    settings = EngineSettings(max_running=1, kv_cache_tokens=1001)
    assert decide_kv_cache_tokens(settings, 100, bytes_per_token=1, free_bytes=10**9) == 1008


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    settings = EngineSettings(kv_cache_tokens=1000)
    with pytest.raises(SettingsError, match=r"kv_cache_tokens is 1,000, .* 10,080 bytes; 5,000 are free for 496"):
        decide_kv_cache_tokens(settings, 100, bytes_per_token=10, free_bytes=5000)


@pytest.mark.parametrize("free_bytes", [-5, 0, 159])
def test_no_room_for_one_block_is_refused(free_bytes: int) -> None:
    with pytest.raises(SettingsError, match="no memory is left"):
        decide_kv_cache_tokens(EngineSettings(), 100, bytes_per_token=10, free_bytes=free_bytes)


def test_a_cpu_gives_a_quarter_of_what_is_free_unless_a_size_is_asked() -> None:
    free = available_ram_bytes()
    assert free > 0
    share = free_bytes_for_cache(EngineSettings(), CPU)
    asked = free_bytes_for_cache(EngineSettings(kv_cache_tokens=16), CPU)
    assert share < asked / 2


def test_the_worst_step_has_every_token_and_every_row() -> None:
    batch, num_blocks = worst_step_batch(100, max_running=7, max_model_len=64, block_size=16, device=CPU)
    lengths = batch.sequence_lengths.tolist()
    assert (sum(lengths), len(lengths), max(lengths) - min(lengths)) == (100, 7, 1)
    assert num_blocks == 7
    assert batch.logits_indices is not None
    assert len(batch.logits_indices) == 7
    slots = batch.slot_mapping.tolist()
    assert len(set(slots)) == 100
    assert max(slots) < num_blocks * 16


def test_the_worst_step_of_a_short_context_needs_more_rows() -> None:
    batch, _ = worst_step_batch(100, max_running=1, max_model_len=30, block_size=16, device=CPU)
    assert batch.sequence_lengths.tolist() == [25, 25, 25, 25]


_COUNT_NEW_BYTES = """
import resource, torch
from engine.memory import keep_freed_memory
def allocate():
    return [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(8)]
keep_freed_memory()
allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_freed_tensors_are_the_next_ones_memory_without_new_pages() -> None:
    # In a process of its own, since it matters what else has been allocated and freed.
    command = [sys.executable, "-c", _COUNT_NEW_BYTES]
    new_bytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert new_bytes < 100 << 20  # where freed memory is given back, up to 1,600 MB were seen to be new


def run_out_in_a_capture(error: type[Exception]) -> None:
    try:
        raise error("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139 GiB")
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_gpu_that_is_full_is_explained_even_where_the_capture_fails_of_it() -> None:
    with (
        pytest.raises(SettingsError, match=r"does not hold the CUDA graphs: .*2\.00 GiB.*engine\.max_tokens_per_step"),
        explaining_memory("the CUDA graphs"),
    ):
        run_out_in_a_capture(torch.OutOfMemoryError)
    with pytest.raises(RuntimeError, match="previous error"), explaining_memory("the CUDA graphs"):
        run_out_in_a_capture(ValueError)
