"""Models on a GPU, with random weights: captured once, replayed at new addresses against eager."""

from __future__ import annotations

import device_models
import pytest
import torch
from device_models import MODELS, Named, assert_close, cases, lively
from on_device import replay_at_new_addresses
from torch import nn

import offload


def normal(*shape):
    return on_gpu(device_models.normal(*shape), torch.float32)


def on_gpu(make, dtype):
    """The batches of a turn at new addresses on the GPU."""
    return lambda turn: {
        name: one.cuda() for name, one in device_models.cast(make(turn), dtype).items()
    }


@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_model(name, dtype):
    model = MODELS[name]
    pytest.importorskip(model.needs, reason=f"models of {model.needs}")
    run = replay_at_new_addresses(lively(model.build()).to(dtype).cuda(), on_gpu(model.make, dtype))
    assert model.n_launches in (None, len(run.program.launches))


def replay_opaque(function, make):
    """Launches that bypass torch's dispatcher make the call one opaque launch."""
    run = replay_at_new_addresses(function, make)
    assert [one.name for one in run.program.launches] == ["offload::opaque"]
    assert [one.mode for one in run.launch_reports()] == ["opaque"]
    return run


def test_raw_triton_kernel():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        return add_one(x * 2, torch.empty_like(x)) * 3

    run(normal(1024)(0)["x"])  # torch and Triton compile
    replay_opaque(run, normal(1024))


def test_raw_triton_kernel_in_place():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        scaled = x * 2
        add_one(scaled, scaled)
        return scaled

    replay_opaque(run, normal(1024))


def test_raw_triton_kernel_on_a_buffer():
    """The recorded call and executions write it, loading does not."""
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(100_000, device="cuda"))

        def forward(self, x):
            add_one(self.steps, self.steps)
            return x * self.steps[: len(x)]

    model, make = Counting(), normal(1024)
    captured = offload.capture(model, **make(0))
    run = captured.load()
    assert run.program.opaque is not None
    for turn in (2, 3, 4):
        x = make(turn)["x"]
        assert_close(run(x=x), x * turn)
        assert torch.equal(model.steps, torch.full_like(model.steps, turn))


def test_hidden_kernels_are_found_where_no_address_is_asked_for():
    pytest.importorskip("triton", reason="a raw Triton kernel")
    from probe_triton import add_one

    def run(x):
        scaled = x * 2
        with torch._C.DisableTorchFunction():  # as an extension in C++, which no mode sees
            add_one(scaled, scaled)
        return scaled * 3

    replayed = replay_opaque(run, normal(1024))
    assert "launches work that the recorder cannot see" in replayed.program.opaque.reason


@pytest.mark.parametrize("kind", ["module", "inside", "in place"])
def test_compiled_model(kind):
    model = Named(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))).cuda().eval()
    if kind == "in place":
        model.compile()
        compiled = model
    else:
        compiled = torch.compile(model)
    make, function = normal(8, 64), Named(compiled) if kind == "inside" else compiled
    captured = offload.capture(function, **make(0))
    assert captured.program.opaque is None
    run = captured.load(fuse=True)
    for turn in (1, 2, 3):
        assert_close(run(**make(turn)), function(**make(turn)))


def test_compiled_model_with_graphs_of_its_own():
    compiled = torch.compile(nn.Linear(8, 8).cuda(), mode="reduce-overhead")
    x = torch.ones(2, 8, device="cuda")
    with torch.no_grad():
        captured = offload.capture(compiled, x)
        assert_close(captured(x), compiled._orig_mod(x))


def test_models_without_hidden_work_stay_programs():
    model = Named(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))).cuda().eval()
    captured = offload.capture(model, **normal(8, 64)(0))
    assert captured.program.opaque is None
    assert captured.program.unchecked == ""
