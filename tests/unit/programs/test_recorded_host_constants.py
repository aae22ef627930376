"""Recording tensors of no dimensions on the CPU as constants of a program on another device."""

from __future__ import annotations

import types

import pytest
import torch
from meta_recording import record, record_bound, take_meta_for_an_accelerator
from torch import nn
from torch_captures import one_capture

from offload.api.recorded_program import without_dead_launches
from offload.backends.captured.torch_warm_up import _private_bases
from offload.errors import CaptureError
from offload.files import has_same_content
from offload.program import BoundProgram, Program, Role
from offload.record import recorder, recording_device, watched_call
from offload.record.callables import Parameters
from offload.record.compiled_callables import CompiledParts
from offload.record.fake_weights import FakeWeights
from offload.record.recording import Recording


@pytest.fixture(autouse=True)
def _meta_is_an_accelerator(monkeypatch):
    take_meta_for_an_accelerator(monkeypatch)


def on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def constants(program: Program) -> dict[str, float]:
    return {
        value.name: torch.frombuffer(bytearray(value.host_content), dtype=torch.float32).item()
        for value in program.values
        if value.host_content is not None
    }


def operators(program: Program) -> list[str]:
    return [launch.name for launch in program.launches]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("shift", torch.tensor(-1.0))

    def forward(self, x):
        return x * self.scale + self.shift


def test_parameters_buffers_and_closed_over_tensors():
    outside = torch.tensor(4.0)
    model = Scaled()
    bound = record_bound(lambda x: model(x) / outside, on_device(3))
    program = bound.program
    assert sorted(constants(program).values()) == [-1.0, 2.5, 4.0]
    assert operators(program) == ["aten::mul.Tensor", "aten::add.Tensor", "aten::div.Tensor"]
    assert program.device == "meta"
    weights = {program.values[index].name: held for index, held in bound.bindings.weights.items()}
    assert any(held[0] is model.scale for held in weights.values())


def test_literals():
    program = record(lambda x: x * torch.tensor(3.0), on_device(3))
    assert list(constants(program).values()) == [3.0]
    assert operators(program) == ["aten::mul.Tensor"]


def test_inputs():
    program = record(lambda x, t: x * t, on_device(3), torch.tensor(7.0))
    assert constants(program) == {"args[1]": 7.0}
    assert program.values[program.inputs[1].value].on_host
    assert not program.values[program.inputs[0].value].on_host


def test_an_input_may_be_a_part_of_a_larger_tensor():
    steps = torch.tensor([5.0, 6.0, 7.0])
    program = record(lambda x, t: x * t, on_device(3), steps[1])
    assert constants(program) == {"args[1]": 6.0}


@pytest.mark.parametrize(
    ("inputs", "held", "expected"),
    [
        ([("cpu", 0)], [("cuda:1", 2), ("cpu", 0)], "cuda:1"),
        ([], [("cuda:1", 2)], "cuda:1"),
        ([("cpu", 0)], [("cpu", 2)], "cpu"),
        ([("cpu", 0), ("cpu", 1)], [("cuda:1", 2)], "cpu"),
        ([("cpu", 0), ("cuda:0", 1)], [("cuda:1", 2)], "cuda:0"),
    ],
)
def test_inputs_on_the_host_alone_leave_the_device_to_the_model(inputs, held, expected):
    def tensors(kinds):
        return [
            types.SimpleNamespace(device=torch.device(device), dim=lambda n=n: n, is_meta=False)
            for device, n in kinds
        ]

    found = recording_device.recording_device(tensors(inputs), tensors(held))
    assert found == torch.device(expected)


def test_what_is_computed_from_them_alone_is_one_more_constant():
    model = Scaled()
    bound = record_bound(lambda x: x * (model.scale * 2 + model.shift).exp(), on_device(3))
    program, weights = bound.program, bound.bindings.weights
    assert operators(program) == ["aten::mul.Tensor"]
    found = constants(program)
    assert sorted(found.values()) == [-1.0, 2.5, pytest.approx(54.598, rel=1e-4)]
    (launch,) = program.launches
    folded = program.values[launch.arguments[1].value]
    assert folded.on_host
    assert folded.role is Role.WEIGHT
    assert weights[folded.index][0].item() == pytest.approx(54.598, rel=1e-4)
    assert weights[folded.index][0].shape == ()


def test_what_is_moved_to_the_device_is_a_weight_there():
    model = Scaled()
    program = record(lambda x: x * (model.scale + 1).to(x.device), on_device(3))
    assert operators(program) == ["aten::mul.Tensor"]
    assert list(constants(program).values()) == [2.5]
    (launch,) = program.launches
    moved = program.values[launch.arguments[1].value]
    assert (moved.role, moved.on_host) == (Role.WEIGHT, False)


