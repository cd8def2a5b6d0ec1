"""Documents per second on a CPU: this engine beside transformers' own batched `generate`, both in bf16, in one run.

    python -m tests.bench.cpu_engine [--documents 64] [--runs 3] [--baseline-batches 8 16] [--baseline-dtype bfloat16]

The work: documents of about 100 random tokens under one 400-token template, 32 output tokens each, greedy, EOS
ignored. The baseline is transformers with padded batches sorted by length, the best of the batch sizes, on the same
weights from the same GGUF file. The first document's greedy tokens of both are compared in the printed line (bf16 may
differ in late tokens; the exact comparison is the tests', in float32).
"""

import argparse
import gc
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from engine.loading import load_engine, prepare_for_cpu
from pipeline.model_download import demo_model_path
from schemas.inference import EngineSettings, InferenceOutput, InferenceRequest, ModelSettings, SamplingParams

TEMPLATE_TOKENS, DOCUMENT_TOKENS, OUTPUT_TOKENS = 400, 100, 32
FLOOR_FLOP_PER_TOKEN = 2 * 0.357913e9  # the layers' parameters; the head, below, only where a token is sampled
HEAD_FLOP_PER_TOKEN = 2 * 0.136134e9


def make_prompts(num_documents: int, seed: int = 0) -> list[list[int]]:
    """One template, then a document of 70 to 130 tokens; ids below 151,000 exist in the vocabulary."""
    rng = np.random.default_rng(seed)
    template: list[int] = rng.integers(0, 151_000, size=TEMPLATE_TOKENS).tolist()
    lengths = rng.integers(DOCUMENT_TOKENS - 30, DOCUMENT_TOKENS + 31, size=num_documents)
    return [template + rng.integers(0, 151_000, size=int(length)).tolist() for length in lengths]


def run_transformers(
    model_path: Path, prompts: list[list[int]], batch_sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, int, list[int]]:
    """Best seconds over the batch sizes, the batch size, and the first prompt's tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # As from_pretrained(gguf_file=...) does, which asks for another package first.
    config = AutoConfig.from_pretrained(model_path.parent, gguf_file=model_path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(model_path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, assign=True)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = torch.nn.Module()  # not in the file; made below, its angles in float32
    model = model.to(dtype).eval()
    model.model.rotary_emb = rotary(config)
    ordered = sorted(prompts, key=len)
    best: tuple[float, int, list[int]] = (float("inf"), 0, [])
    with torch.inference_mode():
        for batch_size in batch_sizes:
            first: list[int] = []
            began = time.perf_counter()
            for at in range(0, len(ordered), batch_size):
                batch = ordered[at : at + batch_size]
                longest = max(map(len, batch))
                ids = torch.zeros(len(batch), longest, dtype=torch.long)
                mask = torch.zeros_like(ids)
                for row, prompt in enumerate(batch):
                    ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                    mask[row, longest - len(prompt) :] = 1
                out = model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS,
                    do_sample=False, pad_token_id=0, eos_token_id=None,
                )  # fmt: skip
                first = first or out[0, longest:].tolist()
            seconds = time.perf_counter() - began
            print(
                f"transformers, batches of {batch_size:2d}: {seconds:6.1f} s, {len(prompts) / seconds:.2f} documents/s"
            )
            if seconds < best[0]:
                best = (seconds, batch_size, first)
    return best


def run_engine(
    model_path: Path, prompts: list[list[int]], runs: int, settings: EngineSettings
) -> tuple[list[float], list[int]]:
    """Seconds of each run, each with an empty prefix cache, and the shortest prompt's tokens."""
    seconds, tokens = [], []
    ordered = sorted(prompts)  # the batcher's order: by the prompts' blocks
    shortest = min(range(len(ordered)), key=lambda i: len(ordered[i]))
    for run in range(runs):
        engine, _ = load_engine(
            ModelSettings(path=str(model_path), dtype="bfloat16", device="cpu", max_model_len=2048),
            settings,
            lambda *_: None,
        )
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        began = time.perf_counter()
        for request_id, prompt in enumerate(ordered):
            engine.add_request(InferenceRequest(request_id, tuple(prompt), sampling, seed=0))
        outputs: dict[int, InferenceOutput] = {}
        while len(outputs) < len(ordered):
            for output in engine.step():
                outputs[output.request_id] = output
        seconds.append(time.perf_counter() - began)
        assert all(len(output.token_ids) == OUTPUT_TOKENS for output in outputs.values())
        tokens = list(outputs[shortest].token_ids)
        stats = engine.stats()
        cached = stats.num_cached_tokens / stats.num_prompt_tokens
        parts = ", ".join(f"{name} {value:.2f}" for name, value in stats.step_seconds.items())
        computed = stats.num_computed_tokens
        flop = computed * FLOOR_FLOP_PER_TOKEN + stats.num_sampled_tokens * HEAD_FLOP_PER_TOKEN
        print(
            f"pagemill run {run + 1}: {seconds[-1]:6.1f} s, {len(prompts) / seconds[-1]:.2f} documents/s;"
            f" {cached:.0%} of the prompt cached, {computed:,} tokens computed in {stats.num_steps} steps,"
            f" {flop / seconds[-1] / 1e9:.0f} GFLOP/s; {parts}"
        )
        del engine
        gc.collect()
    return seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--step", type=int, default=EngineSettings().max_tokens_per_step, help="tokens of a step at most"
    )
    parser.add_argument("--baseline-batches", type=int, nargs="*", default=[8, 16], help="none: without the baseline")
    parser.add_argument("--baseline-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    prepare_for_cpu()  # as the engine's process does; the baseline's as well, then
    prompts = make_prompts(arguments.documents)
    settings = EngineSettings(max_tokens_per_step=arguments.step, max_running=arguments.documents)
    ours, our_tokens = run_engine(demo_model_path(), prompts, arguments.runs, settings)
    if not arguments.baseline_batches:
        return
    gc.collect()
    theirs, batch_size, their_tokens = run_transformers(
        demo_model_path(), prompts, tuple(arguments.baseline_batches), getattr(torch, arguments.baseline_dtype)
    )
    same = sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True))
    print(f"first document: {same} of {OUTPUT_TOKENS} greedy tokens equal ({arguments.baseline_dtype})")
    median = statistics.median(ours)
    print(
        f"ratio: {theirs / median:.2f} times transformers (batches of {batch_size}, {theirs:.1f} s);"
        f" ours median {median:.1f} s, {min(ours):.1f} to {max(ours):.1f},"
        f" torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
