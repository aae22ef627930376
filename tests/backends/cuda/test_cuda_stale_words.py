"""Stale words from the host's stack, distinguished from words that kernels read."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import struct
import weakref

import pytest
import torch

from offload.errors import CaptureError, ExecutionError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import IN, OUT, Device, N, on_device, result
from small_graphs import StepCapturer, current_context, floats, make_program, words

from offload.backends.captured.relocation.words import NoiseKind
from offload.backends.cuda import CudaBackend
from offload.backends.cuda.graph import call
from offload.program import BoundProgram

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
PROGRAM = ([(IN, N), (OUT, N)], [("0", "1")])


class HostBlocks:
    """Pageable host memory: one block for both captures of a layout, then others."""

    def __init__(self, factor: float = 2.0) -> None:
        self.blocks = [mmap.mmap(-1, 1 << 16, _PRIVATE) for _ in range(3)]
        self._views = [(ctypes.c_float * 16).from_buffer(one) for one in self.blocks]
        for view in self._views:
            view[0] = factor

    def address(self, layout: int) -> int:
        return ctypes.addressof(self._views[layout])


def noise_of(step) -> list:
    backend = CudaBackend(StepCapturer([step]))
    return list(backend.prepare(BoundProgram(make_program(*PROGRAM))).state.discovery.noise)


def scaling(device: Device, factor_of=lambda stale: 2.0):
    """A kernel whose arguments end in eight uninitialised bytes, and that may read them."""

    def scale(arguments: bytes) -> None:
        source, target, stale = struct.unpack("<3Q", arguments)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * factor_of(stale)

    return device.simulator.kernel("padded_kernel", [8, 8, 8], scale)


def test_a_stale_host_address_is_noise_and_the_model_runs(device):
    blocks, kernel = HostBlocks(), scaling(device)

    def step(at):
        stale = words(blocks.address(at.layout))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    (noise,) = noise_of(step)
    assert (noise.offset_bytes, noise.kind) == (16, NoiseKind.HOST)
    assert noise.first == words(blocks.address(0))
    assert noise.again != noise.first
    run = device.load(make_program(*PROGRAM), [step])
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x * 2)


@pytest.mark.parametrize("how", ["as a number", "as an address"])
def test_the_proof_finds_a_kernel_that_reads_it(device, how):
    """As an address where the device can read pageable host memory, different at each call."""
    blocks = HostBlocks()
    first = blocks.address(0)
    read = {
        "as a number": lambda stale: float(stale == first) + 1,
        "as an address": lambda stale: floats(stale, 1)[0],
    }
    kernel = scaling(device, read[how])

    def step(at):
        stale = words(blocks.address(at.layout))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    where = r"'padded_kernel' \(node 0\) of sim::step0 at model.py:1: parameter 2 holds an address"
    with pytest.raises(CaptureError, match=f"{where} of the host's memory .* depend on it"):
        device.load(make_program(*PROGRAM), [step])


def test_one_in_the_middle_of_a_word_becomes_the_decoy_as_a_whole(device):
    """Though its upper half is the same in all captures: half a decoy could point anywhere."""
    tried = [HostBlocks()]
    while len({tried[-1].address(layout) >> 32 for layout in range(3)}) > 1:
        assert len(tried) < 8  # one may cross a multiple of 4 GiB
        tried.append(HostBlocks())
    blocks = tried[-1]

    def scale(arguments: bytes) -> None:
        source, target, _, stale = struct.unpack("<2QIQ4x", arguments)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * floats(stale, 1)[0]

    kernel = device.simulator.kernel("padded_kernel", [8, 8, 16], scale)

    def step(at):
        stale = struct.pack("<IQI", 5, blocks.address(at.layout), 6)
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    where = r"'padded_kernel' \(node 0\) of sim::step0 at model.py:1: parameter 2 holds an address"
    with pytest.raises(CaptureError, match=f"{where} of the host's memory .* depend on it"):
        device.load(make_program(*PROGRAM), [step])


def test_a_kernel_that_writes_through_it_is_refused(device):
    """No result shows it: the memory does not belong to the program."""
    blocks = HostBlocks()

    def scale(arguments: bytes) -> None:
        source, target, stale = struct.unpack("<3Q", arguments)
        floats(stale, 1)[0] = 7.0
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * 2

    kernel = device.simulator.kernel("padded_kernel", [8, 8, 8], scale)

    def step(at):
        stale = words(blocks.address(at.layout))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    with pytest.raises(CaptureError, match=r"writes through a word .* 'padded_kernel' .* param"):
        device.load(make_program(*PROGRAM), [step])


def test_where_the_system_tells_no_mappings_such_words_are_refused(device, monkeypatch):
    blocks, kernel = HostBlocks(), scaling(device)

    def step(at):
        stale = words(blocks.address(at.layout))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    def missing(*_: object) -> str:
        raise FileNotFoundError("/proc/self/maps")

    monkeypatch.setattr(pathlib.Path, "read_text", missing)
    with pytest.raises(CaptureError, match=r"parameter 2 .* is not an address of an allocation"):
        noise_of(step)


@pytest.mark.parametrize("n_launches", [2, 20])
def test_the_driver_is_not_asked_about_addresses_of_the_pool(device, n_launches):
    """Most words are such addresses."""
    kernel = scaling(device)

    def step(at):
        for _ in range(n_launches):
            at.launch(kernel, words(at.at[0]), words(at.scratch(4 * N)), words(0))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(0))

    device.simulator.forget_calls()
    assert noise_of(step) == []
    assert device.simulator.calls("cuPointerGetAttribute") == 0


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemHostAlloc"])
def test_memory_that_the_driver_knows_is_never_noise(device, function):
    """A device's, and pinned memory of the host."""
    kernel = scaling(device)
    more = (0,) if function == "cuMemHostAlloc" else ()
    kept = [int(call(function, 4096, *more)) for _ in range(3)]

    def step(at):
        block = words(kept[at.layout])
        at.launch(kernel, words(at.at[0]), words(at.at[1]), block)

    with pytest.raises(CaptureError, match=r"parameter 2 .* is not an address of an allocation"):
        noise_of(step)


