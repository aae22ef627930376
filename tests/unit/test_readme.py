"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors.torch
import torch
from torch.nn.functional import linear

import offload

README = Path(__file__).parents[2] / "README.md"


def run_example(title: str) -> dict[str, object]:
    """Run the example of a section; its names."""
    section = README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, str(README), "exec"), names)
    return names


def test_where_the_time_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = run_example("Where the time goes")
    assert "predicted" in capsys.readouterr().out
    assert [one.scheduling for one in names["both"].executions] == ["host", "offload"]
    for name in ("timeline.json", "timeline.svg", "timeline.html"):
        assert (tmp_path / name).stat().st_size > 1000
    assert list((tmp_path / "offload").glob("costs-cpu-*.json"))


def test_five_minutes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_example("Five minutes")
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed
    assert "words patched" in printed
    again, x = names["again"], names["x"]
    assert isinstance(again, offload.Captured)
    captured = names["captured"]
    assert isinstance(captured, offload.Captured)
    assert again(x).equal(captured(x))
    assert captured.recorded_result.equal(names["y"])
    assert captured(x).equal(names["y4"])


def test_a_model_larger_than_its_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_example("A model larger than its budget")
    printed = capsys.readouterr().out
    assert "least budget" in printed
    assert "of weights streamed at" in printed
    run, x, y = names["run"], names["x"], names["y"]
    assert run.streaming.plan.memory_bytes <= 4 * 2**20
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    expected = x
    for index in range(16):
        expected = linear(expected, weights[f"{index}.weight"], weights[f"{index}.bias"])
    torch.testing.assert_close(y, expected)
    run.streaming.replace({f"15.{name}": weights[f"15.{name}"] * 0 for name in ("weight", "bias")})
    assert run(x).count_nonzero() == 0
