"""Peers that cannot take part are absent with the reason, and contenders take turns."""

from __future__ import annotations

import sys

import torch

import peers
import turns


def doubling(model, inputs, folder):
    return lambda: model(*inputs)


def wrong(model, inputs, folder):
    return lambda: model(*inputs) + 1


def test_peers_are_present_or_absent_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    x = torch.ones(3)
    tried = {
        "doubling": doubling,
        "wrong": wrong,
        "OpenVINO": lambda model, inputs, folder: peers.open_openvino(folder / "m", inputs),
        "failing": lambda model, inputs, folder: (folder / "model").read_bytes,
    }
    present, absent = peers.prepare(tried, lambda x: x * 2, (x,), x * 2, tmp_path)
    assert list(present) == ["doubling"]
    assert absent.keys() == {"wrong", "OpenVINO", "failing"}
    assert absent["wrong"].startswith("AssertionError: Tensor-likes are not close")
    assert absent["OpenVINO"].startswith("ModuleNotFoundError: import of openvino halted")
    assert absent["failing"].startswith("FileNotFoundError")
    assert str(tmp_path) not in str(absent)


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = turns.take_single_turns(contenders, rounds=4)
    assert [sorted(calls[step : step + 3]) for step in range(0, 12, 3)] == [list("abc")] * 4
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_contenders_may_take_part_in_the_first_rounds_alone():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = turns.take_single_turns(contenders, rounds=4, few_rounds={"a": 1})
    assert (len(times["a"]), len(times["b"])) == (1, 4)
    assert "a" in calls[:2]


def test_each_turn_begins_with_a_call_that_is_not_timed():
    n_calls = 0

    def count():
        nonlocal n_calls
        n_calls += 1

    times = turns.take_turns({"count": count}, rounds=3, round_ns=1)
    assert len(times["count"]) == 3
    assert n_calls == 5 + 3 * (1 + 1)  # five to learn how long a call takes
