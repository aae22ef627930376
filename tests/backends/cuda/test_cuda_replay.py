"""Executions of a resident graph through Replay: streams, tickets, leases, copies.

torch treats the simulated device's tensors as tensors of the CPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Cuda, read
from residents import COUNT, SIZE_BYTES, CalledReplay, Chain, make_replay_of

from offload.errors import BindingError, ExecutionError
from offload.native import _native

Make = Callable[..., tuple[CalledReplay, Chain]]


@pytest.fixture
def streams(cuda: Cuda) -> list[int]:
    """The caller's current stream is the last of them."""
    return [cuda.stream()]


@pytest.fixture
def make(cuda: Cuda, streams: list[int]) -> Make:
    """Make a replay of a chain of three kernels: three more than the input."""
    arena = _native.CudaArena(0)
    cuda.simulator.set_host_is_device(True)

    def make_replay(
        current_stream: Callable[[int], int] | None = None,
        host_scheduled: bool = False,
        output_alignment_bytes: int = 1,
        copied_output: bool = False,
        **input_fields: Any,
    ) -> tuple[CalledReplay, Chain]:
        chain = Chain(cuda, arena)
        replay = make_replay_of(
            chain,
            current_stream or (lambda _: streams[-1]),
            host_scheduled=host_scheduled,
            output_alignment_bytes=output_alignment_bytes,
            copied_output=copied_output,
            **input_fields,
        )
        return replay, chain

    return make_replay


def numbers(first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + COUNT)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address aligned to 8 bytes only."""
    memory = torch.zeros(COUNT + 2, dtype=torch.int64)
    begin = 1 if memory.data_ptr() % 16 == 0 else 2
    return memory[begin : begin + COUNT].copy_(tensor)


def on_device(cuda: Cuda, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the simulated device's memory, valid until its reset."""
    address = cuda.allocate(tensor.tolist())
    memory = (ctypes.c_char * SIZE_BYTES).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int64)


def test_a_call_returns_once_its_work_is_enqueued(cuda, make, streams):
    replay, chain = make()
    x, y = numbers(), torch.zeros(COUNT, dtype=torch.int64)
    assert replay(x, out=y) is y
    assert y.tolist() == [0] * COUNT
    cuda.synchronize(streams[-1])
    assert y.tolist() == (x + 3).tolist()
    assert read(chain.resident.arena_address + SIZE_BYTES, COUNT) == (x + 2).tolist()


def test_a_ticket_is_done_when_the_device_is(make):
    replay, _ = make()
    x = numbers()
    ticket = replay.submit(x)
    ticket.wait()
    assert ticket.result().tolist() == (x + 3).tolist()


def test_calls_behind_submitted_work_come_after_it(cuda, make, streams):
    replay, _ = make()
    x = numbers()
    tickets = [replay.submit(x) for _ in range(3)]
    y = replay(x)
    cuda.synchronize(streams[-1])
    assert y.tolist() == (x + 3).tolist()
    assert [ticket.result().tolist() for ticket in tickets] == [y.tolist()] * 3


def test_only_what_moved_is_patched_and_set(make):
    replay, chain = make()
    x, y = numbers(), torch.zeros(COUNT, dtype=torch.int64)
    expected = [
        (x, y, "all", 6, 0),
        (x, y, "none", 0, 0),
        (numbers(7), y, "io", 1, 1),
        (numbers(9), torch.zeros_like(y), "io", 2, 2),
    ]
    kept = []
    for given, out, policy, n_words, n_set in expected:
        before = chain.resident.n_set_params
        replay.submit(given, out=out).wait()
        kept.append((given, out))
        assert replay.last_execution.policy == policy
        assert replay.last_execution.words_patched == n_words
        assert chain.resident.n_set_params - before == n_set
        assert out.tolist() == (given + 3).tolist()


def test_the_callers_stream_is_asked_for_at_each_call(cuda, make):
    streams = [cuda.stream() for _ in range(2)]
    asked = []

    def current_stream(device: int) -> int:
        asked.append(device)
        return streams[(len(asked) - 1) % 2]

    replay, _ = make(current_stream)
    x = numbers()
    first, second = replay(x), replay(x)
    assert asked == [0, 0]
    cuda.synchronize(streams[1])  # it waits for the other one
    assert first.tolist() == second.tolist() == (x + 3).tolist()


def test_a_callers_feature_map_is_used(make):
    replay, chain = make()
    x, feature_map = numbers(), torch.zeros(2 * SIZE_BYTES, dtype=torch.uint8)
    y = replay.submit(x, feature_map=feature_map).result()
    assert y.tolist() == (x + 3).tolist()
    assert feature_map.view(torch.int64)[COUNT:].tolist() == (x + 2).tolist()
    assert read(chain.resident.arena_address, COUNT) != (x + 1).tolist()


