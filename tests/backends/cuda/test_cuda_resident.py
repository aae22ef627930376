"""A resident graph on the simulated driver: updated nodes, and the order of execution."""

from __future__ import annotations

import ctypes

import pytest
from graphs import GLOBAL, THREAD_LOCAL, read, write
from residents import (
    COUNT,
    NUMBERS,
    SIZE_BYTES,
    Chain,
    CopyAndFill,
    Gather,
    plus,
    run,
)

from offload.errors import ExecutionError, OutOfMemory
from offload.native import _native

GRANULARITY = 2 << 20


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


# ---- launch by launch -------------------------------------------------------------------------


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


def test_where_memory_of_another_kind_is_given_the_graph_is_instantiated_anew(cuda, arena):
    """A driver may tie copies and memsets to mapped memory, or to allocated memory."""
    program, other = CopyAndFill(cuda, arena), _native.CudaArena(0)
    resident, mapping = program.resident, other.map(1 << 16)
    allocated = [cuda.allocate(numbers) for numbers in (NUMBERS, [0] * COUNT, [0] * COUNT)]
    mapped = [mapping.address + 256 * place for place in range(3)]
    write(mapped[0], plus(7))
    counts = []
    for x, y, z in (allocated, mapped, mapped, allocated):
        program.bind(x, y, z)
        write(resident.arena_address, plus(8))
        run(resident)
        assert read(y, COUNT) == read(x, COUNT)
        assert ctypes.string_at(z, SIZE_BYTES) == b"\x09" * SIZE_BYTES
        assert read(resident.arena_address + SIZE_BYTES, COUNT) == plus(8)
        counts.append(resident.n_instantiations)
    assert counts == [1, 2, 2, 3]
    cuda.simulator.fail("cuGraphExecMemcpyNodeSetParams", 1)
    cuda.simulator.fail("cuGraphInstantiateWithFlags", 2)
    with pytest.raises(OutOfMemory, match="instantiating the graph"):
        resident.execute()
    run(resident)  # the existing graph still works
    assert resident.n_instantiations == 3


