"""A resident graph on the simulated driver: what is re-set, in which order, and what fails how."""

from __future__ import annotations

import ctypes
import struct

import pytest
from graphs import Cuda, read, write
from residents import COUNT, SIZE_BYTES, SIZES, Chain, elementwise
from simulator import REUSE, Simulator

from offload import _native
from offload.errors import CaptureError, ExecutionError

NUMBERS = [3, -1, 40, 0]
GRANULARITY = 2 << 20


@pytest.fixture
def cuda(simulator: Simulator) -> Cuda:
    return Cuda(simulator)


@pytest.fixture
def arena(cuda: Cuda) -> _native.CudaArena:
    return _native.CudaArena(0)


def plus(number: int) -> list[int]:
    return [one + number for one in NUMBERS]


def run(resident: _native.CudaResident) -> int:
    """Execute to the end; gives how many nodes were re-set for it."""
    before = resident.n_set_params
    resident.execute()
    resident.finish()
    return resident.n_set_params - before


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_library_kernel", [False, True])
def test_a_graph_runs_at_addresses_that_it_was_not_captured_at(cuda, arena, as_library_kernel):
    chain = Chain(cuda, arena, as_library_kernel=as_library_kernel)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    chain.resident.execute()
    chain.resident.finish()
    assert read(y, COUNT) == plus(3)
    assert read(chain.resident.arena_address, 2 * COUNT) == plus(1) + plus(2)


def test_nothing_moved_sets_nothing(cuda, arena):
    chain = Chain(cuda, arena)
    chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT))
    for _ in range(3):
        chain.resident.execute()
    chain.resident.finish()
    assert chain.resident.n_set_params == 0
    assert chain.resident.n_graph_launches == 3
    assert cuda.simulator.calls("cuGraphExecKernelNodeSetParams") == 0
    assert cuda.simulator.calls("cuGraphLaunch") == 3
    assert cuda.simulator.calls("cuGraphInstantiateWithFlags") == 1


@pytest.mark.parametrize(
    ("moved", "n_set"), [(["x"], 1), (["y"], 1), (["x", "y"], 2), (["map"], 6), (["x", "map"], 6)]
)
def test_only_nodes_whose_words_moved_are_set(cuda, arena, moved, n_set):
    chain = Chain(cuda, arena, n_kernels=6)
    places = {
        "x": cuda.allocate(NUMBERS),
        "y": cuda.allocate([0] * COUNT),
        "map": chain.resident.arena_address,
    }
    chain.bind(*places.values())
    assert run(chain.resident) == 0
    chain.bind(
        **{{"map": "feature_map"}.get(name, name): cuda.allocate([7] * 5 * COUNT) for name in moved}
    )
    assert run(chain.resident) == n_set
    assert cuda.simulator.calls("cuGraphExecKernelNodeSetParams") == n_set


def test_moved_addresses_give_the_result_there(cuda, arena):
    chain = Chain(cuda, arena)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    run(chain.resident)
    other_y, other_map = cuda.allocate([0] * COUNT), cuda.allocate([0] * 2 * COUNT)
    chain.bind(y=other_y, feature_map=other_map)
    write(y, [5] * COUNT)
    run(chain.resident)
    assert read(other_y, COUNT) == plus(3)
    assert read(other_map + SIZE_BYTES, COUNT) == plus(2)
    assert read(y, COUNT) == [5] * COUNT


def test_a_word_moved_away_and_back_sets_nothing(cuda, arena):
    chain = Chain(cuda, arena)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    run(chain.resident)
    chain.bind(x=cuda.allocate(NUMBERS))
    chain.bind(x=x)
    assert run(chain.resident) == 0


def test_words_are_needed_before_anything_is_instantiated(cuda, arena):
    chain = Chain(cuda, arena)
    with pytest.raises(ExecutionError, match="6 of 6 address words were never patched"):
        chain.resident.load()
    chain.bind(x=cuda.allocate(NUMBERS), y=cuda.allocate(NUMBERS))
    with pytest.raises(ExecutionError, match="4 of 6"):
        chain.resident.execute()
    assert cuda.simulator.calls("cuGraphInstantiateWithFlags") == 0
    assert cuda.simulator.calls("cuGraphLaunch") == 0


def test_arguments_in_flight_are_those_of_their_execution(cuda, arena):
    chain = Chain(cuda, arena)
    x, ys = cuda.allocate(NUMBERS), [cuda.allocate([0] * COUNT) for _ in range(3)]
    chain.bind_first(x, ys[0])
    for y in ys:
        chain.bind(y=y)
        chain.resident.execute()
    chain.resident.finish()
    assert [read(y, COUNT) for y in ys] == [plus(3)] * 3


