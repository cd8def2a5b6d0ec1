"""`python -m tests.chaos.driver`: rounds of random faults on real workers and servers, several at a time."""

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import SystemRandom

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch

from tests.chaos.books import Books, Outcome
from tests.chaos.lane import ROOT, Lane
from tests.chaos.rounds import KEPT, make_round
from tests.chaos.servers import Servers, open_servers
from tests.chaos.zygote import Zygote
from tests.e2e.workers import worker_environment
from tests.servers.jdk import what_is_missing
from tests.tiny_models import write_tiny_model

NUM_LANES = 4  # fill two cores; with more, sessions time out
TOTALS_EVERY = 10  # rounds


class Rounds:
    """Which rounds are still to come, and what those that were came to. Shared by the lanes."""

    def __init__(self, seeds: Iterator[int], until: float, servers: Servers) -> None:
        self.books = Books()
        self._seeds = seeds
        self._until = until
        self._servers = servers
        self._lock = threading.Lock()
        self._refused: dict[str, int] = {}  # the node's counters when last looked at

    def next_seed(self) -> int | None:
        """None once they or the time (monotonic) are used up; the first one comes in any case. None without servers."""
        with self._lock:
            if self._servers.broker.failure or self._servers.node.failure:
                return None
            if self._until <= time.monotonic() and self.books.num_rounds:
                return None
            return next(self._seeds, None)

    def is_over(self, outcome: Outcome) -> None:
        with self._lock:
            self.books.add(outcome)
            self._count_refusals()
            print(outcome.line())
            for sentence in [*outcome.ended, *outcome.findings]:
                print(f"    {sentence}")
            if self.books.num_rounds % TOTALS_EVERY == 0 or outcome.findings:
                print(self.books.running_line())
            sys.stdout.flush()

    def _count_refusals(self) -> None:
        """How often the node has refused rows: what it counts itself, and forgets when it is killed."""
        if not self._servers.node.is_there:
            return
        with Elasticsearch(self._servers.node_url, request_timeout=2) as client:
            try:
                (node,) = client.nodes.stats(metric="thread_pool,indexing_pressure")["nodes"].values()
            except (ApiError, TransportError):  # it has just gone
                return
        now = {
            "a part of a bulk refused by the node's full queue": node["thread_pool"]["write"]["rejected"],
            "a bulk refused by the node for its memory": node["indexing_pressure"]["memory"]["total"][
                "coordinating_rejections"
            ],
        }
        for refusal, number in now.items():
            before = self._refused.get(refusal, 0)
            self.books.refusals[refusal] += number - before if number >= before else number
        self._refused = now


def run_rounds(seeds: Iterator[int], directory: Path, until: float, num_lanes: int, keeps_logs: bool) -> Books:
    """Rounds until the seeds or the time (monotonic) are used up, each told in a line when it is over."""
    model = write_tiny_model(directory / "model")
    with Zygote(worker_environment()) as zygote, open_servers(directory, num_lanes) as (servers, ways):
        rounds = Rounds(seeds, until, servers)

        def run_lane(lane: Lane) -> None:
            while (seed := rounds.next_seed()) is not None:
                rounds.is_over(lane.run(make_round(seed)))

        lanes = [Lane(servers, way, zygote, model, directory, keeps_logs) for way in ways]
        # Daemons: an interrupted run ends its servers and workers and waits for no round.
        threads = [threading.Thread(target=run_lane, args=(lane,), daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return rounds.books


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, help="this many besides the kept ones; without it as many as there is time for"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no round after so long (without --rounds)")
    parser.add_argument(
        "--seed", type=int, help="the first round's; the next ones count on. Without --rounds: this one"
    )
    parser.add_argument("--lanes", type=int, default=NUM_LANES, help=f"rounds at a time; {NUM_LANES} where absent")
    parser.add_argument("--keep-logs", action="store_true", help="of every round")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends workers and servers too
    options = parser.parse_args(arguments)
    if (missing := what_is_missing()) is not None:
        print(f"rounds run on a real Apache Kafka and Elasticsearch, which need {missing}", file=sys.stderr)
        return 2
    first = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    rounds = options.rounds or (1 if options.seed is not None else None)
    seeds = itertools.chain(KEPT if options.seed is None else (), range(first, first + (rounds or 10**9)))
    until = float("inf") if rounds else time.monotonic() + options.seconds
    directory = Path(tempfile.mkdtemp(prefix="pagemill-chaos-"))
    print(f"first seed {first}; logs in {directory}", flush=True)
    books = run_rounds(seeds, directory, until, min(options.lanes, rounds or options.lanes), options.keep_logs)
    print("\n".join(books.summary()))
    if not books.failed and not options.keep_logs:
        shutil.rmtree(directory)
    return 1 if books.failed or books.is_costly else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["PYTHONPATH"] = str(ROOT)
    # A server is killed every minute or so: it never lives long enough for the better compiler to pay.
    os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1"
    sys.exit(main(sys.argv[1:]))
