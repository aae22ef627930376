"""The report: one JSON file, and a page made of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutations.areas import ROOT
from mutations.results import Draw, Result

SURVIVORS = Path(__file__).with_name("survivors.toml")
DATA = ROOT / "docs" / "measurements" / "mutations.json"
PAGE = ROOT / "docs" / "measurements" / "mutations.md"
_PACKAGES = ("cosmic-ray", "tree-sitter-cpp", "pytest", "torch")


class ReportError(Exception):
    """An entry whose test was not seen to fail, or for a mutant that did not survive."""


def read_survivors(path: Path = SURVIVORS) -> dict[str, dict[str, str]]:
    """Read what is said of each survivor, by the key of the mutant.

    Raises:
        ReportError: an entry has not exactly one of a test and a reason.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["survivor"]
    for entry in entries:
        if ("test" in entry) == ("reason" in entry):
            raise ReportError(f"{path}: {entry['key']} needs either a test or a reason")
    return {entry["key"]: entry for entry in entries}


def write_report(draw: Draw, results: Iterable[Result]) -> None:
    """Write the data and the page.

    Raises:
        ReportError: a test that was added was not seen to fail with its mutant, or an entry names
            a mutant that did not survive.
    """
    known = list(results)
    tested = [one for one in known if one.outcome != "discarded"]
    told, survivors = read_survivors(), [one for one in tested if one.outcome == "survived"]
    for one in survivors:
        if one.noticed_since != told.get(one.key, {}).get("test", ""):
            raise ReportError(f"{one.key}: its test was not run against it: run `survivors`")
    if others := told.keys() - {one.key for one in survivors}:
        raise ReportError(f"{SURVIVORS}: {sorted(others)} are no survivors")
    tested.sort(key=lambda one: (one.area, one.language, one.path, one.line))
    mutants = [_with_reason(one, told) for one in tested]
    data = {
        "machine_info": _machine(),
        "datetime": datetime.now(UTC).isoformat(),
        "draw": asdict(draw),
        "discarded": dict(Counter(one.how for one in known if one.outcome == "discarded")),
    }
    text = json.dumps({**data, "mutants": mutants}, indent=1, ensure_ascii=False)
    DATA.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(_page(data, mutants), encoding="utf-8")


def _with_reason(result: Result, told: dict[str, dict[str, str]]) -> dict[str, Any]:
    reason = told.get(result.key, {}).get("reason", "")
    return {**asdict(result), "reason": reason}


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "python_version": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _page(data: dict[str, Any], mutants: Sequence[dict[str, Any]]) -> str:
    draw, machine = data["draw"], data["machine_info"]
    discarded = ", ".join(f"{count} ({why})" for why, count in data["discarded"].items())
    noticed = [one for one in mutants if one["outcome"] == "noticed"]
    survivors = [one for one in mutants if one["outcome"] == "survived"]
    mended = [one for one in survivors if one["noticed_since"]]
    n_open = sum(not one["noticed_since"] and not one["reason"] for one in survivors)
    lines = [
        "# Mutations",
        "",
        "Written by `make mutations`. A mutant is one changed place of the product, drawn at "
        "random. The tests of its area (`tests/mutations/areas.toml`) run until the first fails.",
        "",
        f"{len(mutants)} mutants were tested (drawn: {draw['count']} of each tree, seed "
        f"{draw['seed']}; {machine['cores']}-core machine, Python {machine['python_version']}). "
        f"The tests noticed {len(noticed)}. Tests that were added since notice {len(mended)} more. "
        f"Left with a reason: {len(survivors) - len(mended) - n_open}; left open: {n_open}. "
        "What its area's tests miss, other tests may notice. [All mutants](mutations.json).",
        "",
        f"Mutants of Python are made by Cosmic Ray {machine['packages']['cosmic-ray']} and two "
        "further rules, those of C++ by rules over its syntax tree. Not counted, and replaced: "
        f"{discarded or 'none'}.",
        "",
        *_areas(mutants),
        "",
        "## Survivors",
        "",
        "| place | was | became | what notices it, or why nothing can |",
        "|---|---|---|---|",
    ]
    for one in survivors:
        why = f"`{one['noticed_since']}`" if one["noticed_since"] else one["reason"] or "open"
        changed = f"{_code(one['before'])} | {_code(one['after'])}"
        lines.append(f"| `{one['path']}`, {one['area']} | {changed} | {why} |")
    return "\n".join(lines) + "\n"


def _areas(mutants: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| area | language | mutants | noticed | by a test added since | with a reason | open |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for area, language in dict.fromkeys((one["area"], one["language"]) for one in mutants):
        own = [one for one in mutants if (one["area"], one["language"]) == (area, language)]
        n_noticed = sum(one["outcome"] == "noticed" for one in own)
        n_mended = sum(bool(one["noticed_since"]) for one in own)
        n_reasons = sum(bool(one["reason"]) for one in own)
        n_open = len(own) - n_noticed - n_mended - n_reasons
        counts = (len(own), n_noticed, n_mended, n_reasons, n_open)
        name = {"python": "Python", "cpp": "C++"}[language]
        yield f"| {area} | {name} | {' | '.join(map(str, counts))} |"


def _code(text: str) -> str:
    shown = " ".join(text.split()).replace("|", "\\|")
    return f"`{shown}`" if shown else "(removed)"
