"""The probes' command line and report, without a device."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import probe_runs
import probes_cuda
from driver_calls import check_code
from probe_runs import chosen, outcome_of, run_part, run_probe
from probes_cuda import PROBES, main
from probing import NotAnswered, Probe, ProbeFailed, conclude, read_told, tell

PROBE = Probe("P1", "question?", "this", "that", "module:function", ("one", "two"))


def test_there_are_fifteen_probes_with_functions():
    assert [probe.name for probe in PROBES] == [f"P{number}" for number in range(15)]
    for probe in PROBES:
        module, _, function = probe.function.partition(":")
        source = (probes_cuda.FOLDER / f"{module}.py").read_text(encoding="utf-8")
        assert f"\ndef {function}(" in source


def test_help_says_what_it_needs():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "cuda-bindings, and" in " ".join(result.output.split())


def test_only_names_probes_in_order():
    assert [probe.name for probe in chosen(PROBES, "p3, P1")] == ["P1", "P3"]
    assert chosen(PROBES, None) == PROBES
    result = CliRunner().invoke(main, ["--only", "P15"])
    assert result.exit_code == 2
    assert "expected some of P0, P1" in result.output


def test_no_device_is_said_and_nothing_written(monkeypatch, tmp_path):
    def missing():
        raise ProbeFailed("torch finds no CUDA device")

    monkeypatch.setattr(probes_cuda, "machine_facts", missing)
    result = CliRunner().invoke(main, [str(tmp_path / "report.json")])
    assert result.exit_code == 1
    assert "Error: torch finds no CUDA device" in result.output
    assert not list(tmp_path.iterdir())


def test_what_is_told_is_read(capsys):
    print("a library talks")
    tell("words", {"kernel": 3})
    conclude(False, "a surprise")
    told = read_told(capsys.readouterr().out)
    assert told == ({"words": {"kernel": 3}}, "otherwise", "a surprise")
    assert read_told("nothing") == ({}, None, "")


def test_outcomes_of_parts():
    assert outcome_of(["as expected", "as expected"]) == "as expected"
    assert outcome_of(["as expected", "otherwise"]) == "otherwise"
    assert outcome_of(["otherwise", "failed: exit status 1"]) == "failed: exit status 1"
    assert outcome_of(["as expected", "not answered"]) == "not answered"
    assert outcome_of(["not answered", "otherwise"]) == "otherwise"


def test_a_question_that_cannot_be_asked_is_left_unanswered(capsys, monkeypatch):
    def answer():
        raise NotAnswered("the runtime is too old")

    monkeypatch.setattr(probe_runs, "answer", answer, raising=False)
    probe_runs.answer_here([Probe("P1", "?", "this", "that", "probe_runs:answer")], "P1", "")
    assert read_told(capsys.readouterr().out) == ({}, "not answered", "the runtime is too old")


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A script in place of each part."""

    def write(source: str) -> Path:
        path = tmp_path / "part.py"
        told = "import sys, time\nprobe = sys.argv[2:]\n"
        path.write_text(told + source, encoding="utf-8")
        monkeypatch.setattr(probes_cuda, "__file__", str(path))
        return path

    return write


def test_a_fault_keeps_what_was_told_before(script):
    path = script(
        'print(\'probe: {"figure": "x", "value": 1}\', flush=True)\n'
        "print('an illegal access', file=sys.stderr)\nsys.exit(3)"
    )
    found = run_part(path, PROBE, "one", 20)
    assert found["outcome"] == "failed: exit status 3; an illegal access"
    assert found["figures"] == {"x": 1}


def test_a_part_that_hangs_is_ended(script):
    path = script("time.sleep(60)")
    assert run_part(path, PROBE, "one", 0.5)["outcome"].startswith("failed: not done after 0 s")


def test_parts_after_the_deadline_are_not_run(script):
    path = script("sys.exit(9)")
    found = run_probe(path, PROBE, time.monotonic() - 1)
    assert found["outcome"] == "failed: no time was left"
    assert list(found["parts"]) == ["one", "two"]


def test_a_run_writes_one_report(script, monkeypatch, tmp_path):
    script('print(\'probe: {"outcome": "as expected", "because": ""}\')')
    facts = {"device": "a GPU", "driver": "1.2", "compute_capability": "9.0"}
    monkeypatch.setattr(probes_cuda, "machine_facts", lambda: facts)

    def no_compiler(folder, architecture):
        assert architecture == "sm_90"
        raise ProbeFailed("nvcc is not on the PATH")

    monkeypatch.setattr(probes_cuda, "build_library", no_compiler)
    path = tmp_path / "new" / "report.json"
    result = CliRunner().invoke(main, [str(path), "--only", "P8,P9"])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["machine"] == facts
    assert report["not_built"] == "nvcc is not on the PATH"
    assert [one["outcome"] for one in report["probes"]] == ["as expected"] * 2
    assert list(report["probes"][0]["parts"]) == ["copy", "memset"]
    assert {"question", "expected", "otherwise", "parts"} <= report["probes"][0].keys()
    console = Console(file=io.StringIO(), width=100)
    probe_runs.print_report(console, report)
    assert "as expected" in console.file.getvalue()


def test_codes_of_the_compiled_part():
    check_code(0, "launch")
    with pytest.raises(ProbeFailed, match="launch: CUDA error 700"):
        check_code(700, "launch")
    with pytest.raises(ProbeFailed, match="result is wrong"):
        check_code(-1, "launch")
