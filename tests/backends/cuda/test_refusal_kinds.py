"""Refusals that the operator database may skip on a GPU, by the errors that the code raises."""

from __future__ import annotations

import ctypes
import math
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from meta_recording import record, take_meta_for_an_accelerator
from refusal_kinds import KINDS, NEVER_REFUSED, skip_reason
from small_graphs import StepCapturer, current_context, make_program, words
from small_programs import added
from torch_captures import FakeGraph, FakePool, one_capture, pool_memory

from offload.backends.captured.relocation import proof, steadiness
from offload.backends.captured.relocation.contents import Difference, Spread, Stretch
from offload.backends.cuda import CudaBackend, node_log, torch_capture
from offload.backends.cuda.graph import call, driver_bindings
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.program import BoundProgram, Role

OUTPUT = Stretch("output 0", 0, 0, "float32")
NO_MEMORY = types.SimpleNamespace(
    allocate=lambda _: 0, free=lambda _: None, chunks=lambda *_: iter(())
)


class World:
    """The simulated device, and code that raises on it."""

    def __init__(self, simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        current_context()
        self.monkeypatch = monkeypatch
        self.kernel = simulator.kernel("add_kernel", [8, 8, 8], lambda arguments: None)

    def captured(self, step: Callable[[Any], None]) -> None:
        """Discovery of a Program whose only launch makes a step."""
        program = make_program([(Role.INPUT, 64), (Role.OUTPUT, 64)], [("0", "1")])
        CudaBackend(StepCapturer([step])).prepare(BoundProgram(program))

    def prepared(self, model: Any, *given: torch.Tensor, host_reads: str = "avoid") -> None:
        """A Program recorded on the CPU, as if recorded on a GPU."""
        bound = offload.capture(model, *given, host_reads=host_reads).bound
        CudaBackend(StepCapturer([])).prepare(bound)

    def launched(self, error: Exception) -> None:
        """A launch that raises while torch captures it."""

        def fail() -> None:
            raise error

        one = one_capture(self.monkeypatch)
        one._launch(types.SimpleNamespace(call=lambda _: fail), added())


@pytest.fixture
def world(simulator, monkeypatch) -> World:
    return World(simulator, monkeypatch)


X = torch.arange(1.0, 7.0)


def copy_to_the_host(at: Any) -> None:
    host = ctypes.create_string_buffer(64)
    call("cuMemcpyDtoHAsync", ctypes.addressof(host), at.at[0], 64, at.stream)


def call_the_host(at: Any) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    address = ctypes.cast(function, ctypes.c_void_p).value
    call("cuLaunchHostFunc", at.stream, driver_bindings().CUhostFn(address), 0)


def use_a_cache(world: World) -> None:
    kept: list[int] = []

    def step(at: Any) -> None:
        kept.append(at.at[0])
        at.launch(world.kernel, words(at.at[1]), words(kept[0]), words(1))

    world.captured(step)


def use_memory_of_nobody(world: World) -> None:
    block = int(call("cuMemAlloc", 4096))
    world.captured(lambda at: at.launch(world.kernel, words(block), words(at.at[1]), words(1)))


def end_the_capture(world: World) -> None:
    stream = call("cuStreamCreate", 1)
    log = node_log.NodeLog(int(stream))
    log.note(added())


def fail_to_end(world: World) -> None:
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        world.monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    world.monkeypatch.setattr(torch_capture, "_never_ended", [])
    graph = FakeGraph(RuntimeError("the capture was invalidated"))
    one_capture(world.monkeypatch, graph=graph)._end()


def record_on_an_accelerator(world: World) -> None:
    take_meta_for_an_accelerator(world.monkeypatch)
    record(lambda x: x + torch.empty((), device="cpu").normal_(), torch.empty(3, device="meta"))


DOCUMENTED: dict[str, list[Callable[[World], object]]] = {
    "host reads, and shapes that depend on data": [
        lambda world: offload.capture(lambda x: x * x.sum().item(), X),
        lambda world: offload.capture(torch.nonzero, X),
        lambda world: world.prepared(lambda x: x * x.sum().item(), X, host_reads="guard"),
        lambda world: world.prepared(lambda x: x[x > 2].sin(), X, host_reads="guard"),
    ],
    "tensors on another device, and copies to the host": [
        lambda world: world.prepared(lambda x: x + torch.rand(6, device="cpu"), X),
        record_on_an_accelerator,
        lambda world: world.captured(copy_to_the_host),
    ],
    "work that is illegal under capture": [
        lambda world: world.launched(RuntimeError("not permitted when stream is capturing")),
        end_the_capture,
        fail_to_end,
    ],
    "nodes that are no kernels, copies or memsets": [lambda world: world.captured(call_the_host)],
    "a constant address that nobody is known to keep": [use_a_cache, use_memory_of_nobody],
    "other bits at each execution": [
        lambda world: steadiness._check_small(NO_MEMORY, OUTPUT, Spread(math.inf, math.inf))
    ],
    "tensors that no device's recording takes": [
        lambda world: offload.capture(lambda x: x.to_sparse() * 2, X),
        lambda world: offload.capture(lambda x: x.as_strided((2,), (1,), 0), X[2:]),
    ],
}


def refusal_by(raises: Callable[[World], object], world: World) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        raises(world)
    return raised.value


@pytest.mark.parametrize("kind", KINDS)
def test_documented_kinds_are_skipped_with_their_message(world, kind):
    """And each pattern is that of a message which the code raises today."""
    found = set()
    for raises in DOCUMENTED[kind]:
        error = refusal_by(raises, world)
        assert skip_reason("nonzero", error) == f"{kind}: {error}"
        found |= {pattern for pattern in KINDS[kind] if re.search(pattern, str(error))}
        for operator in NEVER_REFUSED:
            assert skip_reason(operator, error) is None
    assert found == set(KINDS[kind])


def test_every_kind_is_known_here():
    assert DOCUMENTED.keys() == KINDS.keys()


def hold_what_nobody_explains(world: World) -> None:
    def step(at: Any) -> None:
        at.launch(world.kernel, words(at.at[0]), words(at.at[1]), words(0xAB_0000 + at.layout))

    world.captured(step)


def change_each_time(world: World) -> None:
    world.captured(
        lambda at: at.launch(
            world.kernel, words(at.at[0]), words(at.at[1]), words(1), grid=1 + at.number % 4
        )
    )


def record_history(world: World) -> None:
    world.monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with pool_memory(world.monkeypatch, FakePool()).current():
        pass


def capture_already(world: World) -> None:
    world.monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    TorchCapturer().capture(offload.capture(torch.sin, X).bound, None)


@pytest.mark.parametrize(
    "raises",
    [
        hold_what_nobody_explains,
        change_each_time,
        record_history,
        capture_already,
        lambda world: proof._refuse(Difference("output 0", 0), "differs: {}"),
        lambda world: offload.capture(lambda x: x.data_ptr(), X),
        lambda world: world.launched(CaptureError("whatever else the code may come to say")),
    ],
)
def test_any_other_refusal_is_a_failure(world, raises):
    assert skip_reason("nonzero", refusal_by(raises, world)) is None


def test_what_may_not_be_refused_is_in_the_database():
    pytest.importorskip("expecttest", reason="torch's operator database imports expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    assert {one.name for one in op_db} >= NEVER_REFUSED
