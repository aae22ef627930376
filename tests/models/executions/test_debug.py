"""OFFLOAD_DEBUG: the output of each level for a capture, a load and an execution."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import BindingError
from offload.run import Executable
from offload.run.told_executable import ToldExecutable

KIB = 1024


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.delenv("OFFLOAD_DUMP", raising=False)
    monkeypatch.delenv("OFFLOAD_DEBUG", raising=False)
    return lambda number: monkeypatch.setenv("OFFLOAD_DEBUG", str(number))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The lines on stderr since the last query."""

    def lines() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return lines


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()


# ---- nothing ------------------------------------------------------------------------------------


def test_unset_it_says_nothing_and_calls_stay_native(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    x = torch.randn(2, 8)
    run = offload.capture(small(), x).load()
    assert type(run) is Executable
    assert "__call__" not in vars(Executable)
    frames: list[str] = []
    with torch.no_grad():
        run(x)
        sys.setprofile(lambda frame, event, _: frames.append(event))
        try:
            run(x)
        finally:
            sys.setprofile(None)
    assert "call" not in frames  # no Python function
    assert said() == []


def test_the_level_is_that_of_the_load(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    x = torch.randn(2, 8)
    captured = offload.capture(small(), x)
    silent = captured.load()
    level(3)
    telling = captured.load()
    said()
    with torch.no_grad():
        silent(x)
        assert said() == []
        level(0)
        telling(x)
        assert [line.partition(":")[2][:12] for line in said()] == [" execution 1"]


# ---- 1 ------------------------------------------------------------------------------------------


def test_what_was_recorded_and_loaded(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    level(1)
    captured = offload.capture(small(), torch.randn(2, 8))
    (line,) = said()
    assert re.fullmatch(
        r"offload: recorded Sequential on cpu: 3 launches, 8 values \(input 64 bytes, output 32 "
        r"bytes, weight 432 bytes, activation 128 bytes\), 0 guards, at \S*test_debug\.py:\d+",
        line,
    )
    run = captured.load()
    (line,) = said()
    assert line == (
        "offload: loaded Sequential on cpu: 3 launches as one task, 7 slots, feature map 128 "
        "bytes; the first execution will prove 3 launches, and takes longer: warm up once"
    )
    assert len(run.plan.slots) == 7
    captured.load(scheduling="host", verify=False)
    assert " 3 launches launch by launch, 7 slots" in said()[0]
    assert type(run) is Executable


def test_functions_guards_and_blocks(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    level(1)
    with offload.capture(scaled, host_reads="guard") as captured:
        captured(torch.ones(3))
    (line,) = said()
    assert line.startswith("offload: recorded scaled on cpu: ")
    assert ", 1 guard, at " in line
    captured.load(device="null")
    (line,) = said()
    assert line.startswith("offload: loaded scaled on null: ")
    assert line.endswith("; no launch needs a proof")


def test_what_was_opened(
    level: Callable[[int], None], said: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "model.offload"
    offload.capture(small(), torch.randn(2, 8)).save(path)
    level(1)
    offload.open(path).load()
    opened, loaded = said()
    assert opened.startswith(f"offload: opened {path} on cpu: 3 launches, 8 values (input 64 bytes")
    assert loaded.startswith("offload: loaded model on cpu: 3 launches as one task, 7 slots")


def test_weights_that_are_streamed(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    captured = offload.capture(deep(), torch.randn(2, 64))
    level(1)
    with captured.load(weights_budget=40 * KIB) as run:
        plan = run.streaming.plan
    (line,) = said()  # the load that timed launches is not the user's
    assert plan.streamed_bytes == 64 * KIB
    assert ", 64.00 KiB of weights streamed by each execution, 33.00 KiB in memory; " in line
    with captured.load(weights_budget="1MiB"):
        assert ", weights resident in 65.00 KiB; " in said()[0]


@pytest.mark.slow
def test_kernels(level: Callable[[int], None], said: Callable[[], list[str]]) -> None:
    captured = offload.capture(small(), torch.randn(2, 8))
    level(1)
    with captured.load(fuse=True) as run:
        (line,) = said()
        kernels = f"{run.fusion.n_kernels} kernel{'s' * (run.fusion.n_kernels != 1)}"
        assert f", {kernels} for {run.fusion.n_replaced} recorded launches; " in line


@pytest.mark.parametrize("given", ["4", "on"])
def test_what_is_no_level_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, given: str, tmp_path: Path
) -> None:
    called = []

    def model(x: torch.Tensor) -> torch.Tensor:
        called.append(x)
        return x + 1

    captured = offload.capture(lambda x: x + 1, torch.ones(2))
    path = tmp_path / "model.offload"
    captured.save(path)
    monkeypatch.setenv("OFFLOAD_DEBUG", given)
    for refused in (
        lambda: offload.capture(model, torch.ones(2)),
        captured.load,
        lambda: captured(torch.ones(2)),
        lambda: offload.open(path),
    ):
        with pytest.raises(BindingError, match=f"OFFLOAD_DEBUG: expected .* got '{given}'"):
            refused()
    assert called == []


# ---- 2 ------------------------------------------------------------------------------------------


def test_the_place_of_each_value_and_what_is_patched(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    captured = offload.capture(small(), torch.randn(2, 8))
    level(2)
    run = captured.load()
    loaded, planned, *lines = said()
    assert loaded.startswith("offload: loaded Sequential")
    assert planned.startswith("offload: planned: feature map 128 bytes (lower bound 128 bytes, ")
    lanes, patched = lines.index("lane launches:"), lines.index("patched:")
    values = [line for line in lines[:lanes] if line.startswith("  %")]
    for value, place, line in zip(run.program.values, run.plan.places, values, strict=True):
        slot = run.plan.slots[place.slot]
        assert line.startswith(
            f"  %{value.index} {value.role} {value.name}: slot {slot.index} ({slot.kind}) "
            f"+{place.offset_bytes}, {value.size_bytes} bytes"
        )
    assert lines[lanes + 1 : patched] == ["  run launches 0 to 2, aten::addmm to aten::addmm"]
    word = "each word that holds an address in it"
    assert lines[patched + 1 :] == [
        f"  slot 0: with the caller's tensor, {word}",
        f"  slot 1: with the result's memory, {word}",
        f"  slots 2 to 5: where weights are bound again, {word}",
        f"  slot 6: with feature_map=, {word}",
    ]
    assert type(run) is Executable


def test_the_steps_of_both_lanes(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    captured = offload.capture(deep(), torch.randn(2, 64))
    level(2)
    with captured.load(weights_budget=40 * KIB) as run:
        plan = run.streaming.plan
    lines = said()
    pieces = [line for line in lines if line.startswith("  piece ")]
    assert len(pieces) == len(plan.pieces)
    assert sum(line.endswith(", streamed") for line in pieces) == len(plan.transfers)
    launches, copies = lines.index("lane launches:"), lines.index("lane copies:")
    steps = lines[launches + 1 : copies], lines[copies + 1 : lines.index("patched:")]
    assert tuple(map(len, steps)) == tuple(len(lane.steps) for lane in plan.lanes)
    copied = [line.split()[2].rstrip(",") for line in steps[1] if "copy piece" in line]
    assert copied == [str(one.piece) for one in plan.lanes[1].copies]


# ---- 3 ------------------------------------------------------------------------------------------


@pytest.fixture
def telling(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> tuple[Executable, torch.Tensor, nn.Module]:
    x, model = torch.randn(2, 8), small()
    captured = offload.capture(model, x)
    level(3)
    run = captured.load()
    assert [line.split()[1] for line in said() if line.startswith("offload: ")] == [
        "loaded",
        "planned:",
    ]
    return run, x, model


def test_each_execution_says_what_moved(telling: Any, said: Callable[[], list[str]]) -> None:
    run, x, model = telling
    assert isinstance(run, ToldExecutable)
    with torch.no_grad():
        eager = model(x)
        out, other = torch.empty(2, 4), torch.randn(2, 8)
        arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8)
        assert torch.equal(run(x, out=out), eager)
        (line,) = said()
        assert f" {len(run.plan.slots)} slots changed, {len(run.plan.slots)} words patched" in line
        assert line.endswith("; moved: every slot that is bound, for the first time")
        for arguments, moved in (
            ({"out": out}, ""),
            ({"out": out, "feature_map": arena}, "feature_map feature map"),
        ):
            run(x, **arguments)
            assert said()[0].partition("; moved: ")[2] == moved
            assert run.last_execution.slots_changed == bool(moved)
        run(other, out=out, feature_map=arena)
        (line,) = said()
        assert line.startswith("offload: execution 4: m_l_t ")
        assert "policy io: 1 slots changed, 1 words patched" in line
        assert line.endswith("; moved: input args[0]")
        run(other, feature_map=arena)
        assert said()[0].endswith("; moved: output addmm_2")


def test_weights_that_were_bound_again_are_counted(
    telling: Any, said: Callable[[], list[str]]
) -> None:
    run, x, model = telling
    out = torch.empty(2, 4)
    with torch.no_grad():
        run(x, out=out)
        weight = model[0].weight
        weight.data = weight.data.clone()
        run.rebind_weights()
        said()
        run(x, out=out)
    expected = "; moved: 1 more (weights that were bound again, or copies of arguments)"
    assert said()[0].endswith(expected)


def test_submitted_executions_are_told_by_the_wait(
    telling: Any, said: Callable[[], list[str]]
) -> None:
    run, x, model = telling
    with torch.no_grad():
        tickets = [run.submit(x) for _ in range(3)]
        result = tickets[2].result()
        assert torch.equal(result, model(x))
        unasked, line = said()
        assert unasked == "offload: executions 1 to 2 ended without a report"
        assert line.startswith("execution 3: m_l_t ")
        for one in tickets:
            one.wait()
        assert said() == []  # already reported
        run(x)
        (line,) = said()
        assert line.startswith("offload: execution 4: ")
        assert "moved" not in line  # the location of the third one was not observed


def test_a_refused_call_says_nothing(telling: Any, said: Callable[[], list[str]]) -> None:
    run, *_ = telling
    with torch.no_grad(), pytest.raises(BindingError, match=r"args\[0\]"):
        run(torch.randn(3, 8))
    assert said() == []


def test_nested_arguments_and_results(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    def model(pair: list[torch.Tensor], *, scale: torch.Tensor) -> dict[str, Any]:
        first, second = pair
        return {"sum": first + second, "rest": (second * scale, first)}

    pair, scale = [torch.ones(3), torch.ones(3)], torch.ones(())
    with offload.capture(model) as captured:
        captured(pair, scale=scale)
    level(3)
    run = captured.load()
    out = {"sum": torch.empty(3), "rest": (torch.empty(3), None)}
    run(pair, scale=scale, out=out)
    said()
    run([pair[0], torch.ones(3)], scale=scale, out=out)
    assert said()[0].endswith("; moved: input args[0][1]")
    assert run.last_execution.slots_changed == 1


def test_a_diagnosis_is_not_disturbed(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    level(3)
    with torch.no_grad():
        offload.diagnose(small(), torch.randn(2, 8), progress=False)
    lines = said()
    assert any(line.startswith("offload: loaded Sequential") for line in lines)
    assert not any("execution 1:" in line for line in lines)


def test_trials_of_a_load_say_nothing(
    level: Callable[[int], None], said: Callable[[], list[str]]
) -> None:
    captured = offload.capture(deep(), torch.randn(2, 64))
    level(3)
    with captured.load(weights_budget="auto"):
        loaded = [line for line in said() if line.startswith("offload: ")]
    assert [line.split()[1] for line in loaded] == ["loaded", "planned:"]
