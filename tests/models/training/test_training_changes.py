"""Changes between steps: seen as in eager, or refused; never ignored."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn
from training import (
    adamw,
    adding_step,
    assert_alike,
    captured_step,
    mse_step,
    twins,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(4, 8)


class Pair(training.Pair):
    def __init__(self, make_step=mse_step, optimizer=adamw, model=None) -> None:
        super().__init__(model or net(), batch, make_step, optimizer)


# ---- leaves and modules --------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


def test_a_parameter_that_is_trained_later():
    pair = Pair(model=half_frozen())
    weight = pair.ours.model[0].weight
    weight.requires_grad_()
    pair.refused(r"model\.0\.weight: expected a tensor that requires no gradients.*it trained")
    weight.requires_grad_(False)
    pair.steps()


def test_a_frozen_parameter_that_is_given_a_gradient():
    """Optimizers step every parameter that has a gradient."""
    pair = Pair(adding_step, model=half_frozen())
    weight = pair.ours.model[0].weight
    weight.grad = torch.ones_like(weight)
    pair.refused(r"gradient of model\.0\.weight: expected None")
    weight.grad = None
    pair.steps()


def test_a_step_that_freezes_for_a_while_and_leaves_it_so():
    """Such as a step that trains two models in turn."""

    def make_step(model, optimizer):
        def step(x, target):
            first, _, second = model
            first.requires_grad_()
            optimizer.zero_grad()
            second.requires_grad_(False)
            F.mse_loss(model(x), target).backward()
            optimizer.step()
            first.requires_grad_(False)
            second.requires_grad_()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    pair = Pair(make_step)
    pair.steps(6)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_modules_that_come_later(register):
    pair = Pair()
    handle = getattr(pair.ours.model[0], register)(lambda *_: None)
    pair.refused(r"a Linear has other hooks \(forward\)")
    handle.remove()
    pair.steps()


def test_hooks_of_the_accumulation_that_come_later():
    pair = Pair()
    weight = pair.ours.model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    handle = node.register_prehook(lambda gradients: gradients)
    pair.refused(r"the gradient of model\.0\.weight has a hook")
    handle.remove()
    del node, handle
    pair.steps()


def test_a_submodule_that_is_replaced():
    pair = Pair()
    tanh = pair.ours.model[1]
    pair.ours.model[1] = nn.ReLU()
    pair.refused("1 of a Sequential: expected the submodules of the recorded step")
    pair.ours.model[1] = tanh
    pair.steps()


@pytest.mark.parametrize(
    ("layer", "name", "value"),
    [(nn.Dropout(0.5), "p", 0.25), (nn.BatchNorm1d(8), "momentum", None)],
)
def test_a_number_of_a_layer_that_is_another(layer, name, value):
    pair = Pair(model=nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)))
    recorded = getattr(pair.ours.model[1], name)
    setattr(pair.ours.model[1], name, value)
    pair.refused(rf"{name} of a \w+: expected {recorded}, as in the recorded step, got ")
    setattr(pair.ours.model[1], name, float(str(recorded)))
    pair.steps()


def test_an_attribute_of_a_model_that_no_layer_of_torch_reads():
    pair = Pair()
    for number in range(3):
        pair.ours.model[0].step_of_the_trainer = number
        pair.ours.model.best = 0.5 * number
        pair.steps(1)


# ---- state and hyperparameters -------------------------------------------------------------------


def test_states_of_two_parameters_that_change_places():
    pair = Pair()
    for side in pair.sides:
        first, second = side.model.parameters()
        state = side.optimizer.state
        state[first], state[second] = state[second], state[first]
    pair.steps()
    for side in pair.sides:
        first, second = (side.optimizer.state[one] for one in side.model.parameters())
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
    pair.steps()


def test_state_that_comes_to_be_shared():
    pair = Pair()
    first, second = (pair.ours.optimizer.state[one] for one in pair.ours.model.parameters())
    own = second["exp_avg"]
    second["exp_avg"] = first["exp_avg"]
    pair.refused(r"exp_avg of model\.2\.weight .*expected a tensor of its own.*model\.0\.weight")
    second["exp_avg"] = own
    pair.steps()


@pytest.mark.parametrize("of", ["parameter", "gradient"])
def test_state_that_comes_to_be_memory_that_steps_change(of):
    """Eager mode would go on to read the alias, which a copy of its content is not."""
    pair = Pair()
    first = next(pair.ours.model.parameters())
    state = pair.ours.optimizer.state[first]
    own = state["exp_avg"]
    state["exp_avg"] = first.detach() if of == "parameter" else first.grad
    pair.refused(r"exp_avg of model\.0\.weight .*got memory of a parameter or gradient")
    state["exp_avg"] = own
    pair.steps()


def two_groups(parameters):
    first, second = parameters
    groups = [{"params": [first]}, {"params": [second]}]
    return torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True)


def test_a_learning_rate_of_two_groups_that_becomes_two():
    pair = Pair(optimizer=two_groups)
    groups = pair.ours.optimizer.param_groups
    shared = groups[0]["lr"]
    groups[1]["lr"] = torch.tensor(0.1)
    pair.refused(r"\[1\]\['lr'\]: expected the tensor that optimizer\.param_groups\[0\]\['lr'\] is")
    groups[1]["lr"] = shared
    pair.steps()
    for side in pair.sides:
        other = torch.tensor(0.1)
        for group in side.optimizer.param_groups:
            group["lr"] = other
    pair.steps()


# ---- tickets -------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128))


def wide_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 128), torch.randn(64, 128)


@pytest.mark.parametrize("make_step", [mse_step, adding_step])
def test_what_is_put_in_order_waits_for_tickets(make_step):
    """State that is loaded, and gradients that are dropped, while steps are in the queue."""
    ours, eager = twins(wide(), adamw, make_step)
    given = [wide_batch() for _ in range(6)]
    run = captured_step(ours.step, *given[0]).load()
    eager.step(*given[0])
    saved = [copy.deepcopy(side.optimizer.state_dict()) for side in (ours, eager)]
    for _ in range(3):
        tickets = [run.submit(*one) for one in given]
        ours.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        ours.optimizer.zero_grad()
        tickets += [run.submit(*one) for one in given[:2]]
        expected = [eager.step(*one) for one in given]
        eager.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        eager.optimizer.zero_grad()
        expected += [eager.step(*one) for one in given[:2]]
        for ticket, loss in zip(tickets, expected, strict=True):
            assert torch.equal(ticket.result(), loss)
        assert_alike(ours, eager)


# ---- where comparisons run -----------------------------------------------------------------------


def frames_of(call, *given) -> list[str]:
    """The Python functions that run in a call."""
    names: list[str] = []
    sys.setprofile(
        lambda frame, event, _: names.append(frame.f_code.co_qualname) if event == "call" else None
    )
    try:
        call(*given)
    finally:
        sys.setprofile(None)
    return names


def test_an_execution_where_nothing_changed_runs_no_python():
    pair = Pair(adding_step)
    pair.steps(2)
    assert frames_of(pair.run, *batch()) == []
    pair.ours.optimizer.zero_grad()  # which native code repairs
    assert frames_of(pair.run, *batch()) == []
    pair.ours.optimizer.param_groups[0]["lr"] = float("0.001")  # equal, and another object
    assert frames_of(pair.run, *batch()) == []
    pair.ours.optimizer.load_state_dict(pair.ours.optimizer.state_dict())
    assert any("TrainingGuard" in one for one in frames_of(pair.run, *batch()))
    assert frames_of(pair.run, *batch()) == []


def test_gradients_that_are_dropped_after_the_load():
    pair = Pair(adding_step)
    for _ in range(3):
        for side in pair.sides:
            side.optimizer.zero_grad()
        pair.steps()


def test_a_step_that_the_model_holds_is_collected():
    """Watched objects are visible to Python's garbage collector."""
    pair = Pair()
    pair.ours.model[0].run = pair.run  # a cycle through the watched objects of the executable
    references = [weakref.ref(one) for one in (pair.ours.model, pair.ours.optimizer, pair.run)]
    del pair
    gc.collect()
    assert [one() for one in references] == [None, None, None]
