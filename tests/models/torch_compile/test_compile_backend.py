"""`torch.compile(model, backend="offload")` against eager: results, state, weights and sizes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from checks import Call as Arguments
from checks import Weights, normal
from compiling import assert_as_eager, compiled, n_captures, n_executions
from torch import nn
from torch._dynamo.utils import counters

import offload
from offload.integrations import torch_compile
from offload.integrations.torch_compile import CAPTURE_LIMIT, backend

pytestmark = pytest.mark.usefixtures("compiler_reset")


# ---- discovery by torch --------------------------------------------------------------------------


def test_registered_by_entry_point():
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="offload")
    assert entry.load() is backend
    assert "offload" in torch.compiler.list_backends()


def test_importing_offload_does_not_import_torchs_compiler():
    code = "import sys, offload; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- results ------------------------------------------------------------------------------------


def test_recorded_once_then_executed(graphs):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    run = compiled(model)
    results = []
    with torch.no_grad():
        for _ in range(4):
            x = normal(3, 4)
            results.append(run(x))
            assert torch.equal(results[-1], model(x))
    assert n_captures(graphs) == [1]
    assert n_executions(graphs) == 3
    assert len({one.data_ptr() for one in results}) == 4


@pytest.mark.parametrize("training", [False, True])
def test_transformer(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    assert_as_eager(model, *(Arguments(normal(2, 5, 8)) for _ in range(3)))


@pytest.mark.slow
def test_decoder_of_transformers(graphs):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    run = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.randint(64, (2, 6))
            assert torch.equal(run(tokens).logits, model(tokens).logits)
    assert n_captures(graphs) == [1]
    assert n_executions(graphs) == 2


def test_training_mode_buffers_and_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    assert_as_eager(model, *(Arguments(normal(8, 4)) for _ in range(3)))


def test_inputs_written_and_returned():
    def function(x, history):
        history.add_(x)
        history[0] = 5
        return history, x * 2, history[1:], x

    assert_as_eager(function, *(Arguments(normal(3), normal(3)) for _ in range(3)))


def test_recorded_call_returns_memory_of_its_arguments():
    x = normal(4)
    with torch.no_grad():
        view, same = compiled(lambda x: (x.view(2, 2), x))(x)
    assert same is x
    assert view.data_ptr() == x.data_ptr()


def test_one_tensor_given_twice(graphs):
    def function(x, y):
        x.add_(1)
        return x * y

    run = compiled(function)
    with torch.no_grad():
        for _ in range(2):
            one, two = normal(3), normal(3)
            expected = (one + 1) * (one + 1)
            assert torch.equal(run(one, one), expected)
            expected = (one + 1) * two
            assert torch.equal(run(one, two), expected)
    assert n_captures(graphs) == [1, 1]


def test_inputs_that_overlap_otherwise_are_refused():
    """torch guards no overlap, and a recording without overlap would give wrong results."""

    def function(x, y):
        x.add_(1)
        return x * y

    run, memory = compiled(function), torch.zeros(5)
    with torch.no_grad():
        run(normal(4), normal(4))
        with pytest.raises(offload.BindingError, match="overlap"):
            run(memory[:4], memory[1:])
    assert torch.equal(memory, torch.zeros(5))


def test_weights_and_views_of_them():
    assert_as_eager(Weights(), *(Arguments(normal(2)) for _ in range(3)))


def test_graph_breaks(graphs):
    def function(x):
        y = x * 2
        if y.sum() > 0:
            return y.relu()
        return y.exp()

    run = compiled(function)
    with torch.no_grad():
        for x in (torch.ones(3), -torch.ones(3), torch.full((3,), 2.0), torch.full((3,), -2.0)):
            assert torch.equal(run(x), function(x))
    assert n_captures(graphs) == [1, 1, 1]
    assert n_executions(graphs) == 3 + 1 + 1


def test_autocast_inside_and_around():
    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    assert_as_eager(inside, *(Arguments(normal(3, 3)) for _ in range(2)))
    run = compiled(lambda x: x @ x)
    for _ in range(2):
        x = normal(3, 3)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(run(x), x @ x)
        with torch.no_grad():
            assert torch.equal(run(x), x @ x)


def test_inference_mode():
    model = nn.Linear(3, 2)
    run = compiled(model)
    for _ in range(3):
        with torch.inference_mode():
            x = normal(2, 3)
            assert torch.equal(run(x), model(x))


# ---- weights that change ------------------------------------------------------------------------


def change_in_place(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.add_(1)


def change_data(model: nn.Linear) -> None:
    model.weight.data = normal(2, 3)


def change_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(normal(2, 3))


@pytest.mark.parametrize("change", [change_in_place, change_data, change_parameter])
def test_changed_weights_of_a_compiled_model(change):
    model = nn.Linear(3, 2)
    run, x = compiled(model), normal(4, 3)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x), model(x))
            change(model)


@pytest.mark.parametrize("change", [change_in_place, change_data])
def test_changed_weights_held_by_the_graph(change):
    """Older versions of torch leave modules in the graph; so do graphs traced by hand."""
    model = nn.Sequential(nn.Linear(3, 2))
    x = normal(4, 3)
    run = backend(torch.fx.symbolic_trace(model), [x])
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(run(x), model(x))
            change(model[0])


# ---- sizes and numbers --------------------------------------------------------------------------


def test_dynamic_sizes(graphs):
    model = nn.Linear(4, 3)
    calls = [Arguments(normal(size, 4)) for size in (2, 3, 5, 3, 5, 2)]
    assert_as_eager(model, *calls)
    # The first graph is static. The second takes any size: it is captured for 3, then for all.
    assert n_captures(graphs) == [1, 2]
    assert n_executions(graphs) == 3


def test_one_capture_of_all_sizes_serves_those_that_it_has_not_seen(graphs):
    def function(x, y):
        return (x @ y).softmax(-1) + x.shape[0], x.shape[1] * 2

    shapes = [(3, 4), (5, 6), (9, 7), (30, 2), (5, 6), (64, 64), (3, 4)]
    calls = [Arguments(normal(n, m), normal(m, n)) for n, m in shapes]
    assert_as_eager(function, *calls, dynamic=True)
    assert n_captures(graphs) == [2]
    assert n_executions(graphs) == 5


def test_a_graph_that_writes_is_called_once_for_each_call(graphs):
    """A capture for all sizes may be refused and the call repeated: its writes would be, too."""

    def function(x, total):
        total.add_(x.sum())
        return x * total

    calls = [Arguments(normal(size), normal(1)) for size in (3, 9, 7, 9, 3)]
    assert_as_eager(function, *calls, dynamic=True)
    assert not any(graph._families for graph in graphs)


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_draws_is_called_once_for_each_call(graphs, monkeypatch, is_refused):
    if is_refused:
        refuse = mock.Mock(side_effect=offload.CaptureError("sizes may not vary"))
        monkeypatch.setattr(torch_compile.CompiledGraph, "_captured_for_all", refuse)
    calls = [Arguments(normal(size)) for size in (3, 9, 7, 9, 3)]
    assert_as_eager(lambda x: x + torch.rand_like(x), *calls, dynamic=True)
    assert_as_eager(lambda x: x.exp() * 2, *calls, dynamic=True)
    assert any(graph._families for graph in graphs) is not is_refused


def test_sizes_that_break_a_guard_are_captured_by_themselves(graphs, monkeypatch):
    """Torch's own guards would prevent it by tracing another graph."""
    run = compiled(lambda x: x * 2, dynamic=True)
    with torch.no_grad():
        for size in (3, 9):
            run(normal(size))
        (graph,) = graphs
        (family,) = graph._families.values()
        monkeypatch.setattr(family, "accepts", lambda sizes: max(sizes.values()) <= 20)
        for size in (20, 21, 20, 21):
            x = normal(size)
            assert torch.equal(run(x), x * 2)
    assert n_captures(graphs) == [3]
    assert len(graph._runs) == 2


