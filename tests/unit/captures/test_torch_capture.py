"""One capture with torch that needs no GPU: its end, its pools, its refusals."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import subprocess
import types

import pytest
import torch
from small_programs import added
from torch_captures import FakeGraph, FakePool, one_capture
from torch_pools import take_for_devices

import offload
from offload.backends.cuda import torch_capture
from offload.compile.toolchain import CompilerMissing, find_compiler


@pytest.mark.parametrize("ends", ["well", "failed", "never begun"])
def test_a_graph_whose_capture_does_not_end_is_kept(monkeypatch, ends):
    """Torch leaves its filters for the graph's memory in place, and one has its address."""
    asked: list[tuple[str, int, object]] = []
    failed = RuntimeError("operation failed due to a previous error during capture")

    def end(device: int, pool: object) -> None:
        asked.append(("end", device, pool))
        if ends == "never begun":
            raise RuntimeError("not currently recording to mempool_id")

    def release(device: int, pool: object) -> None:
        asked.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(torch_capture, "_never_ended", [])
    graph = FakeGraph(None if ends == "well" else failed)
    one = one_capture(monkeypatch, graph=graph)
    one._abandon()
    assert torch_capture._never_ended == ([] if ends == "well" else [graph])
    pool = one._memory.torch_pool.id
    expected = [("end", 0, pool), ("release", 0, pool)]
    assert asked == {"well": [], "failed": expected, "never begun": expected[:1]}[ends]


class Ends:
    """Notes when it is reset and destroyed, and how many pools had ended by then."""

    def __init__(
        self, name: str, log: list[object], ended: list[int], *, fails: bool = False
    ) -> None:
        self._name, self._log, self._ended, self._fails = name, log, ended, fails

    def reset(self) -> None:
        self._log.append(f"{self._name} reset")
        if self._fails:
            raise RuntimeError("the device has failed")

    def __del__(self) -> None:
        self._log.append((f"{self._name} gone", len(self._ended)))


@pytest.mark.parametrize("device_fails", [False, True])
@pytest.mark.parametrize("capture_fails", [False, True])
def test_pools_are_closed_once_the_graph_has_gone(monkeypatch, device_fails, capture_fails):
    """Only the graph's end unregisters it from generators, whose cells lie in one of the pools."""
    log: list[object] = []
    ended = take_for_devices(monkeypatch).ended
    graphs = [Ends("graph", log, ended, fails=device_fails)]
    one = one_capture(monkeypatch, graph=graphs.pop(), takes_devices=False)
    one._memory.kept.append(Ends("tensor", log, ended))
    one._kept.bases = {0: (Ends("base", log, ended), 0)}
    if capture_fails:
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
        with pytest.raises(offload.CaptureError, match="memory history"):
            one.run()
    else:
        assert log == []
        del one
    assert log == [("base gone", 0), ("tensor gone", 0), "graph reset", ("graph gone", 0)]
    assert ended == [0, 0]


