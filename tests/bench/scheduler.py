"""Host time of a step's schedule() and update(), without a model: what must hide behind the device.

python -m tests.bench.scheduler [--rows 1024] [--requests 4096] [--prompt 300] [--output 256]

Processor time, so that a busy machine does not count; steps with at least 95% of the rows.
"""

import argparse
import random
import time

from engine.block_hash import hash_blocks
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.step_plan import SampledTokens
from schemas.inference import InferenceRequest, SamplingParams

BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--output", type=int, default=256)
    options = parser.parse_args()
    tokens = options.prompt + options.output
    num_blocks = options.rows * (tokens // BLOCK_SIZE + 2)
    scheduler = Scheduler(BlockPool(num_blocks), BLOCK_SIZE, 8192, 8192, options.rows, b"bench")
    sampling = SamplingParams(max_tokens=options.output, ignore_eos=True)
    draw = random.Random(0)
    requests = []
    for request_id in range(options.requests):
        prompt = tuple(draw.choices(range(1000), k=options.prompt))
        hashes = hash_blocks(prompt, BLOCK_SIZE, b"bench")
        requests.append(InferenceRequest(request_id, prompt, sampling, seed=0, block_hashes=hashes))

    started = time.process_time()
    for request in requests:
        scheduler.add(request)
    add_us = (time.process_time() - started) / options.requests * 1e6

    schedule_ms, update_ms = [], []
    while scheduler.has_unfinished():
        started = time.process_time()
        plan = scheduler.schedule()
        scheduled = time.process_time()
        num_rows = sum(run.samples for run in plan.scheduled)
        sampled = SampledTokens([5] * num_rows, [None] * num_rows, [True] * num_rows)
        ready = time.process_time()
        scheduler.update(plan, sampled)
        if num_rows >= 0.95 * options.rows:
            schedule_ms.append((scheduled - started) * 1e3)
            update_ms.append((time.process_time() - ready) * 1e3)
    print(f"add: {add_us:.0f} us a request of {options.prompt} tokens")
    print(f"{len(schedule_ms)} steps of {options.rows} rows, ms of processor time, median and 99th percentile:")
    for name, values in (("schedule", sorted(schedule_ms)), ("update", sorted(update_ms))):
        print(f"  {name:9} {values[len(values) // 2]:.2f}  {values[len(values) * 99 // 100]:.2f}")


if __name__ == "__main__":
    main()
