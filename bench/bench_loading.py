"""Claim: capturing and loading a model is quicker than any peer's preparation of it.

From the model: until the first call can begin. torch.compile and AOTInductor compile with empty
caches; everything else has been done once before in the process. From a file: the work of a process
that serves a model prepared elsewhere, without the import of the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

import offload
import peers
from measurements import Case, figure_of, ratio_of
from models import MODELS
from turns import take_single_turns

OURS = "offload"
COMPILED = {"torch.compile": peers.torch_compile, "AOTInductor": peers.aot_inductor}


def cold(prepare: Callable[[], Any]) -> Callable[[], Any]:
    """With empty compiler caches."""

    def run() -> Any:
        with fresh_cache():
            return prepare()

    return run


def case_of(
    title: str, times: dict[str, list[float]], absent: dict[str, str], *, promised: bool
) -> Case:
    at_least = 1 if promised else None
    return Case(
        title,
        ratios={
            name: ratio_of(times[name], times[OURS], at_least=at_least)
            for name in times
            if name != OURS
        },
        figures={name: figure_of([ns / 1e6 for ns in times[name]], "ms") for name in times},
        absent=absent,
    )


@pytest.mark.parametrize("name", ["mlp16", "gpt_stack"])
def test_from_the_model(
    benchmark: Any, record: Callable[[Case], None], tmp_path: Path, name: str
) -> None:
    title, make = MODELS[name]
    model, inputs = make()

    def capture_and_load() -> offload.Executable:
        with offload.capture(model) as captured:
            model(*inputs)
        return captured.load()

    expected = model(*inputs)
    torch.testing.assert_close(capture_and_load()(*inputs), expected)
    tried = {one: peers.PEERS[one] for one in ("StaticModule", "ONNX Runtime", "OpenVINO")}
    if name == "mlp16":  # compiling takes many seconds: the small model is enough
        tried |= COMPILED
    present, absent = peers.prepare(tried, model, inputs, expected, tmp_path)
    contenders: dict[str, Callable[[], Any]] = {OURS: capture_and_load}
    for peer in present:
        folder = tmp_path / peer.replace(" ", "_")
        prepare = functools.partial(tried[peer], model, inputs, folder)
        contenders[peer] = cold(prepare) if peer in COMPILED else prepare
    few_rounds = dict.fromkeys(set(contenders) - {OURS, "StaticModule"}, 3)  # seconds each
    times = take_single_turns(contenders, rounds=12, few_rounds=few_rounds)
    record(case_of(f"{title}: from the model", times, absent, promised=True))
    benchmark.pedantic(capture_and_load, rounds=5)


@pytest.mark.parametrize("name", ["mlp16", "minilm"])
def test_from_a_file(
    benchmark: Any, record: Callable[[Case], None], tmp_path: Path, name: str
) -> None:
    title, make = MODELS[name]
    model, inputs = make()
    with offload.capture(model) as captured:
        expected = model(*inputs)
    path = tmp_path / "model.offload"
    captured.save(path)

    def open_and_load() -> offload.Executable:
        return offload.open(path).load()

    torch.testing.assert_close(open_and_load()(*inputs), expected)
    tried = {one: peers.PEERS[one] for one in ("AOTInductor", "ONNX Runtime", "OpenVINO")}
    present, absent = peers.prepare(tried, model, inputs, expected, tmp_path)
    openers = {
        "AOTInductor": lambda: peers.open_aot_inductor(
            tmp_path / "AOTInductor" / "model.pt2", inputs
        ),
        "ONNX Runtime": lambda: peers.open_onnx_runtime(
            tmp_path / "ONNX_Runtime" / "model.onnx", inputs
        ),
        "OpenVINO": lambda: peers.open_openvino(tmp_path / "OpenVINO" / "model.onnx", inputs),
    }
    contenders = {OURS: open_and_load, **{peer: openers[peer] for peer in present}}
    times = take_single_turns(contenders, rounds=12)
    record(case_of(f"{title}: from a file", times, absent, promised=False))
    benchmark.pedantic(open_and_load, rounds=5)
