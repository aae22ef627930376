"""Notes of tests on a device as they begin and end, and the report written from them."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEVICE_FAILED = 70
"""The exit status of a process whose device has failed: no other test can run in it."""


@dataclasses.dataclass
class Notes:
    """The content of the notes beside a report.

    Attributes:
        n_collected: tests, some possibly not run; 0 if no test was collected.
        outcomes: per test, `passed`, `failed` or `skipped`.
        reasons: of tests that were skipped, or that ended their process.
        running: the test that has begun and not ended.
    """

    n_collected: int = 0
    outcomes: dict[str, str] = dataclasses.field(default_factory=dict)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    running: str | None = None


def notes_path(report: Path) -> Path:
    """The path of a report's notes."""
    return report.with_suffix(".notes")


def note(report: Path, **told: Any) -> None:
    """Add a line: `collected` alone, `begins` alone, or `test` with `outcome` and `reason`."""
    path = notes_path(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


def read_notes(report: Path) -> Notes:
    """Return all notes; a line cut off by the end of a process is left out."""
    notes, path = Notes(), notes_path(report)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if "collected" in told:
            notes.n_collected = max(notes.n_collected, told["collected"])
        elif "begins" in told:
            notes.running = told["begins"]
        else:
            test = told["test"]
            worst = "failed" if notes.outcomes.get(test) == "failed" else told["outcome"]
            notes.outcomes[test] = worst
            notes.reasons[test] = told["reason"]
            notes.running = None if notes.running == test else notes.running
    return notes


def write_report(report: Path, what: str, machine: Mapping[str, Any], *, interrupted: bool) -> None:
    """Write the report from the notes."""
    notes = read_notes(report)
    failed = [test for test, outcome in notes.outcomes.items() if outcome == "failed"]
    found = {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "counts": collections.Counter(notes.outcomes.values()),
        "failed": failed,
        "ended their process": {one: notes.reasons[one] for one in failed if notes.reasons[one]},
        "skipped": collections.Counter(
            notes.reasons[test] for test, one in notes.outcomes.items() if one == "skipped"
        ),
        "not_run": max(0, notes.n_collected - len(notes.outcomes)),
        "interrupted": interrupted,
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