def test_host_scheduling_gives_the_same(cuda, make):
    replay, chain = make(host_scheduled=True)
    x = numbers()
    assert replay.submit(x).result().tolist() == (x + 3).tolist()
    assert cuda.simulator.calls("cuLaunchKernelEx") == 3
    assert chain.resident.n_graph_launches == 0


def test_a_traced_execution_has_its_launches(make):
    replay, _ = make()
    replay.start_trace()
    replay.submit(numbers()).wait()
    [trace] = replay.stop_trace()
    begin_ns = trace.execution.submitted_ns
    assert trace.launches.begin_ns == trace.launches.end_ns == [begin_ns] * 3


# ---- copies -------------------------------------------------------------------------------------


def test_an_input_below_the_alignment_is_copied(make):
    replay, _ = make(alignment_bytes=16)
    x = shifted(numbers())
    assert replay.submit(x).result().tolist() == (x + 3).tolist()
    assert replay.last_execution.bytes_copied == SIZE_BYTES
    x = shifted(numbers()).clone()
    assert replay.submit(x).result().tolist() == (x + 3).tolist()
    assert replay.last_execution.bytes_copied == 0


def test_an_output_below_the_alignment_is_copied_to(cuda, make):
    cuda.simulator.set_eager(True)  # as a stream orders it: torch's copies run at once here
    replay, _ = make(output_alignment_bytes=16)
    x, y = numbers(), shifted(torch.zeros(COUNT, dtype=torch.int64))
    replay(x, out=y)
    assert y.tolist() == (x + 3).tolist()
    assert replay.last_execution.bytes_copied == SIZE_BYTES
    replay(x, out=y.clone())
    assert replay.last_execution.bytes_copied == 0


def test_a_copied_input_moves_no_word(make):
    replay, chain = make(copied=True)
    y = torch.zeros(COUNT, dtype=torch.int64)
    for first in range(3):
        x = numbers(first)
        replay.submit(x, out=y).wait()
        assert y.tolist() == (x + 3).tolist()
        assert replay.last_execution.bytes_copied == SIZE_BYTES
    assert replay.last_execution.policy == "none"
    assert chain.resident.n_set_params == 0


def test_a_copied_input_that_is_written_is_copied_back(cuda, make):
    cuda.simulator.set_eager(True)
    replay, _ = make(copied=True, written=True)
    x = numbers()
    before = x._version
    assert replay(x).tolist() == (numbers() + 3).tolist()
    assert x.tolist() == numbers().tolist()
    assert x._version > before
    assert replay.last_execution.bytes_copied == 2 * SIZE_BYTES


@pytest.mark.parametrize("output_alignment_bytes", [1, 16])
def test_a_copied_output_moves_no_word(cuda, make, output_alignment_bytes):
    replay, chain = make(copied_output=True, output_alignment_bytes=output_alignment_bytes)
    x = numbers()
    for _ in range(3):
        y = shifted(torch.zeros(COUNT, dtype=torch.int64))
        x.add_(1)
        assert replay.submit(x, out=y).result() is y
        assert y.tolist() == (x + 3).tolist()
        assert replay.last_execution.bytes_copied == SIZE_BYTES
        assert replay.last_execution.outputs_allocated == 0
    assert replay.last_execution.policy == "none"
    assert chain.resident.n_set_params == 0


def test_results_of_a_copied_output_have_memory_of_their_own(cuda, make):
    replay, _ = make(copied_output=True)
    results = [replay.submit(numbers(first)).result() for first in range(4)]
    assert [one.tolist() for one in results] == [(numbers(i) + 3).tolist() for i in range(4)]
    assert len({one.untyped_storage().data_ptr() for one in results}) == 4
    assert replay.last_execution.outputs_allocated == 1
    results[0].zero_()
    assert replay.submit(numbers(9)).result().tolist() == [12, 13, 14, 15]


def test_a_copied_output_goes_to_a_buffer_with_other_strides_at_once(cuda, make):
    cuda.simulator.set_eager(True)  # torch's copies run at once here
    replay, _ = make(copied_output=True)
    y = torch.zeros(2 * COUNT, dtype=torch.int64)[::2]
    replay(numbers(), out=y)
    assert y.tolist() == (numbers() + 3).tolist()
    assert replay.last_execution.bytes_copied == SIZE_BYTES


def test_copies_are_ordered_on_the_stream(cuda, make, streams):
    """Nothing runs before a wait: copied data exist by then, in this order."""
    replay, _ = make(copied=True, copied_output=True)
    x = on_device(cuda, numbers())
    results = [on_device(cuda, torch.zeros(COUNT, dtype=torch.int64)) for _ in range(3)]
    for y in results:
        replay(x, out=y)
        x = y
    assert [y.tolist() for y in results] == [[0] * COUNT] * 3
    cuda.synchronize(streams[-1])
    assert [y[0].item() for y in results] == [3, 6, 9]


