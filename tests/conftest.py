"""What every test may ask for."""

import os
from importlib.util import find_spec
from pathlib import Path

# Triton decides at its import whether kernels are compiled or interpreted, and an engine's test may import it before
# the kernels' own do: so here, before any of them, and by the device files, since torch takes seconds to ask.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Kernels and engine are also tested on machines that have neither Kafka's client nor Elasticsearch's.
if find_spec("kafka") and find_spec("elasticsearch"):
    pytest_plugins = ["tests.servers.fixtures"]
