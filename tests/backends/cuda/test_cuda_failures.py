"""Failures in a resident graph on the simulated driver, and their consequences."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from graphs import Cuda, read
from residents import (
    COUNT,
    NUMBERS,
    SIZE_BYTES,
    SIZES,
    Chain,
    Gather,
    elementwise,
    plus,
    run,
)
from simulator import Simulator

from offload.errors import ExecutionError, OutOfMemory
from offload.native import _native

GRANULARITY = 2 << 20

SLEPT_NS = 20_000_000


def slow(number: int) -> int:
    time.sleep(SLEPT_NS / 1e9)
    return number


def test_a_node_that_could_not_be_set_is_set_by_the_next_execution(cuda, arena):
    chain = Chain(cuda, arena, n_kernels=4)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    run(chain.resident)
    moved = cuda.allocate([0] * 3 * COUNT)
    chain.bind(feature_map=moved)
    cuda.simulator.fail("cuGraphExecKernelNodeSetParams", 1, nth=3)
    with pytest.raises(
        ExecutionError, match=r"re-setting node 2, a kernel add_one: CUDA_ERROR_INVALID_VALUE"
    ):
        chain.resident.execute()
    assert chain.resident.n_set_params == 3
    assert chain.resident.n_graph_launches == 1
    assert run(chain.resident) == 2  # the third again, and the fourth
    assert read(y, COUNT) == plus(4)
    assert read(moved + 2 * SIZE_BYTES, COUNT) == plus(3)


@pytest.mark.parametrize(
    ("function", "what"), [("cuGraphExecKernelNodeSetParams", "re-setting"),
                           ("cuGraphKernelNodeSetParams", "setting")],
)  # fmt: skip
def test_a_node_that_fails_is_named_by_its_launch(cuda, arena, function, what):
    names = ["aten::add.Tensor at model.py:3", "aten::add.Tensor at model.py:4"]
    chain = Chain(cuda, arena, n_kernels=3, launch_names=names)
    chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT))
    if what == "re-setting":
        run(chain.resident)
        chain.bind(feature_map=cuda.allocate([0] * 3 * COUNT))
    cuda.simulator.fail(function, 1, nth=2)
    with pytest.raises(
        ExecutionError,
        match=rf"^{what} node 1 of aten::add.Tensor at model.py:4.*, a kernel add_one: "
        r"CUDA_ERROR_INVALID_VALUE \(invalid argument\)$",
    ):
        chain.resident.execute()
    cuda.simulator.fail(function, 1, nth=2 if what == "re-setting" else 3)
    with pytest.raises(ExecutionError, match=rf"^{what} node 2(, a kernel| of the template)"):
        chain.resident.execute()  # without a name


def test_a_node_that_could_not_be_set_is_set_even_where_it_was_before(cuda, arena):
    chain = Chain(cuda, arena)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    run(chain.resident)
    chain.bind(x=cuda.allocate(plus(9)))
    cuda.simulator.fail("cuGraphExecKernelNodeSetParams", 1)
    with pytest.raises(ExecutionError):
        chain.resident.execute()
    chain.bind(x=x)
    assert run(chain.resident) == 1
    assert read(y, COUNT) == plus(3)


@pytest.mark.parametrize("function", ["cuEventSynchronize", "cuEventRecord", "cuEventCreate"])
def test_after_a_wait_that_failed_every_node_is_set_again(cuda, arena, function):
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    run(chain.resident)
    assert run(chain.resident) == 0
    chain.resident.execute()
    cuda.simulator.fail(function, 999)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_UNKNOWN"):
        chain.resident.finish()
    assert [run(chain.resident) for _ in range(2)] == [3, 0]
    assert read(y, COUNT) == plus(3)


def test_after_a_wait_that_failed_host_tables_are_written_again(cuda, arena):
    program = Gather(cuda, arena, given=True)
    y = cuda.allocate([0] * COUNT)
    program.bind(cuda.allocate(NUMBERS), cuda.allocate(plus(5)), y)
    run(program.resident)
    expected = read(y, COUNT)
    assert run(program.resident) == 0
    program.resident.execute()
    cuda.simulator.fail("cuEventSynchronize", 999)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_UNKNOWN"):
        program.resident.finish()
    assert run(program.resident) > 0
    assert read(y, COUNT) == expected


def test_launches_are_timed_one_behind_the_other(cuda, arena):
    chain = Chain(cuda, arena)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    before = live(cuda.simulator)
    times_ns = chain.resident.time_launches()
    assert len(times_ns) == 3
    assert min(times_ns) > 0
    assert read(y, COUNT) == plus(3)
    assert live(cuda.simulator) == before
    moved = cuda.allocate([0] * COUNT)
    chain.bind(y=moved)
    chain.resident.time_launches()
    assert read(moved, COUNT) == plus(3)


def test_the_time_of_a_launch_is_its_own(cuda, arena):
    """A kernel sleeps, so that its launch takes at least as long, and the others precede it."""
    kernel = elementwise(cuda.simulator, "slow", slow)
    quick = elementwise(cuda.simulator, "quick", lambda number: number)
    pool = _native.DiscoveryPool(0, 1)
    x, y, z, stream = *(pool.allocate(SIZE_BYTES) for _ in range(3)), cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.launch(kernel, stream, [y, x, 1], SIZES)
        cuda.launch(quick, stream, [z, y, 1], SIZES)
    resident = _native.CudaResident(
        device=0,
        graph=graph.handle,
        arena=arena,
        arena_bytes=0,
        node_handles=graph.nodes,
        words=[(0, 0, 0), (0, 0, 8), (1, 0, 0), (1, 0, 8)],
        relocations=[(0, 1, 0), (1, 0, 0), (2, 2, 0), (3, 1, 0)],
        launches=[0, 2],
        n_launches=3,
    )
    x, y, z = (cuda.allocate([0] * COUNT) for _ in range(3))
    resident.patch([(0, y), (1, x), (2, z), (3, y)])
    times_ns = resident.time_launches()
    assert times_ns[0] >= SLEPT_NS * 0.99  # as a float of milliseconds
    assert times_ns[1] == 0.0  # it has no node
    assert times_ns[2] > 0


def test_a_launch_that_fails_can_be_tried_again(cuda, arena):
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    cuda.simulator.fail("cuGraphLaunch", 999)
    with pytest.raises(ExecutionError, match="launching the graph: CUDA_ERROR_UNKNOWN"):
        chain.resident.execute()
    assert run(chain.resident) == 0
    assert read(y, COUNT) == plus(3)


def failing_program(cuda: Cuda, arena: _native.CudaArena) -> _native.CudaResident:
    def fail(number: int) -> int:
        raise ValueError(number)

    kernel = elementwise(cuda.simulator, "fail", fail)
    pool = _native.DiscoveryPool(0, 1)
    x, y, stream = pool.allocate(SIZE_BYTES), pool.allocate(SIZE_BYTES), cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.launch(kernel, stream, [y, x, COUNT], SIZES)
    resident = _native.CudaResident(
        device=0,
        graph=graph.handle,
        arena=arena,
        arena_bytes=0,
        node_handles=graph.nodes,
        words=[(0, 0, 0), (0, 0, 8)],
        relocations=[(0, 1, 0), (1, 0, 0)],
        launches=[0],
        n_launches=1,
    )
    resident.patch([(0, cuda.allocate(NUMBERS)), (1, cuda.allocate(NUMBERS))])
    return resident


def test_a_device_fault_surfaces_at_the_wait(cuda, arena):
    resident = failing_program(cuda, arena)
    resident.execute()
    with pytest.raises(
        ExecutionError,
        match=r"^executing the program: CUDA_ERROR_LAUNCH_FAILED \(.*\); a device that has "
        "faulted can be used again in a new process$",
    ):
        resident.finish()
    with pytest.raises(ExecutionError, match="CUDA_ERROR_LAUNCH_FAILED"):
        resident.execute()


def test_a_fault_that_nobody_waited_for_does_not_stop_the_clean_up(cuda, arena):
    resident = failing_program(cuda, arena)
    resident.execute()
    del resident
    assert [str(error) for error in cuda.simulator.errors] == [str(NUMBERS[0])]


def test_work_in_flight_is_waited_for_before_memory_goes(cuda, arena):
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    chain.resident.execute()
    assert read(y, COUNT) == [0] * COUNT
    chain.resident.close()
    assert read(y, COUNT) == plus(3)
    with pytest.raises(ExecutionError, match="closed"):
        chain.resident.execute()
    chain.resident.close()


class Kept:
    """The target of a graph's constant addresses; notes the live objects at its end."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self.seen: list[object] = []

    def __del__(self) -> None:
        self.seen.append(self._look())


