"""Runs probes of a device, each part in a separate process, and writes their results."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

import process_groups
from probing import NotAnswered, Probe, ProbeFailed, leave_unanswered, read_told

BUDGET_SECONDS = 450
PART_SECONDS = 75


def run_part(script: Path, probe: Probe, part: str, limit_s: float) -> dict[str, Any]:
    """Run one part by `SCRIPT --part NAME PART`; return what it reported, and its outcome."""
    begin = time.monotonic()
    command = [sys.executable, str(script), "--part", probe.name, part]
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        process = process_groups.begin(command, stdout=told, stderr=said)
        try:
            problem = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s"
        finally:
            process_groups.end(process)
        output, errors = (_text(one) for one in (told, said))
    figures, outcome, because = read_told(output)
    if outcome is None:
        last = [line for line in errors.splitlines() if line.strip()][-1:]
        outcome, because = f"failed: {'; '.join([problem, *last])}"[:600], ""
    return {
        "outcome": outcome,
        "because": because,
        "figures": figures,
        "wall_s": round(time.monotonic() - begin, 1),
    }


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def run_probe(script: Path, probe: Probe, deadline: float) -> dict[str, Any]:
    """Run all parts of a probe before the deadline."""
    parts = {}
    for part in probe.parts:
        left_s = min(PART_SECONDS, deadline - time.monotonic())
        if left_s < 5:
            parts[part] = {"outcome": "failed: no time was left", "because": "", "figures": {}}
        else:
            parts[part] = run_part(script, probe, part, left_s)
    return {
        "name": probe.name,
        "question": probe.question,
        "expected": probe.expected,
        "otherwise": probe.otherwise,
        "outcome": outcome_of([one["outcome"] for one in parts.values()]),
        "parts": parts,
    }


def outcome_of(outcomes: list[str]) -> str:
    """The outcome of a probe from those of its parts: the first of these that occurs.

    A failure, a surprise, an unanswerable question, the expected answer.
    """
    failed = [one for one in outcomes if one.startswith("failed")]
    if failed:
        return failed[0]
    return next((one for one in ("otherwise", "not answered") if one in outcomes), "as expected")


def chosen(probes: Sequence[Probe], only: str | None) -> tuple[Probe, ...]:
    """The probes that `--only` names, in order.

    Raises:
        click.BadParameter: no probe has such a name.
    """
    if only is None:
        return tuple(probes)
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    known = {probe.name: probe for probe in probes}
    if not names or not set(names) <= known.keys():
        raise click.BadParameter(f"expected some of {', '.join(known)}, got {only!r}")
    return tuple(probe for probe in probes if probe.name in names)


def answer_here(probes: Sequence[Probe], name: str, part: str) -> None:
    """Answer a part of a probe in this process."""
    probe = next(probe for probe in probes if probe.name == name)
    module, _, function = probe.function.partition(":")
    answer = getattr(importlib.import_module(module), function)
    try:
        answer(*([part] if part else []))
    except NotAnswered as reason:
        leave_unanswered(str(reason))


def new_report(what: str, machine_facts: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a report without probes.

    Raises:
        click.ClickException: the machine has no device; the message says what is missing.
    """
    try:
        machine = machine_facts()
    except ProbeFailed as error:
        raise click.ClickException(str(error)) from error
    return {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": dict(machine),
        "probes": [],
    }


def run_all(
    script: Path, probes: Sequence[Probe], report: dict[str, Any], report_file: Path, begin: float
) -> None:
    """Run the probes one by one; after each the file holds the results so far.

    Args:
        script: the script that runs a part.
        probes: the probes to run.
        report: filled in.
        report_file: where it is written; its folder is made.
        begin: when the run began, by time.monotonic, in seconds.
    """
    console = Console()
    for probe in probes:
        report["probes"].append(run_probe(script, probe, begin + BUDGET_SECONDS))
        console.print(f"{probe.name}: {report['probes'][-1]['outcome']}")
        report["wall_s"] = round(time.monotonic() - begin, 1)
        report_file.parent.mkdir(parents=True, exist_ok=True)
        report_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_report(console, report)
    console.print(f"wrote {report_file}")


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print the outcome of each probe."""
    table = Table(title=f"{report['machine']['device']}, driver {report['machine']['driver']}")
    for heading in ("probe", "part", "outcome", "because", "s"):
        table.add_column(heading, overflow="fold")
    for probe in report["probes"]:
        table.add_section()
        for part, found in probe["parts"].items():
            seconds = str(found.get("wall_s", ""))
            table.add_row(probe["name"], part, found["outcome"], found["because"], seconds)
    console.print(table)


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
