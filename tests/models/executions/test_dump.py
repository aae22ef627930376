"""OFFLOAD_DUMP: the files of each load, whole or not at all, and never over other files."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.backends import find_backend
from offload.costs import STAGES, Coefficient, HeaderModel, HeaderShape, save_cost_model
from offload.errors import BindingError, FileError, PlanError
from offload.load import switched as switching
from offload.plan.steps import Copy, Record, Run, Wait
from offload.program import decode_program
from offload.program.reader import parse
from offload.run.forecast import cost_key

KIB = 1024
STEPS = {"run": Run, "copy": Copy, "record": Record, "wait": Wait}
AT_LOAD = {
    "explain.txt",
    "load.json",
    "plan.json",
    "plan.txt",
    "program.json",
    "program.txt",
    "steps.json",
    "steps.txt",
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of all dumps, without costs that other tests keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("OFFLOAD_DEBUG", raising=False)
    monkeypatch.setenv("OFFLOAD_DUMP", str(tmp_path / "dumps" / "here"))
    return tmp_path / "dumps" / "here"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def spans(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a trace that are, or are not, predicted."""
    events = [one for one in read(path)["traceEvents"] if one["ph"] == "X"]
    return [one for one in events if ("predicted" in one["cat"]) == (kind == "predicted")]


# ---- what is written ----------------------------------------------------------------------------


def test_the_files_of_a_load(folder: Path) -> None:
    captured = offload.capture(small(), torch.randn(2, 8))
    assert not folder.exists()  # a capture is no load
    run = captured.load()
    assert names(folder) == {"0001-Sequential"}
    kept = folder / "0001-Sequential"
    assert names(kept) == AT_LOAD
    assert (kept / "program.txt").read_text() == f"{captured.program}\n"
    assert decode_program(parse((kept / "program.json").read_bytes(), "it")) == captured.program
    plan = read(kept / "plan.json")
    assert plan["format"] == "offload plan"
    assert plan["streaming"] is None
    assert [(one["kind"], one["size_bytes"], one["name"]) for one in plan["slots"]] == [
        (slot.kind, slot.size_bytes, slot.name) for slot in run.plan.slots
    ]
    assert [(one["slot"], one["offset_bytes"]) for one in plan["places"]] == [
        (place.slot, place.offset_bytes) for place in run.plan.places
    ]
    assert plan["feature_map_bytes"] == run.plan.feature_map_bytes
    text = (kept / "plan.txt").read_text()
    assert text.count("  slot ") == len(run.plan.slots)
    assert text.count("  %") == len(run.program.values)
    assert read(kept / "steps.json")["lanes"] == [
        {"kind": "launches", "steps": [{"step": "run", "first": 0, "last": 3}]}
    ]
    assert (kept / "steps.txt").read_text() == (
        "lane launches:\n  run launches 0 to 2, aten::addmm to aten::addmm\n"
    )
    assert (kept / "explain.txt").read_text() == f"{run.explain()}\n"
    about = read(kept / "load.json")
    assert (about["name"], about["device"], about["scheduling"]) == ("Sequential", "cpu", "offload")
    assert (about["process"], about["torch"]) == (os.getpid(), torch.__version__)
    assert about["not_written_at_load"].keys() == {"loaded.txt", "timeline_predicted.json"}
    assert "offload.calibrate()" in about["not_written_at_load"]["timeline_predicted.json"]


def test_the_steps_and_the_predicted_timeline_of_streamed_weights(folder: Path) -> None:
    captured = offload.capture(deep(), torch.randn(2, 64))
    with captured.load(weights_budget=40 * KIB) as run:
        streaming = run.streaming.plan
    assert names(folder) == {"0001-Sequential"}  # and none for the load that timed launches
    kept = folder / "0001-Sequential"
    assert names(kept) == {*AT_LOAD, "timeline_predicted.json"}
    lanes = read(kept / "steps.json")["lanes"]
    made = [
        tuple(STEPS[one.pop("step")](**one) for one in map(dict, lane["steps"])) for lane in lanes
    ]
    assert made == [lane.steps for lane in streaming.lanes]
    plan = read(kept / "plan.json")
    assert len(plan["streaming"]["pieces"]) == len(streaming.pieces)
    assert plan["streaming"]["memory_bytes"] == streaming.memory_bytes
    assert run.streaming.plan.budget_bytes == plan["streaming"]["budget_bytes"]
    assert "budget 40.00 KiB: 33.00 KiB used" in (kept / "explain.txt").read_text()
    predicted = spans(kept / "timeline_predicted.json", "predicted")
    assert spans(kept / "timeline_predicted.json", "measured") == []
    assert sum(one["name"] == "aten::addmm" for one in predicted) == 4
    assert {f"{index}.weight" for index in range(4)} <= {one["name"] for one in predicted}


