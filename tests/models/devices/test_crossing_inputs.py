"""Inputs that are read in another memory: their layouts, and what is refused."""

import threading

import pytest
import torch
from apart import all_ways, apart, movable_tasks
from checks import normal
from copies import before_copies
from two_branches import TwoBranches

import offload


@torch.no_grad()
def test_a_written_view_of_a_tensor_that_requires_gradients_is_refused():
    def write(x, y):
        x.add_(1)
        return y.sin() * x

    captured = offload.capture(write, normal(4), normal(4))
    x = normal(2, 4).requires_grad_()
    with apart(captured.bound, {1: 1}) as run, captured.load() as single, torch.enable_grad():
        with torch.no_grad():
            row = x[0]
        for call in (single, run, run.submit):
            with pytest.raises(offload.BindingError, match="requires gradients"):
                call(row, normal(4))


@torch.no_grad()
def test_tensor_objects_may_change_after_the_submission():
    """Their memory at the submission is read, and torch refuses to resize it."""

    def model(x, y):
        return (x.sin() * 2 + y).cos(), x * y

    captured = offload.capture(model, normal(4), normal(4))
    for where in filter(lambda way: any(way.values()), all_ways(captured.program)):
        with apart(captured.bound, where) as run, offload.tasks() as t:
            x, y = normal(4), normal(4)
            kept = x.detach(), y.detach()
            expected, go_on = model(x, y), threading.Event()
            with before_copies(lambda _, go_on=go_on: go_on.wait(60)):
                ticket = run.after(t.submit(go_on.wait, 60)).submit(x, y)
                try:
                    for one in kept:
                        with pytest.raises(RuntimeError, match="not resizable"):
                            one.untyped_storage().resize_(0)
                    x.data = torch.zeros(4)
                    y.set_(torch.zeros(4))
                finally:
                    go_on.set()
                assert all(map(torch.equal, ticket.result(60), expected))


@torch.no_grad()
def test_torch_in_another_state_is_refused_wherever_launches_run():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, dict.fromkeys(range(5), 1)) as run:
        run(x)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(offload.BindingError, match="autocast on cpu"),
        ):
            run(x)
        with torch.inference_mode():
            assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_inputs_with_lazy_bits_in_another_memory():
    def turned(x):
        return (x * 2).abs() + 1, x.real + x.imag

    x = torch.randn(4, dtype=torch.complex64)
    for one in (x, x.conj(), x.resolve_conj()):
        captured = offload.capture(turned, one)
        for where in (dict.fromkeys(movable_tasks(captured.program), 1), {0: 1}):
            with apart(captured.bound, where) as run:
                assert all(map(torch.equal, run(one), turned(one)))
                with pytest.raises(offload.BindingError, match=r"args\[0\]"):
                    run(one.conj())


@torch.no_grad()
def test_inputs_that_are_expanded_or_have_gaps():
    x = normal(8, 8)
    for one in (x[:, ::2], x[:1].expand(4, 8), x[0, 0].expand(3), x[:0], x.t()[1:]):
        captured = offload.capture(lambda x: (x + 1).cos() * x, one)
        for where in all_ways(captured.program):
            with apart(captured.bound, where) as run:
                assert torch.equal(run(one), (one + 1).cos() * one)
