"""Finds a JDK and Maven, and builds the two test servers once. Knows nothing of how they run."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIN_JAVA_VERSION = 21
SERVERS = Path(__file__).resolve().parent

_JDK_FOLDERS = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/usr/local/java/*",
    "/usr/local/jdk*",
    "/opt/java/*",
    "/opt/jdk*",
    "/opt/*jdk*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdks/*",
    "~/.asdf/installs/java/*",
    "~/.local/share/mise/installs/java/*",
)


class ServersUnavailable(Exception):
    """The real servers cannot be built or started here; the text says what to install or where to look."""


def find_jdk() -> Path | None:
    """The home of a JDK of version 21 or later: JAVA_HOME's, the newest in the usual folders, or that of `javac`."""
    if (java_home := os.environ.get("JAVA_HOME")) and _is_usable(Path(java_home)):
        return Path(java_home)
    installed = {path.resolve() for pattern in _JDK_FOLDERS for path in _glob(pattern)}
    usable = [path for path in installed if _is_usable(path)]
    if usable:
        return max(usable, key=lambda path: (java_version(path) or 0, str(path)))
    if javac := shutil.which("javac"):
        home = Path(javac).resolve().parent.parent
        return home if _is_usable(home) else None
    return None


def java_version(home: Path) -> int | None:
    """The major version that a JDK's `release` file states; None where there is no such file."""
    try:
        stated = re.search(r'^JAVA_VERSION="(\d+)', (home / "release").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(stated.group(1)) if stated else None


def what_is_missing() -> str | None:
    """What to install for the real servers, in words; None where nothing is missing."""
    missing = []
    if find_jdk() is None:
        missing.append(f"a JDK of version {MIN_JAVA_VERSION} or later (found through JAVA_HOME or the usual folders)")
    if shutil.which("mvn") is None:
        missing.append("Maven (`mvn` on PATH)")
    return " and ".join(missing) if missing else None


def build_server(name: str) -> Path:
    """Builds `tests/servers/{name}` with Maven where its target is not up to date; the target folder.

    Two processes may call it at once: the second waits for the first. Raises ServersUnavailable.
    """
    project = SERVERS / name
    target = project / "target"
    if (missing := what_is_missing()) is not None:
        raise ServersUnavailable(f"the {name} test server needs {missing}")
    target.mkdir(exist_ok=True)
    with _locked(project / "target" / "build.lock"):
        stamp, wanted = target / "built-from.sha256", _digest(project)
        if stamp.exists() and stamp.read_text() == wanted:
            return target
        built = subprocess.run(
            ["mvn", "-q", "-B", "-f", str(project / "pom.xml"), "package"],
            env={**os.environ, "JAVA_HOME": str(find_jdk())},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if built.returncode != 0:
            raise ServersUnavailable(
                f"Maven could not build the {name} test server (is its repository reachable?):\n"
                f"{(built.stdout + built.stderr)[-4000:]}"
            )
        stamp.write_text(wanted)
    return target


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    yield from Path(path.anchor).glob(str(path.relative_to(path.anchor)))


def _is_usable(home: Path) -> bool:
    version = java_version(home)
    return version is not None and version >= MIN_JAVA_VERSION and (home / "bin" / "javac").exists()


def _digest(project: Path) -> str:
    """Over everything that the build reads, names included."""
    digest = hashlib.sha256()
    sources = [project / "pom.xml", *sorted(path for path in (project / "src").rglob("*") if path.is_file())]
    for path in sources:
        digest.update(str(path.relative_to(project)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
