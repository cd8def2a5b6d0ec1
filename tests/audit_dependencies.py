"""What of the dependencies can be checked without a network: `python -m tests.audit_dependencies`.

They are the ones that constraints.txt pins, they fit each other, and their licences are ones that were looked at. It
does not know of vulnerabilities: those are in databases, which `make audit` asks.
"""

import importlib.metadata
import re
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OURS = "pagemill"
# The environment's own, in whichever version it came.
NOT_PINNED = frozenset({OURS, "pip", "setuptools", "wheel"})
# What may stand in a licence's name, by whatever way it is written. MPL and LGPL: used as they are, not changed.
# NVIDIA: CUDA's libraries, which torch brings.
LICENCES = re.compile(r"\b(MIT|Apache|BSD|MPL|Mozilla|ISC|PSF|Python Software|LGPL|NumPy|NVIDIA)\b", re.IGNORECASE)
# Those that say nothing of it in their metadata; looked up by hand.
LICENCE_ELSEWHERE = {"cuda-toolkit": "NVIDIA: a package without content, which names CUDA's libraries"}


def pinned(constraints: str) -> dict[str, str]:
    """Name -> version of a constraints file. Raises ValueError for a line that leaves the version open."""
    pins: dict[str, str] = {}
    for line in constraints.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        versions = list(requirement.specifier)
        if len(versions) != 1 or versions[0].operator != "==" or "*" in versions[0].version:
            raise ValueError(f"constraints.txt leaves the version open: {text}")
        pins[canonicalize_name(requirement.name)] = versions[0].version
    return pins


def reach(
    installed: Mapping[str, Distribution], root: str, extras: Collection[str]
) -> tuple[dict[str, Distribution], list[str]]:
    """What the root needs, and that needs in turn, by name; and the requirements that nothing installed meets."""
    reached: dict[str, Distribution] = {}
    unmet: list[str] = []
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        reached[name] = installed[name]
        for text in installed[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            found = installed.get(needed)
            if found is None or not requirement.specifier.contains(found.version, prereleases=True):
                unmet.append(f"{name} needs {requirement}, and there is {'none' if found is None else found.version}")
            if found is not None:
                waiting += [(needed, wanted) for wanted in ("", *requirement.extras)]
    return reached, sorted(set(unmet))


def wrong_versions(pins: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """What is there otherwise than it is pinned, or without a pin. A build's own suffix (`+cu130`) is no difference."""
    wrong = []
    for name, version in sorted(versions.items()):
        if name not in pins:
            wrong.append(f"{name} {version} is installed, and constraints.txt does not pin it")
        elif pins[name] not in (version, version.partition("+")[0]):
            wrong.append(f"{name} {version} is installed, and constraints.txt pins {pins[name]}")
    return wrong


def licence(distribution: Distribution) -> str:
    """As its metadata say, in one line; empty where they do not."""
    told = distribution.metadata.get_all
    kinds = [kind for kind in told("Classifier") or [] if kind.startswith("License ::")]
    texts = [text[:200] for text in told("License") or []]  # some hold the whole licence
    return " ".join([*(told("License-Expression") or []), *kinds, *texts]).strip()


def unknown_licences(distributions: Mapping[str, Distribution]) -> list[str]:
    """Those whose licence nobody has looked at."""
    unknown = []
    for name, distribution in sorted(distributions.items()):
        told = licence(distribution)
        if name not in LICENCE_ELSEWHERE and name != OURS and not LICENCES.search(told):
            unknown.append(f"{name}: a licence that was not looked at: {told.splitlines()[0] if told else 'none told'}")
    return unknown


def main() -> int:
    """Prints what is wrong, and what was not looked at; 1 where anything is wrong."""
    installed: dict[str, Distribution] = {
        canonicalize_name(one.name): one for one in importlib.metadata.distributions()
    }
    reached, wrong = reach(installed, OURS, ("demo", "dev"))
    versions = {name: one.version for name, one in reached.items() if name not in NOT_PINNED}
    wrong += wrong_versions(pinned((ROOT / "constraints.txt").read_text()), versions)
    wrong += unknown_licences(reached)
    for line in wrong:
        print(line, file=sys.stderr)
    print(
        f"{len(versions)} dependencies: versions, fit and licences {'differ' if wrong else 'are as they should be'}; "
        "known vulnerabilities were not looked at (make audit does, over the network)"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
