"""`offload diagnose`: its three kinds of target, its output, its failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import offload
from offload import cli

MODULE = """
import torch

def factory():
    return small()

def small():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), (torch.ones(2, 4),)

def with_keyword():
    return torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 2}

def reads():
    return (lambda x: x * float(x.sum())), (torch.ones(2),)

def wrong_shape():
    return torch.nn.Linear(4, 3), (torch.ones(2, 5),)

def no_tuple():
    return torch.nn.Linear(4, 3), torch.ones(2, 4)

def fails():
    raise ValueError("no weights")
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module that makes models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "diagnosed_models", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "diagnosed_models.py").write_text(MODULE)
    return tmp_path


def diagnose(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["diagnose", *map(str, arguments)])


def failure_of(result: Result) -> str:
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("name", ["small", "with_keyword"])
def test_a_model_that_code_makes(name: str) -> None:
    result = diagnose(f"diagnosed_models:{name}")
    assert result.exit_code == 0, result.stderr
    lines = result.output.splitlines()
    assert lines[0].startswith(f"diagnosed_models:{name}: ")
    assert any(verdict in lines[0] for verdict in ("host-bound", "balanced", "device-bound"))
    positions = [
        next(number for number, line in enumerate(lines) if text in line)
        for text in (lines[0], "1 - t_replay / t_eager", "Operators that cost", "capture makes")
    ]
    assert positions == sorted(positions)
    operator = {"small": "aten::addmm", "with_keyword": "aten::add.Tensor"}[name]
    assert operator in result.output


def test_a_refused_capture_is_reported() -> None:
    result = diagnose("diagnosed_models:reads")
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith("diagnosed_models:reads: undecided (confidence none")
    assert "capture is refused: " in result.output
    assert "the gain of capture is not known: capture is refused" in result.output


def test_a_saved_program(directory: Path) -> None:
    with offload.capture(torch.nn.Linear(4, 3)) as captured:
        captured(torch.ones(2, 4))
    captured.save(directory / "m.offload")
    safetensors.torch.save_file({"input0": torch.ones(2, 4)}, directory / "x.safetensors")
    result = diagnose(directory / "m.offload", "--input", directory / "x.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "m.offload: undecided (confidence none: the file holds the recorded" in result.output
    assert "replay " in result.output
    assert "aten::addmm" in result.output
    assert "expected as inputs" in failure_of(diagnose(directory / "m.offload"))


def test_a_trace_file(directory: Path) -> None:
    def event(category: str, ts: float, dur: float, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": "[red]\x1b", "ts": ts, "dur": dur, "args": args}

    events = [event("cpu_op", 0, 1000)]
    for index in range(10):
        events.append(event("cuda_runtime", index * 50, 5, correlation=index))
        events.append(event("kernel", index * 50 + 10, 4, stream=7, correlation=index))
    (directory / "t.json").write_text(json.dumps({"traceEvents": events}))
    result = diagnose("t.json")
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith("t.json: host-bound (confidence medium: the trace was taken")
    assert "host wait / device span = 0.91: host-bound" in result.output
    assert "under the profiler, not the model's own\n" in result.output
    assert r"[red]\x1b" in result.output
    assert "\x1b" not in result.output
    assert (
        "10 of 10 took less time than their launch call; a launch call took 5.00 us"
        in result.output
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.json", "nothing.json: there is no such file; expected a trace file, a saved"),
        (":small", "there is no such file"),
        ("no_such_module:small", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("diagnosed_models:large", "raised AttributeError"),
        ("diagnosed_models:fails", "making the model raised ValueError: no weights"),
        ("diagnosed_models:no_tuple", "with args a tuple and kwargs a dict"),
        ("diagnosed_models:wrong_shape", "calling the model raised RuntimeError"),
        ("diagnosed_models.py", "expected a trace as JSON"),
    ],
)
def test_what_cannot_be_diagnosed(target: str, message: str) -> None:
    assert message in failure_of(diagnose(target))


def test_a_truncated_program(directory: Path) -> None:
    (directory / "m.offload").write_bytes(b"PK")
    assert "it is not an intact zip file" in failure_of(diagnose("m.offload"))


def test_inputs_are_for_saved_programs(directory: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(1)}, directory / "x.safetensors")
    result = diagnose("diagnosed_models:small", "--input", directory / "x.safetensors")
    assert "inputs can be given for a saved program only" in failure_of(result)


def test_a_name_that_is_also_an_emoji_stays_text() -> None:
    result = CliRunner().invoke(cli.main, ["diagnose", "diagnosed_models:factory"])
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith("diagnosed_models:factory: ")
