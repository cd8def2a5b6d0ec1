"""How many tokens of KV cache there is room for. The decision is a plain function; what it needs is measured here."""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.model_config import ModelConfig
from engine.model_runner import RequestRows, gather_batch
from schemas.errors import SettingsError
from schemas.inference import EngineSettings

CPU_SHARE = 0.25  # of the memory that is free: others live there too
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_KEPT_BYTES, _LARGEST_KEPT_BYTES = 1 << 30, 32 << 20  # the second is the most that glibc takes


def keep_freed_memory() -> None:
    """Tells the C library to keep freed tensors for the next ones. Nothing where it is not glibc.

    Given back to the system after each layer, their pages were zeroed anew in the next: 2% of a CPU's prefill step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


class HasGraphs(Protocol):
    """A runner whose graphs are captured."""

    @property
    def graph_counts(self) -> tuple[int, int]:
        """(those captured, those of a runner that captures all)."""


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize


def decide_kv_cache_tokens(settings: EngineSettings, max_model_len: int, bytes_per_token: int, free_bytes: int) -> int:
    """A multiple of the block size: what the settings ask, or what `free_bytes` hold, at most what could ever be used.

    Raises SettingsError where not even one block fits, or where the settings ask for more than there is.
    """
    block_size = settings.block_size
    room = free_bytes // (bytes_per_token * block_size) * block_size
    # Every request at its longest; beyond that the prefix cache alone would grow.
    usable = settings.max_running * _round_up(max_model_len, block_size)
    wanted = _round_up(settings.kv_cache_tokens, block_size) if settings.kv_cache_tokens else min(room, usable)
    if wanted > room:
        raise SettingsError(
            f"engine.kv_cache_tokens is {settings.kv_cache_tokens:,}, which takes {wanted * bytes_per_token:,} bytes; "
            f"{max(free_bytes, 0):,} are free for {room:,} tokens"
        )
    if wanted < block_size:
        raise SettingsError(
            f"no memory is left for the KV cache: {max(free_bytes, 0):,} bytes are free, one block of {block_size} "
            f"tokens takes {block_size * bytes_per_token:,}; lower engine.max_tokens_per_step or raise "
            "engine.memory_fraction"
        )
    return wanted


def free_bytes_for_cache(
    settings: EngineSettings,
    device: torch.device,
    worst_step: Callable[[], None] = lambda: None,
    capture_largest: Callable[[], HasGraphs] | None = None,
    num_ranks: int = 1,
) -> int:
    """Call it after the weights are loaded. On a GPU `worst_step` runs, the largest step that may come, and what it
    takes at its peak is left free, and what all graphs will hold, measured on those that `capture_largest` makes; on a
    CPU a quarter of the free memory is ours, or all of it for a size in the settings, of which `num_ranks` have equal
    parts.
    """
    if device.type == "cpu":
        free = available_ram_bytes() // num_ranks
        return free if settings.kv_cache_tokens else int(free * CPU_SHARE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    worst_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # In use and not torch's: other processes, the CUDA context, libraries' workspaces.
    others = total - free - torch.cuda.memory_reserved(device)
    graphs = _bytes_of_graphs(device, capture_largest) if capture_largest is not None else 0
    return int(total * settings.memory_fraction) - others - peak - graphs


def _bytes_of_graphs(device: torch.device, capture_largest: Callable[[], HasGraphs]) -> int:
    """The pool of the largest graphs, into which the others fit, and for each graph what the driver keeps of one."""
    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    holder = capture_largest()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    pool = torch.cuda.memory_reserved(device) - reserved
    of_driver = max(0, free - torch.cuda.mem_get_info(device)[0] - pool)
    captured, in_all = holder.graph_counts
    del holder
    gc.collect()
    torch.cuda.empty_cache()
    return pool + (of_driver * in_all // captured if captured else of_driver)


@contextmanager
def explaining_memory(what: str) -> Iterator[None]:
    """Raises SettingsError, with what to lower, where a GPU's memory does not hold `what`."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__context__  # a capture that it ended fails in a way of its own
        if cause is None:
            raise
        raise SettingsError(
            f"the GPU's memory does not hold {what}: {' '.join(str(cause).split())} Lower engine.memory_fraction or "
            "engine.kv_cache_tokens for what others need there, engine.max_tokens_per_step and engine.max_running for "
            "smaller steps; or take a smaller model, or several GPUs (engine.tensor_parallel)"
        ) from error


def available_ram_bytes() -> int:
    """What this process may still take: the system's, within the limit of its control group where there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: free pages are what is known
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        if limit != "max":
            free = min(free, int(limit) - int(used))
    except (OSError, ValueError):
        pass  # no control group of version 2
    return max(free, 0)


def total_ram_bytes() -> int:
    """The system's memory, or its control group's part where that is less: the same at every start."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total  # no control group of version 2


def worst_step_batch(
    num_tokens: int, max_running: int, max_model_len: int, block_size: int, device: torch.device
) -> tuple[ForwardBatch, int]:
    """A step of `num_tokens` tokens in as many sampling rows as may come, and the number of blocks it needs."""
    num_rows = max(min(max_running, num_tokens), -(-num_tokens // max_model_len))
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int64)
    counts[: num_tokens % num_rows] += 1
    blocks_per_row = int(-(-counts.max() // block_size))
    rows = RequestRows.allocate(num_rows, int(counts.max()), block_size)
    rows.block_tables[:] = np.arange(num_rows * blocks_per_row, dtype=np.int32).reshape(num_rows, blocks_per_row)
    batch = gather_batch(
        rows,
        rows=np.arange(num_rows),
        starts=np.zeros(num_rows, dtype=np.int64),
        counts=counts,
        samples=np.ones(num_rows, dtype=np.bool_),
        block_size=block_size,
        device=device,
    )
    return batch, num_rows * blocks_per_row


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
