"""What the audit of the dependencies finds, on packages made up for it."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from tests.audit_dependencies import pinned, reach, unknown_licences, wrong_versions


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, Distribution]:
    """root needs kept >= 2 and, with its extra, loose; kept needs gone; stray is nobody's."""

    def make(name: str, version: str, *lines: str) -> Distribution:
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("\n".join([f"Name: {name}", f"Version: {version}", *lines]) + "\n")
        return PathDistribution(folder)

    made = [
        make("root", "1", "Requires-Dist: kept>=2", "Requires-Dist: loose; extra == 'more'", "License: MIT"),
        make("kept", "1.9", "Requires-Dist: gone", "License-Expression: Apache-2.0"),
        make("loose", "3+local", "License: Ask the author"),
        make("stray", "4"),
    ]
    return {one.name: one for one in made}


def test_what_is_needed_is_followed_and_what_does_not_fit_is_named(packages: dict[str, Distribution]) -> None:
    reached, unmet = reach(packages, "root", ())
    assert sorted(reached) == ["kept", "root"]
    assert unmet == ["kept needs gone, and there is none", "root needs kept>=2, and there is 1.9"]
    assert sorted(reach(packages, "root", ("more",))[0]) == ["kept", "loose", "root"]


def test_versions_are_held_against_the_pins() -> None:
    pins = pinned("# what runs\nKept==1.8\nloose==3 # a build of it\n")
    assert wrong_versions(pins, {"kept": "1.9", "loose": "3+local", "new": "1"}) == [
        "kept 1.9 is installed, and constraints.txt pins 1.8",
        "new 1 is installed, and constraints.txt does not pin it",
    ]
    with pytest.raises(ValueError, match="leaves the version open: kept>=1"):
        pinned("kept>=1")


def test_a_licence_that_nobody_has_looked_at_is_named(packages: dict[str, Distribution]) -> None:
    assert unknown_licences(packages) == [
        "loose: a licence that was not looked at: Ask the author",
        "stray: a licence that was not looked at: none told",
    ]
