"""Refusals of `torch.compile(model, backend="offload")`, and how the user sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import normal
from compiling import compiled
from torch import nn

import offload
from offload.integrations.torch_compile import backend

pytestmark = pytest.mark.usefixtures("compiler_reset")

# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "x"),
    [(nn.Linear(2, 2), normal(1, 2)), (torch.sin, normal(2).requires_grad_())],
    ids=["parameter", "input"],
)
def test_gradients_are_refused(model, x):
    run = compiled(model)
    with pytest.raises(offload.CaptureError, match=r"torch\.no_grad"):
        run(x)
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
        assert torch.equal(run(x), model(x))
    with pytest.raises(offload.CaptureError, match=r"torch\.no_grad"):
        run(x)


def test_gradients_held_by_the_graph_are_refused():
    model, x = nn.Linear(2, 2), normal(1, 2)
    run = backend(torch.fx.symbolic_trace(model), [x])
    with torch.no_grad():
        run(x)
    with pytest.raises(offload.CaptureError, match=r"torch\.no_grad"):
        run(x)


def test_nothing_requires_gradients():
    run, x = compiled(torch.sin), normal(2)
    for _ in range(2):
        assert torch.equal(run(x), x.sin())


def test_no_grad_inside():
    model, x = nn.Linear(2, 2), normal(1, 2)
    run = compiled(torch.no_grad()(model.forward))
    for _ in range(2):
        assert torch.equal(run(x), model(x))
        assert not run(x).requires_grad
    assert torch.is_grad_enabled()


def test_enable_grad_inside():
    def function(x):
        with torch.enable_grad():
            return x * 2

    with torch.no_grad():
        with pytest.raises(offload.CaptureError, match=r"torch\.enable_grad"):
            compiled(function)(normal(2).requires_grad_())
        x = normal(2)
        assert torch.equal(compiled(function)(x), x * 2)


@pytest.mark.parametrize("enabled", [True, False])
def test_switching_gradients_for_good_is_refused(enabled):
    def function(x):
        torch.set_grad_enabled(enabled)
        return x + 1

    with (
        torch.set_grad_enabled(not enabled),
        pytest.raises(offload.CaptureError, match=f"switched {'on' if enabled else 'off'}"),
    ):
        compiled(function)(normal(2))


# ---- refusals reach the user unchanged -----------------------------------------------------------


@pytest.mark.parametrize("suppress", [False, True])
def test_refusal_names_operator_and_line(suppress):
    """Even where torch would run code in eager that a backend cannot compile."""

    def function(x):
        return (x * 2).nonzero()

    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, suppress_errors=suppress),
        torch.no_grad(),
        pytest.raises(
            offload.CaptureError,
            match=rf"test_compile_refusals\.py:{line_of(function) + 1}: .*zero",
        ),
    ):
        compiled(function)(normal(3))


def test_guarded_reads():
    run = compiled(lambda x: x * x.max().item(), options={"host_reads": "guard"})
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for x in (torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0])):
            assert torch.equal(run(x), x * 3)
        with pytest.raises(offload.BindingError):
            run(torch.tensor([1.0, 4.0]))


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


def test_launches_know_the_users_line(graphs):
    def function(x):
        y = x + 1
        return y.exp()

    with torch.no_grad():
        compiled(function)(normal(2))
    (captured,) = graphs[0]._runs.values()
    begin = line_of(function)
    here = Path(__file__).relative_to(Path.cwd()).as_posix()
    sources = [launch.source for launch in captured.program.launches]
    assert sources == [f"{here}:{begin + 1}", f"{here}:{begin + 2}"]


def test_higher_order_operators_are_refused():
    def function(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with torch.no_grad(), pytest.raises(offload.CaptureError, match="higher-order"):
        compiled(function)(normal(3))


def test_errors_of_operators_are_their_own():
    def function(x, index):
        return x.index_select(0, index)

    run, x = compiled(function), normal(3)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(IndexError, match=r"^index out of range"):
                run(x, torch.tensor([7]))
        assert torch.equal(run(x, torch.tensor([1])), x[1:2])
        with pytest.raises(offload.ExecutionError, match="index out of range"):
            run(x, torch.tensor([7]))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"mode": "reduce-overhead"}, "reduce-overhead"),
        ({"options": {"limit": 3}}, "limit"),
        ({"options": {"host_reads": "allow"}}, "'avoid', 'guard'"),
        ({"options": {"capture_limit": 0}}, "1 or more"),
        ({"options": {"capture_limit": "9"}}, "'9'"),
        ({"options": {"beyond_limit": "warn"}}, "eager, raise, got 'warn'"),
        ({"options": {"fuse": "always"}}, "True, False or 'auto', got 'always'"),
    ],
)
def test_unknown_settings_are_refused(settings, part):
    with torch.no_grad(), pytest.raises(offload.CaptureError, match=part):
        compiled(torch.sin, **settings)(normal(2))


def test_compiled_call_inside_a_captured_call():
    """torch compiles nothing under the recorder's modes, so its launches are recorded."""
    run = compiled(torch.sin)
    with torch.no_grad():
        run(normal(2))
        captured = offload.capture(lambda x: run(x) + 1, normal(2))
        x = normal(2)
        assert torch.equal(captured(x), x.sin() + 1)
        model, x = nn.Linear(2, 2), normal(1, 2)
        assert torch.equal(offload.capture(compiled(model), x)(x), model(x))
    assert len(captured.program.launches) == 2
