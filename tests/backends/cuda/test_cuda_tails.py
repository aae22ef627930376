"""Weights whose head stays on a CUDA device and whose tail is streamed, mapped contiguously.

Memory is mapped by 16 KiB here, unless a test says otherwise: the models' weights have some 100
each.
"""

from __future__ import annotations

import dataclasses
import gc

import pytest
import safetensors.torch
import torch
from budgets import Deep, weight_bytes
from shared_stores import headed_in
from simulator import NEWEST_FIRST
from stored import save_weights, without_memory
from torch import nn

import offload
from offload.backends.captured.streamed_copies import check_copies, streamed_graph
from offload.backends.cuda import backend as cuda_backend
from offload.console.amounts import show_bytes
from offload.load.place import place
from offload.native import _native
from offload.plan.streaming import Streaming

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import (
    GIVEN,
    ORDERS,
    check,
    expected_of,
    floor_on,
    poison_after_last_use,
    results,
    unmapped,
)

pytestmark = pytest.mark.usefixtures("small_granules")

KIB = 1024
GRANULE = 16 * KIB
UNKNOWN, OUT_OF_MEMORY = 999, 2

HELD = ("executable", "graph", "stream", "event", "memory handle", "mapping", "reservation")


def rounded(n_bytes: int, unit: int = GRANULE) -> int:
    return -(-n_bytes // unit) * unit


def tails_of(plan: Streaming) -> list:
    return [piece for piece in plan.pieces if piece.streamed and piece.offset_bytes]


def share_memory(one, other) -> bool:
    begin = max(one.memory_offset_bytes, other.memory_offset_bytes)
    ends = (each.memory_offset_bytes + each.size_bytes for each in (one, other))
    return one is not other and begin < min(ends)


def held(simulator, expected: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Live device resources; garbage is collected unless they are as expected at once."""
    found: tuple[int, ...] | None = None
    for collects in (expected is None, True):
        if collects:
            gc.collect()
        counts = tuple(simulator.live(kind) for kind in HELD)
        found = (*counts, simulator.host_bytes, simulator.physical_bytes)
        if found == expected:
            break
    return found


@pytest.fixture
def headed(tmp_path):
    return headed_in(tmp_path)


@pytest.fixture
def budget(deep, backend, device_floor) -> int:
    """A budget under which some weights of `deep` have tails that map the same memory."""
    found = device_floor + (weight_bytes(deep.program) - device_floor) // 2
    with deep.load(backend.name, weights_budget=found, verify=False) as run:
        tails = tails_of(run.streaming.plan)
    assert any(share_memory(one, other) for one in tails for other in tails)
    return found


@pytest.mark.slow
def test_every_budget_gives_the_same_bits_and_takes_what_is_planned(
    backend, simulator, deep, device_floor
):
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs * len(ORDERS))
    whole = weight_bytes(deep.program)
    n_cut = 0
    for given_bytes in (device_floor, *range(device_floor, whole, (whole - device_floor) // 5)):
        gc.collect()  # an earlier load's leftovers would share its arena
        before = simulator.physical_bytes, simulator.host_bytes
        with deep.load(backend.name, weights_budget=given_bytes, verify=False) as run:
            plan = run.streaming.plan
            n_cut += bool(tails_of(plan))
            assert plan.granule_bytes == GRANULE
            assert plan.taken_bytes <= given_bytes
            streamed = [one.size_bytes for one in plan.pieces if one.streamed]
            assert sum(streamed) == whole - plan.resident_bytes
            taken = simulator.physical_bytes - before[0]
            arena = rounded(run.feature_map_bytes)
            assert taken == plan.taken_bytes + arena
            assert f"{show_bytes(plan.taken_bytes)} used" in run.streaming.explain()
            stored = sum(rounded(size_bytes, 4096) for size_bytes in streamed)
            assert simulator.host_bytes - before[1] == stored
            for number, order in enumerate(ORDERS):
                simulator.set_node_order(*order)
                copied = simulator.bytes_from_host
                moved = run.streaming.bytes_moved
                check(run, inputs, expected[number * len(inputs) :][: len(inputs)])
                assert run.last_execution.bytes_streamed == plan.transfer_bytes
                n_bytes = simulator.bytes_from_host - copied
                assert n_bytes == run.streaming.bytes_moved - moved
                if number:  # the first execution has a prologue
                    assert n_bytes == len(inputs) * plan.transfer_bytes
    assert n_cut >= 3


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_tails_are_poisoned_after_their_last_use(order, backend, simulator, deep, budget):
    """The memory that other weights also map, through the addresses of the weight that was read."""
    inputs = [torch.randn(*GIVEN) for _ in range(4)]
    expected = expected_of(deep, inputs)
    simulator.set_node_order(*order)
    with deep.load(backend.name, weights_budget=budget) as run:
        poison_after_last_use(backend, run)
        check(run, inputs, expected)


def test_a_granule_of_the_device_is_kept_to(backend, simulator, tmp_path):
    """2 MiB, as on devices: each weight is three of them, and some bytes more."""
    simulator.set_granularity(2 * 2**20)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1280, 1280, bias=False) for _ in range(6)))

    save_weights(build().eval(), tmp_path)
    given = torch.randn(1, 1280)
    captured = offload.capture(without_memory(build), given, weights=tmp_path)
    expected = expected_of(captured, [given] * 2)
    whole = weight_bytes(captured.program)
    assert whole // 6 % (2 * 2**20)
    before = simulator.physical_bytes
    budget = whole - 3 * 2**20
    with captured.load(backend.name, weights_budget=budget, verify=False) as run:
        plan = run.streaming.plan
        assert plan.granule_bytes == 2 * 2**20
        assert tails_of(plan)
        for piece in tails_of(plan):
            assert piece.offset_bytes % (2 * 2**20) == 0
            assert piece.memory_offset_bytes % (2 * 2**20) == 0
        arena = rounded(run.feature_map_bytes, 2 * 2**20)
        assert simulator.physical_bytes - before == plan.taken_bytes + arena
        assert budget - 2 * 2**20 < plan.taken_bytes <= budget
        check(run, [given] * 2, expected)


def test_less_than_a_granule_is_no_budget(backend, simulator, deep):
    """A device that allocates 2 MiB at a time takes them for a smaller model: that is the floor."""
    simulator.set_granularity(2 * 2**20)
    whole = weight_bytes(deep.program)
    assert whole < 2 * 2**20
    with pytest.raises(offload.PlanError, match=r"at least 2097152 bytes.* gives .* by 2097152"):
        deep.load(backend.name, weights_budget=whole, verify=False)
    gc.collect()
    for budget in (None, 2 * 2**20, 3 * 2**20, "auto"):
        before = simulator.physical_bytes
        with deep.load(backend.name, weights_budget=budget, verify=False) as run:
            plan = run.streaming.plan
            assert plan.is_resident
            arena = rounded(run.feature_map_bytes, 2 * 2**20)
            assert simulator.physical_bytes - before == plan.taken_bytes + arena
            assert plan.taken_bytes == plan.floor.required_bytes == 2 * 2**20


def test_at_the_same_floor_less_is_copied_than_of_whole_weights(backend, headed, monkeypatch):
    """No floor is lower: all operands of a launch are resident as a whole."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(headed, inputs)
    floor = floor_on(headed, backend)
    assert 1024 * 128 * 4 <= floor <= 1024 * 128 * 4 + 64 * KIB
    with headed.load(backend.name, weights_budget=floor) as run:
        mapped = run.streaming.plan
        check(run, inputs, expected)
    monkeypatch.setattr(type(backend.weights), "memory_layout", unmapped(backend))
    assert floor_on(headed, backend) == floor
    with headed.load(backend.name, weights_budget=floor) as run:
        whole = run.streaming.plan
        check(run, inputs, expected)
    assert tails_of(mapped)
    assert not tails_of(whole)
    assert whole.transfer_bytes == weight_bytes(headed.program)
    assert mapped.transfer_bytes <= 7 * 64 * KIB  # the small ones, and as much of the large one
    assert mapped.period_ns < whole.period_ns


class Sliced(nn.Module):
    """Launches that hold addresses inside weights: in their heads and in their tails."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(512, 128)) for _ in range(6))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            low = nn.functional.linear(given, weight[:128])
            high = nn.functional.linear(given, weight[384:].clone())
            given = torch.tanh(low + high + weight[511])
        return given


def test_addresses_inside_of_tails_are_relocated(backend, simulator, tmp_path):
    save_weights(Sliced().eval(), tmp_path)
    captured = offload.capture(without_memory(Sliced), torch.randn(*GIVEN), weights=tmp_path)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(captured, inputs)
    budget = weight_bytes(captured.program) * 2 // 3
    with captured.load(backend.name, weights_budget=budget) as run:
        # Rows from 384 on, in bytes of which some, or all, are of a tail.
        assert any(piece.offset_bytes <= 448 * 512 for piece in tails_of(run.streaming.plan))
        poison_after_last_use(backend, run)
        check(run, inputs, expected)


def test_heads_and_tails_are_replaced_and_read_again(backend, deep, budget, tmp_path):
    given = torch.randn(*GIVEN)
    first = expected_of(deep, [given])
    path = tmp_path / "model.safetensors"
    other = Deep().eval()
    (tmp_path / "other").mkdir()
    save_weights(other, tmp_path / "other")
    again = offload.capture(without_memory(Deep), given, weights=tmp_path / "other")
    second = expected_of(again, [given] * 2)
    with deep.load(backend.name, weights_budget=budget) as run:
        check(run, [given], first)
        new = {name: one.detach().clone() for name, one in other.state_dict().items()}
        run.streaming.replace(new)
        for tensor in new.values():
            tensor.fill_(float("nan"))  # a copy was taken
        check(run, [given] * 2, second)
    with deep.load(backend.name, weights_budget=budget) as run:
        check(run, [given], first)
        changed = {name: one * 2 for name, one in safetensors.torch.load_file(path).items()}
        with path.open("r+b") as file:
            file.write(safetensors.torch.save(changed))
        third = expected_of(deep, [given] * 2)
        run.streaming.refresh()
        check(run, [given] * 2, third)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "refreshes"),
    [("cuGraphLaunch", False), ("cuStreamWaitEvent", False), ("cuGraphLaunch", True),
     ("cuMemcpyHtoDAsync", True), ("cuMemcpyHtoD", True)],
)  # fmt: skip
def test_a_failed_call_leaves_the_next_execution_right(
    function, refreshes, backend, simulator, headed
):
    """Also where a head, or the tail part of the prologue, was not read again."""
    inputs = [torch.randn(*GIVEN) for _ in range(2)]
    expected = expected_of(headed, inputs)
    with headed.load(backend.name, weights_budget=floor_on(headed, backend)) as run:
        assert tails_of(run.streaming.plan)
        poison_after_last_use(backend, run)
        check(run, inputs, expected)
        if refreshes:
            run.streaming.refresh()
        simulator.fail(function, UNKNOWN)
        ticket = run.submit(inputs[0])
        with pytest.raises(offload.ExecutionError, match="CUDA_ERROR_UNKNOWN"):
            ticket.wait()
        check(run, inputs, expected)


@pytest.mark.slow
def test_two_executables_have_memories_of_their_own(backend, simulator, deep, budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 3)
    before = held(simulator)
    with (
        deep.load(backend.name, weights_budget=budget) as one,
        deep.load(backend.name, weights_budget=budget + 64 * KIB) as other,
    ):
        for (wanted,) in expected:
            assert torch.equal(one(given), wanted)
            assert torch.equal(other(given), wanted)
    del one, other
    assert held(simulator) == before


def test_host_scheduling_copies_tails_alike(backend, deep, budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 2)
    with deep.load(backend.name, weights_budget=budget, scheduling="host") as run:
        check(run, [given] * 2, expected)
        assert run.last_execution.bytes_streamed == run.streaming.plan.transfer_bytes


def test_auto_takes_what_is_free(backend, simulator, deep, device_floor):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given])
    whole = weight_bytes(deep.program)
    with deep.load(backend.name, weights_budget=device_floor, verify=False) as run:
        other_bytes = simulator.physical_bytes - run.streaming.plan.memory_bytes
    room = (device_floor + whole) // 2
    simulator.set_memory_limit(other_bytes + room)
    with deep.load(backend.name, weights_budget="auto", verify=False) as run:
        assert tails_of(run.streaming.plan)
        assert device_floor < run.streaming.plan.memory_bytes <= room
        check(run, [given], expected)


MEMORY_CALLS = ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.mark.slow
@pytest.mark.parametrize("function", MEMORY_CALLS)
def test_a_failure_of_any_call_leaves_nothing(function, backend, simulator, deep, budget):
    with deep.load(backend.name, weights_budget=budget, verify=False) as run:  # keeps an arena
        prepared = backend.prepare(deep.bound)
        plan = dataclasses.replace(place(prepared, backend), streaming=run.streaming.plan)
        before = held(simulator)
        simulator.forget_calls()
        loaded = backend.instantiate(prepared, plan)
        n_calls = simulator.calls(function)
        assert n_calls > 1 + len(tails_of(plan.streaming))
        loaded.resident.close()
        del loaded
        assert held(simulator) == before
        for nth in range(1, n_calls + 1):
            for code in (UNKNOWN, OUT_OF_MEMORY):
                simulator.fail_memory(function, code, nth)
                with pytest.raises(offload.ExecutionError) as raised:
                    backend.instantiate(prepared, plan)
                simulator.forget_calls()
                assert (raised.type is offload.OutOfMemory) == (code == OUT_OF_MEMORY)
                del raised
                assert held(simulator, before) == before


@pytest.mark.slow
def test_what_is_closed_is_given_back_whole(backend, simulator, deep, budget):
    deep.load(backend.name, weights_budget=budget, verify=False).close()
    before = held(simulator)
    run = deep.load(backend.name, weights_budget=budget, verify=False)
    run(torch.randn(*GIVEN))
    assert simulator.live("mapping") > simulator.live("memory handle")  # some bytes twice
    run.close()
    del run
    assert held(simulator) == before


@pytest.mark.slow
def test_an_unmapping_that_fails_does_not_keep_the_rest(backend, simulator, deep, budget):
    """Closing cannot report it; all that can be released is released."""
    deep.load(backend.name, weights_budget=budget, verify=False).close()
    gc.collect()
    before = simulator.live("memory handle"), simulator.live("mapping")
    run = deep.load(backend.name, weights_budget=budget, verify=False)
    simulator.fail("cuMemUnmap", UNKNOWN)
    run.close()
    del run
    gc.collect()
    after = simulator.live("memory handle"), simulator.live("mapping")
    assert after == (before[0], before[1] + 1)


def test_pieces_off_the_granule_of_the_device_are_refused(backend):
    def make(granule: int, head: int) -> None:
        weight = torch.zeros(64 * KIB, dtype=torch.uint8)
        _native.CudaWeightStream(
            device=0,
            memory_bytes=64 * KIB,
            granule_bytes=granule,
            weights=[
                _native.StreamedWeight(
                    name="weight",
                    size_bytes=64 * KIB,
                    pieces=[(0, head, 0, False), (head, 64 * KIB - head, head, True)],
                    source=weight,
                )
            ],
            transfers=[(0, 1, 0, 0, 0, -1)],
            n_launches=1,
        ).close()

    make(GRANULE, GRANULE)
    with pytest.raises(offload.PlanError, match="maps memory by 16384 bytes, got 4096"):
        make(4 * KIB, 4 * KIB)
    with pytest.raises(offload.PlanError, match="granules of 16384"):
        make(GRANULE, 4 * KIB)


def test_a_launch_is_not_hidden_from_the_order_by_other_addresses(backend, simulator, deep, budget):
    """Without the edges between weights whose tails map the same memory results are wrong."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    refused = []

    def without_edges(program, graph, streaming):
        found = streamed_graph(program, graph, streaming)
        copies = tuple(dataclasses.replace(one, after=()) for one in found.copies)
        mutant = dataclasses.replace(found, copies=copies)
        try:
            check_copies(program, graph, streaming, mutant)
        except offload.CaptureError as error:
            refused.append(str(error))
        return mutant

    simulator.set_node_order(NEWEST_FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend, "streamed_graph", without_edges)
        with deep.load(backend.name, weights_budget=budget, verify=False) as run:
            outcomes = [results(run(given)) for given in inputs]
    assert "at the same place" in refused[0]
    assert any(
        not torch.equal(got, wanted)
        for one, other in zip(outcomes, expected, strict=True)
        for got, wanted in zip(one, other, strict=True)
    )
