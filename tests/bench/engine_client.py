"""Requests a second through the client and the fake engine's process, both bound to one core.

Also by processor time of the two (the fake's start-up included), which a busy machine does not change.

python -m tests.bench.engine_client [--requests 50000] [--tokens 64]
"""

import argparse
import os
import resource
import time

from engine.client import EngineClient
from schemas.inference import EngineSettings, InferenceRequest, ModelSettings, SamplingParams
from tests.fakes import fake_engine_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=4096)
    options = parser.parse_args()
    os.sched_setaffinity(0, {0})
    sampling = SamplingParams()
    hashes = tuple(bytes([i]) * 16 for i in range(options.tokens // 16))
    requests = [
        InferenceRequest(i, tuple(range(i, i + options.tokens)), sampling, seed=i, block_hashes=hashes)
        for i in range(options.requests)
    ]
    with EngineClient(ModelSettings(), EngineSettings(), fake_engine_command()) as client:
        client.start(60.0)
        started, cpu_started = time.perf_counter(), time.process_time()
        submitted = answered = 0
        while answered < options.requests:
            room = min(options.in_flight - (submitted - answered), options.requests - submitted)
            if room >= 256 or room == options.requests - submitted:
                client.submit(requests[submitted : submitted + room])
                submitted += room
            answered += len(client.poll(1.0))
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds += children.ru_utime + children.ru_stime
    print(f"{answered} requests of {options.tokens} tokens")
    print(f"in {seconds:.2f} s: {answered / seconds:,.0f} a second")
    print(f"by processor time, {cpu_seconds:.2f} s: {answered / cpu_seconds:,.0f} a second")


if __name__ == "__main__":
    main()
