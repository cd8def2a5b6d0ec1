"""From settings to a started engine: every part is read, checked against the others, and tried once."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.block_pool import BlockPool
from engine.cuda_runner import CudaRunner
from engine.detokenizer import TextStream
from engine.engine import Engine
from engine.grammar import LabelSets
from engine.group import Group, join, open_store
from engine.hardware import choose_device, choose_dtype, choose_precision, rank_device
from engine.kv_cache import KVCache
from engine.memory import (
    decide_kv_cache_tokens,
    explaining_memory,
    free_bytes_for_cache,
    keep_freed_memory,
    kv_bytes_per_token,
    worst_step_batch,
)
from engine.model_config import ModelConfig, read_gguf_config, read_model_config
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.precision import Precision
from engine.rehearsal import stand_in, start_rehearsal
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.tensor_parallel import Ranks, Tree
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import Checkpoint, stream_parameters
from engine.weights.gguf import GGUFCheckpoint
from engine.weights.gguf_metadata import is_gguf, read_gguf_metadata
from engine.weights.safetensors import SafetensorsCheckpoint
from engine.weights.sharding import check_divisible, shard_config, shard_parameters
from schemas.errors import ModelError, PagemillError, SettingsError
from schemas.inference import EngineInfo, EngineSettings, ModelSettings

Progress = Callable[[str, float], None]  # part of start-up, fraction of it done

MAX_VOCABULARY_PADDING = 1024  # rows that a checkpoint's vocabulary may have beyond the tokenizer's ids
_CANARY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model's files, read and found to agree; the weights still on disk."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    eos_token_ids: frozenset[int]


def prepare_for_cpu() -> None:
    """Two settings of the whole process, for steps on a CPU; before its first tensor, which makes torch's threads.

    Numbers below 1.2e-38 count as 0: softmax makes many of them, and a CPU computes each by itself. On an Intel Xeon a
    prompt step's softmax took 4.5 times as long. And tensors of 2 MB and more lie in pages of 2 MB, where the system
    has them: 2% of a step on an AMD EPYC. A user's own setting of that stands.
    """
    torch.set_flush_denormal(True)  # False where the processor cannot, and nothing is changed
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it allocates for the first time


def load_engine(
    model: ModelSettings,
    engine: EngineSettings,
    progress: Progress,
    on_rank_lost: Callable[[PagemillError], object] = lambda error: None,
) -> tuple[Engine, EngineInfo]:
    """Raises ModelError or SettingsError, with what to do, before anything is served.

    `on_rank_lost`: called from another thread where one of several ranks fails; nothing can be computed from then on.
    """
    clock = _StartClock(progress)
    with clock.part("tokenizer"):
        files = open_model(Path(model.path).expanduser())
        fingerprint = files.checkpoint.fingerprint()
    ranks, group = Ranks(on_rank_lost), Group()
    if engine.tensor_parallel > 1:
        with clock.part("ranks"):
            group = _start_ranks(ranks, files.config, model, engine)
    with ranks.explaining():
        decoder, cache, max_model_len = _load_part(files, model, engine, group, clock)
        identity = _identity(fingerprint, files.config)
        with clock.part("graphs" if decoder.device.type == "cuda" else "runner"):
            started = build_engine(files, decoder, cache, engine, max_model_len, identity, ranks)
    info = EngineInfo(
        model=model.name or (files.path.stem if files.path.is_file() else files.path.resolve().name),
        identity=identity,
        weights=fingerprint,
        vocab_size=files.tokenizer.vocab_size,
        max_model_len=max_model_len,
        block_size=engine.block_size,
        kv_cache_tokens=cache.num_blocks * cache.block_size,
        device=str(decoder.device),
        start_seconds=clock.seconds,
    )
    return started, info


def load_rank(hello: Tree) -> CudaRunner | ModelRunner:
    """Another rank's part of what `load_engine` loads, side by side with it; `hello`: see `_start_ranks`."""
    model, settings = ModelSettings(**hello["model"]), EngineSettings(**hello["engine"])
    files = open_model(Path(model.path).expanduser())
    device = rank_device(choose_device(model.device), hello["rank"])
    group = join(hello["port"], hello["rank"], settings.tensor_parallel, device)
    clock = _StartClock(lambda part, fraction: None)
    decoder, cache, max_model_len = _load_part(files, model, settings, group, clock)
    sampler = Sampler(LabelSets(files.eos_token_ids, lambda: files.tokenizer.token_bytes))
    return build_runner(decoder, cache, sampler, settings, max_model_len, Ranks())


