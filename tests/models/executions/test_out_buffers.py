"""Buffers given as `out`: written in place or by copy, and refused before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import binding_refused, calls_of, shifted

import offload

OUT_LAYOUTS = {
    "contiguous": lambda: torch.zeros(4, 6),
    "offset": lambda: torch.zeros(30)[5:29].view(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "columns": lambda: torch.zeros(4, 12)[:, ::2],
    "rows": lambda: torch.zeros(8, 6)[::2],
}


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: (x * 2 + 1).t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2] * 1,
        lambda x: (torch.cat([x, x], 1) * 2)[:, :6],
        lambda x: (torch.cat([x, x], 0) * 2)[::2],
        lambda x: (torch.cat([x, x], 1) * 2)[:, ::2],
        lambda x: torch.stack([x, x], -1).exp()[..., 1],
        lambda x: x.sort(dim=1)[0],
        lambda x: x.sum(1, keepdim=True).expand(4, 6),
        lambda x: x.clone(),
    ],
    ids=[
        "whole",
        "transposed",
        "copied",
        "first columns",
        "every other row",
        "every other column",
        "interleaved",
        "of several",
        "expanded",
        "clone",
    ],
)
def test_out_writes_exactly_its_own_elements(function, layout):
    """In place or by copy, whatever the strides of result and buffer; the gaps keep their bytes."""
    with offload.capture(function) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    for _ in range(2):
        x = torch.randn(4, 6)
        out = OUT_LAYOUTS[layout]()
        everything_there = torch.empty(0).set_(out.untyped_storage())
        everything_there.fill_(99.0)
        expected_there = everything_there.clone()
        torch.as_strided(expected_there, out.shape, out.stride(), out.storage_offset()).copy_(
            function(x)
        )
        got = run(x, out=out)
        assert got is out
        assert torch.equal(everything_there, expected_there)
        copied = run.last_execution.bytes_copied
        assert copied in (0, out.numel() * 4)


def test_out_is_used_in_place():
    with offload.capture(lambda x: x * 2 + 1) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x, out = torch.randn(4, 6), torch.empty(4, 6)
    assert run(x, out=out).data_ptr() == out.data_ptr()
    assert run.last_execution.bytes_copied == 0
    transposed = torch.empty(6, 4).t()
    assert torch.equal(run(x, out=transposed), x * 2 + 1)
    assert run.last_execution.bytes_copied == x.numel() * 4


def test_out_of_an_operator_that_allocates():
    """A result that only its operator can allocate is copied into the buffer, and counted."""
    with offload.capture(torch.nonzero_static) as captured:
        captured(torch.ones(4), size=4)
    run = captured.load()
    x, out = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.zeros(4, 1, dtype=torch.int64)
    got = run(x, size=4, out=out)
    assert torch.equal(out, torch.nonzero_static(x, size=4))
    assert got is out


def test_out_changes_the_version():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(4))
    out = torch.empty(4)
    version = out._version
    captured.load()(torch.randn(4), out=out)
    assert out._version > version


def test_nested_out():
    with offload.capture(lambda x: {"a": x * 2, "b": [x + 1, None, (x - 1,)]}) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x = torch.randn(4)
    a, deep = torch.empty(4), torch.empty(4)
    got = run(x, out={"a": a, "b": [None, None, (deep,)]})
    assert got["a"] is a
    assert got["b"][2][0] is deep
    assert torch.equal(a, x * 2)
    assert torch.equal(deep, x - 1)
    assert torch.equal(got["b"][0], x + 1)
    assert got["b"][1] is None
    only_a = run(x, out={"a": a})
    assert only_a["a"] is a


@dataclasses.dataclass
class Scores:
    """A result with a number beside its tensors."""

    first: torch.Tensor
    others: list[torch.Tensor]
    number: int = 7


def test_out_as_the_recorded_class():
    """A model that returns a dataclass is given one, also with what is not a tensor in it."""
    run = offload.capture(lambda x: Scores(x + 1, [x * 2, x - 1]), torch.zeros(3)).load()
    x = torch.randn(3)
    buffers = Scores(torch.empty(3), [torch.empty(3), None])
    for result in (run(x, out=buffers), run.submit(x, out=buffers).result()):
        assert type(result) is Scores
        assert result.number == 7
        assert result.first is buffers.first
        assert result.others[0] is buffers.others[0]
        assert buffers.first.equal(x + 1)
        assert result.others[1].equal(x - 1)
    for out in (torch.empty(3), Scores(torch.empty(3), [torch.empty(3)]), [torch.empty(3)] * 3):
        with pytest.raises(offload.BindingError, match=r"expected buffers nested like the result"):
            run(x, out=out)


def test_same_tensor_twice_with_out():
    def function(x):
        y = x * 2
        return y, y, y[1:]

    with offload.capture(function) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x, out, other = torch.randn(4), torch.empty(4), torch.empty(4)
    got = run(x, out=(out, out, None))
    assert got[0] is out
    assert got[1] is out
    assert torch.equal(out, x * 2)
    assert torch.equal(got[2], x[1:] * 2)
    with pytest.raises(offload.BindingError, match="two buffers"):
        run(x, out=(out, other, None))


# ---- refused -------------------------------------------------------------------------------------

OVERLAPPING_OUT: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, list[str]]]] = {
    "an input": lambda a, b: ((a, None), ["out[0]", "args[0]"]),
    "the other input": lambda a, b: ((None, b), ["out[1]", "args[1]"]),
    "a part of an input": lambda a, b: (
        (a.as_strided((4,), (0,), 1), None),
        ["out[0]"],
    ),
    "each other": lambda a, b: (shifted(a, 2), ["out[0]", "out[1]"]),
    "the same buffer": lambda a, b: ((torch.zeros(4),) * 2, ["out[0]", "out[1]"]),
    "itself": lambda a, b: ((torch.zeros(1).expand(4), None), ["out[0]"]),
}


@pytest.mark.parametrize("kind", OVERLAPPING_OUT)
def test_out_that_overlaps(two_results, kind):
    for call in calls_of(two_results):
        a, b = torch.randn(5)[1:], torch.randn(4)
        buffers, parts = OVERLAPPING_OUT[kind](a, b)
        with binding_refused(two_results, [a, b, buffers], *parts):
            call(a, b, out=buffers)


def test_out_of_another_kind(two_results):
    a, b = torch.randn(4), torch.randn(4)
    fine = torch.zeros(4)
    for bad, parts in [
        ((torch.zeros(5), None), ["out[0]", "[4]", "[5]"]),
        ((None, torch.zeros(4, dtype=torch.float64)), ["out[1]", "float32", "float64"]),
        ((torch.zeros(4, device="meta"), None), ["out[0]", "meta"]),
        ((torch.zeros(4, requires_grad=True), None), ["out[0]", "gradients"]),
        ((torch.zeros(4).to_sparse(), None), ["out[0]", "strided"]),
        ((fine,), ["out", "2"]),
        ((fine, fine.clone(), fine.clone()), ["out", "2"]),
        (fine, ["out", "Tensor"]),
        ((fine, 3), ["out[1]", "int"]),
        ({"a": fine}, ["out"]),
    ]:
        with binding_refused(two_results, [a, b, bad], *parts):
            two_results(a, b, out=bad)
    got = two_results(a, b, out=(fine, None))
    assert torch.equal(fine, a + b)
    assert got[0] is fine


def test_out_for_a_result_that_is_an_alias(model, run):
    args, kwargs = model.arguments()
    buffer = torch.zeros(4)
    with binding_refused(run, [args, kwargs, buffer], "out[2]", "args[1]"):
        run(*args, **kwargs, out=(None, None, buffer))
    with offload.capture(lambda x: (x * 1, model.steps)) as captured:
        captured(torch.randn(2))
    other = captured.load()
    x = torch.randn(2)
    with binding_refused(other, [x, buffer], "out[1]"):
        other(x, out=(None, buffer))


def test_out_that_overlaps_a_weight(model, run):
    args, kwargs = model.arguments()
    out = (None, model.first.bias.detach()[:2], None)
    with binding_refused(run, [args, kwargs], "out[1]", "first.bias"):
        run(*args, **kwargs, out=out)


class Writes(torch.nn.Module):
    """Names its parameters as a call of an executable does."""

    def forward(self, x, out=None, *, feature_map=None):
        return x + (0 if out is None else out) + (0 if feature_map is None else feature_map)


@pytest.mark.parametrize("name", ["out", "feature_map"])
@pytest.mark.parametrize("model", [Writes(), Writes().forward, lambda x, **rest: rest.popitem()[1]])
def test_parameters_that_an_execution_would_take_for_itself(model, name):
    x = torch.ones(2)
    with (
        pytest.raises(offload.CaptureError, match=f"'{name}'.*rename"),
        offload.capture(model) as captured,
    ):
        captured(x, **{name: torch.ones(2)})


def test_such_a_parameter_by_position_or_left_out():
    x = torch.ones(2)
    with pytest.raises(offload.CaptureError, match="'out'"), offload.capture(Writes()) as captured:
        captured(x, torch.ones(2))
    with offload.capture(Writes()) as captured:
        captured(x)
    buffer = torch.empty(2)
    assert captured(x * 2, out=buffer) is buffer
    assert torch.equal(buffer, x * 2)
