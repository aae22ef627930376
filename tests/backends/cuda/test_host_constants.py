"""Tensors of no dimensions on the CPU in a Program for a device: constants that are guarded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import offload
from offload import BindingError, Captured, CaptureError, PlanError
from offload.backends import CpuBackend
from offload.interpreter.torch_names import find_dtype
from offload.plan import Place, SlotKind, check_plan
from offload.program import Bindings, BoundProgram

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from host_constant_models import guarding, with_host_constants
from simulated_backend import SimulatedBackend, install


@pytest.fixture
def backend(simulator, monkeypatch) -> SimulatedBackend:
    return install(simulator, monkeypatch)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("shift", torch.tensor(-3, dtype=torch.int64))
        self.linear = nn.Linear(4, 4)

    def forward(self, factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale + self.shift) * factor


@dataclasses.dataclass
class Loaded:
    model: Scaled
    run: offload.Executable
    factor: torch.Tensor
    x: torch.Tensor

    def assert_right(self) -> None:
        with torch.no_grad():
            expected = self.model(self.factor, self.x)
        assert torch.equal(self.run(self.factor, self.x), expected)


@pytest.fixture
def loaded(backend) -> Loaded:
    model, factor = Scaled(), torch.tensor(0.5)
    captured = offload.capture(model, factor, torch.ones(3, 4))
    bound = with_host_constants(captured, factor)
    return Loaded(model, Captured(bound).load(backend.name), factor, torch.randn(3, 4))


def test_they_are_executed_and_take_no_memory_of_the_device(loaded):
    loaded.assert_right()
    plan, program = loaded.run.plan, loaded.run.program
    on_host = [value for value in program.values if value.on_host]
    assert sorted(value.name for value in on_host) == ["args[0]", "scale", "shift"]
    assert all(plan.places[value.index] is None for value in on_host)
    assert sorted(slot.name for slot in plan.of_kind(SlotKind.WEIGHT)) == [
        "linear.bias",
        "linear.weight",
    ]
    assert [slot.name for slot in plan.of_kind(SlotKind.INPUT)] == ["args[1]"]
    assert "constant on the CPU" in str(program)
    told = "must be unchanged at each execution: input args[0], weight scale, weight shift"
    assert told in loaded.run.explain()


def test_an_input_may_come_as_another_tensor_and_moves_nothing(loaded):
    out = torch.empty(3, 4)
    loaded.run(loaded.factor, loaded.x, out=out)
    loaded.run(torch.tensor([9.0, 0.5])[1], loaded.x, out=out)
    last = loaded.run.last_execution
    assert (last.policy, last.slots_changed, last.words_patched) == ("none", 0, 0)
    assert last.bytes_copied == 0
    assert torch.equal(out, loaded.run(loaded.factor, loaded.x))


def test_an_input_with_another_value_is_refused_before_anything_runs(loaded):
    loaded.assert_right()
    out = torch.full((3, 4), 7.0)
    with pytest.raises(
        BindingError, match=r"args\[0\]: it was recorded on the CPU as 0\.5, got 0\.25: .*capture"
    ):
        loaded.run(torch.tensor(0.25), loaded.x, out=out)
    assert bool((out == 7).all())
    assert loaded.run.last_execution.n_executions == 1
    loaded.assert_right()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.tensor(0.5, dtype=torch.float64),
            r"args\[0\]: expected float32\[\], got float64\[\]",
        ),
        (torch.tensor([0.5]), r"args\[0\]: expected float32\[\], got float32\[1\]"),
        (torch.tensor(0.5, device="meta"), r"args\[0\]: expected a tensor on cpu, got .* meta"),
        (torch._neg_view(torch.tensor(-0.5)), r"args\[0\]: it has another .* negated otherwise"),
    ],
)
def test_an_input_of_another_kind_is_refused(loaded, given, message):
    with pytest.raises(BindingError, match=message):
        loaded.run(given, loaded.x)
    loaded.assert_right()


def test_a_parameter_that_is_changed_in_place_is_refused_until_it_is_changed_back(loaded):
    with torch.no_grad():
        loaded.model.scale.fill_(2.0)
    with pytest.raises(BindingError, match=r"scale: it was recorded on the CPU as 2\.5, got 2: "):
        loaded.run(loaded.factor, loaded.x)
    with torch.no_grad():
        loaded.model.scale.fill_(2.5)
    loaded.assert_right()


def test_a_buffer_is_guarded_as_a_parameter_is(loaded):
    loaded.model.shift += 1
    with pytest.raises(BindingError, match="shift: it was recorded on the CPU as -3, got -2: "):
        loaded.run(loaded.factor, loaded.x)


def test_a_parameter_may_be_given_other_memory_with_the_same_value(loaded):
    """No launch holds its address, so there is nothing to bind again."""
    loaded.model.scale.data = torch.tensor([0.0, 2.5])[1]
    loaded.assert_right()
    loaded.model.scale.data = torch.tensor(1.5)
    with pytest.raises(BindingError, match=r"scale: .* as 2\.5, got 1\.5"):
        loaded.run(loaded.factor, loaded.x)
    loaded.run.rebind_weights()
    with pytest.raises(BindingError, match=r"scale: .* as 2\.5, got 1\.5"):
        loaded.run(loaded.factor, loaded.x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: setattr(scale, "data", torch.tensor([2.5])), "another shape, dtype"),
        (lambda scale: setattr(scale, "data", torch.tensor(2.5).double()), "another shape, dt"),
        (lambda scale: scale.untyped_storage().resize_(0), "its memory was freed or shrunk"),
    ],
)
def test_a_parameter_of_another_kind_is_refused(loaded, change, message):
    change(loaded.model.scale)
    with pytest.raises(BindingError, match=f"scale: .*{message}"):
        loaded.run(loaded.factor, loaded.x)


def test_a_submitted_execution_has_the_value_of_its_submission(loaded):
    expected = loaded.run(loaded.factor, loaded.x)
    ticket = loaded.run.submit(loaded.factor, loaded.x)
    with torch.no_grad():
        loaded.model.scale.fill_(2.0)
    assert torch.equal(ticket.result(), expected)
    with pytest.raises(BindingError, match="scale"):
        loaded.run.submit(loaded.factor, loaded.x)


def test_what_is_loaded_is_what_was_recorded(backend):
    """A value that changed since the recording is refused, never captured in its place."""
    model, factor, x = Scaled(), torch.tensor(0.5), torch.randn(3, 4)
    bound = with_host_constants(offload.capture(model, factor, x), factor)
    with torch.no_grad():
        model.scale.fill_(100.0)
    run = Captured(bound).load(backend.name)
    with pytest.raises(BindingError, match=r"scale: .* as 2\.5, got 100"):
        run(factor, x)
    with torch.no_grad():
        model.scale.fill_(2.5)
        assert torch.equal(run(factor, x), model(factor, x))


@pytest.mark.parametrize(
    ("dtype", "one", "other", "texts"),
    [
        ("bool", True, False, "True, got False"),
        ("uint8", 200, 3, "200, got 3"),
        ("int8", -7, 7, "-7, got 7"),
        ("int64", 2**62, -(2**62), "4611686018427387904, got -4611686018427387904"),
        ("uint64", 2**63 + 1, 2**63, "9223372036854775809, got 9223372036854775808"),
        ("float16", 0.5, 1.5, "0.5, got 1.5"),
        ("bfloat16", 0.5, 1.5, "0.5, got 1.5"),
        ("float64", 0.1, 0.2, "0.10000000000000001, got 0.20000000000000001"),
        ("float64", math.inf, -math.inf, "inf, got -inf"),
        ("complex64", 1 - 2j, 1 + 2j, "1-2j, got 1+2j"),
        ("float8_e4m3fn", 0.5, 1.0, "0.5, got 1"),
    ],
)
def test_both_values_are_told(backend, dtype, one, other, texts):
    number = torch.tensor(one, dtype=find_dtype(dtype))
    run = Captured(guarding(number)).load(backend.name)
    x = torch.randn(3)
    assert torch.equal(run(x), torch.sin(x))
    number.fill_(other)
    with pytest.raises(BindingError) as raised:
        run(x)
    assert f"number: it was recorded on the CPU as {texts}: " in str(raised.value)


def test_a_tensor_that_left_the_cpu_is_refused(backend):
    bound = guarding(torch.tensor(2.5))
    moved = {index: (held[0].to("meta"),) for index, held in bound.bindings.weights.items()}
    run = Captured(BoundProgram(bound.program, Bindings(weights=moved))).load(backend.name)
    with pytest.raises(BindingError, match="number: expected a tensor on the CPU, got one on meta"):
        run(torch.ones(3))


def test_values_are_compared_by_their_bits(backend):
    number = torch.tensor(math.nan)
    run = Captured(guarding(number)).load(backend.name)
    run(torch.ones(3))
    number.copy_(torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32))
    with pytest.raises(BindingError, match=r"nan \(0x7fc00000\), got nan \(0x7fc00001\)"):
        run(torch.ones(3))
    zero = torch.tensor(0.0)
    run = Captured(guarding(zero)).load(backend.name)
    zero.neg_()
    with pytest.raises(BindingError, match="as 0, got -0: "):
        run(torch.ones(3))


def test_a_place_for_one_is_refused(loaded):
    plan, program = loaded.run.plan, loaded.run.program
    index = next(value.index for value in program.values if value.on_host)
    places = [Place(0, 0) if at == index else place for at, place in enumerate(plan.places)]
    with pytest.raises(PlanError, match="is a host constant and has a place"):
        check_plan(program, dataclasses.replace(plan, places=tuple(places)))


def test_a_program_on_the_cpu_has_none(loaded):
    with pytest.raises(CaptureError, match="is a host constant of a program on cpu"):
        CpuBackend().prepare(loaded.run.bound)
