"""What runs on a GPU machine needs torch and the standard library only: it imports without the worker's packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKED = ("pydantic", "pydantic_settings", "kafka", "elasticsearch", "gguf")


def import_with_blocked(modules: list[str], blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Imports the modules in a fresh interpreter in which importing a blocked package fails."""
    program = "\n".join(
        [
            "import sys, importlib",
            f"for name in {blocked!r}: sys.modules[name] = None",
            f"for name in {modules!r}: importlib.import_module(name)",
        ]
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)


def modules_below(folder: str) -> list[str]:
    found = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [".".join(path.parts) for path in found if path.name != "__init__"]


@pytest.mark.parametrize("folder", ["engine", "kernels"])
def test_the_gpu_side_imports_without_the_workers_packages(folder: str) -> None:
    result = import_with_blocked(modules_below(folder), BLOCKED)
    assert result.returncode == 0, result.stderr


def test_the_batcher_the_benchmarks_way_to_it_and_what_crosses_to_the_engine_import_without_them_too() -> None:
    modules = [
        "pipeline.batcher",
        "pipeline.appetite",
        "tests.bench.backlog",
        "schemas.inference",
        "schemas.errors",
        "engine.client",
    ]
    result = import_with_blocked(modules, (*BLOCKED, "torch"))
    assert result.returncode == 0, result.stderr


def test_a_blocked_import_would_be_noticed() -> None:
    result = import_with_blocked(["schemas.document"], BLOCKED)
    assert result.returncode == 1
    assert "import of pydantic halted" in result.stderr
