"""What the proof of a load finds on the simulated driver, and what it leaves where it fails."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from offload.errors import CaptureError, ExecutionError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import (
    ACT,
    IN,
    OUT,
    N,
    chain,
    on_device,
    result,
    scale,
    scale_floats,
)
from small_graphs import floats, make_program, words

from offload.backends.cuda.graph import call


def test_an_address_that_a_kernel_keeps_is_found_by_the_proof(device):
    """No argument shows it: the kernel writes to the first address it got."""
    kept: list[int] = []

    def keeping(arguments: bytes) -> None:
        source, result = struct.unpack("<2Q", arguments)
        kept.append(result)
        for index in range(N):
            floats(kept[0] if len(kept) > 2 else result, N)[index] = floats(source, N)[index] + 1

    kernel = device.simulator.kernel("keeping_kernel", [8, 8], keeping)
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])

    def step(at):
        at.launch(kernel, words(at.at[0]), words(at.at[1]))

    before = device.simulator.live_bytes
    with pytest.raises(CaptureError, match=r"a different result at other addresses: output1"):
        device.load(program, [step])
    assert device.simulator.live_bytes == before


def test_reads_that_the_program_does_not_know_are_found_by_the_proof(device):
    """A Value whose memory is reused too early, since its read is not declared."""
    program = make_program(
        [(IN, N), (ACT, N), (ACT, N), (ACT, N), (OUT, N)],
        [("0", "1"), ("0", "2"), ("2", "3"), ("3", "4")],
    )
    table: dict[int, int] = {}

    def remember(arguments: bytes) -> None:
        scale_floats(arguments)
        table[0] = struct.unpack("<2Qf", arguments)[1]

    def through_memory(arguments: bytes) -> None:
        source, target = struct.unpack("<2Q", arguments)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] + floats(table[0], N)[index]

    first = device.simulator.kernel("table_kernel", [8, 8, 4], remember)
    last = device.simulator.kernel("gather_kernel", [8, 8], through_memory)
    steps = [
        lambda at: at.launch(first, words(at.at[0]), words(at.at[1]), struct.pack("<f", 5.0)),
        lambda at: scale(at, device, at.at[0], at.at[2], 2.0),
        lambda at: scale(at, device, at.at[2], at.at[3], 2.0),
        lambda at: at.launch(last, words(at.at[3]), words(at.at[4])),
    ]
    with pytest.raises(CaptureError, match="a different result at other addresses"):
        device.load(program, steps)


@pytest.mark.parametrize("is_read", [False, True])
def test_padding_that_a_kernel_reads_is_found_by_the_proof(device, is_read):
    """Padding that differs in each capture: a counter, for example."""

    def padded(arguments: bytes) -> None:
        source, result, factor, padding = struct.unpack("<2QfI", arguments)
        for index in range(N):
            floats(result, N)[index] = floats(source, N)[index] * factor + padding * is_read

    kernel = device.simulator.kernel("padded_kernel", [8, 8, 8], padded)

    def step(at, source, result):
        padding = struct.pack("<fI", 2.0, 100 + at.number)
        at.launch(kernel, words(at.at[source]), words(at.at[result]), padding)

    program = make_program([(IN, N), (ACT, N), (OUT, N)], [("0", "1"), ("1", "2")])
    steps = [lambda at: step(at, 0, 1), lambda at: step(at, 1, 2)]
    before = device.simulator.live_bytes
    if is_read:  # the first of the two is named
        where = r"'padded_kernel' \(node 0\) of sim::step0 at model.py:1: parameter 2 differs"
        with pytest.raises(CaptureError, match=where):
            device.load(program, steps)
        assert device.simulator.live_bytes == before
        return
    run = device.load(program, steps)
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x * 4)


def test_padding_of_a_host_table_is_set_too(device):
    host = ctypes.create_string_buffer(24)

    def by_table(arguments: bytes) -> None:
        (table,) = struct.unpack("<Q", arguments)
        source, target, padding = (ctypes.c_uint64 * 3).from_address(table)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] + padding

    kernel = device.simulator.kernel("table_kernel", [8], by_table)

    def step(at):
        table = at.scratch(24)
        ctypes.memmove(host, words(at.at[0], at.at[1], at.number + 7), 24)
        call("cuMemcpyHtoDAsync", table, ctypes.addressof(host), 24, at.stream)
        at.launch(kernel, words(table))

    with pytest.raises(CaptureError, match=r"byte 16 of a host table differs .*depend on it"):
        device.load(make_program([(IN, N), (OUT, N)], [("0", "1")]), [step])


@pytest.mark.parametrize(
    ("function", "nth"),
    [("cuMemAlloc", 2), ("cuGraphInstantiateWithFlags", 2), ("cuGraphLaunch", 2)],
)
def test_a_driver_that_fails_leaves_nothing_behind(device, function, nth):
    program, steps = chain(device)
    before = device.simulator.physical_bytes
    device.simulator.fail(function, 2, nth)
    with pytest.raises(ExecutionError) as raised:
        device.load(program, steps)
    if function == "cuMemAlloc":
        assert "load(verify=False) leaves it out" in str(raised.value)
    del raised
    assert device.simulator.physical_bytes == before
    assert device.simulator.live_bytes == 0
    assert device.simulator.live("executable") == 0
    assert device.simulator.live("graph") == 0


def test_a_device_fault_in_the_proof_is_an_execution_error(device):
    program, steps = chain(device)

    def failing(_: bytes) -> None:
        raise ValueError("as an illegal address would")

    kernel = device.simulator.kernel("failing_kernel", [8, 8], failing)
    steps[0] = lambda at: at.launch(kernel, words(at.at[0]), words(at.at[1]))
    with pytest.raises(ExecutionError):
        device.load(program, steps)
