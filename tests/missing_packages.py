"""Packages missing to build offload and run its tests, found before anything is built.

    python tests/missing_packages.py REQUIREMENT...

Checks offload's dependencies, its build tools and the given requirements. Prints each missing or
outdated package on a line, and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(>=(?P<least>[\d.]+))?$")


def missing(requirements: Sequence[str]) -> list[str]:
    """Return the unmet of the requirements `NAME` and `NAME>=VERSION`, with installed versions.

    `packaging` would compare versions, but may itself be missing.

    Raises:
        ValueError: a requirement has another form.
    """
    found = []
    for requirement in requirements:
        parts = _REQUIREMENT.match(requirement)
        if parts is None:
            raise ValueError(f"{requirement}: expected NAME or NAME>=VERSION")
        try:
            version = metadata.version(parts["name"])
        except metadata.PackageNotFoundError:
            found.append(f"{requirement}: not installed")
            continue
        if parts["least"] and _numbers(version) < _numbers(parts["least"]):
            found.append(f"{requirement}: {version} is installed")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def main() -> int:
    """Check the requirements of pyproject.toml and of the arguments."""
    settings = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    needed = settings["tool"]["scikit-build"]["metadata"]["dependencies"]["always"]
    build = settings["project"]["optional-dependencies"]["build"]
    torch = [one for one in settings["build-system"]["requires"] if one.startswith("torch")]
    asked = [*needed, *torch, *build, *sys.argv[1:]]
    lacking = missing(asked)
    for line in lacking:
        print(f"{sys.executable} needs {line}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
