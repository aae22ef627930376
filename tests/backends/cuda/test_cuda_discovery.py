"""Discovery on small graphs of simulated kernels, captured through the driver's API."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc

import pytest

from offload.errors import BackendUnavailable, CaptureError
from offload.program import BoundProgram, Role

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from prepared_graphs import ACT, IN, OUT, no_work, prepared
from small_graphs import StepCapturer, current_context, make_program, words

from offload.backends.captured.relocation.touches import node_graph
from offload.backends.cuda import CudaBackend, NodeKind, OwnedRange
from offload.backends.cuda.graph import call, driver_bindings


@pytest.fixture
def device(simulator):
    current_context()
    return simulator


@pytest.fixture
def pointers(device) -> int:
    """A kernel with two addresses and a number."""
    return device.kernel("add_kernel", [8, 8, 8], no_work)


def words_of(found):
    return [
        (w.node, w.part, w.offset_bytes, w.value, w.value_offset_bytes)
        for w in found.state.discovery.words
    ]


def test_addresses_become_words_and_numbers_do_not(pointers):
    def first(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1] + 64), words(256))

    def second(at):
        at.launch(pointers, words(at.at[1] + 1024), words(at.at[2] - 8), words(0x2000000020))

    found, capturer = prepared([first, second])
    assert words_of(found) == [
        (0, 0, 0, 0, 0),
        (0, 0, 8, 1, 64),
        (1, 0, 0, 1, 1024),  # one past the end
        (1, 0, 8, 2, -8),
    ]
    assert capturer.n_captures == 4
    assert found.graph.edges == ((0, 1),)
    assert found.graph.touches == ((0,), (0, 1), (1,))
    assert found.program.values[3:] == ()


def test_noise_of_one_capture_is_no_address(device):
    padded = device.kernel("padded_kernel", [8, 24], no_work)

    def step(at):
        tail = bytes([at.number]) * 15
        at.launch(padded, words(at.at[0]), words(7) + tail + b"\1")

    found, _ = prepared([step, lambda at: at.launch(padded, words(at.at[2]), bytes(24))])
    assert words_of(found) == [(0, 0, 0, 0, 0), (1, 0, 0, 2, 0)]
    assert [(one.node, one.offset_bytes) for one in found.state.discovery.noise] == [
        (0, 16),
        (0, 24),
    ]


def test_scratch_becomes_values_of_their_own_even_where_it_was_recycled(pointers):
    """A block that is freed and requested again has another address in a layout without reuse."""

    def step(at):
        for size in (4096, 8192):
            block = at.scratch(size)
            at.launch(pointers, words(at.at[0]), words(block), words(1))
            at.launch(pointers, words(block), words(at.at[1]), words(1))
            at.pool.free(block)

    def last(at):
        at.scratch(64)  # no kernel gets it
        at.launch(pointers, words(at.at[1]), words(at.at[2]), words(1))

    found, _ = prepared([step, last])
    scratch = found.program.of_role(Role.SCRATCH)
    assert [value.size_bytes for value in scratch] == [4096, 8192]
    assert [value.index for value in scratch] == [3, 4]
    # All nodes of the launch may touch them: an address may have travelled through memory.
    assert found.graph.touches[3] == found.graph.touches[4] == (0, 1, 2, 3)


def test_pointer_tables_by_value_and_through_host_memory(device):
    table = device.kernel("foreach_kernel", [8 * 40], no_work)
    host = ctypes.create_string_buffer(24)

    def by_value(at):
        rows = [at.at[index % 2] + 4 * index for index in range(20)]
        at.launch(table, words(*rows, *range(20)))

    def by_copy(at):
        block = at.scratch(24)
        ctypes.memmove(host, words(at.at[1], 5, at.at[2]), 24)
        call("cuMemcpyHtoDAsync", block, ctypes.addressof(host), 24, at.stream)

    found, _ = prepared([by_value, by_copy])
    assert len(words_of(found)) == 20 + 3
    assert words_of(found)[20:] == [(1, 0, 8, 3, 0), (1, 1, 0, 1, 0), (1, 1, 16, 2, 0)]


def test_copies_and_memsets_on_the_device(device):
    def copy(at):
        call("cuMemcpyDtoDAsync", at.at[1], at.at[0] + 16, 256, at.stream)

    def fill(at):
        call("cuMemsetD32Async", at.at[2] + 4, 7, 10, at.stream)

    found, _ = prepared([copy, fill])
    kinds = [node.kind for node in found.state.capture.nodes]
    assert kinds == [NodeKind.MEMCPY, NodeKind.MEMSET]
    assert words_of(found) == [(0, 0, 0, 0, 16), (0, 0, 8, 1, 0), (1, 0, 0, 2, 4)]


def test_kernels_launched_by_their_library_handle(device, pointers):
    library = device.library_kernel(pointers)

    def step(at):
        at.launch(library, words(at.at[0]), words(at.at[1]), words(3))

    found, _ = prepared([step, step])
    node = found.state.capture.nodes[0]
    assert node.name == "add_kernel"
    assert node.parameters == ((0, 8), (8, 8), (16, 8))
    assert len(words_of(found)) == 4


def test_arguments_given_as_one_buffer(pointers):
    def packed(at):
        content = ctypes.create_string_buffer(words(at.at[0], at.at[1], 5), 24)
        size = ctypes.c_size_t(24)
        extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(content), 2, ctypes.addressof(size), 0)
        call(
            "cuLaunchKernel", pointers, 1, 1, 1, 32, 1, 1, 0, at.stream, 0,
            ctypes.addressof(extra),
        )  # fmt: skip

    found, _ = prepared([packed, packed])
    assert len(words_of(found)) == 4


def test_a_number_that_differs_with_the_layout_is_refused(pointers):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0xAB_0000 + at.layout))

    with pytest.raises(CaptureError, match=r"'add_kernel' .*sim::step0 at model.py:1: parameter 2"):
        prepared([step, step])


def test_a_distance_has_both_ends_stay(pointers):
    """Then its word is a constant, and the words are those of the copies' other sides."""

    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(at.at[1] - at.at[0]))

    def last(at):
        at.launch(pointers, words(at.at[1]), words(at.at[2]), words(1))

    found, capturer = prepared([step, last])
    assert capturer.n_captures == 8
    assert [(one.value, one.size_bytes) for one in found.state.fixed.fixed] == [
        (0, 1024),
        (1, 1024),
    ]
    assert words_of(found) == [(1, 0, 8, 2, 0), (2, 0, 0, 0, 0)]
    assert found.graph.edges == ((0, 1), (2, 0))
    assert found.operator_allocated == {1}  # the activation, which is not placed