# ---- copies and memsets -------------------------------------------------------------------------


class CopyAndFill:
    """y = x by a copy node, z = 0 by a memset node, and the same between parts of the arena."""

    def __init__(self, cuda: Cuda, arena: _native.CudaArena):
        pool = _native.DiscoveryPool(0, 1)
        x, y, z, feature_map = (pool.allocate(4 * SIZE_BYTES) for _ in range(4))
        stream = cuda.stream()
        with cuda.capture(stream) as graph:
            cuda.copy(y, x, SIZE_BYTES, stream)
            cuda.fill(z, 9, SIZE_BYTES, 1, stream)
            cuda.copy(feature_map + SIZE_BYTES, feature_map, SIZE_BYTES, stream)
            cuda.fill(feature_map, 0x0102, SIZE_BYTES // 2, 2, stream)
        words = [(0, 0, 0), (0, 0, 8), (1, 0, 0), (2, 0, 0), (2, 0, 8), (3, 0, 0)]
        offsets = [(0, 0), (1, 0), (2, 0), (3, 0), (3, SIZE_BYTES), (3, 0)]
        self.offsets = offsets
        self.resident = _native.CudaResident(
            device=0,
            graph=graph.handle,
            arena=arena,
            arena_bytes=2 * SIZE_BYTES,
            node_handles=graph.nodes,
            words=words,
            relocations=[(word, *offset) for word, offset in enumerate(offsets)],
            launches=[0, 1, 2, 3],
            n_launches=4,
        )
        cuda.destroy(graph)

    def bind(self, x: int, y: int, z: int) -> None:
        bases = [x, y, z, self.resident.arena_address]
        self.resident.patch(
            [(word, bases[slot] + offset) for word, (slot, offset) in enumerate(self.offsets)]
        )


def test_copies_and_memsets_outside_the_arena_are_set_every_time(cuda, arena):
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    write(program.resident.arena_address, plus(8))
    assert run(program.resident) == 0  # instantiated with them
    assert read(y, COUNT) == NUMBERS
    assert ctypes.string_at(z, SIZE_BYTES) == b"\x09" * SIZE_BYTES
    assert read(program.resident.arena_address + SIZE_BYTES, COUNT) == plus(8)
    arena_bytes = ctypes.string_at(program.resident.arena_address, SIZE_BYTES)
    assert arena_bytes == b"\x02\x01" * (SIZE_BYTES // 2)
    for _ in range(3):
        assert run(program.resident) == 2  # the two inside the arena stay
    assert cuda.simulator.calls("cuGraphExecMemcpyNodeSetParams") == 3
    assert cuda.simulator.calls("cuGraphExecMemsetNodeSetParams") == 3


def test_memory_allocated_again_at_the_same_address_is_used(cuda, arena):
    cuda.simulator.set_free_policy(REUSE)
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    run(program.resident)
    cuda.free(x)
    assert cuda.allocate(plus(2)) == x
    program.bind(x, y, z)
    run(program.resident)
    assert read(y, COUNT) == plus(2)


def test_a_copy_that_moves_is_set_once(cuda, arena):
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    run(program.resident)
    program.bind(cuda.allocate(plus(1)), y, z)
    assert run(program.resident) == 2
    assert read(y, COUNT) == plus(1)


# ---- host tables --------------------------------------------------------------------------------


class Gather:
    """A copy of a host table of two addresses to the device, and a kernel that adds what is there.

    Slots: 0 and 1 the inputs, 2 the output, 3 the arena, where the table goes.
    """

    def __init__(self, cuda: Cuda, arena: _native.CudaArena, *, given: bool):
        def add(arguments: bytes) -> None:
            destination, table = struct.unpack("<QQ", arguments[:16])
            first, second = read(table, 2)
            pairs = zip(read(first, COUNT), read(second, COUNT), strict=True)
            write(destination, [one + other for one, other in pairs])

        kernel = cuda.simulator.kernel("add_all", [8, 8], add)
        pool = _native.DiscoveryPool(0, 1)
        first, second, y, table = (pool.allocate(SIZE_BYTES) for _ in range(4))
        source = ctypes.create_string_buffer(struct.pack("<QQ", first, second), 16)
        stream = cuda.stream()
        with cuda.capture(stream) as graph:
            cuda.copy_from_host(table, ctypes.addressof(source), 16, stream)
            cuda.launch(kernel, stream, [y, table], [8, 8])
        tables = {0: bytes(source.raw)} if given else {}
        if given:
            ctypes.memset(source, 0xEE, 16)
        self.places = [(3, 0), (0, 0), (1, 0), (2, 0), (3, 0)]
        self.resident = _native.CudaResident(
            device=0,
            graph=graph.handle,
            arena=arena,
            arena_bytes=16,
            node_handles=graph.nodes,
            words=[(0, 0, 8), (0, 1, 0), (0, 1, 8), (1, 0, 0), (1, 0, 8)],
            relocations=[(word, *place) for word, place in enumerate(self.places)],
            launches=[0, 0],
            n_launches=1,
            host_tables=tables,
        )
        cuda.destroy(graph)
        ctypes.memset(source, 0xEE, 16)

    def bind(self, first: int, second: int, y: int) -> None:
        bases = [first, second, y, self.resident.arena_address]
        self.resident.patch(
            [(word, bases[slot] + offset) for word, (slot, offset) in enumerate(self.places)]
        )


@pytest.mark.parametrize("given", [False, True])
def test_host_tables_hold_the_addresses_of_each_execution(cuda, arena, given):
    program = Gather(cuda, arena, given=given)
    inputs = [cuda.allocate([index] * COUNT) for index in range(6)]
    outputs = [cuda.allocate([0] * COUNT) for _ in range(5)]
    for index, y in enumerate(outputs):  # nothing runs before somebody waits
        program.bind(inputs[index], inputs[index + 1], y)
        program.resident.execute()
    program.resident.finish()
    assert [read(y, 1) for y in outputs] == [[2 * index + 1] for index in range(5)]


def test_only_executions_before_the_last_change_of_a_table_are_waited_for(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x = cuda.allocate([1] * COUNT)
    outputs = [cuda.allocate([0] * COUNT) for _ in range(3)]
    others = [cuda.allocate([index] * COUNT) for index in range(3)]
    for y, other in zip(outputs[:2], others, strict=False):
        program.bind(x, other, y)
        program.resident.execute()
    assert [read(y, 1) for y in outputs] == [[0], [0], [0]]
    program.bind(x, others[2], outputs[2])
    program.resident.execute()
    assert [read(y, 1) for y in outputs] == [[1], [0], [0]]
    program.resident.finish()
    assert [read(y, 1) for y in outputs] == [[1], [2], [3]]


def test_unchanged_tables_are_written_once(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x, y = cuda.allocate([1] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    run(program.resident)
    assert run(program.resident) == 0
    program.bind(x, x, cuda.allocate([0] * COUNT))
    assert run(program.resident) == 2  # the table was patched, with what it held


# ---- launch by launch ---------------------------------------------------------------------------


def test_issued_launches_give_what_the_graph_gives(cuda, arena):
    chain = Chain(cuda, arena)
    x, y, other = (cuda.allocate(NUMBERS) for _ in range(3))
    chain.bind_first(x, y)
    run(chain.resident)
    chain.bind(y=other)
    for launch in range(chain.resident.n_launches):
        chain.resident.issue(launch)
    chain.resident.finish()
    assert read(other, COUNT) == read(y, COUNT) == plus(3)
    assert cuda.simulator.calls("cuLaunchKernelEx") == 3
    assert chain.resident.n_graph_launches == 1


def test_a_launch_of_many_nodes_is_issued_in_the_order_of_its_edges(cuda, arena):
    chain = Chain(cuda, arena, n_kernels=5, one_launch=True)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    assert chain.resident.n_launches == 1
    chain.resident.issue(0)
    chain.resident.finish()
    assert read(y, COUNT) == plus(5)


def test_copies_and_memsets_are_issued(cuda, arena):
    program = CopyAndFill(cuda, arena)
    x, y, z = (cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT))
    program.bind(x, y, z)
    write(program.resident.arena_address, plus(8))
    for launch in range(4):
        program.resident.issue(launch)
    program.resident.finish()
    assert read(y, COUNT) == NUMBERS
    assert ctypes.string_at(z, SIZE_BYTES) == b"\x09" * SIZE_BYTES
    assert read(program.resident.arena_address + SIZE_BYTES, COUNT) == plus(8)
    arena_bytes = ctypes.string_at(program.resident.arena_address, SIZE_BYTES)
    assert arena_bytes == b"\x02\x01" * (SIZE_BYTES // 2)


def test_host_tables_are_issued(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x, y = cuda.allocate([4] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    program.resident.issue(0)
    program.resident.finish()
    assert read(y, COUNT) == [8] * COUNT


# ---- streams ------------------------------------------------------------------------------------


def test_executables_that_share_an_arena_are_ordered_across_streams(cuda, arena):
    chains = [Chain(cuda, arena), Chain(cuda, arena)]
    ys = [cuda.allocate([0] * COUNT) for _ in chains]
    streams = [cuda.stream() for _ in chains]
    for chain, y, stream in zip(chains, ys, streams, strict=True):
        chain.bind_first(cuda.allocate(NUMBERS), y)
        chain.resident.set_stream(stream)
        chain.resident.execute()
    assert read(ys[0], COUNT) == [0] * COUNT
    cuda.synchronize(streams[1])
    assert [read(y, COUNT) for y in ys] == [plus(3)] * 2
    assert chains[0].resident.arena_address != chains[1].resident.arena_address
    assert arena.size_bytes == GRANULARITY


def test_executions_of_one_executable_are_ordered_across_streams(cuda, arena):
    chain = Chain(cuda, arena)
    streams = [cuda.stream() for _ in range(2)]
    ys = [cuda.allocate([0] * COUNT) for _ in streams]
    chain.bind_first(cuda.allocate(NUMBERS), ys[0])
    for y, stream in zip(ys, streams, strict=True):
        chain.bind(y=y)
        chain.resident.set_stream(stream)
        chain.resident.execute()
    cuda.synchronize(streams[1])
    assert [read(y, COUNT) for y in ys] == [plus(3)] * 2


def test_one_stream_needs_no_event(cuda, arena):
    chain = Chain(cuda, arena)
    chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate(NUMBERS))
    stream = cuda.stream()
    for _ in range(4):
        chain.resident.set_stream(stream)
        chain.resident.execute()
    assert cuda.simulator.calls("cuEventRecord") == 0
    assert cuda.simulator.calls("cuStreamWaitEvent") == 0
    chain.resident.finish()
    assert cuda.simulator.calls("cuEventRecord") == 1


def test_a_stream_that_captures_is_refused(cuda, arena):
    chain = Chain(cuda, arena)
    chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate(NUMBERS))
    stream = cuda.stream()
    chain.resident.set_stream(stream)
    with cuda.capture(stream) as graph, pytest.raises(ExecutionError, match="being captured"):
        chain.resident.execute()
    assert graph.nodes == []
    assert run(chain.resident) == 0


# ---- failures -----------------------------------------------------------------------------------


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
    with pytest.raises(ExecutionError, match="CUDA_ERROR_LAUNCH_FAILED"):
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
    Gather(cuda, arena, given=True)  # what is made once is there
    captured = cuda.simulator.live("graph")
    arena = _native.CudaArena(0)
    before = live(cuda.simulator)
    pool_calls = {"cuMemCreate", "cuMemAddressReserve"}
    n_pool_calls = {"cuMemMap": 4, "cuMemSetAccess": 4}
    skipped = n_pool_calls.get(function, 1 if function in pool_calls else 0)
    cuda.simulator.fail(function, 2, nth=skipped + 1)
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
    with pytest.raises(ExecutionError, match="allocating device memory, 83886080 bytes"):
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"words": [(0, 0, 24)]}, r"word 0 \(node 0, part 0, byte 24\) lies outside"),
        ({"words": [(0, 1, 0)]}, "lies outside the node's bytes"),
        ({"words": [(5, 0, 0)]}, "a node that does not exist"),
        ({"relocations": []}, "exactly one relocation"),
        ({"relocations": [(0, 0, 0), (0, 1, 0)]}, "exactly one relocation"),
        ({"relocations": [(3, 0, 0)]}, "a word that does not exist"),
        ({"launches": []}, "each node needs its launch"),
        ({"node_handles": [], "words": [], "relocations": []}, "the graph has 1 nodes, got 0"),
        ({"host_tables": {0: b"12"}}, "only a copy has a host source"),
    ],
)
def test_words_that_lie_nowhere_are_refused(cuda, arena, changed, message):
    kernel = elementwise(cuda.simulator, "same", lambda number: number)
    stream = cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.launch(kernel, stream, [8, 16, COUNT], SIZES)
    fields = {
        "node_handles": graph.nodes,
        "words": [(0, 0, 0)],
        "relocations": [(0, 0, 0)],
        "launches": [0],
        "host_tables": {},
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        _native.CudaResident(
            device=0, graph=graph.handle, arena=arena, arena_bytes=0, n_launches=1, **fields
        )


def test_host_functions_cannot_be_resident(cuda, arena):
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    stream = cuda.stream()
    with cuda.capture(stream) as graph:
        cuda("cuLaunchHostFunc", ctypes.c_void_p(stream), called, None)
    with pytest.raises(CaptureError, match="node of type 3"):
        _native.CudaResident(
            device=0,
            graph=graph.handle,
            arena=arena,
            arena_bytes=0,
            node_handles=graph.nodes,
            words=[],
            relocations=[],
            launches=[0],
            n_launches=1,
        )
