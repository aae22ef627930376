"""Leftovers of a capture: only the program's memory, and no local folders in files."""

from __future__ import annotations

import gc
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from checks import normal

import offload

MEMORY_THAT_STAYS = """
import resource, sys, torch, offload
from torch import nn
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
# 256 values of 0.4 MB: below the size from which the C library maps each by itself.
model = nn.Sequential(*(nn.ReLU() if i % 2 else nn.Linear(64, 64) for i in range(256))).eval()
x = torch.randn(1600, 64)
with torch.no_grad():
    offload.capture(nn.Linear(64, 64), x)
    for _ in range(3):
        model(x)
    before = resident_bytes()
    captured = offload.capture(model, x)
held = sum(one.size_bytes for one in captured.program.values)
print(resident_bytes() - before, held)
"""


def storages_bytes() -> dict[int, int]:
    gc.collect()
    found = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}


def test_a_capture_keeps_no_tensors_but_its_result():
    layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8))
    model = torch.nn.Sequential(*layers).eval()
    x = normal(32, 64)
    with torch.no_grad():
        offload.capture(model, x)
        before = storages_bytes()
        captured = offload.capture(model, x)
        new = {key: size for key, size in storages_bytes().items() if key not in before}
    result = captured.recorded_result.untyped_storage()
    assert new == {result.data_ptr(): result.nbytes()}


@pytest.mark.alone
def test_freed_memory_of_a_recording_returns_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_THAT_STAYS], capture_output=True, text=True, check=True
    )
    stays, held = map(int, done.stdout.split())
    assert held > 90e6
    assert stays < held / 5


def test_a_saved_program_names_no_folder_of_the_machine(tmp_path):
    module = tmp_path / "folder_of_the_user" / "net.py"
    module.parent.mkdir()
    names = {}
    exec(compile("def function(x):\n    return x + 1\n", str(module), "exec"), names)
    captured = offload.capture(names["function"], normal(2))
    assert captured.program.launches[0].source == "net.py:2"
    captured.save(tmp_path / "net.offload")
    with zipfile.ZipFile(tmp_path / "net.offload") as archive:
        members = [archive.read(name) for name in archive.namelist()]
    for content in members:
        assert b"folder_of_the_user" not in content
        assert str(Path.home()).encode() + b"/" not in content
    assert offload.open(tmp_path / "net.offload").program.launches[0].source == "net.py:2"


def test_lines_of_an_installed_package_begin_with_its_name():
    packages = next(one for one in sys.path if one.endswith("site-packages"))
    names = {}
    place = f"{packages}/models/net.py"
    exec(compile("def function(x):\n    return x + 1\n", place, "exec"), names)
    captured = offload.capture(names["function"], normal(2))
    assert captured.program.launches[0].source == "models/net.py:2"
