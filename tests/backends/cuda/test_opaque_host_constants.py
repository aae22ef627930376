"""Tensors of no dimensions on the CPU in opaque Programs, and in random mixtures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meta_recording import record_bound, take_meta_for_an_accelerator

import offload
from offload import BindingError, Captured, CaptureError
from offload.program import BoundProgram

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from hidden_models import Raw
from host_constant_models import Raised, guarding, with_host_constants
from simulated_backend import SimulatedBackend, install


@pytest.fixture
def backend(simulator, monkeypatch) -> SimulatedBackend:
    return install(simulator, monkeypatch)


def load_recorded(backend: SimulatedBackend, function, *args: torch.Tensor) -> offload.Executable:
    bound = record_bound(function, *args)
    program = dataclasses.replace(bound.program, device="cpu")
    return Captured(BoundProgram(program, bound.bindings)).load(backend.name)


def test_what_was_folded_is_executed(backend, monkeypatch):
    take_meta_for_an_accelerator(monkeypatch)
    scale, factor = torch.tensor(2.5), torch.tensor(0.5)

    def function(x, t):
        exponent = (scale * t + torch.tensor(0.25)).exp()
        return (x * exponent + scale.item()) / (t - 3)

    run = load_recorded(backend, function, torch.empty(3, device="meta"), factor)
    assert [launch.name for launch in run.program.launches] == [
        "aten::mul.Tensor",
        "aten::add.Tensor",
        "aten::div.Tensor",
    ]
    x = torch.randn(3)
    assert torch.equal(run(x, factor), function(x, factor))
    with pytest.raises(BindingError, match=r"args\[1\]: it was recorded .* as 0\.5, got 1: "):
        run(x, torch.tensor(1.0))
    scale.neg_()
    with pytest.raises(BindingError, match=r"it was recorded .* as 2\.5, got -2\.5: "):
        run(x, factor)


OPERATORS = (torch.add, torch.mul, torch.maximum, torch.sub)


@st.composite
def mixtures(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """For each step the operator, and which two of the existing values it reads."""
    n_steps = draw(st.integers(1, 8))
    return [
        (
            draw(st.integers(0, len(OPERATORS) - 1)),
            draw(st.integers(0, 3 + step)),
            draw(st.integers(0, 3 + step)),
        )
        for step in range(n_steps)
    ]


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mixtures())
def test_any_mixture_of_host_and_device_computes_what_eager_does(backend, steps):
    held = torch.tensor(-1.5)

    def function(x, t):
        values = [x, t, held, x + 1]
        for operator, one, other in steps:
            values.append(OPERATORS[operator](values[one], values[other]))
        return torch.cat([value if value.dim() else value * x for value in values])

    with pytest.MonkeyPatch.context() as patch:
        take_meta_for_an_accelerator(patch)
        factor = torch.tensor(0.75)
        run = load_recorded(backend, function, torch.empty(4, device="meta"), factor)
    with run:
        x = torch.randn(4)
        assert torch.equal(run(x, factor), function(x, factor))


@pytest.fixture
def raised(simulator, monkeypatch) -> Captured:
    """Its Program, with the numbers on the host."""
    install(simulator, monkeypatch, records=True)
    factor = torch.tensor(0.5)
    captured = offload.capture(Raised(Raw(simulator)), factor, torch.ones(3, 4))
    assert captured.program.opaque is not None
    return Captured(with_host_constants(captured, factor))


def held_by(captured: Captured) -> Raised:
    assert captured.program.opaque is not None
    return captured.bindings.callables[captured.program.opaque.index].function


def test_the_numbers_of_an_opaque_program_are_guarded(raised):
    model, run = held_by(raised), raised.load()
    on_host = [value for value in run.program.values if value.on_host]
    assert sorted(value.name for value in on_host) == ["args[0]", "scale"]
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(run(torch.tensor(0.5), x), x * 2.5 * 0.5 + 1)
    model.scale.fill_(3.0)
    with pytest.raises(BindingError, match=r"scale: it was recorded on the CPU as 2\.5, got 3: "):
        run(torch.tensor(0.5), x)
    model.scale.fill_(2.5)
    with pytest.raises(BindingError, match=r"args\[0\]: it was recorded .* as 0\.5, got 1: "):
        run(torch.tensor(1.0), x)
    assert torch.equal(run(torch.tensor(0.5), x), x * 2.5 * 0.5 + 1)


def test_an_opaque_program_is_not_captured_with_other_numbers(raised):
    """They would be in its kernels, and executions would be checked against the recorded ones."""
    model = held_by(raised)
    model.scale.fill_(3.0)
    with pytest.raises(CaptureError, match="scale, a tensor on the CPU, has changed since it was"):
        raised.load()
    model.scale.fill_(2.5)
    x = torch.randn(3, 4)
    assert torch.equal(raised.load()(torch.tensor(0.5), x), x * 2.5 * 0.5 + 1)


def test_every_holder_of_a_larger_one_is_guarded(backend):
    table = torch.arange(6.0)
    bound = guarding(table, table[1:3])
    run = Captured(bound).load(backend.name)
    x = torch.randn(3)
    assert torch.equal(run(x), torch.sin(x))
    table[5] = 0.0
    with pytest.raises(BindingError, match="number: its content differs from what was recorded"):
        run(x)
    table[5] = 5.0
    row = bound.bindings.weights[bound.program.values[-1].index][1]
    row.data = torch.tensor([1.0, 2.0])
    assert torch.equal(run(x), torch.sin(x))
    row.data = torch.tensor([1.0, 9.0])
    with pytest.raises(BindingError, match="number: its content differs"):
        run(x)
    row.data = torch.arange(4.0)[1::2]
    with pytest.raises(BindingError, match="another shape, dtype or strides"):
        run(x)