@pytest.fixture
def each_size_by_itself(monkeypatch):
    """As where sizes may not vary."""
    monkeypatch.setattr(torch_compile, "dynamic_sizes", lambda graph_module, example_inputs: None)


def test_sizes_as_results():
    def function(x):
        return x.sum(0), x.shape[0] * 2, x.new_ones(x.shape[0])

    calls = [Arguments(normal(size, 2)) for size in (3, 4, 4, 3)]
    assert_as_eager(function, *calls, dynamic=True)


def test_layouts_of_dynamic_sizes():
    calls = [Arguments(x) for x in (normal(3, 4), normal(4, 3).t(), normal(4, 5).t(), normal(5, 4))]
    assert_as_eager(lambda x: x + 1, *calls, *calls, dynamic=True)


@pytest.mark.slow
def test_numbers(graphs):
    def function(x, by):
        return (x * by).relu()

    values = (0.5, 0.25, 0.25, -0.0, 0.0, 3, 4, 3, True, False)
    x = normal(3)
    for dynamic in (None, True):
        assert_as_eager(function, *(Arguments(x, by) for by in values), dynamic=dynamic)
    assert n_executions(graphs) > 0


def test_not_a_number(graphs):
    run = compiled(lambda x, by: x + by, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            assert run(normal(2), float("nan")).isnan().all()
    assert max(n_captures(graphs)) == 1


@pytest.mark.usefixtures("each_size_by_itself")
def test_beyond_the_limit_calls_run_eagerly_with_one_warning(graphs):
    run = compiled(lambda x: (x + 1, x.shape[0]), dynamic=True)
    before = counters["offload"]["calls_beyond_limit"]
    with torch.no_grad():
        for size in range(2, 2 + CAPTURE_LIMIT):
            run(normal(size))
        with pytest.warns(RuntimeWarning, match=r"16 combinations.*\(40,\).*: 32.*raise"):
            run(normal(40))
        for size in (41, 40):  # without another warning, which would be an error here
            x = normal(size)
            result, length = run(x)
            assert torch.equal(result, x + 1)
            assert length == size
        x = normal(2)
        assert torch.equal(run(x)[0], x + 1)
    assert n_captures(graphs) == [CAPTURE_LIMIT]
    assert n_executions(graphs) == 1
    assert counters["offload"]["calls_beyond_limit"] == before + 3


def test_each_graph_warns_of_its_own_limit():
    for function in (torch.sin, torch.cos):
        run = compiled(lambda x, of=function: of(x), dynamic=True, options={"capture_limit": 1})
        with torch.no_grad():
            run(normal(2))
            with pytest.warns(RuntimeWarning, match="captured for 1 combination"):
                run(normal(3))


def test_beyond_the_limit_numbers_come_as_they_were_given():
    run = compiled(lambda x, by: x * by, dynamic=True, options={"capture_limit": 1})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for by in (0.5, 0.25, 0.125, 3.5):
            x = normal(3)
            assert torch.equal(run(x, by), x * by)


def test_beyond_the_limit_calls_raise_if_asked_to(graphs):
    options = {"capture_limit": 1, "beyond_limit": "raise"}
    run = compiled(lambda x: x + 1, dynamic=True, options=options)
    with torch.no_grad():
        run(normal(2))
        for _ in range(2):
            with pytest.raises(offload.CaptureError, match=r"captured for 1 combination.*\(3,\)"):
                run(normal(3))
        x = normal(2)
        assert torch.equal(run(x), x + 1)
    assert n_captures(graphs) == [1]
