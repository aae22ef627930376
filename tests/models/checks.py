"""Helpers of the tests of models: a call against eager, and calls that are refused.

`check` records one call and replays others on a twin of the model: results, arguments, parameters,
buffers and the random generator must be left as eager leaves them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload

UNSEEN = pytest.mark.xfail(
    reason="a stated limit: nothing tells the recorder (README)", strict=True
)


class Call:
    """Arguments of one call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def copy(self) -> Call:
        return copy.deepcopy(self)

    def on(self, function: Callable[..., Any]) -> Any:
        return function(*self.args, **self.kwargs)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested arguments, results or objects."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "__dict__"):
        yield from tensors_in(vars(tree))


def assert_same(got: Any, expected: Any, where: str = "result", tolerance: float = 0.0) -> None:
    """Require the same nesting, and tensors equal in everything that a caller can see."""
    if not isinstance(expected, torch.Tensor):
        assert type(got) is type(expected), where
        if isinstance(expected, Mapping):
            assert list(got) == list(expected), where
            for key in expected:
                assert_same(got[key], expected[key], f"{where}[{key!r}]", tolerance)
        elif isinstance(expected, (list, tuple)):
            assert len(got) == len(expected), where
            for position, pair in enumerate(zip(got, expected, strict=True)):
                assert_same(*pair, f"{where}[{position}]", tolerance)
        elif any(True for _ in tensors_in(expected)):
            assert_same(vars(got), vars(expected), where, tolerance)
        else:
            assert got == expected, where
        return
    assert isinstance(got, torch.Tensor), where
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    steps = zip(got.stride(), expected.stride(), got.shape, strict=True)
    assert got.numel() == 0 or all(one == other for one, other, size in steps if size > 1), (
        f"{where}: strides {got.stride()} for {expected.stride()}"
    )
    bits = [(one.is_conj(), one.is_neg()) for one in (got, expected)]
    assert bits[0] == bits[1], f"{where}: conjugate and negative bits"
    torch.testing.assert_close(
        got.detach(),
        expected.detach(),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


def sharing(call: Call, result: Any) -> list[tuple[int, ...]]:
    """For each result tensor, return the arguments and other results that share its storage."""
    everything = [*tensors_in([call.args, call.kwargs]), *tensors_in(result)]
    places = [one.untyped_storage()._cdata for one in everything]
    return [
        tuple(position for position, other in enumerate(places) if other == place)
        for place, one in zip(places, everything, strict=True)
        if one.numel()
    ]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else {}


def run_eager(model: Callable[..., Any], call: Call, seed: int) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        result = call.on(model)
    return result, torch.get_rng_state()


def check(
    model: Callable[..., Any],
    *calls: Call,
    host_reads: str = "avoid",
    tolerance: float = 0.0,
    shares: bool = True,
) -> offload.Executable:
    """Record the first call, replay them all, and compare each with eager on a twin."""
    twin = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    own, theirs = calls[0].copy(), calls[0].copy()
    expected, generator = run_eager(twin, theirs, 11)
    torch.manual_seed(11)
    with torch.no_grad(), offload.capture(model, host_reads=host_reads) as captured:
        recorded = own.on(captured)
    assert_same(recorded, expected, "recorded result", tolerance)
    assert_same([own.args, own.kwargs], [theirs.args, theirs.kwargs], "arguments", tolerance)
    assert_same(state_of(model), state_of(twin), "state after recording", tolerance)
    assert torch.equal(torch.get_rng_state(), generator), "generator after recording"
    run = captured.load()
    for turn, call in enumerate((*calls, calls[0])):
        own, theirs = call.copy(), call.copy()
        expected, generator = run_eager(twin, theirs, 20 + turn)
        torch.manual_seed(20 + turn)
        got = own.on(run)
        label = f"replay {turn}"
        assert_same(got, expected, f"{label}: result", tolerance)
        assert_same(
            [own.args, own.kwargs], [theirs.args, theirs.kwargs], f"{label}: arguments", tolerance
        )
        assert_same(state_of(model), state_of(twin), f"{label}: state", tolerance)
        assert torch.equal(torch.get_rng_state(), generator), f"{label}: generator"
        assert all(not one.requires_grad for one in tensors_in(got) if not is_argument(one, own))
        if shares:
            assert sharing(own, got) == sharing(theirs, expected), f"{label}: shared storages"
    return run


def is_argument(tensor: torch.Tensor, call: Call) -> bool:
    return any(tensor is one for one in tensors_in([call.args, call.kwargs]))


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> offload.Captured:
    with torch.no_grad(), offload.capture(function) as captured:
        captured(*args, **kwargs)
    return captured


def refusal(function: Callable[..., Any], *args: Any, host_reads: str = "avoid") -> str:
    """Return the message of the CaptureError that recording this call raises."""
    with (
        pytest.raises(offload.CaptureError) as caught,
        torch.no_grad(),
        offload.capture(function, host_reads=host_reads) as captured,
    ):
        captured(*args)
    return str(caught.value)


@contextlib.contextmanager
def binding_refused(run: offload.Executable, given: list[Any], *parts: str) -> Iterator[None]:
    """Require a BindingError whose message holds every part; no argument changed, nothing ran."""
    watched = [
        one for one in tensors_in(given) if one.layout is torch.strided and one.device.type == "cpu"
    ]
    before = [one.detach().clone() for one in watched]
    versions = [one._version for one in watched]
    weights = [one for held in run.bound.bindings.weights.values() for one in held]
    weights_before = [one.detach().clone() for one in weights]
    generator = torch.get_rng_state()
    n_executions = run.last_execution.n_executions
    with pytest.raises(offload.BindingError) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert isinstance(caught.value, ValueError)
    for one, other in zip(watched, before, strict=True):
        assert torch.equal(one.detach(), other)
    for one, other in zip(weights, weights_before, strict=True):
        assert torch.equal(one.detach(), other)
    assert [one._version for one in watched] == versions
    assert torch.equal(torch.get_rng_state(), generator)
    assert run.last_execution.n_executions == n_executions


def calls_of(run: offload.Executable) -> list[Callable[..., Any]]:
    """The synchronous call and the submission, which must make the same checks."""
    return [run, lambda *args, **kwargs: run.submit(*args, **kwargs).result()]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def normals(count: int, *shape: int) -> list[Call]:
    return [Call(normal(*shape)) for _ in range(count)]


def shifted(tensor: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of this shape, the second offset by this many elements from the first."""
    base = torch.randn(tensor.numel() + elements)
    return (
        base[: tensor.numel()].view(tensor.shape),
        base[elements : elements + tensor.numel()].view(tensor.shape),
    )


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Weights(nn.Module):
    """Returns its weights as they are and through views."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(3, 2))
        self.register_buffer("steps", normal(4))

    def forward(self, x):
        return x + 1, self.weight, self.weight.t(), self.steps[1:], self.steps
