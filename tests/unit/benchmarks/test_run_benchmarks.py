"""Benchmarks run file by file: a file that breaks its process leaves the others intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types

import pytest
import torch

import device_turns
import process_groups
import run_benchmarks

GOOD = """
def test_{name}(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)
"""
FAULT = "import os\nos._exit(9)\n"
FAILS = GOOD + "    assert False\n"


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Benchmarks are off in workers of pytest-xdist, and processes begun here would be workers."""
    for name in [one for one in os.environ if one.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_each_file_is_measured_whatever_the_others_do(tmp_path, monkeypatch):
    monkeypatch.setattr(run_benchmarks, "LEAST_SECONDS", 20.0)
    sources = {
        "one": GOOD.format(name="one"),
        "fault": FAULT,
        "fails": FAILS.format(name="fails") + GOOD.format(name="beside"),
        "two": GOOD.format(name="two"),
    }
    files = []
    for name, source in sources.items():
        files.append(tmp_path / f"test_{name}.py")
        files[-1].write_text(source)
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "new" / "report.json"
    found = run_benchmarks.run(report, 300, [str(file) for file in files])
    assert json.loads(report.read_text()) == found
    names = [one["name"] for one in found["benchmarks"]]
    assert [name for name in names if name != "test_fails"] == [
        "test_one",
        "test_beside",
        "test_two",
    ]
    assert found["not_whole"] == {
        "test_fault.py": "exit status 9",
        "test_fails.py": "some benchmark failed",
    }
    assert found["machine_info"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["by itself", "at its limit", "without listening"])
def test_what_was_measured_before_a_process_ended_is_kept(tmp_path, monkeypatch, end):
    marker = tmp_path / "hangs"
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    last = f"    open({str(marker)!r}, 'w').close()\n    while True: time.sleep(0.01)\n"
    source = {
        "by itself": "    os._exit(9)\n",
        "at its limit": last,
        "without listening": f"    {deaf}\n{last}",
    }[end]
    file = tmp_path / "test_two.py"
    hangs = f"\n\ndef test_hangs(benchmark):\n    benchmark(int)\n{source}"
    file.write_text("import os, signal, time\n" + GOOD.format(name="one") + hangs)

    def begin(command, **options):
        process = process_groups.begin(command, **options)

        def wait_for_marker(limit_s):
            """The time limit comes when the test hangs, however slow this machine is."""
            while not marker.exists() and process.poll() is None:
                time.sleep(0.05)
            process.wait = subprocess.Popen.wait.__get__(process)
            return process.wait(0.2)

        process.wait = wait_for_marker
        return process

    waiting = types.SimpleNamespace(begin=begin, end=process_groups.end)
    monkeypatch.setattr(run_benchmarks, "process_groups", waiting)
    monkeypatch.setattr(
        run_benchmarks, "_ENDING_SECONDS", 1.0 if end == "without listening" else 60.0
    )
    monkeypatch.chdir(tmp_path)
    found = run_benchmarks.run(tmp_path / "report.json", 300, [str(file)])
    names = [one["name"] for one in found["benchmarks"]]
    assert names[0] == "test_one"
    assert found["machine_info"]
    why = "exit status 9" if end == "by itself" else "ended after 300 s"
    assert found["not_whole"] == {"test_two.py": why}
    assert json.loads((tmp_path / "report.json").read_text()) == found


def test_a_file_leaves_time_to_those_after_it(tmp_path, monkeypatch):
    limits = []

    def run_file(file, part, limit_s):
        limits.append(round(limit_s))
        monkeypatch.setattr(run_benchmarks.time, "monotonic", lambda: clock[0])
        clock[0] += limit_s
        return f"ended after {limit_s:.0f} s"

    clock = [1000.0]
    monkeypatch.setattr(run_benchmarks.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_benchmarks, "run_file", run_file)
    found = run_benchmarks.run(tmp_path / "report.json", 450, ["a.py", "b.py", "c.py"])
    assert limits == [370, 40, 40]
    assert list(found["not_whole"]) == ["a.py", "b.py", "c.py"]


def test_a_file_that_does_not_end_is_ended_with_what_it_has_started(tmp_path):
    marker = tmp_path / "alive"
    child = (
        f"import time\nwhile True:\n    open({str(marker)!r}, 'w').close()\n    time.sleep(0.05)"
    )
    source = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    process = process_groups.begin([sys.executable, "-c", source + "time.sleep(600)"])
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_groups.end(process, 5.0) != 0
    marker.unlink()
    time.sleep(0.5)
    assert not marker.exists()


def test_a_process_that_does_not_listen_is_killed():
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(1, flush=True)\n"
    )
    process = process_groups.begin(
        [sys.executable, "-c", deaf + "time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"1\n"
    assert process_groups.end(process, 0.3) == -9
    process.stdout.close()


def test_a_slow_contender_is_called_less_often_in_a_turn(monkeypatch):
    now, counts = [0], {"slow": 0, "quick": 0}

    def contender(name, call_ns):
        def call():
            counts[name] += 1
            now[0] += call_ns

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device_turns.time, "perf_counter_ns", lambda: now[0])
    contenders = {"slow": contender("slow", 500_000_000), "quick": contender("quick", 1000)}
    times = device_turns.device_turns(contenders, rounds=3, calls=4)
    assert times == {"slow": [5e8] * 3, "quick": [1e3] * 3}
    assert counts == {"slow": 2 + 3 * (1 + 1), "quick": 2 + 3 * (1 + 4)}
