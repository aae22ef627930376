"""torch's optimizers in recorded steps: with eager's bits, or refused with the option to set."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from training import batch, batches, check, mlp, mse_step

import offload

RECORDED = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True, "maximize": True},
    ],
    "Adam": [
        {},
        {"amsgrad": True, "weight_decay": 0.1},
        {"amsgrad": True, "foreach": True},
        {"foreach": True, "maximize": True},
        {"fused": True},
    ],
    "AdamW": [{}, {"foreach": True}, {"fused": True, "amsgrad": True}],
    "Adagrad": [
        {"lr_decay": 0.1},
        {"fused": True},
        {"foreach": True, "lr_decay": 0.1},
        {"foreach": True, "maximize": True, "weight_decay": 0.1},
    ],
    "Adamax": [{}, {"foreach": True}, {"foreach": True, "maximize": True, "weight_decay": 0.1}],
    "ASGD": [
        {"foreach": True},
        {"foreach": True, "t0": 5.0, "lr": 0.1, "lambd": 0.1},  # averages from the seventh step on
        {"foreach": True, "t0": 3.0, "maximize": True, "weight_decay": 0.1},
    ],
    "NAdam": [{}, {"foreach": True}],
    "RMSprop": [{"momentum": 0.9}, {"foreach": True, "centered": True}],
    "Adadelta": [{}, {"foreach": True}],
    "Rprop": [{}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [(name, one) for name, given in RECORDED.items() for one in given]
)
def test_recorded(name, options):
    make = getattr(torch.optim, name)
    check(mlp(), lambda parameters: make(parameters, **options), mse_step, batches())


RADAM = [
    {},
    {"weight_decay": 0.1},
    {"foreach": True},
    {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1},
    {"maximize": True, "lr": 0.05},
]


@pytest.mark.parametrize("options", RADAM)
def test_an_optimizer_that_goes_another_way_in_its_first_steps(options):
    def make(parameters):
        return torch.optim.RAdam(parameters, **options)

    check(mlp(), make, mse_step, batches(), n_before=6)
    model = mlp()
    optimizer = make(model.parameters())
    step = mse_step(model, optimizer)
    with pytest.raises(offload.CaptureError, match="make some steps before the capture"):
        offload.capture(step, *batch(), training=True)


def test_a_counter_that_goes_back_to_the_first_steps_is_noticed_before_anything_is_written():
    model = mlp()
    optimizer = torch.optim.RAdam(model.parameters())
    step = mse_step(model, optimizer)
    for _ in range(6):
        step(*batch())
    run = offload.capture(step, *batch(), training=True).load()
    run(*batch())
    before = [one.detach().clone() for one in model.parameters()]
    for state in optimizer.state.values():
        state["step"].fill_(2.0)
    with pytest.raises(offload.BindingError, match="a step counter of optimizer, at least its"):
        run(*batch())
    assert all(map(torch.equal, before, model.parameters()))
    for state in optimizer.state.values():
        state["step"].fill_(100.0)
    run(*batch())


def test_an_optimizer_of_some_parameters():
    check(
        mlp(),
        lambda given: torch.optim.Muon([one for one in given if one.dim() == 2]),
        mse_step,
        batches(),
    )


RATE = torch.tensor(0.01)

# They branch on a counter, or use numbers where torch accepts no tensors.
REFUSED = [
    ("ASGD", {}, r"give the optimizer foreach=True; or leave its step out"),
    ("Adafactor", {}, r"leave its step out of the captured call"),
    ("AdamW", {"lr": RATE}, r"give the optimizer fused=True; or leave its step out"),
    ("SGD", {"lr": RATE}, r"give the optimizer fused=True; or leave"),
    ("RMSprop", {"lr": RATE}, r"give lr as a number, and capture again where it changes"),
    ("ASGD", {"lr": RATE}, r"give the optimizer foreach=True; or leave"),
    (
        "Adam",
        {"lr": RATE, "betas": (torch.tensor(0.9), torch.tensor(0.99)), "fused": True},
        r"give betas as numbers, or leave its step out",
    ),
]


@pytest.mark.parametrize(("name", "options", "advice"), REFUSED)
def test_refused_with_what_to_set(name, options, advice):
    model = mlp()
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    with pytest.raises(offload.CaptureError, match=f"{name} reads.*repeat: {advice}"):
        offload.capture(mse_step(model, optimizer), *batch(), training=True)


def test_a_step_that_is_made_behind_each_execution():
    """The advice for optimizers that read on the host."""
    model = mlp()
    twin = copy.deepcopy(model)
    sides = []
    for one in (model, twin):
        optimizer = torch.optim.RAdam(one.parameters())

        def gradients(x, target, one=one, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(one(x), target)
            loss.backward()
            return loss.detach()

        sides.append((gradients, optimizer))
    (ours, optimizer), (eager, other) = sides
    given = batches()
    run = offload.capture(ours, *given[0], training=True).load()
    eager(*given[0])
    for number in range(20):
        optimizer.step()
        other.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        batch = given[number % 3]
        assert torch.equal(run(*batch), eager(*batch))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_decides_how_often_it_calls_its_closure(line_search):
    """LBFGS is refused in the step, and calls an executable by its closure."""
    model = mlp()
    sides = []
    for one in (model, copy.deepcopy(model)):
        optimizer = torch.optim.LBFGS(one.parameters(), max_iter=5, line_search_fn=line_search)

        def gradients(x, target, one=one, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(one(x), target)
            loss.backward()
            return loss.detach()

        sides.append((one, gradients, optimizer))
    (_, ours, optimizer), (twin, eager, other) = sides

    def step(x, target):
        return optimizer.step(lambda: ours(x, target))

    given = batch()
    with pytest.raises(offload.CaptureError, match=r"LBFGS reads.*with a closure that executes"):
        offload.capture(step, *given, training=True)
    model.load_state_dict(twin.state_dict())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search)
    run = offload.capture(ours, *given, training=True).load()
    for given in batches() * 2:
        got = optimizer.step(lambda given=given: run(*given))
        expected = other.step(lambda given=given: eager(*given))
        assert torch.equal(got, expected)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_groups_with_hyperparameters_of_their_own():
    def optimizer(parameters):
        weight, *others = parameters
        groups = [{"params": [weight], "lr": 0.01}, {"params": others, "betas": (0.5, 0.9)}]
        return torch.optim.AdamW(groups, lr=1e-3)

    captured = check(mlp(), optimizer, mse_step, batches())
    assert captured.bindings.before_execution is not None


def test_parameters_in_float64_and_bfloat16():
    for dtype in (torch.float64, torch.bfloat16):
        given = [tuple(one.to(dtype) for one in batch) for batch in batches()]
        check(mlp().to(dtype), torch.optim.AdamW, mse_step, given)


class Momentum(torch.optim.Optimizer):
    """A user's optimizer, which keeps its state in tensors that it writes in place, or not."""

    def __init__(self, parameters, how="in place"):
        self.how = how
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["mean"] = torch.zeros_like(one)
                    state["count"] = 0
                if self.how == "anew":
                    state["mean"] = state["mean"] * 0.9 + one.grad
                else:
                    state["mean"].mul_(0.9).add_(one.grad)
                if self.how == "counting":
                    state["count"] += 1
                one.sub_(state["mean"], alpha=group["lr"])