def test_one_that_the_host_reads_stays_guarded():
    """Python's use of the value is fixed in the Program, so the value must recur."""
    model = Scaled()
    program = record(lambda x: x * model.scale.item() + model.shift.tolist(), on_device(3))
    assert sorted(constants(program).values()) == [-1.0, 2.5]
    assert operators(program) == ["aten::mul.Tensor", "aten::add.Tensor"]
    assert all(launch.guard is None for launch in program.launches)


def test_a_check_of_them_alone_makes_no_launch():
    model = Scaled()

    def checked(x):
        torch._assert_async(model.scale > 0)
        return x * 2

    program = record(checked, on_device(3))
    assert operators(program) == ["aten::mul.Tensor"]
    assert list(constants(program).values()) == [2.5]


def test_those_that_nothing_uses_are_no_part_of_the_program():
    model = Scaled()
    program = record(lambda x: x * model.scale, on_device(3))
    assert list(constants(program).values()) == [2.5]


STATE = Scaled()
TABLE = torch.arange(5.0)
PART = torch.arange(5.0)[2]


def drawn(x):
    return x * torch.rand(())


def written(x):
    factor = STATE.scale * 2
    factor.add_(1)
    return x * factor


def written_parameter(x):
    STATE.shift.add_(1)
    return x + STATE.shift


def written_literal(x):
    factor = torch.tensor(1.0)
    factor += 1
    return x * factor


def drawn_in_place(x):
    return x * torch.tensor(1.0).uniform_()


def reserved(x):
    return x * torch.empty(())


def with_dimensions(x):
    return x.sum() + TABLE.sum()


def computed_with_dimensions(x):
    return x * torch.stack([STATE.scale, STATE.shift]).sum()


def part_of_another(x):
    return x * PART


def made_from_the_device(x):
    return x * torch.ones_like(x.sum(), device="cpu")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drawn, "aten::rand makes a tensor on the CPU and draws random numbers"),
        (written, r"aten::add_.Tensor writes mul_0, a tensor on the CPU, .* compute a new tensor"),
        (written_parameter, r"aten::add_.Tensor writes STATE.shift, a tensor on the CPU"),
        (written_literal, r"aten::add_.Tensor writes constant, a tensor on the CPU"),
        (drawn_in_place, "aten::uniform_ writes constant, a tensor on the CPU"),
        (reserved, "aten::empty.memory_format makes a tensor on the CPU and reserves memory"),
        (
            with_dimensions,
            r"TABLE, of shape \[5\], is on the CPU, .* only tensors of no dimensions",
        ),
        (computed_with_dimensions, r"of shape \[2\], is on the CPU, .* only tensors of no dimens"),
        (part_of_another, r"PART is one number of a larger tensor on the CPU, .* \.clone\(\)"),
        (made_from_the_device, "aten::ones_like makes a tensor on the CPU and computes it from"),
    ],
)
def test_anything_else_is_refused_with_the_users_line(function, message):
    shift, generator = STATE.shift.clone(), torch.get_rng_state()
    line = function.__code__.co_firstlineno
    try:
        with pytest.raises(CaptureError, match=message) as raised:
            record(function, on_device(3))
    finally:
        torch.set_rng_state(generator)
        STATE.shift.copy_(shift)
    place = str(raised.value).split(": ")[0]
    assert place.partition(".py:")[0].endswith("test_recorded_host_constants")
    assert int(place.partition(".py:")[2]) in range(line + 1, line + 4)


@pytest.mark.parametrize("function", [lambda x, t: t, lambda x, t: (x, t + 1)])
def test_results_on_the_host_are_refused(function):
    with pytest.raises(CaptureError, match=r"a result is .*, a tensor on the CPU, which a program"):
        record(function, on_device(3), torch.tensor(1.0))


def test_an_input_with_dimensions_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"args\[1\] is on cpu, and the model or another input"):
        record(lambda x, y: x.sum() + y.sum(), on_device(3), torch.ones(3))


def test_a_change_that_no_launch_made_is_refused():
    scale = torch.tensor(2.0)

    def run(x):
        product = x * scale
        memory[()] = 5.0
        return product

    memory = scale.numpy()
    with pytest.raises(CaptureError, match="was changed by work that the recorder cannot see"):
        record(run, on_device(3))


# ---- what compiled code may read unseen ----------------------------------------------------------


