"""The command line of the NPU probes, and the files that they carry, without a device."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import probes_ascend
from onnx_model import relu_model
from probes_ascend import PROBES, driver_release, main, package_version


def test_there_are_thirteen_probes_with_functions():
    assert [probe.name for probe in PROBES] == [f"A{number}" for number in range(13)]
    for probe in PROBES:
        module, _, function = probe.function.partition(":")
        source = (probes_ascend.FOLDER / f"{module}.py").read_text(encoding="utf-8")
        assert f"\ndef {function}(" in source


def test_help_says_what_it_needs():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "CANN 8.1 or later" in " ".join(result.output.split())


def test_without_torch_npu_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    result = CliRunner().invoke(main, [str(tmp_path / "report.json")])
    assert result.exit_code == 1
    assert "the probes need torch and torch_npu" in result.output
    assert not list(tmp_path.iterdir())


def test_a_probe_that_is_not_there():
    result = CliRunner().invoke(main, ["--only", "A13"])
    assert result.exit_code == 2
    assert "expected some of A0, A1" in result.output


def test_the_drivers_release(tmp_path):
    path = tmp_path / "version.info"
    assert driver_release(path) == ""
    path.write_text("Package=driver\nVersion=25.0.rc1\nInnerversion=V100\n", encoding="utf-8")
    assert driver_release(path) == "25.0.rc1"


class Versions:
    """A runtime that reports the versions of two packages."""

    def aclsysGetCANNVersion(self, package, content):
        if package > 1:
            return 107000
        content[:6] = (b"8.5.0\0", b"8.5.1\0")[package]
        return 0


def test_versions_of_packages():
    assert [package_version(Versions(), number) for number in (0, 1, 2)] == ["8.5.0", "8.5.1", ""]
    assert package_version(object(), 0) == ""


def test_the_model_for_the_compiler_is_one_of_onnx():
    runtime = pytest.importorskip("onnxruntime", reason="reads the model: make bench has it")
    session = runtime.InferenceSession(relu_model(300), providers=["CPUExecutionProvider"])
    x = np.arange(-150, 150, dtype=np.float32)
    assert np.array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0))


def test_modules_need_no_device_to_be_imported():
    for name in ("probes_rules", "probes_copies", "probes_offline", "probe_kernels"):
        assert importlib.import_module(name)