def test_numbers_and_read_only_memory_are_no_addresses_of_the_host(device):
    kernel = scaling(device)
    library = ctypes.CDLL(None)
    address = ctypes.cast(library.strlen, ctypes.c_void_p).value  # code: mapped, not writable

    for stale in (address, 0x7000, 1 << 46):

        def step(at, stale=stale):
            word = words(stale + 8 * at.layout)
            at.launch(kernel, words(at.at[0]), words(at.at[1]), word)

        with pytest.raises(
            CaptureError, match=r"parameter 2 .* is not an address of an allocation"
        ):
            noise_of(step)


@pytest.mark.parametrize("is_constant", [False, True])
def test_the_driver_is_asked_in_the_devices_context(device, is_constant):
    """Whatever the caller's current context: without one the driver knows no address."""
    kernel = scaling(device)
    kept = [int(call("cuMemAlloc", 4096)) for _ in range(3)]

    class Bare(StepCapturer):
        def capture(self, bound, pool):
            current_context()
            try:
                return super().capture(bound, pool)
            finally:
                call("cuCtxSetCurrent", 0)

    def step(at):
        block = words(kept[0 if is_constant else at.layout])
        at.launch(kernel, words(at.at[0]), words(at.at[1]), block)

    with pytest.raises(CaptureError, match=r"parameter 2 (is always|.* is not an address of)"):
        CudaBackend(Bare([step])).prepare(BoundProgram(make_program(*PROGRAM)))


def test_a_driver_that_cannot_be_asked_is_no_answer(device):
    blocks, kernel = HostBlocks(), scaling(device)

    def step(at):
        stale = words(blocks.address(at.layout))
        at.launch(kernel, words(at.at[0]), words(at.at[1]), stale)

    device.simulator.fail("cuPointerGetAttribute", 201)
    with pytest.raises(ExecutionError, match="cuPointerGetAttribute: CUDA_ERROR_INVALID_CONTEXT"):
        noise_of(step)


@pytest.mark.parametrize("half", ["lower", "whole"])
def test_an_address_of_the_heap_differs_in_one_layout(device, half):
    """A capture in another layout lives on between the two, and has the blocks of the first."""
    kernel = scaling(device)
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]

    class Heap(StepCapturer):
        def capture(self, bound, pool):
            self.block = library.malloc(1000)
            found = super().capture(bound, pool)
            free = weakref.finalize(found.keep, library.free, self.block)
            free.atexit = False
            return found

    def step(at):
        stale = capturer.block if half == "whole" else capturer.block % (1 << 32) + (7 << 32)
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(stale))

    capturer = Heap([step])
    (noise,) = (
        CudaBackend(capturer).prepare(BoundProgram(make_program(*PROGRAM))).state.discovery.noise
    )
    assert (noise.offset_bytes, noise.kind) == (16, NoiseKind.DIFFERS)
