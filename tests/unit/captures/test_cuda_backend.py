"""The CUDA backend without a device: its refusals and their reasons."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

import offload
from offload.backends import CpuBackend, backend_names, find_backend
from offload.backends.cuda import CudaBackend, prepared_graph
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda.capture import device_of
from offload.backends.cuda.driver import driver_bindings
from offload.errors import BackendUnavailable, CaptureError
from offload.program import BoundProgram, Overlap, Symbol

without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")


def recorded(**changes: object) -> BoundProgram:
    """A Program of one launch, recorded on the CPU, with changes to that launch."""
    program = offload.capture(torch.sin, torch.ones(3)).program
    (launch,) = program.launches
    launches = (dataclasses.replace(launch, **changes),)
    return BoundProgram(dataclasses.replace(program, device="cuda", launches=launches))


def prepare(bound: BoundProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare as if a device existed: refusals come before any capture."""
    monkeypatch.setattr(CudaBackend, "machine", lambda self, index: None)
    monkeypatch.setattr(cuda_backend, "_known", {})  # of kernels that other tests loaded
    CudaBackend(object()).prepare(bound)


@without_cuda
def test_what_is_missing_is_named():
    assert "cuda" in backend_names()
    with pytest.raises(BackendUnavailable, match=r"torch .* is built without CUDA"):
        find_backend("cuda").machine()


@without_cuda
def test_everything_that_is_missing_is_named_at_once(monkeypatch):
    def none() -> int:
        raise BackendUnavailable("libcuda.so.1 is not there")

    def no_bindings() -> None:
        raise BackendUnavailable("pip install 'offload[cuda]'")

    monkeypatch.setattr(cuda_backend._native, "cuda_driver_version", none)
    monkeypatch.setattr(cuda_backend, "driver_bindings", no_bindings)
    with pytest.raises(BackendUnavailable) as raised:
        find_backend("cuda").machine()
    assert str(raised.value).split("; ")[:2] == [
        "libcuda.so.1 is not there",
        "pip install 'offload[cuda]'",
    ]
    assert "built without CUDA" in str(raised.value)


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (types.SimpleNamespace(driver=types.SimpleNamespace()), "is older than CUDA 13: pip"),
        (None, "which are not installed: pip"),  # as a failing import
    ],
)
def test_missing_and_old_bindings_say_what_to_install(monkeypatch, bindings, message):
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    asked_anew = driver_bindings.__wrapped__  # the earlier result stays cached
    with pytest.raises(BackendUnavailable, match=rf"{message} install 'offload\[cuda\]'$"):
        asked_anew()


def test_programs_of_another_device_are_not_loaded():
    captured = offload.capture(torch.sin, torch.ones(3))
    with pytest.raises(BackendUnavailable, match="recorded on cpu"):
        captured.load("cuda")


def test_a_program_stays_on_the_device_that_it_was_recorded_on():
    """Without weights only the Program states its device."""
    program = dataclasses.replace(recorded().program, device_index=1)
    assert device_of(program) == 1
    captured = offload.Captured(BoundProgram(program))
    for device in ("cuda:0", torch.device("cuda:0")):
        with pytest.raises(
            BackendUnavailable, match=r"are on cuda:1: to run it on cuda:0, capture the model there"
        ):
            captured.load(device)


@pytest.mark.parametrize(
    ("device", "index"), [(None, 1), ("cuda", 1), ("cuda:1", 1), (torch.device("cuda", 1), 1)]
)
def test_the_machine_is_that_of_the_programs_device(monkeypatch, device, index):
    asked: list[int | None] = []

    def machine(self, index=None):
        asked.append(index)
        raise BackendUnavailable("seen")

    monkeypatch.setattr(CudaBackend, "machine", machine)
    program = dataclasses.replace(recorded().program, device_index=1)
    with pytest.raises(BackendUnavailable, match="seen"):
        offload.Captured(BoundProgram(program)).load(device)
    assert asked == [index]


def test_a_program_of_no_device_goes_where_it_is_loaded(monkeypatch):
    asked: list[int] = []

    def prepare(self, bound):
        asked.append(device_of(bound.program))
        raise BackendUnavailable("seen")

    monkeypatch.setattr(CudaBackend, "machine", lambda self, index: None)
    monkeypatch.setattr(CudaBackend, "prepare", prepare)
    with pytest.raises(BackendUnavailable, match="seen"):
        offload.Captured(recorded()).load("cuda:1")
    assert asked == [1]


def test_a_device_is_named_by_type_and_number():
    captured = offload.capture(torch.sin, torch.ones(3))
    x = torch.ones(3)
    assert torch.equal(captured.load(torch.device("cpu", 0))(x), x.sin())
    for name in ("cpu:x", "cpu:", "cpu:-1"):
        with pytest.raises(BackendUnavailable, match=f"no backend for device '{name}'"):
            captured.load(name)


def test_a_backend_may_be_given_itself():
    captured = offload.capture(torch.sin, torch.ones(3))
    x = torch.ones(3)
    assert torch.equal(captured.load(CpuBackend())(x), x.sin())
    with pytest.raises(BackendUnavailable, match="no backend for device"):
        captured.load(CpuBackend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guard": 3}, "is read on the host"),
        ({"guards_shape": True}, "has shapes that depend on data"),
        ({"arguments": (Symbol("device", "cpu"),)}, "makes a tensor on cpu"),
    ],
)
def test_launches_that_a_graph_cannot_hold_are_refused_with_their_line(
    changes, message, monkeypatch
):
    with pytest.raises(CaptureError, match=message) as raised:
        prepare(recorded(**changes, source="net.py:7"), monkeypatch)
    assert str(raised.value).startswith("net.py:7: ")
    assert "aten::sin" in str(raised.value)


@pytest.mark.parametrize(("distance_bytes", "is_refused"), [(0, False), (-512, False), (-16, True)])
def test_inputs_that_can_never_be_aligned_together_are_refused(
    distance_bytes, is_refused, monkeypatch
):
    """Neither may be copied, since they overlap: the proof would run kernels on odd addresses."""

    class Reached(Exception):
        pass

    def capture(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(prepared_graph, "capture_in_layouts", capture)
    program = offload.capture(torch.add, torch.ones(300), torch.ones(300)).program
    program = dataclasses.replace(program, overlaps=(Overlap(0, 1, distance_bytes),))
    if not is_refused:
        with pytest.raises(Reached):
            prepare(BoundProgram(program), monkeypatch)
        return
    with pytest.raises(CaptureError, match=r"16 bytes apart.* multiples of 256 bytes") as raised:
        prepare(BoundProgram(program), monkeypatch)
    assert program.values[program.inputs[0].value].name in str(raised.value)


def test_verify_is_a_keyword_of_load_that_the_cpu_accepts():
    captured = offload.capture(torch.sin, torch.ones(3))
    x = torch.randn(3)
    for verify in (True, False):
        with captured.load(verify=verify) as run:
            assert torch.equal(run(x), x.sin())


def test_a_caller_who_captures_is_refused_before_memory_is_taken(monkeypatch):
    """Other driver calls meanwhile may end the caller's capture."""

    def pool(*_: object) -> None:
        raise AssertionError("a pool of discovery takes memory")

    monkeypatch.setattr(CudaBackend, "machine", lambda self, index: None)
    monkeypatch.setattr(cuda_backend._native, "DiscoveryPool", pool)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    program = recorded()
    for ask in (CudaBackend().prepare, lambda one: CudaBackend().opaque.unseen_work(one, one)):
        with pytest.raises(CaptureError, match="being captured on the current stream"):
            ask(program)
