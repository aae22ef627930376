"""Claim: a replay beats eager and the engines that, like it, run torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import offload
import peers


def capture(model: torch.nn.Module, x: torch.Tensor) -> offload.Executable:
    with offload.capture(model) as captured:
        model(x)
    return captured.load()


def check(contenders: dict[str, Callable[[], Any]], expected: torch.Tensor) -> None:
    for name, function in contenders.items():
        result = function()
        result = result[0] if isinstance(result, (list, tuple)) else result
        torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("make", [models.mlp16, models.elementwise100, models.gpt_stack])
def test_replay(compare: Any, tmp_path: Path, make: Callable[[], Any]) -> None:
    model, x = make()
    run = capture(model, x)
    contenders: dict[str, Callable[[], Any]] = {
        "offload": lambda: run(x),
        "eager": lambda: model(x),
        "torch.compile": peers.torch_compile(model, x),
        "AOTInductor": peers.aot_inductor(model, x, tmp_path),
        "StaticModule": peers.static_module(model, x),
    }
    if make is models.elementwise100:
        contenders["C++ loop"] = peers.elementwise_loop(x)
    check(contenders, model(x))
    compare(contenders)


def test_minilm(compare: Any) -> None:
    demo = pytest.importorskip("offload.demo.search")
    encoder = demo.load_encoder()
    model = encoder.model
    inputs = dict(encoder.tokenizer("the quick brown fox jumps over it", return_tensors="pt"))
    assert inputs["input_ids"].shape == (1, 9)
    with offload.capture(model) as captured:
        expected = model(**inputs)
    run = captured.load()
    compiled = torch.compile(model)
    contenders = {
        "offload": lambda: run(**inputs),
        "eager": lambda: model(**inputs),
        "torch.compile": lambda: compiled(**inputs),
    }
    for function in contenders.values():
        torch.testing.assert_close(function()[0], expected[0], rtol=1e-4, atol=1e-4)
    compare(contenders, rounds=20, calls=3)