def test_timelines_that_are_recorded(folder: Path) -> None:
    x = torch.randn(2, 8)
    run = offload.capture(small(), x).load()
    kept = folder / "0001-Sequential"
    with torch.no_grad():
        run(x)
        with run.timeline():
            pass  # nothing to execute
        assert names(kept) == AT_LOAD
        for n_executions in (1, 2):
            with run.timeline() as timeline:
                for _ in range(n_executions):
                    run(x)
            assert len(timeline.executions) == n_executions
    assert names(kept) == {*AT_LOAD, "timeline_1.json", "timeline_2.json"}
    for number in (1, 2):
        measured = spans(kept / f"timeline_{number}.json", "measured")
        assert sum(one["name"] == "aten::relu" for one in measured) == number
        assert sum(one["name"] == "convert" for one in measured) >= number


def test_costs_that_were_kept_predict_what_a_timeline_has_measured(folder: Path) -> None:
    x = torch.randn(2, 8)
    terms = HeaderShape(0, 0, 0, 0, 0, 0)
    coefficients = {
        stage: dict.fromkeys(terms.terms(stage), Coefficient(20.0, 20.0, 20.0)) for stage in STAGES
    }
    captured = offload.capture(small(), x)
    costs = offload.CostModel(HeaderModel(coefficients, 1), 3000.0, 1000.0, {})
    save_cost_model(costs, cost_key(find_backend("cpu").machine()))
    run = captured.load()
    kept = folder / "0001-Sequential"
    unwritten = read(kept / "load.json")["not_written_at_load"]
    assert "was never measured on this machine" in unwritten["timeline_predicted.json"]
    with torch.no_grad(), run.timeline() as timeline:
        run(x)
    predicted = spans(kept / "timeline_predicted.json", "predicted")
    (execution,) = timeline.executions
    assert [one["name"] for one in predicted if one["name"].startswith("aten")] == [
        one.name for one in execution.spans if one.name.startswith("aten")
    ]
    assert {"convert", "policy", "patch", "submit"} <= {one["name"] for one in predicted}


