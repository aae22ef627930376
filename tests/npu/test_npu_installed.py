"""`make test-npu` as far as testable: the simulator's libraries as installed ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ascend_simulator
import on_npu  # noqa: F401  skips where torch_npu is missing
import pytest
from ascend_simulator import AscendSimulator

ROOT = Path(__file__).parents[2]


def run_installed(report: Path, libraries: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the runtime that the loader finds in this folder, with a report."""
    environment = {**os.environ, "NPU_RUNTIME": "installed", "LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    return subprocess.run(
        [*command, f"--device-report={report}", *what],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.usefixtures("simulated_npu")
def test_tests_run_on_the_runtime_that_is_found(tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    graphs = "tests/npu/test_npu_graphs.py"
    executions = "tests/conformance/test_executions.py"
    wanted = "replay or chain"
    libraries = ascend_simulator.LIBRARY.parent
    done = run_installed(report, libraries, graphs, executions, "-k", wanted)
    assert done.returncode == 0, done.stdout
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["machine"]["device"] == "Ascend910B1"
    assert found["counts"]["passed"] > found["counts"]["skipped"] > 0
    assert found["skipped"]["controls the simulated runtime, or looks into it"] > 0
    assert (found["failed"], found["interrupted"]) == ([], False)


def test_without_a_runtime_nothing_is_run(simulated_npu: AscendSimulator, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_installed(report, tmp_path, "tests/npu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "torch_npu does not start here" in done.stderr
    assert not report.exists()
