"""Torch's real capturer and pool on the simulated driver: run by `test_torch_on_simulator`.

Programs are recorded on the CPU and moved to the device, except training steps, which
`training_cases` records there. Torch's Python and C++ are real, except the CUDA backend, which is a
stand-in (backend.cpp); no GPU and no CUDA build of torch has run this.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"
sys.path.insert(0, str(FOLDER))

import stand_in  # noqa: E402

import offload  # noqa: E402
from offload.backends.captured.relocation.captures import Allocation  # noqa: E402
from offload.backends.cuda import CudaBackend  # noqa: E402
from offload.backends.cuda.layouts import discovery_pool  # noqa: E402
from offload.backends.cuda.torch_capture import TorchCapturer  # noqa: E402
from offload.program import BoundProgram, Role  # noqa: E402


@pytest.fixture(scope="module")
def cuda():
    """The stand-in, for the whole process."""
    return stand_in.install()


@pytest.fixture(autouse=True)
def settled(cuda):
    """Errors of callbacks fail the test that caused them; kernels run when they are enqueued."""
    cuda.current()
    cuda.simulator.set_eager(True)
    yield
    gc.collect()
    assert cuda.allocator.error is None
    if cuda.simulator.errors:  # of a kernel, which made the device fail
        raise cuda.simulator.errors.pop()
    cuda.simulator.set_lazy_loading(False)
    cuda.simulator.set_eager(True)


def on_cuda(captured):
    """Return the captured program as if recorded on the device, with its weights there."""
    bound = captured.bound
    program = dataclasses.replace(bound.program, device="cuda", device_index=0)
    weights = {
        index: [one.detach().to("cuda") for one in holders]
        for index, holders in bound.bindings.weights.items()
    }
    bindings = dataclasses.replace(bound.bindings, weights=weights)
    return offload.Captured(BoundProgram(program, bindings))


def captured_of(model, *inputs):
    torch.manual_seed(0)
    return on_cuda(offload.capture(model().eval(), *inputs))


def eager(model, *inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return model().eval()(*inputs)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x).softmax(-1)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)
        )

    def forward(self, x):
        return sum(tower(x) for tower in self.towers)


def backend():
    return CudaBackend(TorchCapturer())


# ---- the stand-in itself ----------------------------------------------------------------------


def test_tensors_of_the_device_compute(cuda):
    x = torch.arange(6.0).view(2, 3)
    on_device = x.to("cuda")
    assert on_device.device == torch.device("cuda", 0)
    torch.testing.assert_close(((on_device + 1) @ on_device.t()).to("cpu"), (x + 1) @ x.t())
    part = on_device[1:, ::2]
    part += 10
    assert on_device.to("cpu").tolist() == [[0, 1, 2], [13, 4, 15]]


def test_blocks_are_used_again(cuda):
    one = torch.empty(100, dtype=torch.uint8, device="cuda")
    address = one.data_ptr()
    del one
    two = torch.empty(50, dtype=torch.uint8, device="cuda")
    assert two.data_ptr() == address


def test_a_read_ends_a_capture(cuda):
    stream = stand_in.Stream(int(stand_in.call("cuStreamCreate", 1)))
    x = torch.ones(2).to("cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(Exception, match="STREAM_CAPTURE_UNSUPPORTED"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="INVALIDATED"):
            graph.capture_end()
    torch._C._cuda_endAllocateToPool(0, graph.pool())  # which torch does not do then


# ---- the capturer -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Mlp, Towers])
def test_a_model_is_captured_loaded_and_executed(cuda, model):
    x = torch.randn(4, 16)
    with captured_of(model, x).load(backend()) as run:
        for _ in range(3):
            x = torch.randn(4, 16)
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(model, x))


def test_a_capture_names_all_that_it_allocates(cuda):
    """Inputs and weights as stand-ins, results, each launch's own scratch, a shared workspace."""
    bound = captured_of(Mlp, torch.randn(4, 16)).bound
    capturer = TorchCapturer()
    found = capturer.capture(bound, discovery_pool(bound.program, 0))
    values = [one.value for one in found.allocations if one.value is not None]
    assert sorted(values) == [one.index for one in bound.program.values if one.size_bytes]
    workspaces = [one for one in found.allocations if one.size_bytes == found.workspace_bytes]
    assert [one.value for one in workspaces] == [None]
    (workspace,) = workspaces
    words = [one.to_bytes(8, "little") for one in (workspace.address,)]
    users = [
        launch
        for node, launch in zip(found.nodes, found.launches, strict=True)
        if any(word in part for part in node.parts for word in words)
    ]
    assert [bound.program.launches[one].name for one in users] == ["aten::addmm"] * 2
    assert set(found.launches) == {one.index for one in bound.program.launches}


def test_the_process_is_left_as_it_was(cuda):
    captured = captured_of(Mlp, torch.randn(4, 16))
    captured.load(backend()).close()
    gc.collect()
    kinds = ("graph", "executable", "event", "mapping", "reservation", "memory handle")
    before = {kind: cuda.simulator.live(kind) for kind in kinds}
    n_blocks = len(cuda.allocator._used)
    captured.load(backend()).close()
    gc.collect()
    assert {kind: cuda.simulator.live(kind) for kind in kinds} == before
    assert len(cuda.allocator._used) == n_blocks
    assert cuda.allocator.filters == []
    assert cuda.allocator.trace is None


