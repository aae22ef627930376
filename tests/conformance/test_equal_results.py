"""Results of every computing backend: views, results, weights, guards and random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload
from offload.load.options import delivering


@pytest.fixture
def computing(backend):
    """A backend whose results have content."""
    if not backend.capabilities.computes:
        pytest.skip("it computes nothing")
    return backend


VIEWS = {
    "rows": lambda x: x[2:].sin(),
    "columns": lambda x: x[:, 3:5].sin(),
    "steps": lambda x: x[1::2, ::3] + 1,
    "transposed": lambda x: x.T[1:] * 2,
    "one": lambda x: x[3, 4].sin(),
    "repeated": lambda x: x[1].expand(3, 8) * x[:3],
    "of what was made": lambda x: (x + 1)[2:4, 1:].sin(),
    "as other numbers": lambda x: x[1:].view(torch.int32) + 1,
    "parts": lambda x: torch.cat([one * 2 for one in (x + 1).split(2, 1)], 1),
    "diagonal": lambda x: (x @ x.T).diagonal(1) + 1,
    "written in part": lambda x: _with_row_cleared(x + 1) * 2,
    "a slice written": lambda x: _with_slice_written(x * 1),
}


def _with_row_cleared(x: torch.Tensor) -> torch.Tensor:
    x[1].zero_()
    return x


def _with_slice_written(x: torch.Tensor) -> torch.Tensor:
    x[2:4, 1:3] = x[:2, :2] * 3
    return x + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_launches_are_given_the_views_that_were_recorded(computing, load, name):
    function = VIEWS[name]
    run = load(function, torch.randn(6, 8))
    for _ in range(2):
        x = torch.randn(6, 8)
        assert torch.equal(run(x), function(x))


RESULTS = {
    "several": lambda x: x.max(1),
    "the second alone": lambda x: x.max(1).indices + 1,
    "several, used": lambda x: torch.add(*(x + 1).max(1)),
    "a view of one": lambda x: (x + 1)[1:, 2:],
    "two views of one": lambda x: [one for y in [x * 2] for one in (y[:2], y.T)],
    "one twice": lambda x: [x * 2] * 2,
    "a view of an input": lambda x: [x[1:], x + 1],
    "nothing in it": lambda x: x[:0] * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_that_were_recorded(computing, load, name):
    function = RESULTS[name]
    run = load(function, torch.randn(6, 8))
    x = torch.randn(6, 8)
    got, expected = run(x), function(x)
    if isinstance(expected, torch.Tensor):
        got, expected = [got], [expected]
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def two_weights() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)).requires_grad_(False)


def test_each_weight_is_read_where_it_lies(computing, load):
    """After writes in place, executions use the new content."""
    model = two_weights()
    run = load(model, torch.randn(4, 8))
    x = torch.randn(4, 8)
    assert torch.equal(run(x), model(x))
    for weight in model.parameters():
        weight.mul_(1.5).add_(0.25)
        assert torch.equal(run(x), model(x))


def test_weights_in_other_storages(computing, load, scheduling):
    """Refused until they are bound again, or permanently where kernels keep their addresses."""
    model = two_weights()
    run = load(model, torch.randn(4, 8))
    x = torch.randn(4, 8)
    before = run(x)
    held = model[2].weight.data
    model[2].weight.data = held * 2
    with pytest.raises(offload.BindingError, match=r"2\.weight"):
        run(x)
    if not delivering(computing, scheduling).capabilities.rebinds_weights:
        with pytest.raises(offload.BindingError, match="stay where they were"):
            run.rebind_weights()
        model[2].weight.data = held
        assert torch.equal(run(x), before)
        return
    run.rebind_weights()
    assert torch.equal(run(x), model(x))


def test_an_input_that_is_written_holds_what_eager_leaves(computing, load):
    def step(x, y):
        x.mul_(2).add_(y)
        return x.sum(0)

    run = load(step, torch.randn(4, 4), torch.randn(4, 4))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    twin = x.clone()
    for _ in range(2):
        assert torch.equal(run(x, y), step(twin, y))
        assert torch.equal(x, twin)


def guarded(backend, function, x, reason) -> offload.Executable | None:
    """Load a call that reads on the host; None where the device refuses it for this reason."""
    with torch.no_grad():
        captured = offload.capture(function, x, host_reads="guard")
    if not backend.capabilities.queues_work:
        return captured.load(backend.name)
    with pytest.raises(offload.CaptureError, match=reason):
        captured.load(backend.name)
    return None


GUARDED = {
    "a comparison": (lambda x: x * 2 if x.sum() > 0 else x - 1, -torch.ones(3), "True"),
    "a number": (
        lambda x: x / 2 if x.sum().item() > 0 else x,
        torch.full((3,), 2.0),
        r"read 6\.0 on the host, the recorded value is 3\.0",
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_holds_or_the_program_is_refused(computing, name):
    """A device that cannot wait for a value refuses the program; no other value goes unnoticed."""
    function, other, message = GUARDED[name]
    x = torch.ones(3)
    run = guarded(computing, function, x, "is read on the host")
    if run is None:
        return
    assert torch.equal(run(x.clone()), function(x))
    with pytest.raises(offload.BindingError, match=message):
        run(other.to(x.device))
    assert torch.equal(run(x), function(x))


def test_a_shape_that_depends_on_data_holds_or_the_program_is_refused(computing):
    def positions(x):
        return x.nonzero() + 1

    run = guarded(computing, positions, torch.eye(3), "has shapes that depend on")
    if run is None:
        return
    assert torch.equal(run(torch.eye(3).flip(0)), positions(torch.eye(3).flip(0)))
    with pytest.raises(offload.BindingError):
        run(torch.ones(3, 3))


# Simulated kernels draw from the CPU's generator, whose state lies in no memory of theirs.
DRAW_NOWHERE = {
    "cuda-simulated": "random numbers.*pass the numbers as an input",
    "npu-simulated": r"aten::\S* draws random numbers",
}


def noisy(x):
    return nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x)


def test_random_numbers_are_those_that_eager_draws(computing, load):
    """The device's own kernels draw them, from the generator's current state."""
    if computing.name in DRAW_NOWHERE:
        with pytest.raises(offload.CaptureError, match=DRAW_NOWHERE[computing.name]):
            load(noisy, torch.ones(64))
        return
    run = load(noisy, torch.ones(64))
    x = torch.randn(64)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = [noisy(x) for _ in range(2)]
        after = torch.rand(2)
        torch.manual_seed(seed)
        for one in expected:
            assert torch.equal(run(x), one)
        assert torch.equal(torch.rand(2), after)


class Counter(nn.Module):
    """Writes a buffer, and a column of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total.add_(x.sum(0))
        x.t()[1].mul_(2)
        return self.total * 1