def _start_ranks(ranks: Ranks, config: ModelConfig, model: ModelSettings, engine: EngineSettings) -> Group:
    """Starts them and meets them. Raises SettingsError where the model or the devices cannot be divided so."""
    size = engine.tensor_parallel
    check_divisible(config, size)
    first = choose_device(model.device)
    for rank in range(size):
        rank_device(first, rank)
    store = open_store()
    ranks.start({"port": store.port, "model": asdict(model), "engine": asdict(engine)}, size - 1)
    with ranks.explaining():
        return join(store, 0, size, rank_device(first, 0))


def _load_part(
    files: LoadedModel, model: ModelSettings, settings: EngineSettings, group: Group, clock: "_StartClock"
) -> tuple[Decoder, KVCache, int]:
    """This rank's decoder and cache, tried once; and the longest sequence that fits."""
    device = rank_device(choose_device(model.device), group.rank)
    dtype = choose_dtype(model.dtype, device)
    if device.type == "cpu" and (settings.num_threads or group.size > 1):
        torch.set_num_threads(settings.num_threads or max(1, (os.cpu_count() or 1) // group.size))
    max_model_len = _max_model_len(model, files.config)
    precision = choose_precision(model.quantization, dtype, device, files.config)
    rehearsal = None
    if device.type == "cuda":
        with clock.part("kernels"), explaining_memory("two of the model's layers"):
            shape = shard_config(files.config, group)
            small = stand_in(shape, dtype, max_model_len, device, precision)
            rehearsal = start_rehearsal(small, settings, max_model_len)
            del small  # the thread alone holds it
    with clock.part("weights"), explaining_memory("the model's weights"):
        decoder = load_decoder(
            files,
            dtype,
            device,
            max_model_len,
            progress=lambda fraction: clock.progress("weights", fraction),
            precision=precision,
            group=group,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last copies
    if rehearsal is not None:
        with clock.part("kernels"):
            rehearsal.join()
    with clock.part("memory"), explaining_memory("the largest step"):
        kv_cache_tokens = _size_cache(decoder, settings, max_model_len)
    with clock.part("cache"), explaining_memory(f"a KV cache of {kv_cache_tokens:,} tokens"):
        cache = allocate_cache(decoder, kv_cache_tokens // settings.block_size, settings.block_size)
        if device.type == "cpu":
            keep_freed_memory()
    with clock.part("canary"):
        check_canary(decoder)
    # A sequence longer than the whole cache could never run.
    return decoder, cache, min(max_model_len, kv_cache_tokens)


def build_engine(
    files: LoadedModel,
    decoder: Decoder,
    cache: KVCache,
    settings: EngineSettings,
    max_model_len: int,
    identity: bytes,
    ranks: Ranks | None = None,
) -> Engine:
    """An engine over a loaded decoder and an empty cache. Several may share a decoder, each with its own cache."""
    label_sets = LabelSets(files.eos_token_ids, lambda: files.tokenizer.token_bytes)
    runner = build_runner(decoder, cache, Sampler(label_sets), settings, max_model_len, ranks or Ranks())
    scheduler = Scheduler(
        BlockPool(cache.num_blocks),
        settings.block_size,
        max_model_len,
        settings.max_tokens_per_step,
        settings.max_running,
        identity,
        settings.prefix_caching,
    )
    return Engine(runner, scheduler, lambda stop: TextStream(files.tokenizer, stop), label_sets, files.eos_token_ids)


def build_runner(
    decoder: Decoder, cache: KVCache, sampler: Sampler, settings: EngineSettings, max_model_len: int, ranks: Ranks
) -> CudaRunner | ModelRunner:
    """What carries steps out on the decoder's device."""
    if decoder.device.type == "cpu":
        return ModelRunner(decoder, cache, sampler, settings.max_running, max_model_len, ranks)
    with explaining_memory("the CUDA graphs"):
        return CudaRunner(
            decoder, cache, sampler, settings.max_running, max_model_len, settings.max_tokens_per_step, ranks=ranks
        )


def open_model(path: Path) -> LoadedModel:
    """Reads config and tokenizer and opens the weights. Raises ModelError where a part is missing or disagrees."""
    checkpoint: Checkpoint
    if path.is_dir():
        config = read_model_config(path)
        checkpoint = SafetensorsCheckpoint(path)
    elif is_gguf(path):
        metadata = read_gguf_metadata(path)
        config = read_gguf_config(metadata)
        checkpoint = GGUFCheckpoint(metadata)
    elif path.exists():
        raise ModelError(f"{path} is neither a Hugging Face folder nor a GGUF file")
    else:
        raise ModelError(f"there is no model at {path}; model.path is a Hugging Face folder or a GGUF file")
    tokenizer = Tokenizer.from_path(path)
    check_vocabulary(tokenizer.vocab_size, config.vocab_size, path)
    return LoadedModel(path, config, tokenizer, checkpoint, config.eos_token_ids | tokenizer.eos_token_ids)


def check_vocabulary(tokenizer_size: int, vocab_size: int, path: Path) -> None:
    """A checkpoint may pad its vocabulary a little; anything else means that the tokenizer is another model's."""
    if not vocab_size - MAX_VOCABULARY_PADDING <= tokenizer_size <= vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer_size:,} tokens and the model's vocabulary {vocab_size:,}; "
            "they belong to different models"
        )


def load_decoder(
    files: LoadedModel,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    progress: Callable[[float], None] = lambda fraction: None,
    precision: Precision[Any] | None = None,
    group: Group | None = None,
) -> Decoder:
    """The weights, of several ranks this one's part of them, read and packed.

    Raises ModelError where the checkpoint's tensors are not this model's.
    """
    group = group or Group()
    parameters = stream_parameters(files.config, files.checkpoint, dtype, device, progress)
    parameters = shard_parameters(parameters, files.config, group)
    config = shard_config(files.config, group)
    with torch.inference_mode():
        return Decoder(config, parameters, files.tokenizer.vocab_size, num_positions, device, precision, group)


@torch.inference_mode()
def check_canary(decoder: Decoder) -> None:
    """One small step over the vocabulary's first ids. Raises ModelError where its logits are not finite."""
    num_tokens = min(_CANARY_TOKENS, decoder.num_positions)
    batch, num_blocks = worst_step_batch(num_tokens, 1, num_tokens, _CANARY_TOKENS, decoder.device)
    batch = replace(batch, token_ids=torch.arange(num_tokens, device=decoder.device) % decoder.num_tokens)
    hidden = decoder.forward(batch, allocate_cache(decoder, num_blocks, _CANARY_TOKENS))
    logits = decoder.gather_logits(decoder.logits(hidden))
    if not bool(torch.isfinite(logits[:, : decoder.num_tokens]).all()):
        raise ModelError(
            f"the model's first logits are not finite in {str(decoder.dtype).removeprefix('torch.')}: its weights are "
            "damaged, or model.dtype is too narrow for them (bfloat16 and float32 reach further than float16)"
        )


def _max_model_len(model: ModelSettings, config: ModelConfig) -> int:
    if model.max_model_len > config.max_position_embeddings:
        raise SettingsError(
            f"model.max_model_len is {model.max_model_len:,}; the model's context is {config.max_position_embeddings:,}"
        )
    return model.max_model_len or config.max_position_embeddings


def _size_cache(decoder: Decoder, settings: EngineSettings, max_model_len: int) -> int:
    """kv_cache_tokens, from the settings and the memory that is left."""

    @torch.inference_mode()
    def worst_step() -> None:
        batch, num_blocks = worst_step_batch(
            settings.max_tokens_per_step, settings.max_running, max_model_len, settings.block_size, decoder.device
        )
        cache = allocate_cache(decoder, num_blocks, settings.block_size)
        decoder.gather_logits(decoder.logits(decoder.forward(batch, cache)))

    def capture_largest() -> CudaRunner:
        cache = allocate_cache(decoder, 1, settings.block_size)
        sampler = Sampler(LabelSets(frozenset(), lambda: ()))
        max_running, max_tokens = settings.max_running, settings.max_tokens_per_step
        return CudaRunner(decoder, cache, sampler, max_running, max_model_len, max_tokens, largest_only=True)

    group = decoder.group
    free_bytes = free_bytes_for_cache(settings, decoder.device, worst_step, capture_largest, group.size)
    free_bytes = group.minimum(free_bytes, decoder.device)  # all pools are of one size
    return decide_kv_cache_tokens(
        settings, max_model_len, kv_bytes_per_token(decoder.config, decoder.dtype), free_bytes
    )


def allocate_cache(decoder: Decoder, num_blocks: int, block_size: int) -> KVCache:
    """An empty cache of the decoder's shape, dtype and device."""
    config = decoder.config
    return KVCache.allocate(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_size,
        decoder.dtype,
        decoder.device,
    )


def _identity(fingerprint: str, config: ModelConfig) -> bytes:
    """The root of block hashes: other weights, or another reading of them, never meet in a cache."""
    return hashlib.blake2b(f"{fingerprint}\0{config!r}".encode(), digest_size=16).digest()


class _StartClock:
    """Seconds by part of start-up, and the parts' beginnings and ends told to whoever watches."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part may come in several pieces: its seconds add up."""
        self.progress(name, 0.0)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.progress(name, 1.0)