def test_what_no_file_holds_is_named(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    captured = offload.capture(lambda x: x + torch.rand(3, generator=generator), torch.ones(3))
    captured.load()
    (kept,) = folder.iterdir()
    assert kept.name == "0001-lambda"
    assert names(kept) == AT_LOAD - {"program.json"}
    why = read(kept / "load.json")["not_written_at_load"]["program.json"]
    assert "draws from a generator of its own" in why
    assert "aten::rand" in (kept / "program.txt").read_text()


@pytest.mark.slow
def test_what_was_fused(folder: Path) -> None:
    captured = offload.capture(small(), torch.randn(2, 8))
    with captured.load(fuse=True) as run:
        assert run.fusion.n_kernels
    kept = folder / "0001-Sequential"
    assert names(kept) == {*AT_LOAD, "loaded.txt"}
    assert (kept / "program.txt").read_text() == f"{captured.program}\n"
    assert (kept / "loaded.txt").read_text() == f"{run.program}\n"
    assert "offload::fused(" in (kept / "steps.txt").read_text()
    assert read(kept / "load.json")["is_fused"] is True


# ---- what is not written ------------------------------------------------------------------------


def test_no_file_has_the_content_of_a_weight(folder: Path) -> None:
    model, number = small(), 1234.56789
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(number)
    x = torch.randn(2, 8)
    run = offload.capture(model, x).load()
    with torch.no_grad(), run.timeline():
        run(x)
    raw = struct.pack("<f", number)
    stored = struct.unpack("<f", raw)[0]
    contents = {one.name: one.read_bytes() for one in (folder / "0001-Sequential").iterdir()}
    assert len(contents) == len(AT_LOAD) + 1
    for content in contents.values():
        for form in (raw, raw.hex().encode(), b"1234.5", repr(stored).encode()):
            assert form not in content


# ---- where it is written ------------------------------------------------------------------------


def test_each_load_has_a_folder_of_its_own(folder: Path) -> None:
    (folder / "0007-mine").mkdir(parents=True)
    (folder / "0007-mine" / "plan.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    captured = offload.capture(small(), torch.randn(2, 8))
    captured.load()
    captured.load(scheduling="host")
    captured.save(folder / "saved model.offload")
    offload.open(folder / "saved model.offload").load()
    assert names(folder) == {
        "0007-mine",
        "0008-Sequential",
        "0009-Sequential",
        "0010-saved_model",
        "notes.txt",
        "saved model.offload",
    }
    assert (folder / "0007-mine" / "plan.txt").read_text() == "mine"
    assert read(folder / "0009-Sequential" / "load.json")["scheduling"] == "host"


@pytest.mark.parametrize("is_below", [False, True])
def test_a_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_below: bool
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    path = taken / "below" if is_below else taken
    captured = offload.capture(small(), torch.randn(2, 8))
    monkeypatch.setenv("OFFLOAD_DUMP", str(path))
    with pytest.raises(FileError, match=f"{path}: OFFLOAD_DUMP cannot be written there") as error:
        captured.load()
    assert "unset OFFLOAD_DUMP" in str(error.value)
    assert names(tmp_path) == {"taken"}
    assert taken.read_text() == "mine"


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = offload.capture(small(), torch.randn(2, 8))
    written: list[str] = []
    original = Path.write_text

    def write_text(path: Path, text: str, *args: Any) -> int:
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path.name)
        return original(path, text, *args)

    monkeypatch.setattr(Path, "write_text", write_text)
    closed: list[offload.Executable] = []
    close = offload.Executable.close
    monkeypatch.setattr(
        offload.Executable, "close", lambda self: (closed.append(self), close(self))
    )
    with pytest.raises(FileError, match=r"0001-Sequential: OFFLOAD_DUMP .* No space left"):
        captured.load()
    assert len(written) == 4
    (run,) = closed
    assert run.closed
    assert names(folder) == set()


def test_a_timeline_that_cannot_be_written_is_an_error_and_is_not_lost(folder: Path) -> None:
    x = torch.randn(2, 8)
    run = offload.capture(small(), x).load()
    kept = folder / "0001-Sequential"
    for one in kept.iterdir():
        one.unlink()
    kept.rmdir()
    with (
        torch.no_grad(),
        pytest.raises(FileError, match="0001-Sequential: OFFLOAD_DUMP cannot"),
        run.timeline() as timeline,
    ):
        run(x)
    assert len(timeline.executions) == 1
    with torch.no_grad():
        run(x)


def test_a_load_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = offload.capture(deep(), torch.randn(2, 64))
    with pytest.raises(PlanError):
        captured.load(weights_budget=1)
    with pytest.raises(BindingError):
        captured.load(scheduling="later")
    assert names(folder) == set()

    def fail(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(switching, "loaded_line", fail)
    monkeypatch.setenv("OFFLOAD_DEBUG", "1")
    with pytest.raises(KeyboardInterrupt):
        captured.load()
    assert names(folder) == set()


def test_several_threads(folder: Path) -> None:
    x = torch.randn(2, 8)
    captured = offload.capture(small(), x)
    failures: list[BaseException] = []
    barrier = threading.Barrier(6)

    def load() -> None:
        try:
            barrier.wait()
            with captured.load() as run, torch.no_grad(), run.timeline():
                run(x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failures == []
    assert names(folder) == {f"000{number}-Sequential" for number in range(1, 7)}
    for kept in folder.iterdir():
        assert names(kept) == {*AT_LOAD, "timeline_1.json"}


@pytest.mark.slow
def test_a_forked_process(folder: Path) -> None:
    script = """
import os, torch, offload
x = torch.randn(2, 8)
torch.set_num_threads(1)
captured = offload.capture(torch.nn.Linear(8, 8).eval(), x)
with torch.no_grad():
    run = captured.load()
    run(x)
    child = os.fork()
    with run.timeline():
        run(x)
    mine = captured.load()
    mine(x)
    if not child:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
"""
    environment = {**os.environ, "OFFLOAD_DEBUG": "3"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert names(folder) == {f"000{number}-Linear" for number in (1, 2, 3)}
    assert names(folder / "0001-Linear") == {*AT_LOAD, "timeline_1.json", "timeline_2.json"}
    processes = [read(one / "load.json")["process"] for one in sorted(folder.iterdir())]
    assert len(set(processes[1:])) == 2
    assert processes[0] in processes[1:]
    assert done.stderr.count("offload: execution 2: ") == 2


def test_nothing_is_kept_where_nobody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OFFLOAD_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    x = torch.randn(2, 8)
    run = offload.capture(small(), x).load()
    with torch.no_grad(), run.timeline():
        run(x)
    assert names(tmp_path) == set()
    assert type(run) is offload.Executable
