"""Opaque Programs without a device: executed again, separated, compared, refused."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import threading

import pytest
import torch
from torch import nn
from torch_captures import FakeLog, one_capture

import offload
from offload.api.recorded_program import without_dead_launches
from offload.backends.captured.opaque_weights import weights_at_risk
from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.relocation.fixed_weights import FixedWeights, weight_ranges
from offload.backends.captured.torch_warm_up import _weights_kept
from offload.backends.cuda import CudaBackend, GraphNode, NodeKind, torch_capture
from offload.backends.cuda import opaque as cuda_opaque
from offload.backends.cuda.torch_capture import _OneCapture
from offload.backends.cuda.torch_pool import PoolMemory
from offload.costs import signature_of
from offload.interpreter.eager_run import EagerRun
from offload.program import BoundProgram, Program, Role
from offload.record import Recorder, parameters_of


class Counting(nn.Module):
    """A parameter that is read, a buffer that is written, and one that might be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.steps += 1
        return x * self.weight + self.steps, x


def opaque_program(function, *args: object) -> BoundProgram:
    """The opaque form of a call, as for a device that runs such launches."""
    recorder = Recorder(
        host_reads="avoid",
        function=function,
        parameters=parameters_of(function),
        runs_opaque=lambda _: True,
    )
    args, kwargs = recorder.begin(args, {})
    _, recording = recorder.finish(function(*args, **kwargs))
    return without_dead_launches(recording.as_opaque("the test says so").bound)


def run_on(bound: BoundProgram, x: torch.Tensor) -> EagerRun:
    weights = bound.bindings.weights
    bases = {index: (one[0].untyped_storage(), 0) for index, one in weights.items()}
    bases[bound.program.inputs[0].value] = (x.untyped_storage(), 0)
    return EagerRun(bound, bases, fill=None)


def name(program: Program, index: int) -> str:
    return program.values[index].name


def changed(bound: BoundProgram, **changes: object) -> BoundProgram:
    return dataclasses.replace(bound, program=dataclasses.replace(bound.program, **changes))


def test_the_launch_reads_all_and_writes_what_changed():
    bound = opaque_program(Counting(), torch.ones(4))
    (launch,) = bound.program.launches
    assert launch.name == "offload::opaque"
    assert list(launch.views()) == list(bound.program.inputs)
    assert sorted(name(bound.program, one) for one in launch.reads) == [
        "args[0]", "steps", "table", "weight",
    ]  # fmt: skip
    (output,) = bound.program.of_role(Role.OUTPUT)
    written = [bound.program.values[one] for one in launch.writes if one != output.index]
    assert [one.name for one in written] == ["steps"]
    assert launch.results == (bound.program.results[0].view, None)
    assert bound.program.results[1].input_leaf == 0
    assert not launch.random
    assert [one.role for one in bound.program.values if one.role is Role.ACTIVATION] == []


def test_it_is_run_by_calling_the_callable():
    model = Counting()
    bound = opaque_program(model, torch.ones(4))
    x = torch.full((4,), 3.0)
    run = run_on(bound, x)
    (launch,) = bound.program.launches
    run.keep(launch, run.call(launch)())
    assert torch.equal(run.tensor(bound.program.results[0].view), torch.full((4,), 5.0))
    assert run.tensor(bound.program.results[1].view).data_ptr() == x.data_ptr()
    assert torch.equal(model.steps, torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda x, w: (x.double(), x), "result 0 differed"),
        (lambda x, w: (torch.zeros(8)[::2], x), "result 0 differed"),
        (lambda x, w: (torch.zeros(8)[:4], x), "result 0 differed"),
        (lambda x, w: (w[:4], x), "in other memory than the recorded place"),
        (lambda x, w: (x + 1, x + 1), "result 1 .* in other memory than the recorded place"),
        (lambda x, w: [x + 1, x], "returned something else"),
        (lambda x, w: (x, x), "one tensor in other places"),
    ],
)
def test_a_callable_that_returns_otherwise_is_refused(other, says):
    state = threading.local()  # state outside the recorder's watch
    state.call = lambda x, w: (x + 1, x)
    held = torch.ones(8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Buffer(held)

        def forward(self, x):
            return state.call(x, self.held)

    bound = opaque_program(Model(), torch.ones(4))
    run = run_on(bound, torch.ones(4))
    (launch,) = bound.program.launches
    state.call = other
    with pytest.raises(offload.CaptureError, match=says):
        run.keep(launch, run.call(launch)())


def test_a_model_that_has_changed_since_is_refused():
    model = Counting()
    bound = opaque_program(model, torch.ones(4))
    model.eval()
    run = run_on(bound, torch.ones(4))
    with pytest.raises(offload.CaptureError, match=r"changed since .*training: True became False"):
        run.call(bound.program.launches[0])()
    assert torch.equal(model.steps, torch.ones(4))


def test_signatures_of_two_places_differ():
    (launch,) = opaque_program(Counting(), torch.ones(4)).program.launches
    other = dataclasses.replace(launch, source="elsewhere.py:1")
    assert signature_of(launch) != signature_of(other)


# ---- weights that stay where they are -----------------------------------------------------------


class HostMemory:
    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}

    def allocate(self, size_bytes: int) -> int:
        block = ctypes.create_string_buffer(size_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.blocks[address]

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)