def test_kernels_that_are_loaded_late_are_loaded_by_the_warm_up(cuda):
    """See `Simulator.set_lazy_loading`: a launch that loads its kernel would end the capture."""
    cuda.simulator.set_lazy_loading(True)
    x = torch.randn(4, 16)
    with captured_of(Mlp, x).load(backend()) as run:
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Mlp, x))


def test_lanes_have_workspaces_of_their_own(cuda):
    x = torch.randn(4, 16)
    with captured_of(Towers, x).load(backend(), lanes=3) as run:
        n_lanes = len(run.plan.launch_lanes)
        assert n_lanes > 1
        scratch = [one for one in run.program.values if one.role is Role.SCRATCH]
        workspaces = [one for one in scratch if one.size_bytes == stand_in.WORKSPACE_BYTES]
        assert len(workspaces) == n_lanes
        for _ in range(3):
            x = torch.randn(4, 16)
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Towers, x))


def test_work_that_is_late_gives_the_same(cuda):
    """Nothing runs before the host waits for it, as on a busy device."""
    cuda.simulator.set_eager(False)
    x = torch.randn(4, 16)
    with captured_of(Mlp, x).load(backend()) as run:
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Mlp, x))


def test_a_caller_who_is_capturing_is_refused(cuda):
    captured = captured_of(Mlp, torch.randn(4, 16))
    stream = stand_in.Stream(int(stand_in.call("cuStreamCreate", 1)))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(offload.CaptureError, match="being captured on the current stream"):
            captured.load(backend())
        graph.capture_end()


def test_a_caller_who_records_torchs_memory_is_refused(cuda):
    captured = captured_of(Mlp, torch.randn(4, 16))
    torch.cuda.memory._record_memory_history("all")
    try:
        with pytest.raises(offload.CaptureError, match="memory history is being recorded"):
            captured.load(backend())
    finally:
        torch.cuda.memory._record_memory_history(None)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_pool_without_addresses_fails_the_load_and_leaves_nothing(cuda, nth):
    captured = captured_of(Mlp, torch.randn(4, 16))
    captured.load(backend()).close()
    gc.collect()
    before = cuda.simulator.live("mapping"), len(cuda.allocator._used)
    cuda.simulator.fail("cuMemMap", 2, nth=nth)
    with pytest.raises((offload.ExecutionError, offload.OutOfMemory)):
        captured.load(backend())
    gc.collect()
    assert (cuda.simulator.live("mapping"), len(cuda.allocator._used)) == before
    captured.load(backend()).close()


def test_results_have_their_own_size_and_scratch_is_not_recycled(cuda):
    """Memory that an operator frees is given to no later launch, so words identify their owner."""
    bound = captured_of(Mlp, torch.randn(4, 16)).bound
    found = TorchCapturer().capture(bound, discovery_pool(bound.program, 1))
    addresses = [one.address for one in found.allocations]
    assert len(set(addresses)) == len(addresses)
    sizes = {one.value: one.size_bytes for one in found.allocations if one.value is not None}
    assert all(bound.program.values[index].size_bytes == size for index, size in sizes.items())
    semaphores = [one for one in found.allocations if one == Allocation(one.address, 64, None)]
    assert len(semaphores) == 1  # of the softmax


class Flipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x):
        return self.layer(x.flip(0))


def test_a_result_on_memory_that_was_something_larger_is_copied(cuda):
    """The operator first frees larger memory, which its result then gets: seen in the history.

    Another capture copies the result, so that its words belong to it alone.
    """
    x = torch.randn(4, 16)
    captured = captured_of(Flipped, x)
    bound = captured.bound
    capturer = TorchCapturer()
    found = capturer.capture(bound, discovery_pool(bound.program, 2))
    (flip,) = (one for one in bound.program.launches if one.name == "aten::flip")
    assert capturer._copied == {view.value for view in flip.made()}
    addresses = [one.address for one in found.allocations]
    assert len(set(addresses)) == len(addresses)
    assert 8192 in [one.size_bytes for one in found.allocations if one.value is None]
    with captured.load(backend()) as run:
        for _ in range(2):
            x = torch.randn(4, 16)
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Flipped, x))


def test_auto_measures_both_graphs_by_events_of_the_device(cuda):
    x = torch.randn(4, 16)
    captured = captured_of(Towers, x)
    cuda.simulator.set_clock(kernel_ns=10_000, copy_ns=0)
    with captured.load(backend(), lanes="auto") as run:
        assert len(run.plan.launch_lanes) > 1
        assert "measured" in run.explain()
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Towers, x))


def test_a_program_that_is_loaded_again_is_captured_once(cuda, monkeypatch):
    """Its kernels are known from the proof of the first load."""
    from offload.backends.cuda import backend as cuda_backend

    monkeypatch.setattr(cuda_backend, "_known", {})
    x = torch.randn(4, 16)
    captured = captured_of(Mlp, x)
    counts = []
    for _ in range(2):
        capturer = TorchCapturer()
        capture = capturer.capture
        calls: list[object] = []

        def noted(*given, calls=calls, capture=capture):
            calls.append(given)
            return capture(*given)

        monkeypatch.setattr(capturer, "capture", noted)
        with captured.load(CudaBackend(capturer)) as run:
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Mlp, x))
        counts.append(len(calls))
    assert counts == [4, 1]
