"""Tests on a device, some of which end their process or break the device for it."""

from __future__ import annotations

import json
import sys
import textwrap
import types

import pytest
import torch

import device_report
import run_on_device
from device_notes import DEVICE_FAILED, note, notes_path, read_notes, write_report

pytestmark = pytest.mark.long

CONFTEST = """
import sys
from pathlib import Path

sys.path[:0] = {path!r}
import device_report

def pytest_addoption(parser):
    parser.addoption("--device-report", type=Path)
    parser.addoption("--device-report-goes-on", action="store_true")
    parser.addoption("--device-part", default="0/1")

def pytest_configure(config):
    path, goes_on = config.getoption("--device-report"), config.getoption("--device-report-goes-on")
    part = config.getoption("--device-part")
    found = device_report.DeviceReport(
        path, "tests", {{"device": "a GPU"}}, goes_on=goes_on, part=part
    )
    config.pluginmanager.register(found)
"""

TESTS = """
import os, time
import pytest, torch

def test_passes():
    pass

def test_ends_its_process():
    os._exit(9)

def test_breaks_the_device():
    def lost():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    assert False

def test_after_the_fault():
    assert not torch.cuda.is_initialized()

def test_is_skipped():
    pytest.skip("no reason")

def test_never_ends():
    time.sleep(600)

def test_last():
    pass
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(path=sys.path))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(textwrap.dedent(TESTS))
    return tmp_path


@pytest.mark.slow
def test_each_test_is_run_once_whatever_the_others_do(folder, monkeypatch, capfd):
    report = folder / "reports" / "report.json"
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    monkeypatch.chdir(folder)
    assert run_on_device.run(options, report, 500, stuck_s=30)
    outcomes = {name.partition("::")[2]: one for name, one in read_notes(report).outcomes.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_ends_its_process": "failed",
        "test_breaks_the_device": "failed",
        "test_after_the_fault": "passed",
        "test_is_skipped": "skipped",
        "test_never_ends": "failed",
        "test_last": "passed",
    }
    written = json.loads(report.read_text())
    assert written["counts"] == {"passed": 3, "failed": 3, "skipped": 1}
    assert written["machine"] == {"device": "a GPU"}
    assert sorted(written["ended their process"].values()) == [
        "exit status 9",
        "nothing came of it for 30 s",
    ]
    assert written["skipped"] == {"no reason": 1}
    assert (written["not_run"], written["interrupted"]) == (0, False)


@pytest.mark.slow
def test_several_processes_share_the_tests_and_write_one_report(folder, monkeypatch):
    report = folder / "reports" / "report.json"
    (folder / "test_some.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('number', range(10))\n"
        "def test_one(number):\n"
        "    assert number != 3\n"
        "    if number == 4:\n"
        "        os._exit(9)\n"
        "    if number == 5:\n"
        "        pytest.skip('no reason')\n"
    )
    monkeypatch.chdir(folder)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    given = ["run_on_device.py", str(report), "300", "--processes=3", *options]
    monkeypatch.setattr(sys, "argv", given)
    assert run_on_device.main() == 1
    written = json.loads(report.read_text())
    assert written["counts"] == {"passed": 7, "failed": 2, "skipped": 1}
    assert [*written["ended their process"].values()] == ["exit status 9"]
    assert written["machine"] == {"device": "a GPU"}
    assert (written["not_run"], written["interrupted"]) == (0, False)
    assert list(report.parent.iterdir()) == [report]


def test_what_was_found_until_the_time_was_over_is_reported(tmp_path, monkeypatch):
    report = tmp_path / "report.json"

    def run_out(arguments, path, deadline, stuck_s):
        note(path, collected=3)
        note(path, begins="one")
        note(path, test="one", outcome="passed", reason="")
        note(path, begins="two")
        monkeypatch.setattr(run_on_device.time, "monotonic", lambda: deadline + 1)
        return -9, "no time was left"

    monkeypatch.setattr(run_on_device, "run_once", run_out)
    monkeypatch.setattr(sys, "argv", ["run_on_device.py", str(report), "5"])
    assert run_on_device.main() == 1
    written = json.loads(report.read_text())
    assert (written["counts"], written["not_run"]) == ({"passed": 1}, 2)
    assert written["interrupted"]
    assert list(tmp_path.iterdir()) == [report]


def test_a_device_that_is_gone_for_good_ends_the_run(tmp_path, monkeypatch):
    report, calls = tmp_path / "report.json", []

    def fail(arguments, path, deadline, stuck_s):
        calls.append(arguments)
        done = read_notes(path).outcomes
        left = [one for one in ("one", "two") if one not in done]
        if not left:
            return 0, ""
        note(path, begins=left[0])
        return DEVICE_FAILED, ""

    monkeypatch.setattr(run_on_device, "run_once", fail)
    assert run_on_device.run([], report, 60)
    notes = read_notes(report)
    assert notes.outcomes == {"one": "failed", "two": "failed"}
    assert set(notes.reasons.values()) == {f"exit status {DEVICE_FAILED}"}
    assert len(calls) <= 5


def test_a_process_that_ends_before_any_test_is_not_begun_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_on_device, "run_once", lambda *_: (4, ""))
    assert not run_on_device.run([], tmp_path / "report.json", 60)
    monkeypatch.setattr(run_on_device, "run_once", lambda *_: (-11, ""))
    assert not run_on_device.run([], tmp_path / "report.json", 60)


def test_a_failure_after_a_test_passed_counts(tmp_path):
    report = tmp_path / "report.json"
    note(report, begins="one")
    note(report, test="one", outcome="passed", reason="")
    note(report, test="one", outcome="failed", reason="")  # its teardown
    with notes_path(report).open("a") as file:
        file.write('{"test": "tw')
    write_report(report, "tests", {}, interrupted=False)
    written = json.loads(report.read_text())
    assert (written["counts"], written["failed"]) == ({"failed": 1}, ["one"])


def test_a_device_that_computes_no_more_has_failed(monkeypatch):
    npu = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    computed = torch.tensor([0.0])
    monkeypatch.setattr(torch, "ones", lambda *_, **__: computed)
    assert device_report.failure_of_device() == "torch_npu launches nothing any more"
    computed += 1
    assert device_report.failure_of_device() == ""

    def lost():
        raise RuntimeError("EZ9999")

    npu.synchronize = lost
    assert device_report.failure_of_device() == "EZ9999"
    npu.is_initialized = lambda: False
    assert device_report.failure_of_device() == ""