def test_an_address_of_an_earlier_capture_is_refused(pointers):
    cache: list[int] = []

    def step(at):
        cache.append(at.at[0])  # as if a plan were made in the first capture, and kept
        at.launch(pointers, words(at.at[1]), words(cache[0]), words(1))

    with pytest.raises(CaptureError, match=r"parameter 1 is always .* keeps that address"):
        prepared([step, step])


def test_constant_addresses_need_an_owner(device, pointers):
    block = int(call("cuMemAlloc", 4096))

    def step(at):
        at.launch(pointers, words(at.at[0]), words(block + 128), words(1))

    whose = rf"0x{block + 128:x} \(byte 128 of 4096 allocated on device 0\)"
    to_do = "if it is a library's, let torch choose another library for the operator"
    with pytest.raises(CaptureError, match=f"parameter 1 is always {whose}, .* owns.*{to_do}"):
        prepared([step, step])
    found, _ = prepared([step, step], owned=[OwnedRange(block, 4096, "a library's workspace")])
    constants = found.state.discovery.constants
    assert [(one.node, one.offset_bytes, one.owner) for one in constants] == [
        (0, 8, "a library's workspace"),
        (1, 8, "a library's workspace"),
    ]


def test_pinned_memory_of_the_host_needs_an_owner_too(pointers):
    block = int(call("cuMemHostAlloc", 4096, 0))

    def step(at):
        at.launch(pointers, words(at.at[0]), words(block), words(1))

    whose = rf"0x{block:x} \(byte 0 of 4096 allocated on the host, known to the driver\)"
    with pytest.raises(CaptureError, match=f"parameter 1 is always {whose}, .* owns"):
        prepared([step, step])


