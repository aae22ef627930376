"""Runs benchmarks file by file within a time limit, and writes one report of pytest-benchmark.

    python bench/run_benchmarks.py REPORT SECONDS FILE...

Each file has a separate process: a device fault lasts as long as its process. After each file the
report holds all measurements so far, and the reason for every incomplete file. It includes a file's
measurements before its process ended for any reason (`kept_benchmarks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import process_groups

LEAST_SECONDS = 40.0
"""Time that a file leaves to each of those after it."""

_ENDING_SECONDS = 15.0
_FAILURES = {1: "some benchmark failed", 5: "no benchmark was collected"}


def run_file(file: str, part: Path, limit_s: float) -> str:
    """Measure one file into a separate report; return why it is incomplete (empty: it is whole)."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-W", "default"]
    command += ["--benchmark-enable", "--benchmark-only", f"--benchmark-json={part}"]
    command += ["-p", "kept_benchmarks"]
    search = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = process_groups.begin(command, env=os.environ | {"PYTHONPATH": ":".join(search)})
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process_groups.end(process, _ENDING_SECONDS)
        return f"ended after {limit_s:.0f} s"
    finally:
        process_groups.end(process)
    return _FAILURES.get(status, f"exit status {status}") if status else ""


def merge(report: dict[str, Any], part: Path) -> None:
    """Add the measurements of one file; a report that was cut off or not written has none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(part.read_text(encoding="utf-8"))
        benchmarks = [*report.get("benchmarks", ()), *found["benchmarks"]]
        report |= {**found, "benchmarks": benchmarks, "not_whole": report["not_whole"]}


def run(report_file: Path, seconds: float, files: Sequence[str]) -> dict[str, Any]:
    """Measure all files; return the report, which is written after each."""
    deadline = time.monotonic() + seconds
    report: dict[str, Any] = {"machine_info": {}, "benchmarks": [], "not_whole": {}}
    report_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            part = Path(folder) / f"{number}.json"
            left_s = deadline - time.monotonic()
            limit_s = left_s - LEAST_SECONDS * (len(files) - number - 1)
            why = run_file(file, part, limit_s) if limit_s > 1 else "no time was left"
            merge(report, part)
            if why:
                report["not_whole"][Path(file).name] = why
                print(f"{file}: {why}", flush=True)
            report_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {report_file}: {len(report['benchmarks'])} benchmarks", flush=True)
    return report


def main() -> int:
    """Run as the arguments say; return 0 if every file is whole."""
    report_file, seconds, *files = sys.argv[1:]
    return 1 if run(Path(report_file), float(seconds), files)["not_whole"] else 0


if __name__ == "__main__":
    sys.exit(main())