def test_what_a_graph_points_into_goes_after_its_work(cuda, arena):
    y = cuda.allocate([0] * COUNT)
    kept = Kept(lambda: read(y, COUNT))
    seen = kept.seen
    chain = Chain(cuda, arena, keep=kept)
    del kept
    chain.bind_first(cuda.allocate(NUMBERS), y)
    chain.resident.execute()
    assert seen == []
    del chain
    assert seen == [plus(3)]


def test_what_a_refused_program_was_to_keep_goes(cuda, arena):
    kept = Kept(lambda: None)
    seen = kept.seen
    cuda.simulator.fail("cuGraphClone", 2)
    with pytest.raises(ExecutionError) as raised:
        Chain(cuda, arena, keep=kept)
    del kept, raised
    assert seen == [None]


def live(simulator: Simulator) -> dict[str, int]:
    kinds = ("event", "graph", "executable", "reservation", "mapping")
    return {
        **{kind: simulator.live(kind) for kind in kinds},
        "device": simulator.physical_bytes,
        "host": simulator.host_bytes,
    }


@pytest.mark.parametrize(
    "function",
    [
        "cuGraphClone",
        "cuGraphNodeFindInClone",
        "cuGraphKernelNodeGetParams",
        "cuGraphMemcpyNodeGetParams",
        "cuFuncGetParamInfo",
        "cuGraphGetEdges",
        "cuMemHostAlloc",
        "cuEventCreate",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_a_construction_that_fails_leaves_nothing(cuda, arena, function):
    Gather(cuda, arena, given=True)  # per-process objects now exist
    captured = cuda.simulator.live("graph")
    arena = _native.CudaArena(0)
    before = live(cuda.simulator)
    pool_calls = {"cuMemCreate", "cuMemAddressReserve"}
    n_pool_calls = {"cuMemMap": 4, "cuMemSetAccess": 4}
    skipped = n_pool_calls.get(function, 1 if function in pool_calls else 0)
    cuda.simulator.fail_memory(function, 2, nth=skipped + 1)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Gather(cuda, arena, given=True)
    assert cuda.simulator.live("graph") == captured + 1  # the test's own
    assert live(cuda.simulator) == {**before, "graph": captured + 1}


@pytest.mark.parametrize(
    "function", ["cuGraphKernelNodeSetParams", "cuGraphInstantiateWithFlags", "cuGraphUpload"]
)
def test_a_load_that_fails_leaves_nothing_and_can_be_tried_again(cuda, arena, function):
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    before = live(cuda.simulator)
    cuda.simulator.fail(function, 2)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        chain.resident.load()
    assert live(cuda.simulator) == before
    chain.resident.load()
    assert run(chain.resident) == 0
    assert read(y, COUNT) == plus(3)


def test_too_little_memory_for_the_arena_leaves_nothing(cuda, arena):
    before = live(cuda.simulator)
    cuda.simulator.set_memory_limit(cuda.simulator.physical_bytes + 2 * GRANULARITY)
    with pytest.raises(OutOfMemory, match="allocating device memory, 83886080 bytes"):
        arena.map(40 * GRANULARITY)
    assert live(cuda.simulator) == before


def test_everything_goes_with_the_resident(cuda, arena):
    before = live(cuda.simulator)
    program = Gather(cuda, arena, given=True)
    program.bind(*(cuda.allocate(NUMBERS) for _ in range(3)))
    run(program.resident)
    during = live(cuda.simulator)
    assert during["executable"] == 1
    assert during["host"] > 0
    held = cuda.simulator.live_bytes
    del program
    after = live(cuda.simulator)
    assert after.pop("device") - before.pop("device") == held + arena.size_bytes
    assert after == before
