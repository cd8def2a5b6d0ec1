"""Choosing tokens from (rows, 151,936) float32 logits: milliseconds by kind of request, and the logits' bytes a second.

    python -m tests.bench.sampling [cpu|cuda]

The baseline beside the Triton argmax is torch.argmax with the gather that finds NaN and infinity. On CUDA the kernel's
results are compared with it, and each kind's rows with those of the same requests sampled alone.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.grammar import LabelSets
from engine.request import Request
from engine.sampler import Sampler
from kernels.sampling import greedy_reference, greedy_triton
from schemas.inference import InferenceRequest, SamplingParams

VOCAB = 151_936
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 20},
    "labels": {},
}


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times[1:])[repeats // 2]


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
    sizes = (1, 8, 64, 256, 1024) if device.type == "cuda" else (8, 64)
    generator = torch.Generator().manual_seed(0)
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for num_rows in sizes:
        # Sharply falling, like a language model's: the likeliest token has about half of the mass.
        ranks = torch.rand(num_rows, VOCAB, generator=generator).mul(VOCAB).add(1).to(device)
        logits = -1.5 * ranks.log()
        logits[0, 5:9] = logits.max() + 1  # a tie
        num_bytes = logits.numel() * 4
        plain = milliseconds(lambda logits=logits: greedy_reference(logits), device)  # type: ignore[misc]
        line = f"{num_rows:5} rows  argmax: torch {plain:8.3f} ms ({num_bytes / plain / 1e9:6.3f} TB/s)"
        if device.type == "cuda":
            ours = milliseconds(lambda logits=logits: greedy_triton(logits), device)  # type: ignore[misc]
            for mine, theirs in zip(greedy_triton(logits), greedy_reference(logits), strict=True):
                assert torch.equal(mine, theirs)
            line += f", Triton {ours:8.3f} ms ({num_bytes / ours / 1e9:6.3f} TB/s)"
        print(line, flush=True)
        for kind, options in KINDS.items():
            sampler = Sampler(LabelSets({1}))
            labels = ((4,), (5, 6), (7, 8, 9)) if kind == "labels" else ()
            prompt = tuple(range(400))
            requests = []
            for i in range(num_rows):
                inference = InferenceRequest(i, prompt, SamplingParams(**options), seed=i, label_token_ids=labels)
                requests.append(Request(inference, [*prompt, *((3,) * 50 if not labels else ())]))
                sampler.add(requests[-1])
            sampled = sampler.sample(logits, requests)
            for row in range(0, num_rows, max(1, num_rows // 8)):
                alone = sampler.sample(logits[row : row + 1], requests[row : row + 1])
                assert alone.token_ids[0] == sampled.token_ids[row], (kind, row)
            took = milliseconds(lambda s=sampler, x=logits, r=requests: s.sample(x, r), device)  # type: ignore[misc]
            print(f"            {kind:12} {took:9.2f} ms", flush=True)


if __name__ == "__main__":
    main()
