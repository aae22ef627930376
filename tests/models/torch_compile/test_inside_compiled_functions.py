"""Captures, loads and executions in a function that torch compiles: they run between its graphs."""

import contextlib

import pytest
import torch
from checks import normal
from torch import nn
from torch._dynamo.exc import Unsupported

import offload

pytestmark = [
    pytest.mark.usefixtures("compiler_reset"),
    pytest.mark.filterwarnings("error:Dynamo"),  # of what it follows without understanding it
]

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
aot_compiled = torch.compile(model, backend="aot_eager")
captured = offload.capture(model, normal(3, 8))
run = captured.load()


def graphs():
    """The number of graphs that torch has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def captures(x):
    return offload.capture(model, x)(x * 1) + 0


def captures_a_block(x):
    with offload.capture(model) as found:
        model(x)
    return found(x)


def captures_what_is_compiled(x):
    return offload.capture(aot_compiled, x)(x)


def captures_varying_sizes(x):
    shapes = ({0: torch.export.Dim("n", min=2, max=64)},)
    return offload.capture(lambda y: model(y) + 0, x, dynamic_shapes=shapes)(x)


def loads(x):
    return captured.load()(x)


def loads_fused(x):
    return captured.load(fuse=True)(x)


def calls(x):
    return captured(x)


def executes(x):
    return run(x * 1) + 0


def executes_into_a_buffer(x):
    out = torch.empty(3, 4)
    run(x, out=out)
    return out


def submits(x):
    return run.submit(x).result() + 0


def maps(x):
    return next(iter(run.map([x])))


def submits_tasks(x):
    with offload.tasks() as tasks:
        return tasks.submit(run, x).result()


def times(x):
    with run.timeline():
        return run(x)


def explains(x):
    return run(x) + ("launches on cpu" not in run.explain())


FUNCTIONS = [
    captures,
    captures_a_block,
    captures_what_is_compiled,
    captures_varying_sizes,
    loads,
    calls,
    executes,
    executes_into_a_buffer,
    submits,
    maps,
    submits_tasks,
    times,
    explains,
    pytest.param(loads_fused, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_each_call(function):
    """Not of the call that was compiled."""
    compiled = torch.compile(function, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            x = normal(3, 8)
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("function", [captures, loads, calls, submits])
def test_one_graph_for_all_is_refused_with_advice(function):
    """By torch's error, which torch raises while it compiles."""
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Unsupported, match=r"call it outside of the compiled"):
        compiled(normal(3, 8))


def test_what_lies_around_is_compiled():
    compiled = torch.compile(executes, backend="eager")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        compiled(normal(3, 8))
        assert graphs() == 2
        compiled(normal(3, 8))
        assert graphs() == 2  # and the same code serves the next call


def test_an_open_file(tmp_path):
    captured.save(tmp_path / "model.offload")
    compiled = torch.compile(
        lambda x: offload.open(tmp_path / "model.offload")(x) + 0, backend="eager"
    )
    with torch.no_grad():
        for _ in range(2):
            x = normal(3, 8)
            assert torch.equal(compiled(x), model(x))


def test_errors_are_those_of_offload():
    def recovers(x):
        try:
            return run(x[:2])
        except offload.BindingError:
            return run(x) * 2

    x = normal(3, 8)
    with torch.no_grad():
        assert torch.equal(torch.compile(recovers, backend="eager")(x), model(x) * 2)
        with pytest.raises(offload.BindingError, match=r"expected float32\[3, 8\]"):
            torch.compile(executes, backend="eager", dynamic=True)(x[:2])


def test_training_steps():
    layer = nn.Linear(8, 4)
    twin = nn.Linear(8, 4)
    twin.load_state_dict(layer.state_dict())

    def new_step(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    step = offload.capture(new_step(layer), normal(3, 8), training=True)
    eager = new_step(twin)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(lambda x: step(x) + 0, backend="eager")
    for _ in range(3):
        x = normal(3, 8)
        assert torch.allclose(compiled(x), eager(x))
    assert torch.allclose(layer.weight, twin.weight)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_module_that_holds_an_executable(context):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = run
            self.last = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            return self.last(self.run(x))

    holder = Holder()
    compiled = torch.compile(holder, backend="aot_eager")
    with context():
        for _ in range(2):
            x = normal(3, 8)
            assert torch.equal(compiled(x), holder.last(model(x)))
