"""The `pagemill` command with another engine process: `python -m tests.chaos.worker ENGINE_COMMAND_AS_JSON worker`."""

import json
import sys
from functools import partial

import pipeline.worker
from pipeline.cli import app

if __name__ == "__main__":
    engine_command = json.loads(sys.argv.pop(1))
    # The command takes the class from its module when it runs.
    setattr(pipeline.worker, "Worker", partial(pipeline.worker.Worker, engine_command=engine_command))  # noqa: B010
    app()
