"""From the engine process's start to its first token, split by part; first with cold files and kernels, then warm.

python -m tests.bench.startup_gpu [--shape 1.5b|7b|tiny] [--device cuda] [--folder /tmp] [--seconds 90]

Writes a random bf16 checkpoint of a Qwen2.5 shape (1.5b: 3.1 GB) below --folder and starts the real engine process on
it. Cold: the file is put out of the page cache, where the system lets us, and compiled kernels go to an empty folder.
Needs what the engine needs; no Kafka, no pydantic.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.client import EngineClient
from engine.gguf_tokenizer import byte_alphabet
from engine.model_config import read_model_config
from engine.weights.names import expected_parameters
from schemas.errors import PagemillError
from schemas.inference import EngineInfo, EngineSettings, InferenceRequest, ModelSettings, SamplingParams

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_COMMON = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "max_position_embeddings": 32_768, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip
NOISE_ELEMENTS = 2**22 + 1  # drawn once and repeated: a checkpoint is written, not learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything; a start that does not fit is left")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    folder = Path(tempfile.mkdtemp(prefix="pagemill-startup-", dir=options.folder))
    try:
        file = write_checkpoint(folder / "model", options.shape)
        print(f"{options.shape}: {file.stat().st_size / 1e9:.2f} GB written, torch {torch.__version__}", flush=True)
        keep_kernels_in(folder / "kernels")
        for name, is_cold in (("cold file, cold kernels", True), ("warm", False), ("cold file, warm kernels", True)):
            if is_cold and not put_out_of_memory(file):
                print(f"{name}: the file cannot be put out of the page cache here", flush=True)
            if deadline - time.monotonic() < 5:
                print(f"{name}: left out, the time is over", flush=True)
                continue
            try:
                start(name, file, options.device, deadline)
            except PagemillError as error:
                print(f"{name}: FAILED: {error}", flush=True)
                # The one part that writes compiled code to disk by a switch: without it, the rest is still measured.
                os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "0"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(name: str, file: Path, device: str, deadline: float) -> None:
    """One engine process, from its start to its first token."""
    model = ModelSettings(path=str(file.parent), device=device, dtype="bfloat16", max_model_len=8192)
    settings = EngineSettings(max_running=1024, max_tokens_per_step=8192)
    if device == "cpu":
        settings = EngineSettings(max_running=4, max_tokens_per_step=64, kv_cache_tokens=1024)
    heard: list[str] = []

    def tell(part: str, fraction: float) -> None:
        if part not in heard[-1:]:
            heard.append(part)

    started = time.monotonic()
    with EngineClient(model, settings) as client:
        try:
            info = client.start(deadline - started, tell)
            ready = time.monotonic()
            client.submit([InferenceRequest(1, (1, 2, 3), SamplingParams(max_tokens=1, ignore_eos=True), seed=0)])
            while not (outputs := client.poll(1.0)):
                if time.monotonic() > deadline:
                    print(f"{name}: no token before the time was over", flush=True)
                    return
        except PagemillError:
            print(f"{name}: came to {', '.join(heard)}", flush=True)
            raise
        token = time.monotonic()
    if outputs[0].failure is not None:
        print(f"{name}: FAILED: {outputs[0].failure}", flush=True)
        return
    print_parts(name, info, file.stat().st_size, token - ready, token - started)


def print_parts(name: str, info: EngineInfo, num_bytes: int, first_token: float, total: float) -> None:
    parts = {**info.start_seconds, "first token": first_token}
    split = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
    print(f"{name}: {total:.2f} s from the process's start to the first token on {info.device}")
    print(f"  {split}, between them {total - sum(parts.values()):.2f}")
    rate = num_bytes / 1e9 / info.start_seconds["weights"]
    print(f"  weights at {rate:.1f} GB/s; a KV cache of {info.kv_cache_tokens:,} tokens", flush=True)


def write_checkpoint(folder: Path, shape: str) -> Path:
    """A Hugging Face folder; returns its one file of weights."""
    folder.mkdir()
    vocab_size = int(SHAPES[shape]["vocab_size"])
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}))
    write_tokenizer(folder, vocab_size - 200)
    noise = torch.randn(NOISE_ELEMENTS).mul_(0.02).bfloat16()
    tensors = {}
    for parameter in expected_parameters(read_model_config(folder), "huggingface"):
        for part, rows in zip(parameter.parts, parameter.part_rows, strict=True):
            part_shape = (rows, *parameter.shape[1:])
            count = torch.Size(part_shape).numel()
            flat = noise.repeat(-(-count // NOISE_ELEMENTS))[:count]
            tensors[part] = (torch.ones_like(flat) if "norm" in part else flat).view(part_shape)
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    return path


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """Bytes, and made-up tokens that no text has, up to `num_tokens` with the special ones."""
    alphabet = sorted(byte_alphabet().values())
    made_up = [f"made up {i}" for i in range(num_tokens - len(alphabet) - len(SPECIAL))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *made_up])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def keep_kernels_in(folder: Path) -> None:
    """For the processes that are started: no kernel of an earlier run is found, and none is left behind."""
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR"):
        path = folder / name.lower()
        path.mkdir(parents=True)
        os.environ[name] = str(path)


def put_out_of_memory(file: Path) -> bool:
    """Whether the file's pages have left the page cache (a file system in memory keeps them)."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        flags = getattr(os, "RWF_NOWAIT", 0)
        try:
            return os.preadv(opened.fileno(), [bytearray(4096)], file.stat().st_size // 2, flags) == 0
        except BlockingIOError:
            return True  # it would have to be read
        except OSError:
            return False


if __name__ == "__main__":
    main()
