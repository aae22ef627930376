"""Random kernels in a graph: each executable has its own cells for the generator's state."""

from __future__ import annotations

import weakref

import pytest
import torch

import offload

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from random_graphs import INCREMENT, Device, N, PhiloxGenerator, Tail, load_plain, numbers
from small_graphs import current_context

from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.graph import call


@pytest.fixture
def device(simulator, monkeypatch) -> Device:
    current_context()
    simulator.set_eager(True)
    monkeypatch.setattr(cuda_backend, "_arenas", weakref.WeakValueDictionary())
    return Device(simulator, monkeypatch)


@pytest.mark.parametrize("in_capture", [False, True])
def test_each_execution_draws_on_from_where_the_generator_is(device, in_capture):
    """Whether torch makes a capture's cells before it, or in it and never fills them."""
    generator = PhiloxGenerator(seed=3, offset=8)
    run = device.load(generator, in_capture=in_capture)
    assert generator.get_offset() == 8  # loading and the proof draw nothing
    for turn in range(3):
        (got,) = run(torch.zeros(N))
        assert torch.equal(got, numbers(3, 8 + INCREMENT * turn))
    generator.set_offset(0)
    assert torch.equal(run(torch.zeros(N))[0], numbers(3, 0))
    assert generator.get_offset() == INCREMENT


def test_a_call_that_draws_writes_a_seed_and_an_offset(device, simulator):
    """Instead of the prologue of torch's replay; a call that draws nothing writes nothing."""
    drawing = device.load(PhiloxGenerator(seed=3))
    plain = load_plain(device, Tail(device, lambda capturer: capturer.cells[0]))
    for run, n_written in ((drawing, 2), (plain, 0)):
        simulator.forget_calls()
        for _ in range(3):
            run(torch.zeros(N))
        assert simulator.calls("cuStreamWriteValue64") == 3 * n_written
        assert simulator.calls("cuGraphLaunch") == 3
    assert plain._loaded.draw is None


def test_launches_draw_one_after_the_other(device):
    first, second = device.load(PhiloxGenerator(seed=2), n_launches=2)(torch.zeros(N))
    assert torch.equal(first, numbers(2, 0))
    assert torch.equal(second, numbers(2, INCREMENT))


def test_executables_do_not_share_cells(device, simulator):
    """Executions in flight on several executables draw from their own cells."""
    generator = PhiloxGenerator(seed=5)
    runs = [device.load(generator) for _ in range(2)]
    simulator.set_eager(False)
    results = [run(torch.zeros(N))[0] for _ in range(2) for run in runs]
    call("cuStreamSynchronize", 0)
    for turn, got in enumerate(results):
        assert torch.equal(got, numbers(5, INCREMENT * turn))


def test_submitted_executions_draw_in_the_order_of_submission(device):
    run = device.load(PhiloxGenerator(seed=1))
    tickets = [run.submit(torch.zeros(N)) for _ in range(4)]
    for turn, ticket in enumerate(tickets):
        assert torch.equal(ticket.result()[0], numbers(1, INCREMENT * turn))


def test_a_refused_call_draws_nothing(device):
    generator = PhiloxGenerator(seed=1)
    run = device.load(generator)
    with pytest.raises(offload.BindingError):
        run(torch.zeros(N + 1))
    assert generator.get_offset() == 0


@pytest.mark.parametrize("how", ["__call__", "submit"])
def test_a_call_with_another_host_constant_draws_nothing(device, how):
    """Generators advance only when a refusal is no longer possible."""
    generator, number = PhiloxGenerator(seed=1), torch.tensor(2.5)
    run = device.load(generator, number=number)
    number.fill_(2.0)
    with pytest.raises(offload.BindingError, match="number"):
        getattr(run, how)(torch.zeros(N))
    assert generator.get_offset() == 0
    number.fill_(2.5)
    (got,) = run(torch.zeros(N))
    assert torch.equal(got, numbers(1, 0))


@pytest.mark.parametrize("how", ["__call__", "submit"])
def test_a_call_with_a_swapped_weight_draws_nothing(device, how):
    generator, weight = PhiloxGenerator(seed=1), torch.zeros(N)
    run = device.load(generator, weight=weight)
    weight.data = torch.zeros(N)
    with pytest.raises(offload.BindingError, match="weight2: its storage was swapped"):
        getattr(run, how)(torch.zeros(N))
    assert generator.get_offset() == 0
    run.rebind_weights()
    assert torch.equal(run(torch.zeros(N))[0], numbers(1, 0))
    assert generator.get_offset() == INCREMENT


def test_the_cells_are_given_back(device, simulator):
    before = simulator.live_bytes
    run = device.load(PhiloxGenerator(seed=1))
    captured_bytes = 512 * 2 * 4  # of the four captures, which this test never frees
    assert simulator.live_bytes - before > captured_bytes
    run.close()
    assert simulator.live_bytes - before == captured_bytes


def test_unknown_state_is_refused(device):
    with pytest.raises(offload.CaptureError, match=r"model.py:1.*draws random numbers"):
        device.load(None)


def test_several_states_are_refused(device):
    with pytest.raises(offload.CaptureError, match="distribution_kernel: it reads the state"):
        device.load(PhiloxGenerator(seed=1), n_launches=2, n_cells=2)
