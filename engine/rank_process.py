"""A process that holds one rank's part of the model: `python -m engine.rank_process FD`, started by rank 0."""

import gc
import signal
import sys
import traceback
from collections.abc import Sequence

from engine.lifetime import die_with_parent
from engine.tensor_parallel import RankConnection
from schemas.errors import PagemillError


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m engine.rank_process FD  (the engine starts this; it is no command)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    connection = RankConnection(int(arguments[0]))
    try:
        from engine.loading import load_rank, prepare_for_cpu  # torch takes seconds to import

        prepare_for_cpu()
        runner = load_rank(connection.receive())
        gc.collect()
        gc.freeze()  # what loading made lives as long as the process: collections need not look at it
        while True:
            runner.follow(connection.receive_step())
    except BaseException as error:
        if not isinstance(error, PagemillError):
            traceback.print_exc()
        connection.fail(error)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
