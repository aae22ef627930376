"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import offload

README = Path(__file__).parents[2] / "README.md"


def test_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(README), "exec"), names)
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