@pytest.fixture
def without_collector():
    """A pass of the garbage collector runs finalizers, which overwrite the painted stack."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_what_a_launch_leaves_on_the_stack_is_another_byte_in_each_capture(monkeypatch, tmp_path):
    """Variables that a function does not write hold the bytes painted before the launch."""
    source, library = tmp_path / "peek.cpp", tmp_path / "peek.so"
    source.write_text(
        '#ifdef __cplusplus\nextern "C"\n#endif\n'
        "void peek(unsigned char* out) {\n"
        "  volatile unsigned char left[4096];\n"
        "  for (int index = 0; index < 4096; ++index) out[index] = left[index];\n"
        "}\n"
    )
    try:
        compiler = find_compiler().command
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    options = ["-w", "-O0", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run([*compiler, *options], check=True)
    peek, seen = ctypes.CDLL(str(library)).peek, []

    def launch() -> None:
        found = (ctypes.c_ubyte * 4096)()
        peek(found)
        seen.append(bytes(found))
        raise offload.CaptureError("enough")

    paints = set()
    for _ in range(4):
        one = one_capture(monkeypatch)
        with pytest.raises(offload.CaptureError, match="enough"):
            one._launch(types.SimpleNamespace(call=lambda _: launch), added(4))
        # Zeros are what intermediate calls have written.
        ((paint, count),) = collections.Counter(seen[-1].replace(b"\0", b"")).most_common(1)
        assert count > 1500
        paints.add(paint)
    assert len(paints) == 4


def run_that_raises(error: BaseException) -> types.SimpleNamespace:
    def fail() -> None:
        raise error

    return types.SimpleNamespace(call=lambda launch: fail)


def test_an_operator_that_a_capture_forbids_is_named(monkeypatch):
    forbidden = RuntimeError("operation not permitted when stream is capturing\nadvice of torch")
    with pytest.raises(offload.CaptureError) as raised:
        one_capture(monkeypatch)._launch(run_that_raises(forbidden), added(4))
    assert str(raised.value) == (
        "model.py:4: aten::add.Tensor cannot be captured in a CUDA graph, and has to be left out "
        "of the captured model: operation not permitted when stream is capturing"
    )
    assert raised.value.__cause__ is forbidden


@pytest.mark.parametrize("kind", [offload.CaptureError, offload.BindingError, offload.OutOfMemory])
def test_an_error_of_offload_in_a_launch_stays_as_it_is(monkeypatch, kind):
    refusal = kind("differed")
    with pytest.raises(kind) as raised:
        one_capture(monkeypatch)._launch(run_that_raises(refusal), added(4))
    assert raised.value is refusal
    assert refusal.__notes__ == ["model.py:4: aten::add.Tensor, in the capture"]


@pytest.mark.parametrize(
    ("pool_error", "error"),
    [("no range is left", RuntimeError("x")), (None, torch.OutOfMemoryError("out of memory"))],
)
def test_a_launch_that_gets_no_addresses_is_no_refusal(monkeypatch, pool_error, error):
    """Torch then tries to free memory, which a capture forbids: the cause is the pool's."""
    one = one_capture(monkeypatch, pool=FakePool(error=pool_error))
    reason = pool_error or "out of memory"
    with pytest.raises(
        offload.ExecutionError, match=f"^model.py:4: no addresses for aten::add.Tensor: {reason}$"
    ):
        one._launch(run_that_raises(error), added(4))


@pytest.mark.parametrize("pool_error", ["no range is left", None])
def test_what_a_launch_has_freed_that_cannot_be_taken_is_no_refusal(monkeypatch, pool_error):
    """As under a limit on torch's memory: a filler is an additional torch allocation."""

    def empty(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nadvice")

    one = one_capture(monkeypatch, pool=FakePool(512, error=pool_error))
    monkeypatch.setattr(torch, "empty", empty)
    run = types.SimpleNamespace(call=lambda _: lambda: None, keep=lambda *_: None, bases={})
    launch = dataclasses.replace(added(4), results=())
    reason = pool_error or "CUDA out of memory. Tried to allocate 2 MiB"
    with pytest.raises(
        offload.ExecutionError, match=f"^model.py:4: no addresses for aten::add.Tensor: {reason}$"
    ):
        one._launch(run, launch)


def test_a_capture_that_failed_says_why(monkeypatch):
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    monkeypatch.setattr(torch_capture, "_never_ended", [])
    graph = FakeGraph(RuntimeError("the capture was invalidated\nadvice of torch"))
    with pytest.raises(offload.CaptureError) as raised:
        one_capture(monkeypatch, graph=graph)._end()
    assert str(raised.value) == (
        "the capture of the program's launches failed, so that one of them has to be left out of "
        "the captured model: the capture was invalidated"
    )
    assert torch_capture._never_ended == [graph]
