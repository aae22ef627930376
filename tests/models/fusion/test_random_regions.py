"""Regions of random programs: their replacements give the launches' results."""

from __future__ import annotations

import pytest
import torch
from checks import normal
from hypothesis import given, reject, settings
from random_programs import RETURNED, STEP_LISTS, RandomProgram
from torch import nn

import offload
from offload.compile.proof import run
from offload.compile.regions import Kind, Region, find_regions
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.program import BoundProgram, TensorView


def has_compiler() -> bool:
    try:
        find_compiler()
    except CompilerMissing:
        return False
    return True


class Recorded:
    """The launches of a program as recorded, on separate memory."""

    def __init__(self, bound: BoundProgram, inputs: list[torch.Tensor]) -> None:
        self.program = bound.program
        bases = {
            view.value: (tensor.clone().untyped_storage(), 0)
            for view, tensor in zip(bound.program.inputs, inputs, strict=True)
        }
        for index, holders in bound.bindings.weights.items():
            bases[index] = (holders[0].detach().clone().untyped_storage(), 0)
        self._eager = EagerRun(bound, bases, fill=0)

    def advance(self, first: int, end: int) -> None:
        for launch in self.program.launches[first:end]:
            self._eager.keep(launch, self._eager.call(launch)())

    def content(self, view: TensorView) -> torch.Tensor:
        """The bytes of a whole Value."""
        self._eager.tensor(view)
        storage, begin = self._eager.bases[view.value]
        size_bytes = self.program.values[view.value].size_bytes
        return bytes_of(storage)[begin : begin + size_bytes]


def made_model(steps, returned) -> tuple[nn.Module, list[torch.Tensor]]:
    """A module whose writes eager allows: reads have no partial overlap."""
    torch.manual_seed(len(steps))
    model, inputs = RandomProgram(steps, returned, is_local=True), [normal(4, 4), normal(4, 4)]
    try:
        with torch.no_grad():
            model(*inputs)
    except RuntimeError:
        reject()
    return model, inputs


def check_region(recorded: Recorded, region: Region) -> None:
    given = [recorded.content(view).clone() for view in region.extracted.inputs]
    found = run(region.extracted.program, given)
    recorded.advance(region.first, region.end)
    for tensor, view in zip(found, region.extracted.made, strict=True):
        storage = tensor.untyped_storage()
        assert torch.equal(bytes_of(storage)[: view.end_bytes], recorded.content(view))


def check_regions(model: nn.Module, inputs: list[torch.Tensor]) -> list[Region]:
    """Run a model's launches, and each region beside the launches that it replaces."""
    with torch.no_grad():
        bound = offload.capture(model, *inputs).bound
        recorded = Recorded(bound, inputs)
        regions = [one for one in find_regions(bound.program, {}).found if one.kind is Kind.LOOPS]
        at = 0
        for region in regions:
            recorded.advance(at, region.first)
            check_region(recorded, region)
            at = region.end
    return regions


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEP_LISTS, returned=RETURNED)
def test_what_stands_for_launches_gives_their_bits(steps, returned):
    """In-place operators as functional ones, over the views and parts that were written before."""
    check_regions(*made_model(steps, returned))


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler here")
@settings(max_examples=6, deadline=None, derandomize=True)
@given(steps=STEP_LISTS, returned=RETURNED)
def test_compiled_programs_are_near_eager(steps, returned):
    model, inputs = made_model(steps, returned)
    with torch.no_grad():
        fused = offload.capture(model, *inputs)
        state = {name: one.clone() for name, one in model.state_dict().items()}
        execution = fused.load(fuse=True)
        for _ in range(2):
            given = [normal(4, 4), normal(4, 4)]
            model.load_state_dict(state)
            kept = [one.clone() for one in given]
            torch.manual_seed(0)
            expected = model(*kept)
            expected = [one.clone() for one in expected]
            expected_state = {name: one.clone() for name, one in model.state_dict().items()}
            model.load_state_dict(state)
            torch.manual_seed(0)
            got = execution(*given)
            for one, other in zip([*got, *given], [*expected, *kept], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
            for name, one in model.state_dict().items():
                torch.testing.assert_close(one, expected_state[name], rtol=1e-4, atol=1e-4)


class Cell(nn.Module):
    """Parts of a product, written one by one, as GRUCell writes them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = x.mm(y), y.mm(x)
        a, b, c = first.chunk(3, 1)
        p, q, r = second.chunk(3, 1)
        a, b = a.add_(p).sigmoid_(), b.add_(q).sigmoid_()
        c = c.mul_(a).add_(r).tanh_()
        return (x[:, :2] - c).mul_(b).add_(c)


class Chain(nn.Module):
    """A Value that is made and written as a whole, and shown."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        z = y.t()
        y.add_(1)
        seen = z[1:].clone()
        y.relu_().mul_(3)
        return y, seen


class Overlapping(nn.Module):
    """A read part is neither the written part nor disjoint from it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, :2].add_(1)
        y[1:, 1:] *= 3
        return y[:, 1:3] + 1


class Escaping(nn.Module):
    """Parts are written of a Value that is later used as a whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].add_(1)
        y[:, 1].index_fill_(0, torch.tensor([2]), 0.5)
        y[:, :2].copy_(x[:, 2:])
        return y.sort().values


class Foreign(nn.Module):
    """A part is written of a Value that is made elsewhere and used later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sort().values
        y[0].add_(1)
        return y


class Narrow(nn.Module):
    """An in-place operator keeps the dtype of its target."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.half()
        y.add_(x)
        return y * 2


@pytest.mark.parametrize(
    ("make", "shapes", "kept"),
    [
        (Cell, [(6, 6), (6, 6)], ["aten::mm", "aten::mm"]),
        (Chain, [(3, 4)], []),
        (Overlapping, [(4, 4)], []),
        (Escaping, [(4, 4)], ["aten::sort"]),
        (Foreign, [(4, 4)], ["aten::sort", "aten::add_.Tensor"]),
    ],
)
def test_writes_that_are_followed_and_that_are_not(make, shapes, kept):
    inputs = [normal(*shape) for shape in shapes]
    regions = check_regions(make(), inputs)
    launches = offload.capture(make(), *inputs).program.launches
    fused = {at for region in regions for at in range(region.first, region.end)}
    assert [launch.name for launch in launches if launch.index not in fused] == kept


def test_an_operator_that_rounds_to_what_it_writes_stays():
    regions = check_regions(Narrow(), [normal(4, 4)])
    program = offload.capture(Narrow(), normal(4, 4)).program
    names = {program.launches[at].name for one in regions for at in range(one.first, one.end)}
    assert names == {"aten::_to_copy", "aten::mul.Tensor"}