STATEFUL = {
    "a counter": Counter,
    "batch normalisation": lambda: nn.BatchNorm1d(4).requires_grad_(False).train(),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_and_inputs_are_written_as_in_eager(computing, load, name):
    if name == "batch normalisation" and computing.records() == "npu":
        pytest.skip("torch_npu trains it by BNTrainingReduce of the graph engine, not simulated")
    model, twin = STATEFUL[name](), STATEFUL[name]()
    run = load(model, torch.randn(8, 4))
    twin.load_state_dict(model.state_dict())
    versions = [buffer._version for buffer in model.buffers()]
    for _ in range(3):
        x = torch.randn(8, 4)
        y = x.clone()
        assert torch.equal(run(x), twin(y))
        assert torch.equal(x, y)
        for one, other in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(one, other)
    for buffer, version in zip(model.buffers(), versions, strict=True):
        assert buffer._version > version


def test_weights_of_less_alignment_are_read_or_refused(computing, load):
    if computing.records() != "cpu":
        pytest.skip("tensors that begin anywhere in memory are made on the CPU")
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model.weight.data = torch.from_numpy(torch.randn(17).numpy()[1:]).view(4, 4)
    if computing.capabilities.queues_work:
        message = r"weight: its memory begins at .* multiples of 16 bytes: give it a clone\(\)"
        with pytest.raises(offload.BindingError, match=message):
            load(model, torch.ones(4, 4))
        return
    x = torch.randn(4, 4)
    assert torch.equal(load(model, torch.ones(4, 4))(x), model(x))
