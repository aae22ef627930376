"""Results of all tests on a device, with the device and the versions, as one JSON file.

Each test is noted as it begins and ends, beside the report, so that no result is lost when a test
ends its process, and another process can continue after it (`run_on_device`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import npu_device
import pytest
import torch

from device_notes import DEVICE_FAILED, note, notes_path, read_notes, write_report
from probing import ProbeFailed


class DeviceReport:
    """Note results of tests, and write the report when they end, interrupted or not."""

    def __init__(
        self,
        path: Path,
        what: str,
        machine: Mapping[str, Any],
        *,
        goes_on: bool = False,
        part: str = "0/1",
    ) -> None:
        """Begin anew, or continue after the existing notes, with this part of the tests."""
        self._number, self._n_parts = map(int, part.split("/"))
        self._path, self._what, self._machine = path, what, machine
        self._goes_on = goes_on
        if not goes_on:
            notes_path(path).unlink(missing_ok=True)
        self._done = read_notes(path).outcomes
        write_report(path, what, machine, interrupted=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out tests that another process runs, and tests that have run."""
        own = items[self._number :: self._n_parts]
        note(self._path, collected=len(own))
        left = [one for one in own if one.nodeid not in self._done]
        run = {one.nodeid for one in left}
        config.hook.pytest_deselected(items=[one for one in items if one.nodeid not in run])
        items[:] = left

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Exit once the device has failed: it can run no later test in this process."""
        if why := failure_of_device():
            pytest.exit(f"the device has failed before {item.nodeid}: {why}", DEVICE_FAILED)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        note(self._path, begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or what prepares it or cleans up after it, has ended."""
        if report.when != "call" and report.passed:
            return
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        note(self._path, test=report.nodeid, outcome=report.outcome, reason=reason)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """All tests have ended, or the run was interrupted."""
        interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, DEVICE_FAILED)
        write_report(self._path, self._what, self._machine, interrupted=interrupted)
        if not self._goes_on:
            notes_path(self._path).unlink(missing_ok=True)


def failure_of_device() -> str:
    """Return why the GPU or NPU of this process no longer works; empty if it works or none is used.

    The thread by which torch_npu launches ends silently, so on an NPU something is computed.
    """
    npu = getattr(torch, "npu", None)
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if npu is not None and npu.is_initialized():
            npu.synchronize()
            if (torch.ones(1, device="npu") + 1).item() != 2:
                return "torch_npu launches nothing any more"
    except RuntimeError as error:
        return str(error)
    return ""


def make(path: Path, *, goes_on: bool = False, part: str = "0/1") -> DeviceReport:
    """Return a report on the device on which the tests, or a part of them, run: a DeviceReport."""
    return DeviceReport(path, *described(), goes_on=goes_on, part=part)


def described() -> tuple[str, Mapping[str, Any]]:
    """Return what the report covers, and the machine with its device."""
    if npu_device.uses_installed():
        from probes_ascend import machine_facts

        return "tests on an NPU", _facts(machine_facts)
    from probes_cuda import machine_facts

    return "tests on a GPU", _facts(machine_facts)


def _facts(machine_facts: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return {**machine_facts(), "system": platform.system()}
    except ProbeFailed as reason:
        return {"missing": str(reason)}
