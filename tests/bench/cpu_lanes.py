"""A CPU step in lanes beside the same step whole, by turns: what lanes save, and from how many tokens on.

    python -m tests.bench.cpu_lanes [--tokens 256 512 1024 2048] [--runs 5]

The model is the demo's in bf16; a step is prompts of 128 tokens, nothing cached.
"""

import argparse
import os
import statistics
import time

import torch

from engine.batch import ForwardBatch
from engine.kv_cache import KVCache
from engine.lanes import Lanes
from engine.loading import allocate_cache, load_decoder, open_model, prepare_for_cpu
from engine.models.decoder import Decoder
from pipeline.model_download import demo_model_path

BLOCK, PROMPT = 16, 128


def make_step(num_tokens: int) -> ForwardBatch:
    """Prompts of PROMPT tokens, each with blocks of its own."""
    num_rows = num_tokens // PROMPT
    tokens = torch.arange(num_rows * PROMPT)
    return ForwardBatch(
        token_ids=tokens * 7919 % 151_000,
        positions=tokens % PROMPT,
        slot_mapping=tokens,
        block_tables=torch.arange(len(tokens) // BLOCK, dtype=torch.int32).view(num_rows, -1),
        query_starts=torch.arange(0, len(tokens) + 1, PROMPT, dtype=torch.int32),
        sequence_lengths=torch.full((num_rows,), PROMPT, dtype=torch.int32),
        logits_indices=torch.arange(PROMPT - 1, len(tokens), PROMPT),
        max_query_length=PROMPT,
        max_sequence_length=PROMPT,
    )


def seconds_of(lanes: Lanes, decoder: Decoder, batch: ForwardBatch, cache: KVCache) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        lanes.forward(decoder, batch, cache)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048], help="of a step")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    num_threads = os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    prepare_for_cpu()  # as the engine's process does
    decoder = load_decoder(open_model(demo_model_path()), torch.bfloat16, torch.device("cpu"), PROMPT)
    cache = allocate_cache(decoder, max(arguments.tokens) // BLOCK, BLOCK)
    whole = Lanes(1)
    for num_tokens in arguments.tokens:
        batch, lanes = make_step(num_tokens), Lanes(num_threads, num_tokens // num_threads)
        seconds_of(whole, decoder, batch, cache), seconds_of(lanes, decoder, batch, cache)  # warm
        pairs = [[seconds_of(way, decoder, batch, cache) for way in (whole, lanes)] for _ in range(arguments.runs)]
        ratios = [of_whole / in_lanes for of_whole, in_lanes in pairs]
        print(
            f"{num_tokens:5d} tokens: whole {statistics.median(pair[0] for pair in pairs) * 1e3:6.0f} ms, in"
            f" {lanes.num_lanes(num_tokens)} lanes {statistics.median(pair[1] for pair in pairs) * 1e3:6.0f} ms;"
            f" {statistics.median(ratios):.3f} times as fast ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
