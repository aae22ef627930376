"""Runs tests on a device within a time limit, whatever a test does to its process.

    python tests/run_on_device.py REPORT SECONDS [--processes=N] [arguments of pytest]

With N, that many processes run at a time, each a part of the tests. A GPU fault lasts as long as
its process, and a test may end the process or hang. Another process runs the remaining tests
without that test; REPORT has all of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import process_groups
from device_notes import DEVICE_FAILED, note, notes_path, read_notes, write_report

STUCK_SECONDS = 150.0
"""Longest time without a test that begins or ends; scripts that tests run may take 120 s."""

_ENDING_SECONDS = 15.0
_POLL_SECONDS = 0.2
_ENDED = (0, 1, 5)  # pytest: all passed, some failed, none were collected
_REFUSED = (2, 3, 4)  # pytest: interrupted, an internal error, an error of its arguments


def run_once(
    arguments: Sequence[str], report: Path, deadline: float, stuck_s: float
) -> tuple[int, str]:
    """Run the tests not yet run; return exit status and why the process was ended ("" if not)."""
    options = [f"--device-report={report}", "--device-report-goes-on"]
    command = [sys.executable, "-m", "pytest", *arguments, *options]
    process = process_groups.begin(command)
    why, seen, size = "", time.monotonic(), -1
    try:
        while not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS), ""
            path = notes_path(report)
            now, new_size = time.monotonic(), path.stat().st_size if path.exists() else 0
            if new_size != size:
                seen, size = now, new_size
            if now > deadline:
                why = "no time was left"
            elif now > seen + stuck_s:
                why = f"nothing came of it for {stuck_s:.0f} s"
    finally:
        status = process_groups.end(process, _ENDING_SECONDS if why else 0.0)
    return status, why


def run(
    arguments: Sequence[str], report: Path, seconds: float, stuck_s: float = STUCK_SECONDS
) -> bool:
    """Run all tests, in as many processes as needed; return whether all were run."""
    deadline = time.monotonic() + seconds
    notes_path(report).unlink(missing_ok=True)
    n_before = -1
    while True:
        status, why = run_once(arguments, report, deadline, stuck_s)
        if status in _ENDED and not why:
            return True
        notes = read_notes(report)
        if time.monotonic() > deadline or (status in _REFUSED and not why):
            return False
        is_new_failure = status != DEVICE_FAILED or len(notes.outcomes) == n_before
        n_before = len(notes.outcomes)
        if notes.running is None:
            if is_new_failure:  # before any test, or after the last: no test to exclude
                return False
        elif is_new_failure:
            reason = why or f"exit status {status}"
            note(report, test=notes.running, outcome="failed", reason=reason)
            print(f"{notes.running} ended its process: {reason}", flush=True)


def run_in_parts(arguments: Sequence[str], report: Path, seconds: float, n_parts: int) -> bool:
    """Run all tests in this many processes at a time, each as `run`; return whether all were run.

    The notes of the report then hold those of all parts.
    """
    parts = [report.with_name(f"{report.stem}_{part}.json") for part in range(n_parts)]

    def run_part(part: int) -> bool:
        return run([*arguments, f"--device-part={part}/{n_parts}"], parts[part], seconds)

    notes_path(report).unlink(missing_ok=True)
    try:
        with concurrent.futures.ThreadPoolExecutor(n_parts) as threads:
            return all([*threads.map(run_part, range(n_parts))])
    finally:
        _gather(report, parts)


def _gather(report: Path, parts: Sequence[Path]) -> None:
    """Merge the notes of all parts; their reports are deleted, the last one becomes the report."""
    note(report, collected=sum(read_notes(part).n_collected for part in parts))
    for part in parts:
        notes = read_notes(part)
        for test, outcome in notes.outcomes.items():
            note(report, test=test, outcome=outcome, reason=notes.reasons[test])
        notes_path(part).unlink(missing_ok=True)
        if part.exists():
            part.replace(report)


_PROCESSES = "--processes="


def main() -> int:
    """Run as the arguments say; return 0 if all tests were run and passed."""
    report, seconds, *arguments = sys.argv[1:]
    path, is_whole, n_parts = Path(report), False, 1
    if arguments and arguments[0].startswith(_PROCESSES):
        n_parts = int(arguments.pop(0).removeprefix(_PROCESSES))
    path.unlink(missing_ok=True)
    try:
        if n_parts > 1:
            is_whole = run_in_parts(arguments, path, float(seconds), n_parts)
        else:
            is_whole = run(arguments, path, float(seconds))
    finally:
        write_report(path, *_machine(path), interrupted=not is_whole)
    notes = read_notes(path)
    notes_path(path).unlink(missing_ok=True)
    print(f"wrote {path}", flush=True)
    return 0 if is_whole and "failed" not in notes.outcomes.values() else 1


def _machine(path: Path) -> tuple[str, dict[str, object]]:
    """The machine as the processes reported it; this process does not use the device."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return written["what"], written["machine"]
    except (OSError, ValueError, KeyError):
        return "tests on a device", {"missing": "no process wrote a report"}


if __name__ == "__main__":
    sys.exit(main())
