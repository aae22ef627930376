"""Peers that cannot take part are absent with a reason, and contenders take turns."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import safetensors.torch
import torch

import device_decoder
import device_peers
import device_turns
import peers
import process_memory
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
    assert n_calls == 5 + 3 * (1 + 1)  # five to measure the duration of a call


@pytest.mark.parametrize("n_sets", [1, 2, 3])
def test_alternating_calls_take_each_set_with_its_options(n_sets):
    seen = []
    sets = [(f"x{turn}", f"y{turn}") for turn in range(n_sets)]
    call = device_peers.alternating(
        lambda x, y, out=None: seen.append((x, y, out)), sets, out=list(range(n_sets))
    )
    for _ in range(2 * n_sets):
        call()
    assert seen == [(f"x{turn}", f"y{turn}", turn) for turn in range(n_sets)] * 2


def test_alternating_calls_without_options():
    call = device_peers.alternating(lambda *given: given, [(1,), (2,)])
    assert [call() for _ in range(3)] == [(1,), (2,), (1,)]


def test_graphed_callables_leave_the_module_as_it_is(monkeypatch):
    """torch returns the same module with another forward."""

    def make_graphed_callables(function, inputs):
        assert not isinstance(function, torch.nn.Module)
        return lambda *given: function(*given) + 0

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    call = device_peers.graphed_callables(model, (x,))
    assert torch.equal(call(x), model(x))
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("call_ns", "n_rounds"), [(1_000, 40), (10**12, device_turns.LEAST_ROUNDS)]
)
def test_what_takes_long_has_fewer_rounds_on_a_device(monkeypatch, call_ns, n_rounds):
    clock = itertools.count(step=call_ns)
    monkeypatch.setattr(device_turns, "time", types.SimpleNamespace(perf_counter_ns=clock.__next__))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = device_turns.device_turns({"a": lambda: None, "b": lambda: None}, rounds=40, calls=1)
    assert {name: len(found) for name, found in times.items()} == {"a": n_rounds, "b": n_rounds}
    assert set(times["a"]) == {call_ns}


def test_a_process_that_fails_says_why(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('{\"peak_bytes\": 1}'); sys.exit(sys.argv[2] == '0')")
    assert process_memory.measure(script, tmp_path, 1) == {"peak_bytes": 1}
    with pytest.raises(RuntimeError, match=r"script.py ended with status 1: nothing on stderr"):
        process_memory.measure(script, tmp_path, 0)
    script.write_text("raise ValueError('no budget')")
    with pytest.raises(RuntimeError, match="status 1: ValueError: no budget"):
        process_memory.measure(script, tmp_path, 0)


def test_the_decoders_weights_are_in_a_file_for_each_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(device_decoder, "WIDTH", 8)
    monkeypatch.setattr(device_decoder, "HIDDEN", 12)
    monkeypatch.setattr(device_decoder, "HEADS", 2)
    monkeypatch.setattr(device_decoder, "N_LAYERS", 2)
    device_decoder.save(tmp_path)
    names = {"layers.0.safetensors", "layers.1.safetensors", "norm.weight.safetensors"}
    assert {one.name for one in tmp_path.iterdir()} == names
    content = {}
    for one in tmp_path.iterdir():
        content |= safetensors.torch.load_file(one)
    model = device_decoder.without_memory()
    model.load_state_dict(content, assign=True)
    assert len({one.float().sum().item() for one in content.values() if one.dim() > 1}) == 14
    result = model(*device_decoder.inputs(3, "cpu"))
    assert result.shape == (1, 3, 8)
    assert torch.isfinite(result).all()
