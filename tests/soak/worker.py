"""The `pagemill` command with a fake engine, which also says how many objects' memory its Python holds.

`python -m tests.soak.worker BLOCKS_FILE ENGINE_COMMAND_AS_JSON worker`. Blocks of Python's allocator show what RSS
cannot: the memory that objects hold, without what fragmentation and freed memory add and take.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import pipeline.worker
from pipeline.cli import app
from pipeline.flow import Flow

_WRITE_SECONDS = 1.0


class BlockCount:
    """Called on every turn of the pipeline's thread; now and then it writes the number down."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._write()
        self._next = time.monotonic() + _WRITE_SECONDS

    def __call__(self, flow: Flow) -> None:
        if time.monotonic() >= self._next:
            self._write()
            self._next = time.monotonic() + _WRITE_SECONDS

    def _write(self) -> None:
        os.pwrite(self._descriptor, b"%20d" % sys.getallocatedblocks(), 0)  # as wide each time: never torn


if __name__ == "__main__":
    blocks, engine_command = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
    made = partial(pipeline.worker.Worker, engine_command=engine_command, on_turn=BlockCount(blocks))
    setattr(pipeline.worker, "Worker", made)  # noqa: B010  # the command takes the class from its module when it runs
    app()
