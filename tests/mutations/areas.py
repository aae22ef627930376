"""The table of areas: which tests run for a mutant of which file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("areas.toml")

Language = Literal["python", "cpp"]


@dataclass(frozen=True)
class Group:
    """Files of an area that the same tests cover.

    Attributes:
        area: what the report counts by, as "planner".
        language: of all its files.
        files: relative to the repository.
        tests: modules and tests for pytest; `--deselect=` and a test excludes it.
        programs: native test programs, which run before `tests`. Only of C++ groups.
        module: the extension module that `tests` need rebuilt. Only of C++ groups.
    """

    area: str
    language: Language
    files: tuple[str, ...]
    tests: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    module: str = ""


def read_groups(table: Path = TABLE) -> list[Group]:
    """Read the table.

    Raises:
        ValueError: a file or test does not exist, a file is in two groups, a file's language is not
            the group's, or a group has no test.
    """
    entries = tomllib.loads(table.read_text(encoding="utf-8"))["group"]
    groups = [Group(**{key: _frozen(value) for key, value in one.items()}) for one in entries]
    seen: set[str] = set()
    for group in groups:
        tests = [one.removeprefix("--deselect=").partition("::")[0] for one in group.tests]
        paths = [*group.files, *tests]
        if missing := [path for path in paths if not (ROOT / path).exists()]:
            raise ValueError(f"{table}: area {group.area} names {missing}, which do not exist")
        suffix = {"python": ".py", "cpp": ".cpp"}[group.language]
        if others := [path for path in group.files if not path.endswith(suffix)]:
            raise ValueError(f"{table}: area {group.area}: {others} are not {group.language}")
        if twice := seen & set(group.files):
            raise ValueError(f"{table}: {sorted(twice)} are in two groups")
        if not group.tests and not group.programs:
            raise ValueError(f"{table}: area {group.area} has a group without tests")
        seen |= set(group.files)
    return groups


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