def test_an_optimizer_of_ones_own():
    check(mlp(), Momentum, mse_step, batches())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("anew", r"mean of model\.0\.weight \(state of optimizer\) in each call"),
        ("counting", r"'count' of model\.0\.weight.*Python number \(1 became 2\).*a tensor"),
    ],
)
def test_state_that_is_not_written_in_place_is_refused(how, message):
    model = mlp()
    optimizer = Momentum(model.parameters(), how)
    with pytest.raises(offload.CaptureError, match=message):
        offload.capture(mse_step(model, optimizer), *batch(), training=True)


class Counting(torch.optim.Optimizer):
    """An optimizer whose state is in attributes, or in containers."""

    def __init__(self, parameters, how):
        super().__init__(parameters, {"lr": 0.1})
        self.how = how
        self.count, self.counts, self.means = 0, {"steps": 0}, {}

    @torch.no_grad()
    def step(self):
        self.count += self.how == "attribute"
        self.counts["steps"] += self.how == "dictionary"
        rate = -0.1 / max(1, self.count, self.counts["steps"])
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            if not state:
                state["past"] = [torch.zeros_like(one), torch.zeros_like(one)]
                self.means[one] = torch.zeros_like(one)
            if self.how == "list":
                state["past"] = [*state["past"][1:], one.grad.clone()]
            elif self.how == "list in place":
                state["past"].append(one.grad.clone())
                del state["past"][0]
            elif self.how == "tensors in attributes":
                self.means[one] = self.means[one] * 0.9 + one.grad
            elif self.how == "kept tensors":
                self.means[one].mul_(0.9).add_(one.grad)
                state["past"][0].add_(one.grad)
            one.add_(sum(state["past"]) + self.means[one] + one.grad, alpha=rate)


def test_an_optimizer_with_tensors_in_attributes_and_containers():
    check(mlp(), lambda given: Counting(given, "kept tensors"), mse_step, batches())


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("attribute", r"changed an attribute or variable \(optimizer\.count: \d became \d\)"),
        ("dictionary", r"changed an attribute or variable \(optimizer\.counts\['steps'\]: \d bec"),
        ("list", r"past of model\.0\.weight \(state of optimizer\) in each call"),
        ("list in place", r"past of model\.0\.weight \(state of optimizer\) in each call"),
        ("tensors in attributes", r"changed an attribute or variable \(optimizer\.means"),
    ],
)
def test_an_optimizer_that_keeps_state_in_python_is_refused(how, message, n_before):
    model = mlp()
    optimizer = Counting(model.parameters(), how)
    step = mse_step(model, optimizer)
    for given in batches()[:n_before]:
        step(*given)
    with pytest.raises(offload.CaptureError, match=message):
        offload.capture(step, *batch(), training=True)


def n_launches(captured: offload.Captured, name: str) -> int:
    return sum(launch.name == name for launch in captured.program.launches)


@pytest.mark.parametrize("foreach", [False, True])
def test_numbers_of_counters_that_are_alike_are_computed_once(foreach):
    captured = check(
        mlp(),
        lambda given: torch.optim.AdamW(given, foreach=foreach),
        mse_step,
        batches(),
    )
    assert n_launches(captured, "aten::equal") == 1
    assert n_launches(captured, "aten::_to_copy") == 1
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    step = mse_step(model, optimizer)
    step(*batch())
    optimizer.state[model[0].weight]["step"] += 5  # separate counters from then on
    captured = offload.capture(step, *batch(), training=True)
    assert n_launches(captured, "aten::equal") == 0
    assert n_launches(captured, "aten::_to_copy") == 4


def test_counters_that_are_not_alike_any_more_are_noticed_before_anything_is_written():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = offload.capture(mse_step(model, optimizer), *batch(), training=True).load()
    counter = optimizer.state[model[0].weight]["step"]
    counter += 5
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        offload.BindingError, match="the step counters of optimizer, which were equal"
    ):
        run(*batch())
    assert all(map(torch.equal, before, model.parameters()))
    counter -= 5
    run(*batch())
    assert counter == 2
