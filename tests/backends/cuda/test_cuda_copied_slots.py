"""Inputs and outputs that are copied because many nodes hold them: from load to result."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import pytest
import torch

import offload
from offload.plan.topology import CopyCosts
from offload.program import Overlap
from offload.timeline import Scheduling

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import simulated_backend
from loading import ACT, IN, OUT, N, SimulatedBackend, add, on_device, result, scale
from simulated_backend import SimulatedBackend as AtenBackend
from small_graphs import make_program

from offload.backends.cuda import CudaBackend, backend
from offload.run.debug_lines import loaded_line, planned_text


class CopyingBackend(SimulatedBackend):
    """A device on which a copy of these tensors costs as much as three nodes."""

    def copy_costs(self, index: int, resident: object) -> CopyCosts:
        return CopyCosts(1000.0, 1000.0, 1488.0, 1.0)


def star(device, n_readers):
    """out = n * x + x, each term by a kernel that reads x; only the last one writes out."""
    n = n_readers
    program = make_program(
        [(IN, N), *[(ACT, N)] * (n - 1), (OUT, N)],
        [("0", "1"), *[(f"0{at}", str(at + 1)) for at in range(1, n)]],
    )
    steps = [
        lambda at: scale(at, device, at.at[0], at.at[1], 2.0),
        *[
            lambda at, made=made: add(at, device, at.at[0], at.at[made], at.at[made + 1])
            for made in range(1, n)
        ],
    ]
    return program, steps


def test_a_slot_with_many_nodes_is_copied(device):
    run = device.load(*star(device, 5), backend=CopyingBackend)
    before = run._loaded.resident.n_set_params
    for _ in range(3):
        x = on_device(torch.randn(N))
        expected = functools.reduce(lambda total, _: x + total, range(4), x * 2)
        assert torch.equal(result(run, x), expected)
        assert run.last_execution.bytes_copied == 4 * N
    assert run.last_execution.slots_changed == 1  # the output
    assert run._loaded.resident.n_set_params - before == 2  # the first instantiated the graph
    assert run.memory_report().buffer_bytes == 4 * N
    said = run.explain()
    assert (
        "input input0: copied: 5 nodes would be re-set (5.0 us measured) against 3.0 us for a copy "
        "of 512 bytes; by itself a copy pays from K = 4 nodes on"
    ) in said
    assert "output output5: not copied: 1 nodes" in said
    assert "buffers of copied inputs and outputs: 512 bytes" in said


def test_a_slot_with_fewer_nodes_than_break_even_is_not_copied(device):
    run = device.load(*star(device, 3), backend=CopyingBackend)
    x = on_device(torch.randn(N))
    assert torch.equal(result(run, x), x + (x + x * 2))
    assert run.last_execution.bytes_copied == 0
    assert "input input0: not copied: 3 nodes" in run.explain()


def test_an_output_that_many_nodes_write_is_copied(device):
    def step(at):
        scale(at, device, at.at[0], at.at[1], 2.0)
        for _ in range(4):
            add(at, device, at.at[1], at.at[1], at.at[1])

    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    run = device.load(program, [step], backend=CopyingBackend)
    results = []
    for _ in range(3):
        x = on_device(torch.randn(N))
        (y,) = run.submit(x).result()
        results.append((y, x * 32))
        assert run.last_execution.bytes_copied == 4 * N
    assert all(torch.equal(y, expected) for y, expected in results)
    assert len({y.data_ptr() for y, _ in results}) == 3


def test_a_written_input_is_copied_both_ways_and_counted_so(device):
    def step(at):
        for _ in range(7):
            add(at, device, at.at[0], at.at[0], at.at[0])
        scale(at, device, at.at[0], at.at[1], 1.0)

    program = make_program([(IN, N), (OUT, N)], [("0", "01")])
    run = device.load(program, [step], backend=CopyingBackend)
    x = on_device(torch.randn(N))
    expected = x * 128
    assert torch.equal(result(run, x), expected)
    assert torch.equal(x, expected)
    assert run.last_execution.bytes_copied == 2 * 4 * N
    assert "copied: 8 nodes would be re-set (8.0 us measured) against 6.0 us" in run.explain()


def test_inputs_that_must_overlap_are_not_copied(device):
    """They are bound in place, however many nodes hold them."""

    def step(at):
        for _ in range(8):
            add(at, device, at.at[0], at.at[1], at.at[0])
        scale(at, device, at.at[0], at.at[2], 1.0)

    program = make_program([(IN, N), (IN, N), (OUT, N)], [("01", "02")])
    program = dataclasses.replace(program, overlaps=(Overlap(0, 1, 0),))
    run = device.load(program, [step], backend=CopyingBackend)
    x = on_device(torch.ones(N))
    run(x, x, out=(on_device(torch.zeros(N)),))
    run._loaded.resident.finish()
    assert x[0] == 256
    assert run.last_execution.bytes_copied == 0


def test_host_scheduling_copies_nothing(device):
    """A single launch gets its addresses at each call anyway."""
    run = device.load(*star(device, 5), backend=CopyingBackend, scheduling=Scheduling.HOST)
    assert run.copy_choices == ()


def test_costs_are_measured_once_and_only_for_several_nodes(device, monkeypatch):
    class Measuring(SimulatedBackend):
        copy_costs = CudaBackend.copy_costs

    monkeypatch.setattr(backend, "_copy_costs", {})
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    steps = [lambda at: scale(at, device, at.at[0], at.at[1], 2.0)]
    device.load(program, steps, backend=Measuring)
    assert device.simulator.calls("cuEventElapsedTime") == 0
    for _ in range(2):
        run = device.load(*star(device, 5), backend=Measuring)
        n_calls = device.simulator.calls("cuEventElapsedTime")
        assert n_calls > 0
    assert device.simulator.calls("cuEventElapsedTime") == n_calls
    (costs,) = backend._copy_costs.values()
    assert run.copy_choices[0].set_ns == 5 * costs.set_node_ns
    x = on_device(torch.ones(N))
    assert result(run, x)[0] == 6


class MallocCounts(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    # fmt: off
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]
    # fmt: on


def allocated_bytes() -> int:
    """Bytes allocated by malloc in this process, an exact count: resident pages vary."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("mallinfo2 comes with glibc 2.33 and later")
    library.mallinfo2.restype = MallocCounts
    counts = library.mallinfo2()
    return counts.hblkhd + counts.uordblks


