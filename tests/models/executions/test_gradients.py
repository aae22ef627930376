"""Gradients: executions record none, and raise or warn where eager would record."""

import warnings

import pytest
import torch
from checks import assert_same, capture, normal, refusal
from torch import nn

import offload


def leaf(*shape: int) -> torch.Tensor:
    return normal(*shape).requires_grad_()


# ---- at an execution -----------------------------------------------------------------------------


def test_an_input_that_requires_gradients_is_refused_in_grad_mode():
    captured = capture(torch.sin, normal(3))
    run, x = captured.load(), leaf(3)
    for call in (captured, run, run.submit):
        with pytest.raises(offload.BindingError, match=r"args\[0\]: it requires .*no_grad"):
            call(x)
        with pytest.raises(offload.BindingError, match="requires gradients"):
            call(x * 2)  # which is no leaf
    assert run.last_execution.n_executions == 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(run(x), x.detach().sin())
    assert_same(run(x.detach()), x.detach().sin())


def test_the_grad_mode_of_a_submission_is_the_callers():
    run, x = capture(torch.sin, normal(3)).load(), leaf(3)
    with torch.no_grad():
        ticket = run.submit(x)
    assert_same(ticket.result(), x.detach().sin())


def test_writes_into_an_autograd_graph_are_refused():
    run = capture(lambda x: x.mul_(2), normal(4)).load()
    x = leaf(4)
    with torch.no_grad():
        view = x.view(4)
    before = x.detach().clone()
    for given in (x, x * 1, view):
        with pytest.raises(offload.BindingError, match=r"requires? gradients.*detach"):
            run(given)
    assert_same(x.detach(), before)
    with torch.no_grad():
        run(x)
    assert_same(x.detach(), before * 2)


def test_a_write_without_gradients_counts_for_what_was_saved_for_backward():
    run, x, y = capture(lambda x: x.mul_(2), normal(4)).load(), normal(4), leaf(4)
    product = (x * y).sum()
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_buffers_in_an_autograd_graph_are_refused():
    run = capture(torch.sin, normal(16)).load()
    held = leaf(16)
    with torch.no_grad():
        view = held.view(16)
    for out in (held, view):
        with pytest.raises(offload.BindingError, match=r"out.*gradients"):
            run(normal(16), out=out)


# ---- weights -------------------------------------------------------------------------------------


def test_one_warning_of_a_model_in_training_mode():
    model, x = nn.Linear(3, 3), normal(2, 3)
    run = capture(model, x).load()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(x)
        run(x)
        run.submit(x).wait()
    assert [one.filename for one in caught] == [__file__]
    assert "executions record no gradients" in str(caught[0].message)


@pytest.mark.parametrize("kind", ["evaluation", "frozen"])
def test_no_warning_where_nobody_trains(kind):
    model, x = nn.Linear(3, 3).train(kind == "frozen"), normal(2, 3)
    model.requires_grad_(kind != "frozen")
    captured = capture(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(x)


# ---- at a recording ------------------------------------------------------------------------------


def test_a_recorded_input_that_requires_gradients_is_refused_in_grad_mode():
    x = leaf(3)
    with pytest.raises(offload.CaptureError, match=r"args\[0\] requires gradients"):
        offload.capture(torch.sin, x)
    model = nn.Identity()
    with pytest.raises(offload.CaptureError, match=r"torch\.no_grad"), offload.capture(model):
        model(x)
    with torch.no_grad():
        captured = capture(torch.sin, x)
    assert_same(captured(x.detach()), x.detach().sin())


class Step(nn.Module):
    """A forward that trains, or takes gradients in some other way."""

    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.how = how

    def forward(self, x):
        with torch.enable_grad():
            loss = self.linear(x).square().sum()
            if self.how == "grad":
                return torch.autograd.grad(loss, list(self.linear.parameters()))
            if self.how == "assigned":
                self.linear.weight.grad = torch.autograd.grad(loss, self.linear.weight)[0]
            elif self.how == "dropped":
                self.linear.zero_grad(set_to_none=True)
            else:
                loss.backward()
        return loss.detach()


@pytest.mark.parametrize("how", ["made", "accumulated", "assigned", "dropped"])
def test_a_call_that_changes_gradients_is_refused(how):
    model, x = Step(how), normal(2, 3)
    if how in ("accumulated", "dropped"):
        for one in model.parameters():
            one.grad = torch.ones_like(one)
    message = refusal(model, x)
    assert "changed the gradient of linear." in message
    assert "torch.autograd.grad" in message


def test_the_gradient_of_an_input_is_noticed():
    def function(x):
        with torch.enable_grad():
            x.square().sum().backward()
        return x * 2

    x = leaf(3)
    with torch.no_grad():
        assert "changed the gradient of args[0]" in refusal(function, x)


def test_gradients_in_the_result_are_supported():
    model, x = Step("grad"), normal(2, 3)
    captured, other = capture(model, x), normal(2, 3)
    assert_same(list(captured(other)), list(model(other)), tolerance=1e-6)
    assert model.linear.weight.grad is None