def test_buffers_are_at_risk_and_parameters_only_if_written():
    bound = opaque_program(Counting(), torch.ones(4))
    assert sorted(one.name for one in weights_at_risk(bound)) == ["steps", "table"]
    (launch,) = bound.program.launches
    weight = next(one.index for one in bound.program.values if one.name == "weight")
    writes = dataclasses.replace(launch, writes=(*launch.writes, weight))
    written = changed(bound, launches=(writes,))
    assert sorted(one.name for one in weights_at_risk(written)) == ["steps", "table", "weight"]
    assert weights_at_risk(changed(bound, launches=())) == []


def test_weights_own_their_memory():
    model = Counting()
    bound = opaque_program(model, torch.ones(4))
    found = {one.owner: (one.address, one.size_bytes) for one in weight_ranges(bound)}
    assert found == {
        f"weight {name}": (tensor.data_ptr(), 16) for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("fails", [False, True])
def test_what_an_execution_writes_is_read_and_undone(fails):
    model, memory = Counting(), HostMemory()
    bound = opaque_program(model, torch.ones(4))
    weights = FixedWeights(bound, memory, weights_at_risk(bound), {})
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def execute() -> None:
        with weights.restored():
            model.steps.fill_(7)
            model.table.fill_(8)
            if fails:
                raise offload.ExecutionError("the device failed")

    if fails:
        with pytest.raises(offload.ExecutionError, match="the device failed"):
            execute()
    else:
        execute()
        left = {
            one.name.partition(" ")[0]: memory.read(one.address, one.size_bytes)
            for one in weights.left
        }
        assert left == {
            "steps": torch.full((4,), 7.0).numpy().tobytes(),
            "table": torch.full((4,), 8.0).numpy().tobytes(),
        }
    for one, content in before.items():
        assert torch.equal(model.state_dict()[one], content)
    weights.free()
    assert memory.blocks == {}


@pytest.mark.parametrize("fails", [False, True])
def test_the_warm_up_puts_weights_back(fails):
    model = Counting()
    bound = opaque_program(model, torch.ones(4))
    before = model.steps.clone()

    def call() -> None:
        with _weights_kept(bound):
            model(torch.ones(4))
            if fails:
                raise ValueError("of the user's code")

    if fails:
        with pytest.raises(ValueError, match="of the user's code"):
            call()
    else:
        call()
    assert torch.equal(model.steps, before)


# ---- tensors on the CPU ------------------------------------------------------------------------


class Scaled(nn.Module):
    """A number that kernels take at capture, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.5))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return x * self.scale + self.shift


def with_scale_on_the_host(model: Scaled) -> Program:
    bound = opaque_program(model, torch.ones(4))
    values = tuple(
        dataclasses.replace(value, host_content=content_of(model.scale))
        if value.name == "scale"
        else value
        for value in bound.program.values
    )
    return changed(bound, values=values)


def content_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def test_host_constants_are_no_memory_of_the_device():
    """No kernel may point there, and nothing copies them on the device."""
    bound = with_scale_on_the_host(Scaled())
    assert [one.name for one in weights_at_risk(bound)] == ["shift"]
    assert [one.owner for one in weight_ranges(bound)] == ["weight shift"]


def test_a_callable_is_not_called_with_other_host_constants():
    """It would be captured with a value that executions are not checked against."""
    model = Scaled()
    bound = with_scale_on_the_host(model)
    x = torch.ones(4)
    run = run_on(bound, x)
    (launch,) = bound.program.launches
    model.scale.fill_(3.0)
    with pytest.raises(
        offload.CaptureError, match=r"scale, a tensor on the CPU, has changed since"
    ):
        run.call(launch)
    model.scale.fill_(2.5)
    assert torch.equal(run.call(launch)()[0], torch.full((4,), 3.5))


def test_a_callable_is_not_called_with_a_changed_argument():
    options = array.array("d", [2.0])
    bound = opaque_program(lambda x, one: x * one[0], torch.ones(4), options)
    run = run_on(bound, torch.ones(4))
    (launch,) = bound.program.launches
    assert torch.equal(run.call(launch)()[0], torch.full((4,), 2.0))
    options[0] = 3.0
    with pytest.raises(offload.CaptureError, match=r"an argument of the recorded call, a array,"):
        run.call(launch)()


# ---- captures -----------------------------------------------------------------------------------


class CountingCapturer:
    """Each capture gives a graph of the kernels given for it."""

    def __init__(self, *graphs: str) -> None:
        self.graphs = list(graphs)

    def capture(self, bound: BoundProgram, pool: object) -> GraphCapture:
        nodes = [
            GraphNode(0, NodeKind.EMPTY if one == "-" else NodeKind.KERNEL, one, (), ())
            for one in self.graphs.pop(0)
        ]
        return GraphCapture(0, nodes, (), (), (), (), None)


@pytest.mark.parametrize(
    ("graphs", "unseen", "left"),
    [
        (["aab", "baa"], (), 0),
        (["aab", "ab", "aab", "ab"], (), 2),  # fewer than the Program's is no unseen work
        (["ab", "a-b"], (), 0),
        (["a", "aa"] * 3, ("a",), 0),
        (["ab", "axb", "ay", "ay"], (), 0),  # a library chose another kernel once
        (["ab", "axb", "ab", "ayb"], (), 0),
        (["ab", "azxb", "ab", "azzb", "ab", "azyb"], ("z",), 0),
    ],
)
def test_a_surplus_counts_if_it_is_there_each_time(monkeypatch, graphs, unseen, left):
    asked = []
    monkeypatch.setattr(CudaBackend, "machine", lambda self, index: asked.append(index))
    monkeypatch.setattr(cuda_opaque, "device_of", lambda program: 0)
    monkeypatch.setattr(cuda_opaque, "discovery_pool", lambda program, seed: None)
    capturer = CountingCapturer(*graphs)
    launcher = CudaBackend(capturer).opaque
    assert launcher.unseen_work(BoundProgram(None), BoundProgram(None)) == unseen
    assert len(capturer.graphs) == left


def capture_of(
    monkeypatch, call, copied: set[int], log: list[object]
) -> tuple[_OneCapture, EagerRun]:
    """A capture of an opaque launch, whose settling of memory is noted with its reads of nodes."""
    bound = opaque_program(Counting(), torch.ones(4))
    assert bound.program.opaque is not None
    bindings = dataclasses.replace(bound.bindings, callables=(call,))
    bound = dataclasses.replace(bound, bindings=bindings)
    monkeypatch.setattr(PoolMemory, "settle", lambda _, held: log.append(("settle", held)))
    return one_capture(monkeypatch, bound, copied=copied, nodes=FakeLog(log)), run_on(
        bound, torch.ones(4)
    )


def test_a_copied_result_gets_no_memory_that_the_launch_has_freed(monkeypatch):
    made = torch.ones(4)
    log: list[object] = []
    bound = opaque_program(Counting(), torch.ones(4))
    (output,) = bound.program.of_role(Role.OUTPUT)
    call = lambda tensors: [made, tensors[0]]  # noqa: E731
    capture, run = capture_of(monkeypatch, call, {output.index}, log)

    def copied(storage):
        log.append("copy")
        return storage.clone()

    monkeypatch.setattr(torch_capture, "copied", copied)
    capture._launch(run, capture._program.launches[0])
    copy = run.bases[output.index][0]
    assert copy.data_ptr() != made.data_ptr()
    assert log == [
        ("settle", {made.data_ptr()}), "nodes", "copy", "added nodes",
        ("settle", {copy.data_ptr()}),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [TypeError, RuntimeError, KeyError])
def test_whatever_the_callable_raises_is_a_capture_error(monkeypatch, kind):
    def call(tensors):
        raise kind("of the user's code")

    capture, run = capture_of(monkeypatch, call, set(), [])
    with pytest.raises(offload.CaptureError, match=r"cannot be captured .*of the user"):
        capture._launch(run, capture._program.launches[0])
