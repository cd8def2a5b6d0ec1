"""What tests pass in where the real thing is a clock, a model or a server."""

import sys
from pathlib import Path


class FakeClock:
    """A clock that moves when told to. Call it for the time in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def fake_engine_command(**behaviour: float | str) -> tuple[str, ...]:
    """A command for EngineClient: tests/fake_engine.py with fields of its Behaviour, e.g. `die_after=10`."""
    options = [text for name, value in behaviour.items() for text in ("--" + name.replace("_", "-"), str(value))]
    # -P: tests/ must not come before the root on the path, or tests/engine hides engine.
    return (sys.executable, "-P", str(Path(__file__).parent / "fake_engine.py"), *options)
