"""Small models on torch_npu, eager and replayed, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from npu_models import MODELS
from on_npu import capture, check_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_eager(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().eval().to(dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    tolerance = 3e-2 if dtype is torch.bfloat16 else None
    check_same(copy.deepcopy(model).npu()(x.npu()), model(x), tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_replay_follows_inputs(name: str) -> None:
    model = MODELS[name]().eval()
    static = torch.randn(2, 5, 16).npu()
    graph, result = capture(copy.deepcopy(model).npu(), static)
    for _ in range(3):
        x = torch.randn(2, 5, 16)
        static.copy_(x)
        graph.replay()
        check_same(result, model(x))


def test_replay_follows_weights() -> None:
    model = MODELS["mlp"]().eval()
    on_device = copy.deepcopy(model).npu()
    x = torch.randn(3, 16)
    graph, result = capture(on_device, x.npu())
    for weight in (model[0].weight, on_device[0].weight):
        weight.mul_(-0.5)
    graph.replay()
    check_same(result, model(x))