def test_host_tables_are_issued(cuda, arena):
    program = Gather(cuda, arena, given=True)
    x, y = cuda.allocate([4] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    program.resident.issue(0)
    program.resident.finish()
    assert read(y, COUNT) == [8] * COUNT


# ---- streams ----------------------------------------------------------------------------------


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
    with cuda.capture(stream) as graph, pytest.raises(ExecutionError, match="being captured"):
        chain.resident.set_stream(stream)
    assert graph.nodes == []
    assert run(chain.resident) == 0


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_is_not_spoiled_by_an_execution_on_another_stream(cuda, arena, captured):
    """Neither by one that comes to the captured stream nor by one that comes from it."""
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    streams = [cuda.stream() for _ in range(2)]
    chain.resident.set_stream(streams[0])
    chain.resident.execute()
    refused = pytest.raises(ExecutionError, match="being captured")
    with cuda.capture(streams[captured]) as graph, refused:
        chain.resident.set_stream(streams[1])
    assert graph.nodes == []
    chain.resident.set_stream(streams[1])
    run(chain.resident)
    assert read(y, COUNT) == plus(3)


def test_a_capture_is_not_spoiled_by_another_user_of_the_arena(cuda, arena):
    chains = [Chain(cuda, arena) for _ in range(2)]
    streams = [cuda.stream() for _ in range(2)]
    for chain, stream in zip(chains, streams, strict=True):
        chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT))
        chain.resident.set_stream(stream)
    chains[0].resident.execute()
    with cuda.capture(streams[0]) as graph, pytest.raises(ExecutionError, match="being captured"):
        chains[1].resident.execute()
    assert graph.nodes == []
    chains[1].resident.execute()


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("end", ["finish", "close"])
def test_the_end_of_an_execution_does_not_disturb_a_capture(cuda, arena, mode, end):
    before = cuda.simulator.host_bytes
    program = Gather(cuda, arena, given=True)
    x, y = cuda.allocate([1] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    program.resident.execute()
    with cuda.capture(cuda.stream(), mode) as graph:
        getattr(program.resident, end)()
        assert read(y, COUNT) == [2] * COUNT
    assert graph.nodes == []
    program.resident.close()
    assert cuda.simulator.host_bytes == before


def test_loading_does_not_disturb_a_capture(cuda, arena):
    with cuda.capture(cuda.stream(), GLOBAL) as graph:
        program = Gather(cuda, arena, given=True)
    assert graph.nodes == []
    x, y = cuda.allocate([1] * COUNT), cuda.allocate([0] * COUNT)
    program.bind(x, x, y)
    run(program.resident)
    assert read(y, COUNT) == [2] * COUNT


def test_what_a_failed_execution_left_on_its_stream_is_waited_for(cuda, arena):
    """Its copies to memory that the next execution also writes."""
    chain = Chain(cuda, arena)
    y = cuda.allocate([0] * COUNT)
    chain.bind_first(cuda.allocate(NUMBERS), y)
    streams = [cuda.stream() for _ in range(2)]
    written = cuda.allocate([0])
    chain.resident.set_stream(streams[0])
    cuda.fill(written, 7, 1, 1, streams[0])
    cuda.simulator.fail("cuGraphInstantiateWithFlags", 2)
    with pytest.raises(ExecutionError, match="instantiating the graph"):
        chain.resident.execute()
    chain.resident.set_stream(streams[1])
    cuda.synchronize(streams[1])
    assert read(written, 1) == [7]


def test_a_closed_resident_refuses_everything(cuda, arena):
    chain = Chain(cuda, arena)
    chain.bind_first(cuda.allocate(NUMBERS), cuda.allocate(NUMBERS))
    chain.resident.set_stream(cuda.stream())
    run(chain.resident)
    chain.resident.close()
    chain.resident.finish()
    chain.bind(x=8)
    with pytest.raises(ExecutionError, match="closed"):
        chain.resident.set_stream(cuda.stream())


# ---- costs of updates and copies -----------------------------------------------------------------

KINDS = ["graph", "executable", "stream", "event", "mapping"]


def test_costs_are_sampled_without_a_trace(cuda, arena):
    chain = Chain(cuda, arena)
    x, y = cuda.allocate(NUMBERS), cuda.allocate([0] * COUNT)
    chain.bind_first(x, y)
    run(chain.resident)
    before = [cuda.simulator.live(kind) for kind in KINDS]
    n_bytes, n_set = cuda.simulator.live_bytes, chain.resident.n_set_params
    set_node_ns, submit_ns, device_ns = chain.resident.sample_copy_costs()
    assert [cuda.simulator.live(kind) for kind in KINDS] == before
    assert (cuda.simulator.live_bytes, chain.resident.n_set_params) == (n_bytes, n_set)
    assert cuda.simulator.calls("cuGraphExecKernelNodeSetParams") == 16 * (len(set_node_ns) + 1)
    assert cuda.simulator.calls("cuGraphLaunch") == 1  # its own
    assert len(submit_ns) == len(device_ns) == 4 * len(set_node_ns)
    assert min(set_node_ns) >= 0
    assert min(submit_ns) >= 0
    assert {size for size, _ in device_ns} == {4 << 10, 64 << 10, 1 << 20, 4 << 20}
    assert run(chain.resident) == 0
    assert read(y, COUNT) == plus(3)


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        ("cuStreamCreate", 1), ("cuGraphCreate", 1), ("cuGraphAddKernelNode", 2),
        ("cuGraphInstantiateWithFlags", 1), ("cuGraphUpload", 1),
        ("cuGraphExecKernelNodeSetParams", 20), ("cuMemAlloc", 1), ("cuEventCreate", 1),
        ("cuEventCreate", 2), ("cuMemcpyAsync", 3), ("cuEventRecord", 2),
        ("cuEventSynchronize", 1), ("cuEventElapsedTime", 5),
    ],
)  # fmt: skip
def test_sampling_that_fails_leaves_nothing(cuda, arena, function, nth):
    chain = Chain(cuda, arena)
    before = [cuda.simulator.live(kind) for kind in KINDS]
    n_bytes = cuda.simulator.live_bytes
    cuda.simulator.fail(function, 999, nth=nth)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_UNKNOWN"):
        chain.resident.sample_copy_costs()
    assert [cuda.simulator.live(kind) for kind in KINDS] == before
    assert cuda.simulator.live_bytes == n_bytes
