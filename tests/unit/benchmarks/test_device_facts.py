"""All three reports of a GPU state their GPU, driver and versions; none is queried here."""

from __future__ import annotations

import importlib.util
import platform
import types
from pathlib import Path
from typing import Any

import npu_device
import pytest
import torch

import device_report
import probes_cuda

pytest.importorskip("cuda.bindings.driver", reason="the driver is asked by NVIDIA's bindings")


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU."""
    from cuda.bindings import driver

    found = types.SimpleNamespace(name="a GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13010))
    monkeypatch.setattr(probes_cuda, "_driver_release", lambda: "580.65.06")


def test_probes(gpu):
    facts = probes_cuda.machine_facts()
    assert facts["device"] == "a GPU"
    assert facts["memory_bytes"] == 80 << 30
    assert facts["compute_capability"] == "9.0"
    assert (facts["driver"], facts["driver_cuda_version"]) == ("580.65.06", 13010)
    assert (facts["torch"], facts["torch_cuda"]) == (torch.__version__, "13.0")
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["cuda-bindings"]


def test_tests(gpu, monkeypatch):
    monkeypatch.setattr(npu_device, "uses_installed", lambda: False)
    what, facts = device_report.described()
    assert what == "tests on a GPU"
    assert facts == {**probes_cuda.machine_facts(), "system": platform.system()}


def test_tests_without_a_gpu_say_so(monkeypatch):
    monkeypatch.setattr(npu_device, "uses_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, facts = device_report.described()
    assert list(facts) == ["missing"]
    assert "finds no CUDA device" in facts["missing"]


def benchmarks_of(folder: str) -> Any:
    """The conftest of a folder of benchmarks."""
    path = Path(__file__).parents[3] / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"conftest of {folder}".replace("/", " "), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmarks(gpu):
    info: dict[str, Any] = {}
    for folder in ("bench", "bench/cuda"):
        benchmarks_of(folder).pytest_benchmark_update_machine_info(None, info)
    assert info["gpu"] == {
        "name": "a GPU",
        "memory_bytes": 80 << 30,
        "driver": "580.65.06",
        "cuda": "13.0",
    }
    assert info["packages"]["torch"]
    assert info["packages"]["cuda-bindings"]