def test_a_look_alike_number_is_no_address_to_the_driver(pointers):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(0x7ABC_DEF0_1230))

    found, _ = prepared([step, step])
    assert found.state.discovery.constants == ()
    assert len(words_of(found)) == 4


def test_a_kernel_that_changes_is_captured_again_and_then_refused(device, pointers):
    other = device.kernel("other_kernel", [8, 8, 8], no_work)

    def once(at):
        at.launch(other if at.number == 2 else pointers, words(at.at[0]), words(1), words(1))

    found, capturer = prepared([once, once])
    assert capturer.n_captures == 8
    assert found.state.capture.nodes[0].name == "add_kernel"

    def always(at):
        at.launch(other if at.number % 2 else pointers, words(at.at[0]), words(1), words(1))

    with pytest.raises(CaptureError, match=r"'(add|other)_kernel' .*3 captures all differed"):
        prepared([always, always])


@pytest.mark.parametrize("n_differing", [2, 12])
def test_captures_that_differed_are_let_go(device, pointers, n_differing):
    """At once, not at a garbage collection: each is a graph and a chunk of device memory."""
    other = device.kernel("other_kernel", [8, 8, 8], no_work)
    before = device.physical_bytes, device.live("graph")

    def step(at):
        kernel = other if at.number % 2 and at.number < n_differing else pointers
        at.launch(kernel, words(at.at[0]), words(1), words(1))

    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            prepared([step, step])
        assert (device.physical_bytes, device.live("graph")) == before
    finally:
        gc.enable()


def test_other_launch_dimensions_are_another_kernel(pointers):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(1), words(1), grid=1 + at.number % 4)

    with pytest.raises(CaptureError, match="launches it differently"):
        prepared([step, step])


def test_host_functions_are_refused(device):
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)

    def step(at):
        address = ctypes.cast(function, ctypes.c_void_p).value
        call("cuLaunchHostFunc", at.stream, driver_bindings().CUhostFn(address), 0)

    with pytest.raises(CaptureError, match="has a host function, which cannot be executed"):
        prepared([step, step])


def test_copies_to_the_host_are_refused(device):
    host = ctypes.create_string_buffer(64)

    def read_back(at):
        call("cuMemcpyDtoHAsync", ctypes.addressof(host), at.at[0], 64, at.stream)

    with pytest.raises(CaptureError, match="copies to the host"):
        prepared([read_back, read_back])


def test_a_failing_capture_leaves_nothing_behind(device, pointers):
    def step(at):
        at.launch(pointers, words(at.at[0]), words(at.at[1]), words(1))

    device.fail("cuLaunchKernel", 1, nth=3)
    before = device.physical_bytes
    with pytest.raises(Exception, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
        prepared([step, step])
    assert device.physical_bytes == before
    assert device.live("graph") <= 1  # that of the failed capture: its stream gave none


def test_without_a_device_the_backend_says_so(device):
    device.set_device_count(0)
    with pytest.raises(BackendUnavailable, match="finds no GPU"):
        CudaBackend(StepCapturer([])).machine()


def test_a_device_that_is_not_there_is_told(device):
    backend = CudaBackend(StepCapturer([]))
    device.set_device_count(1)
    with pytest.raises(BackendUnavailable, match="there is no GPU 3: the driver finds 1"):
        backend.machine(3)
    program = dataclasses.replace(make_program([(IN, 64), (OUT, 64)], [("0", "1")]), device_index=3)
    with pytest.raises(BackendUnavailable, match="there is no GPU 3: the driver finds 1"):
        backend.prepare(BoundProgram(program))


def test_the_machine_is_the_drivers(device):
    machine = CudaBackend(StepCapturer([])).machine()
    assert machine.device == "cuda"
    assert machine.memory_bytes > 0
    assert machine.alignment_bytes == 256


def test_touches_follow_the_programs_reads_where_no_word_does(pointers):
    """A launch may get an address through memory; its reads say that it uses the Value."""
    program = make_program([(IN, 64), (ACT, 64), (ACT, 64)], [("0", "1"), ("01", "2")])

    def step(at):
        at.launch(pointers, words(at.at[2]), words(1), words(1))

    found, _ = prepared([step, step], program)
    graph = node_graph(found.program, found.state.capture, found.state.discovery.words)
    assert graph == found.graph
    assert graph.touches == ((0, 1), (0, 1), (0, 1))
