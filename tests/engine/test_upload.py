"""Weights by way of buffers: every byte, in order, whatever the sizes; and what a reader's thread meets is told."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_config import read_model_config
from engine.weights.checkpoint import stream_parameters
from engine.weights.safetensors import SafetensorsCheckpoint
from engine.weights.upload import FileRange, Upload
from schemas.errors import ModelError
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upload") / "bytes"
    path.write_bytes(bytes(i * i % 251 for i in range(4096)))
    return path


def ranges_of(path: Path, sizes: list[int], gap: int = 1) -> list[FileRange]:
    """int8 ranges one behind the other, `gap` bytes between."""
    ranges, offset = [], 3
    for size in sizes:
        ranges.append(FileRange(path, offset, size, torch.int8))
        offset += size + gap
    return ranges


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100), max_size=12),
    buffer_bytes=st.sampled_from([8, 16, 64]),
    num_buffers=st.integers(1, 5),
    num_threads=st.integers(1, 4),
)
def test_every_byte_arrives_in_its_place(
    file: Path, sizes: list[int], buffer_bytes: int, num_buffers: int, num_threads: int
) -> None:
    content = file.read_bytes()
    ranges = ranges_of(file, sizes)
    with Upload(ranges, CPU, buffer_bytes, num_buffers, num_threads) as upload:
        for each in ranges:
            out = torch.empty(each.num_bytes, dtype=torch.int8)
            upload.next_into(out)
            assert out.numpy().tobytes() == content[each.offset : each.offset + each.num_bytes]


def test_numbers_become_those_of_the_parameters_dtype(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 50)
    (tmp_path / "floats").write_bytes(values.numpy().tobytes())
    with Upload([FileRange(tmp_path / "floats", 0, 200, torch.float32)], CPU, buffer_bytes=64) as upload:
        out = torch.empty(5, 10, dtype=torch.bfloat16)
        upload.next_into(out)
    assert torch.equal(out, values.to(torch.bfloat16).view(5, 10))


def test_a_file_that_became_shorter_is_told_to_who_takes_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    ranges = [FileRange(path, 0, 64, torch.int8), FileRange(path, 64, 64, torch.int8)]
    with Upload(ranges, CPU, buffer_bytes=64) as upload:
        upload.next_into(torch.empty(64, dtype=torch.int8))
        with pytest.raises(ModelError, match=r"short became shorter than 128 bytes while it was read"):
            upload.next_into(torch.empty(64, dtype=torch.int8))


def test_a_file_that_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone cannot be read: No such file"):
        Upload([FileRange(tmp_path / "gone", 0, 8, torch.int8)], CPU)
    with (
        Upload([FileRange(tmp_path, 0, 8, torch.int8)], CPU) as upload,
        pytest.raises(ModelError, match=r"cannot be read: Is a directory"),
    ):
        upload.next_into(torch.empty(8, dtype=torch.int8))


def test_what_is_not_taken_is_left_and_the_files_are_closed(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Upload(ranges_of(file, [100] * 20), CPU, buffer_bytes=8, num_buffers=2) as upload:
        upload.next_into(torch.empty(100, dtype=torch.int8))
    upload.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_checkpoints_ranges_hold_what_it_reads(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_model(tmp_path, max_shard_size="100KB"))
    names = sorted(checkpoint.names())
    with Upload([checkpoint.stored_at(name) for name in names], CPU, buffer_bytes=4096) as upload:
        for name in names:
            mapped, uploaded = (torch.empty(checkpoint.shape(name), dtype=torch.bfloat16) for _ in range(2))
            checkpoint.read_into(name, mapped)
            upload.next_into(uploaded)
            assert torch.equal(mapped, uploaded), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_the_same_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    config = read_model_config(write_tiny_model(tmp_path, vocab_size=4096, hidden_size=512))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    on_cpu = dict(stream_parameters(config, checkpoint, dtype, CPU, lambda fraction: None))
    for name, tensor in stream_parameters(config, checkpoint, dtype, torch.device("cuda", 0), lambda fraction: None):
        assert torch.equal(tensor.cpu(), on_cpu[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_buffer_is_filled_again_only_when_its_copy_is_over(tmp_path: Path) -> None:
    values = torch.randn(1 << 22)
    (tmp_path / "floats").write_bytes(values.numpy().tobytes())
    half = values.numel() // 2 * 4
    ranges = [FileRange(tmp_path / "floats", start, half, torch.float32) for start in (0, half)]
    with Upload(ranges, torch.device("cuda", 0), buffer_bytes=1 << 16, num_buffers=2) as upload:
        parts = [torch.empty(half // 4, device="cuda") for _ in ranges]
        for part in parts:
            upload.next_into(part)
    assert torch.equal(torch.cat(parts).cpu(), values)
