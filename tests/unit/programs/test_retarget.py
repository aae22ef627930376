"""Programs for another device: on `meta`, which has kernels of all operators and no memory."""

import dataclasses

import pytest
import torch

import offload
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.retarget import retargeted, why_not_on
from offload.interpreter.torch_names import runs_on
from offload.program import Operator, Role, Symbol

META = torch.device("meta", 0)


def made(x):
    rows = torch.arange(4) + torch.zeros(4, dtype=torch.int64)
    y = torch.empty_like(x).copy_(x).to(torch.float64)
    return y.new_full((4, 4), 2.0) @ y + torch.full((4,), 3.0) + rows, x.t().contiguous()


@torch.no_grad()
def test_operators_make_everything_on_the_device():
    captured = offload.capture(made, torch.randn(4, 4))
    program = captured.program
    # Factories were folded into constants: restore one, with the default device and pinned.
    views = {view.value for view in program.inputs}
    launch = next(one for one in program.launches if views & set(one.reads))
    factory = dataclasses.replace(
        launch,
        callee=Operator("aten::empty_like"),
        arguments=(program.inputs[0], None, None, Symbol("device", "cpu"), True, None),
    )
    assert not why_not_on(program, factory, "meta")
    weights = {
        value.index: tuple(
            torch.empty_strided(
                view.shape, view.strides, dtype=getattr(torch, view.dtype), device="meta"
            )
            for view in program.weight_views[value.index]
        )
        for value in program.of_role(Role.WEIGHT)
    }
    moved = retargeted(captured.bound, META, weights)
    assert (moved.program.device, moved.program.device_index) == ("meta", 0)
    assert moved.program.caller is None
    bases = {
        value.index: (
            torch.empty(value.size_bytes, dtype=torch.uint8, device=META).untyped_storage(),
            0,
        )
        for value in moved.program.values
        if value.role in (Role.INPUT, Role.WEIGHT)
    }
    run = EagerRun(moved, bases, fill=None)
    for one in moved.program.launches:
        outcome = run.call(one)()
        assert all(each.device.type == "meta" for each in torch.utils._pytree.tree_leaves(outcome))
        run.keep(one, outcome)


@torch.no_grad()
def test_a_factory_without_a_device_meant_the_host(monkeypatch):
    captured = offload.capture(lambda x: x + 1, torch.randn(4))
    bound = captured.bound
    [launch] = bound.program.launches
    given = dataclasses.replace(
        launch,
        callee=Operator("aten::zeros"),
        arguments=((4,), Symbol("dtype", "float32"), None, None, True),
        reads=(),
    )
    program = dataclasses.replace(bound.program, launches=(given,))
    moved = retargeted(dataclasses.replace(bound, program=program), META, {})
    assert moved.program.launches[0].arguments[3:] == (Symbol("device", "meta"), False)


@torch.no_grad()
def test_why_launches_stay():
    captured = offload.capture(lambda x: x * 2, torch.randn(4))
    program = captured.program
    [launch] = program.launches
    assert not why_not_on(program, launch, "meta")
    pinned = dataclasses.replace(launch, callee=Operator("aten::_pin_memory"))
    assert why_not_on(program, pinned, "meta") == "it pins host memory"
    elsewhere = dataclasses.replace(launch, arguments=(*launch.arguments, Symbol("device", "cuda")))
    assert why_not_on(program, elsewhere, "meta") == "it makes a tensor on cuda"
    here = dataclasses.replace(launch, arguments=(*launch.arguments, Symbol("device", "cpu")))
    assert not why_not_on(program, here, "meta")
    library = torch.library.Library("only_on_cpu", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    own = dataclasses.replace(launch, callee=Operator("only_on_cpu::twice"))
    assert why_not_on(program, own, "xpu") == "only_on_cpu::twice has no kernel on xpu"
    formatted = dataclasses.replace(program.values[0], device_format="FRACTAL_NZ")
    other = dataclasses.replace(program, values=(formatted, *program.values[1:]))
    assert "lies in a format of the device" in why_not_on(other, launch, "meta")


@pytest.mark.parametrize("operator", ["aten::add.Tensor", "aten::mm", "aten::silu", "aten::view"])
def test_the_processor_has_kernels(operator):
    assert runs_on(operator, "cpu")