def test_copies_are_ordered_between_streams(cuda, make):
    handles = [cuda.stream() for _ in range(2)]
    turns = iter(handles * 2)
    replay, _ = make(lambda _: next(turns), copied=True, copied_output=True)
    xs = [on_device(cuda, numbers(10 * index)) for index in range(4)]
    ys = [on_device(cuda, torch.zeros(COUNT, dtype=torch.int64)) for _ in range(4)]
    for x, y in zip(xs, ys, strict=True):
        replay(x, out=y)
    cuda.synchronize(handles[1])
    assert [y.tolist() for y in ys] == [(x + 3).tolist() for x in xs]


def test_copies_are_in_a_timeline(make):
    replay, _ = make(copied=True, copied_output=True)
    replay.start_trace()
    replay.submit(numbers()).wait()
    [trace] = replay.stop_trace()
    transfers = [(one.inbound, one.size_bytes) for one in trace.transfers]
    assert transfers == [(True, SIZE_BYTES), (False, SIZE_BYTES)]


def test_another_shape_is_refused_as_on_any_device(make):
    replay, _ = make()
    with pytest.raises(BindingError, match="x: expected int64"):
        replay(torch.arange(COUNT + 1))


# ---- failures and the end -----------------------------------------------------------------------


def test_a_device_fault_is_raised_at_the_wait(cuda, make):
    replay, _ = make()
    x = numbers()
    replay(x)
    cuda.simulator.fault()
    ticket = replay.submit(x)
    with pytest.raises(ExecutionError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ticket.wait()
    with pytest.raises(ExecutionError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        ticket.result()


def test_a_failed_set_is_made_good_by_the_next_call(cuda, make):
    replay, chain = make()
    y = torch.zeros(COUNT, dtype=torch.int64)
    replay.submit(numbers(), out=y).wait()
    cuda.simulator.fail("cuGraphExecKernelNodeSetParams", 999)
    x = numbers(5)
    with pytest.raises(ExecutionError, match="re-setting node 0"):
        replay(x, out=y)
    replay.submit(x, out=y).wait()
    assert y.tolist() == (x + 3).tolist()
    assert replay.last_execution.policy == "none"  # the words were written before the failure
    assert chain.resident.n_set_params == 2


def test_a_ticket_that_failed_leaves_nothing_under_way(cuda, make):
    replay, chain = make(host_scheduled=True)
    x = numbers()
    cuda.simulator.fail("cuLaunchKernelEx", 999, nth=3)
    ticket = replay.submit(x)
    with pytest.raises(ExecutionError, match="launching node 2"):
        ticket.wait()
    assert read(chain.resident.arena_address + SIZE_BYTES, COUNT) == (x + 2).tolist()


def test_a_replay_that_goes_waits_first(make):
    """Executions read objects that it keeps, such as the buffers of copied inputs."""
    replay, chain = make(copied=True)
    x = numbers()
    y = replay(x)
    del replay
    assert y.tolist() == (numbers() + 3).tolist()
    assert chain.resident.arena_address == 0


def test_a_call_under_capture_is_refused_before_it_copies(cuda, make, streams):
    replay, _ = make(copied=True)
    x = numbers()
    first = replay(x)
    with cuda.capture(streams[-1]) as graph, pytest.raises(ExecutionError, match="being captured"):
        replay(numbers(5))
    assert graph.nodes == []
    cuda.synchronize(streams[-1])
    assert first.tolist() == (numbers() + 3).tolist()


def test_close_waits_and_gives_back_the_device(cuda, make):
    replay, chain = make()
    x = numbers()
    y = replay(x)
    assert cuda.simulator.live("executable") == 1
    replay.close()
    assert y.tolist() == (x + 3).tolist()
    assert cuda.simulator.live("executable") == 0
    assert cuda.simulator.live("mapping") == 0
    with pytest.raises(ExecutionError, match="closed"):
        replay(x)
    assert chain.resident.arena_address == 0


def test_threads_that_share_an_arena_get_their_own_results(cuda, make):
    n_calls = 10
    wrong: list[object] = []

    def work(replay: _native.Replay, first: int) -> None:
        try:
            for call in range(n_calls):
                x = numbers(first + call)
                found = replay.submit(x).result()
                if found.tolist() != (x + 3).tolist():
                    wrong.append((first + call, found))
        except BaseException as error:
            wrong.append(error)

    handles = [cuda.stream() for _ in range(3)]
    replays = [
        make(lambda _, handle=handle: handle, host_scheduled=index == 2)[0]
        for index, handle in enumerate(handles)
    ]
    threads = [
        threading.Thread(target=work, args=(replay, 100 * index))
        for index, replay in enumerate(replays)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
