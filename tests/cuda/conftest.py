"""Tests that need a GPU; elsewhere each is skipped with the reason."""

from __future__ import annotations

import collections
import datetime
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("on_device")


def _missing() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-cuda` keeps what was found."""
    parser.addoption("--device-report", type=Path, help="Write counts and reasons as JSON here.")


class _Report:
    """What came of each test, with the device and the versions."""

    def __init__(self, path: Path) -> None:
        self._path = path
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

    def pytest_sessionfinish(self) -> None:
        found = {
            "what": "tests on a GPU",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": _machine(),
            "counts": dict(self._counts),
            "failed": self._failed,
            "skipped": dict(self._skipped),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _machine() -> dict[str, Any]:
    if _missing():
        return {"missing": _missing()}
    from probes_cuda import machine_facts

    return {**machine_facts(), "system": platform.system()}


def pytest_configure(config: pytest.Config) -> None:
    """Keep a report where one is asked for."""
    if path := config.getoption("--device-report", default=None):
        config.pluginmanager.register(_Report(path))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Libraries that only a GPU loads may warn."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """The GPU, for inference."""
    if missing := _missing():
        pytest.skip(missing)
    torch.cuda.synchronize()  # a fault of the test before is its own
    with torch.no_grad():
        torch.cuda.manual_seed_all(0)
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()