@pytest.mark.slow
def test_closing_gives_the_buffers_back(simulator, monkeypatch):
    class Copying(AtenBackend):
        def copy_costs(self, index, resident):
            return CopyCosts(1e6, 1.0, 1.0, 0.0)

    n_items = 2**23
    monkeypatch.setattr(simulated_backend, "SimulatedBackend", Copying)
    name = simulated_backend.install(simulator, monkeypatch).name
    x = torch.ones(n_items)
    captured = offload.capture(lambda x: (x + 1, x[:8] * 2, x[8:16] * 3), x)
    run = captured.load(name)
    assert run.memory_report().buffer_bytes >= 4 * n_items
    results = run(x)
    before = allocated_bytes()
    run.close()
    assert before - allocated_bytes() > 3 * n_items
    assert [one[0].item() for one in results] == [2, 2, 3]
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(x)


def test_what_is_said_of_slots_with_nodes(device):
    run = device.load(*star(device, 5), backend=CopyingBackend)
    said = planned_text(run).splitlines()
    patched = said[said.index("patched:") + 1 :]
    assert patched[0] == (
        "  slot 0: with the caller's tensor, copied, and nothing written (5 nodes have its address)"
    )
    assert patched[1] == "  slot 1: with the result's memory, 1 node re-set"
    assert loaded_line(run, "star", verify=True).endswith(
        "; proofs of the device at load, if any, held"
    )
    assert loaded_line(run, "star", verify=False).endswith("; nothing proved (verify=False)")
