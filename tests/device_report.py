"""What came of each test on a device, with the device and the versions, as one JSON file."""

from __future__ import annotations

import collections
import datetime
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import npu_device
import pytest

from probing import ProbeFailed


class DeviceReport:
    """Counts tests, and writes what it has counted when they end, interrupted or not."""

    def __init__(self, path: Path, what: str, machine: Mapping[str, Any]) -> None:
        self._path = path
        self._what, self._machine = what, machine
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed: list[str] = []
        self._skipped: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self._counts[report.outcome] += 1
        if report.failed:
            self._failed.append(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        found = {
            "what": self._what,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": self._machine,
            "counts": dict(self._counts),
            "failed": self._failed,
            "skipped": dict(self._skipped),
            "interrupted": exitstatus == pytest.ExitCode.INTERRUPTED,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def make(path: Path) -> DeviceReport:
    """A report on the device that the tests run on."""
    if npu_device.uses_installed():
        from probes_ascend import machine_facts

        return DeviceReport(path, "tests on an NPU", _described(machine_facts))
    from probes_cuda import machine_facts

    return DeviceReport(path, "tests on a GPU", _described(machine_facts))


def _described(machine_facts: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return {**machine_facts(), "system": platform.system()}
    except ProbeFailed as reason:
        return {"missing": str(reason)}