def recorded_compiled(monkeypatch, function, *args: torch.Tensor) -> Recording:
    """The recording of a call whose launches torch.compile would have hidden."""
    monkeypatch.setattr(
        watched_call, "compiled_parts", lambda *_: CompiledParts((), ("the function",))
    )
    watching = recorder.Recorder(
        host_reads="avoid",
        function=function,
        parameters=Parameters((), ()),
        runs_opaque=lambda _: True,
    )
    args, _ = watching.begin(args, {})
    return watching.finish(function(*args))[1]


class Tables(nn.Module):
    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.table = torch.arange(float(n_items))
        self.row = self.table[1:3]
        self.unused = torch.tensor(4.0)

    def forward(self, x):
        return x + self.table[1].item()


def test_every_tensor_on_the_cpu_that_compiled_code_holds_is_guarded(monkeypatch):
    program = recorded_compiled(monkeypatch, Tables(4), on_device(3)).bound.program
    assert program.opaque is not None
    contents = {one.name: one.host_content for one in program.values if one.on_host}
    assert contents == {
        "table": torch.arange(4.0).numpy().tobytes(),
        "unused": torch.tensor(4.0).numpy().tobytes(),
    }
    (table,) = (index for index in program.weight_views if program.values[index].name == "table")
    assert [view.offset_bytes for view in program.weight_views[table]] == [0, 4]


def test_a_large_one_is_refused(monkeypatch):
    with pytest.raises(CaptureError, match=r"table, of 80000 bytes, is on the CPU"):
        recorded_compiled(monkeypatch, Tables(20_000), on_device(3))


def test_numbers_that_compiled_code_draws_on_the_cpu_are_refused(monkeypatch):
    with pytest.raises(CaptureError, match="the function is compiled, and draws random numbers on"):
        recorded_compiled(monkeypatch, lambda x: x * torch.rand(()).item(), on_device(3))


# ---- under fake tensors, for weights in files ----------------------------------------------------


def recorded_fake(function, *args: torch.Tensor) -> Program:
    watching = recorder.Recorder(
        host_reads="avoid",
        function=function,
        parameters=Parameters((), ()),
        runs_opaque=lambda _: True,
        fakes=FakeWeights({}, torch.device("meta"), has_same_content),
    )
    args, _ = watching.begin(args, {})
    return without_dead_launches(watching.finish(function(*args))[1].bound).program


def test_an_input_on_the_cpu_stays_there_while_nothing_is_computed():
    program = recorded_fake(lambda x, t: x * t, on_device(3), torch.tensor(7.0))
    assert constants(program) == {"args[1]": 7.0}
    assert operators(program) == ["aten::mul.Tensor"]


def test_what_is_computed_from_host_constants_alone_is_computed():
    held = torch.tensor(0.0)

    def function(x, t):
        return x * (held.exp() + t + torch.full((), 3.0)) + torch.tensor(5.0)

    program = recorded_fake(function, on_device(3), torch.tensor(7.0))
    assert sorted(constants(program).values()) == [0.0, 5.0, 7.0, 11.0]
    assert operators(program) == ["aten::mul.Tensor", "aten::add.Tensor"]


def test_compiled_code_has_nothing_to_record_there(monkeypatch):
    monkeypatch.setattr(
        watched_call, "compiled_parts", lambda *_: CompiledParts((), ("the model",))
    )
    with pytest.raises(
        CaptureError, match=r"the model is compiled .* with weights= nothing is comp"
    ):
        recorded_fake(lambda x: x, on_device(3))


# ---- what a capture reads ------------------------------------------------------------------------


def changed_program() -> BoundProgram:
    """A Program whose host constants have changed since it was recorded."""
    scale, factor = torch.tensor(2.0), torch.tensor(3.0)
    bound = record_bound(lambda x, t: x * t * scale, on_device(3), factor)
    scale.fill_(-1.0)
    factor.fill_(-1.0)
    return bound


def numbers_of(program: Program, bases: dict[int, tuple[torch.UntypedStorage, int]]) -> list[float]:
    return sorted(
        torch.empty(0).set_(bases[value.index][0])[0].item()
        for value in program.values
        if value.on_host
    )


def test_the_warm_up_reads_what_was_recorded():
    bound = changed_program()
    assert numbers_of(bound.program, _private_bases(bound, "cpu", None)) == [2.0, 3.0]
    given = [torch.ones(3), torch.tensor(-1.0)]
    assert numbers_of(bound.program, _private_bases(bound, "cpu", given)) == [2.0, 3.0]


def test_a_capture_reads_what_was_recorded(monkeypatch):
    bound = changed_program()
    bases = one_capture(monkeypatch, bound)._stand_ins()
    assert numbers_of(bound.program, bases) == [2.0, 3.0]
    assert bases[bound.program.inputs[0].value][0].nbytes() == 12
