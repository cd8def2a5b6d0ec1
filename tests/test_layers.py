"""The house's floors: imports only point down, and nothing that only schedules or does I/O reaches torch.

Read from the sources; imports for type checking and inside functions count too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("schemas", "kernels", "consumers", "engine", "pipeline")

MAY_IMPORT = {
    "schemas": ("schemas",),
    "kernels": ("kernels",),
    "consumers": ("consumers", "schemas"),
    "engine": ("engine", "kernels", "schemas"),
    "pipeline": ("pipeline", "consumers", "schemas", "engine.client", "engine.tokenizer", "engine.block_hash"),
}

# Of engine/, what only schedules or talks. schemas/, consumers/ and pipeline/ are free of torch as a whole.
ENGINE_WITHOUT_TORCH = (
    "engine.block_hash",
    "engine.block_pool",
    "engine.client",
    "engine.engine",
    "engine.pace",
    "engine.protocol",
    "engine.request",
    "engine.scheduler",
    "engine.step_plan",
    "engine.tokenizer",
    "engine.waiting",
)
TORCH = ("torch", "triton", "transformers", "safetensors.torch", "flash_attn")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Each module of ours, by its dotted name."""
    return {module_name(path): path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """The dotted names that a module imports; of ours, as modules (`from engine import client` is engine.client)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(sources()[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import on line {node.lineno}; write the full name"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in sources() else node.module)
    return frozenset(found)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def chain_to_torch(module: str) -> list[str] | None:
    """The imports by which a module reaches torch, or None."""
    chains, seen = [[module]], {module}
    while chains:
        chain = chains.pop()
        for name in sorted(imports(chain[-1])):
            if any(is_within(name, package) for package in TORCH):
                return [*chain, name]
            if name in sources() and name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return None


def find_circle(graph: dict[str, list[str]]) -> list[str] | None:
    """A circle of imports, its first module repeated at its end, or None."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str] | None:
        for name in graph[path[-1]]:
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (circle := walk([*path, name])):
                return circle
        done.add(path[-1])
        return None

    return next((circle for module in graph if module not in done and (circle := walk([module]))), None)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_point_down(layer: str) -> None:
    upward = [
        f"{module} imports {name}"
        for module in sources()
        if is_within(module, layer)
        for name in sorted(imports(module))
        if name.split(".")[0] in (*LAYERS, "tests")
        and not any(is_within(name, allowed) for allowed in MAY_IMPORT[layer])
    ]
    assert upward == []


def test_no_module_imports_itself_over_others() -> None:
    graph = {module: sorted(name for name in imports(module) if name in sources()) for module in sources()}
    assert find_circle(graph) is None


def test_a_circle_would_be_found() -> None:
    assert find_circle({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]


@pytest.mark.parametrize("layer", ["schemas", "consumers", "pipeline"])
def test_nothing_that_does_io_reaches_torch(layer: str) -> None:
    assert {
        module: chain for module in sources() if is_within(module, layer) and (chain := chain_to_torch(module))
    } == {}


@pytest.mark.parametrize("module", ENGINE_WITHOUT_TORCH)
def test_nothing_that_only_schedules_reaches_torch(module: str) -> None:
    assert module in sources(), f"{module} is gone or renamed; this list goes with it"
    assert chain_to_torch(module) is None


def test_torch_would_be_found() -> None:
    assert chain_to_torch("engine.batch") == ["engine.batch", "torch"]


def test_package_files_are_empty() -> None:
    assert [module for module, path in sources().items() if path.name == "__init__.py" and path.read_text()] == []
