"""Parts of capturing with torch that need no GPU: request identities, last uses, refusals."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import subprocess
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch
from small_programs import ACT, IN, OUT, added, program

import offload
from offload.backends.ascend.one_capture import OneCapture
from offload.backends.captured.random_draws import RandomState, own_random_states
from offload.backends.captured.relocation.captures import Allocation, GraphCapture
from offload.backends.captured.torch_warm_up import first_line, last_uses_of
from offload.backends.cuda import torch_capture, torch_pool
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.backends.cuda.torch_pool import PoolMemory
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.program import BoundProgram


class FakePool:
    """Allocations requested from the discovery pool."""

    def __init__(self, *addresses: int) -> None:
        self._events = [("allocate", address, 2 << 20) for address in addresses]

    def events(self, begin=0):
        return [*self._events, ("free", 1, 2 << 20)][begin:]

    def add(self, size_bytes):
        self._events.append(("allocate", len(self._events) << 44, size_bytes))
        return self._events[-1][1]

    @property
    def n_events(self):
        return len(self.events())


@pytest.fixture
def memory(monkeypatch):
    """A PoolMemory over given addresses, and torch's record of requests."""

    def make(addresses, requests, idle=(), fillers=None):
        entries = [{"action": "alloc", "addr": at, "size": size} for at, size in requests]
        entries.insert(1, {"action": "free_completed", "addr": requests[0][0], "size": 1})
        record = {"device_traces": [entries]}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: record)
        found = PoolMemory.__new__(PoolMemory)
        found._pool, found._device = FakePool(*addresses), 0
        found._idle, found._fillers, found._stand_ins = set(idle), fillers or {}, {}
        return found

    return make


def test_values_have_their_own_size_and_scratch_the_largest_request(memory):
    found = memory([10, 20], [(10, 100), (20, 40), (20, 60), (20, 50)])
    allocations, recycled = found.allocations({10: 3}, {3: 96})
    assert allocations == [Allocation(10, 96, 3), Allocation(20, 60, None)]
    assert recycled == set()


def test_fillers_are_neither_requests_nor_allocations(memory):
    requests = [(10, 100), (20, 40), (20, 1 << 20), (30, 1 << 20)]
    found = memory([10, 20, 30], requests, idle=[30], fillers={20: 1})
    allocations, recycled = found.allocations({10: 0}, {0: 100})
    assert allocations == [Allocation(10, 100, 0), Allocation(20, 40, None)]
    assert recycled == set()


def test_a_value_on_memory_that_was_something_else_is_told(memory):
    found = memory([10], [(10, 4096), (10, 16)])
    allocations, recycled = found.allocations({10: 5}, {5: 16})
    assert allocations == [Allocation(10, 16, 5)]
    assert recycled == {5}


@pytest.mark.parametrize("earlier", [[16], [8, 16, 4]])
def test_a_value_on_memory_of_nothing_larger_needs_no_copy(memory, earlier):
    found = memory([10], [(10, one) for one in (*earlier, 16)])
    allocations, recycled = found.allocations({10: 5}, {5: 16})
    assert allocations == [Allocation(10, 16, 5)]
    assert recycled == set()


def test_memory_without_a_recorded_request_is_refused(memory):
    found = memory([10, 20], [(10, 16)])
    with pytest.raises(offload.ExecutionError, match=r"no record of the request .* 0x14"):
        found.allocations({10: 0}, {0: 16})


def test_stand_ins_are_no_memory_of_torchs(memory, monkeypatch):
    """A user's limit on the process's memory does not count them: they are only addresses."""
    found = memory([10], [(10, 16)])
    found._pool.allocate, found._n_seen = found._pool.add, 0
    taken: list[object] = []
    monkeypatch.setattr(torch, "empty", lambda *given, **_: taken.append(given))
    stand_ins = [found.stand_in(size_bytes) for size_bytes in (1 << 40, 96)]
    assert not taken
    addresses = [one.data_ptr() for one in stand_ins]
    assert [one.nbytes() for one in stand_ins] == [1 << 40, 96]
    assert [event[1] for event in found._pool.events()][1:3] == addresses
    assert found._n_seen == found._pool.n_events == 4
    allocations, recycled = found.allocations({10: 0, addresses[0]: 1}, {0: 16, 1: 1 << 40})
    assert allocations == [
        Allocation(10, 16, 0),
        Allocation(addresses[0], 1 << 40, 1),
        Allocation(addresses[1], 96, None),
    ]
    assert recycled == set()


def test_a_stand_in_that_gets_no_addresses_says_so(memory):
    def refuse(size_bytes):
        raise offload.ExecutionError("reserving addresses: CUDA_ERROR_OUT_OF_MEMORY")

    found = memory([10], [(10, 16)])
    found._pool.allocate = refuse
    with pytest.raises(offload.ExecutionError, match=r"^no addresses for 96 bytes: reserving"):
        found.stand_in(96)


def test_settling_asks_for_the_events_of_one_launch(memory, monkeypatch):
    """A capture of n launches must not read the allocations of all launches at each launch."""
    found = memory([10, 20], [(10, 16)])
    seen: list[tuple[str, int, int]] = []
    asked: list[int] = []

    class Pool:
        @property
        def n_events(self) -> int:
            return len(seen)

        def events(self, begin=0):
            asked.append(len(seen[begin:]))
            return seen[begin:]

    filled: list[int] = []
    found._pool, found._n_seen = Pool(), 0
    monkeypatch.setattr(found, "_fill", filled.append)
    for launch in range(50):
        seen += [("allocate", 100 * launch, 512), ("allocate", 100 * launch + 1, 1024),
                 ("free", 100 * launch, 512)]  # fmt: skip
        found.settle(held={100 * launch + 1})
    assert asked == [3] * 50
    assert filled == [512] * 50


def test_last_uses_name_each_activation_once():
    def run(x):
        first = x + 1
        second = first * 2
        return first + second

    with offload.capture(run) as captured:
        captured(torch.ones(3))
    dead = last_uses_of(captured.bound)
    (first,), (second,), _ = (
        tuple(view.value for view in launch.made()) for launch in captured.program.launches
    )
    assert {launch: sorted(values) for launch, values in dead.items()} == {2: [first, second]}


def test_a_caller_who_captures_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with offload.capture(torch.sin) as captured:
        captured(torch.ones(3))
    with pytest.raises(offload.CaptureError, match="being captured on the current stream"):
        TorchCapturer().capture(captured.bound, None)


@pytest.mark.parametrize("failing", ["all", None, "inside"])
def test_the_pool_serves_nobody_afterwards_whatever_fails(monkeypatch, failing):
    """Torch's history is switched on and off by calls that may fail, as may the code between."""
    current: list[object] = []
    recorded: list[str | None] = []

    def record(enabled: str | None, **_: object) -> None:
        recorded.append(enabled)
        if enabled == failing:
            raise RuntimeError("history")

    pool = types.SimpleNamespace(set_current=current.append)
    monkeypatch.setattr(torch_pool, "_native", types.SimpleNamespace(DiscoveryPool=pool))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    memory = PoolMemory.__new__(PoolMemory)
    memory._pool = "pool"
    with pytest.raises(RuntimeError), memory.current():
        raise RuntimeError("inside")
    assert current == ["pool", None]
    assert recorded == (["all"] if failing == "all" else ["all", None])


@pytest.mark.parametrize("ends", ["well", "failed", "never begun"])
def test_a_graph_whose_capture_does_not_end_is_kept(monkeypatch, ends):
    """Torch leaves its filters for the graph's memory in place, and one has its address."""
    asked: list[tuple[str, int, object]] = []

    class Graph:
        def capture_end(self) -> None:
            if ends != "well":
                raise RuntimeError("operation failed due to a previous error during capture")

    def end(device: int, pool: object) -> None:
        asked.append(("end", device, pool))
        if ends == "never begun":
            raise RuntimeError("not currently recording to mempool_id")

    def release(device: int, pool: object) -> None:
        asked.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(torch_capture, "_never_ended", [])
    one = torch_capture._OneCapture.__new__(torch_capture._OneCapture)
    one._graph, one._device = Graph(), 3
    one._memory = types.SimpleNamespace(torch_pool=types.SimpleNamespace(id=(0, 7)))
    one._abandon()
    assert torch_capture._never_ended == ([] if ends == "well" else [one._graph])
    expected = [("end", 3, (0, 7)), ("release", 3, (0, 7))]
    assert asked == {"well": [], "failed": expected, "never begun": expected[:1]}[ends]


class Ends:
    """Notes when it is reset, closed, and destroyed."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self._name, self._log, self._fails = name, log, fails

    def reset(self) -> None:
        self._log.append(f"{self._name} reset")
        if self._fails:
            raise RuntimeError("the device has failed")

    def close(self) -> None:
        self._log.append(f"{self._name} closed")

    def __del__(self) -> None:
        self._log.append(f"{self._name} gone")


@pytest.mark.parametrize("device_fails", [False, True])
@pytest.mark.parametrize("capture_fails", [False, True])
def test_pools_are_closed_once_the_graph_has_gone(monkeypatch, device_fails, capture_fails):
    """Only the graph's end unregisters it from generators, whose cells lie in one of the pools."""
    log: list[str] = []
    one = torch_capture._OneCapture.__new__(torch_capture._OneCapture)
    one._graph = Ends("graph", log, fails=device_fails)
    one._kept = torch_capture._Kept(one._graph, [Ends("tensor", log)], [Ends("pool", log)])
    one._kept.bases = {0: (Ends("base", log), 0)}
    expected = ["base gone", "tensor gone", "graph reset", "graph gone", "pool closed", "pool gone"]
    if capture_fails:

        def fail() -> None:
            raise RuntimeError("an operator")

        monkeypatch.setattr(one, "_captured", fail)
        with pytest.raises(RuntimeError, match="an operator"):
            one.run()
    else:
        assert log == []
        del one
    assert log == expected


@contextlib.contextmanager
def nothing(*_: object):
    yield


class FakeStream:
    device_index = 0

    def __init__(self, waits: list[object] | None = None) -> None:
        self._waits = [] if waits is None else waits

    def wait_event(self, event: object) -> None:
        self._waits.append(event)

    def record_event(self) -> str:
        return "what the caller has enqueued"


def test_captures_on_several_threads_take_turns(monkeypatch):
    """The pool that serves torch, its record of requests and its generators are process-wide."""
    n_inside, most = 0, 0
    on_threads: set[int] = set()
    waits: list[object] = []

    @contextlib.contextmanager
    def states(*_: object):
        nonlocal n_inside, most
        n_inside += 1
        most = max(most, n_inside)
        on_threads.add(threading.get_ident())
        time.sleep(0.02)
        yield
        n_inside -= 1

    for name, fake in {
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda _: FakeStream(),
        "device": nothing,
        "stream": nothing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch_capture, "generators_of", lambda *_: [])
    monkeypatch.setattr(torch_capture, "own_random_states", states)
    monkeypatch.setattr(torch_capture, "device_of", lambda _: 0)
    monkeypatch.setattr(torch_capture, "capture_stream", lambda _: FakeStream(waits))
    monkeypatch.setattr(torch_capture, "_warm_up_drawing", lambda *_: None)
    monkeypatch.setattr(TorchCapturer, "_until_unshared", lambda *_: "captured")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda _: TorchCapturer().capture(BoundProgram(None), None), range(4))
        )
    assert found == ["captured"] * 4
    assert most == 1
    assert len(on_threads) == 1  # which keeps cuDNN's plans
    assert waits == ["what the caller has enqueued"] * 4


class FakeGenerator:
    """A generator whose state is an object; those that cannot be set fail half-way."""

    def __init__(self, state: object, fails: bool = False) -> None:
        self._cdata = id(self)
        self.state, self._fails = state, fails

    def graphsafe_get_state(self) -> object:
        return self.state

    def get_state(self) -> object:
        if self._fails:
            raise RuntimeError("out of memory")
        return self.state

    def graphsafe_set_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("second_fails", [False, True])
def test_generators_get_their_states_back_and_nobody_draws_from_them(monkeypatch, second_fails):
    class Own:
        """A state of seed and offset, as Philox."""

        def __init__(self, device: object) -> None:
            self.seed_now, self.offset = 0, 0

        def set_state(self, state: tuple[int, int]) -> None:
            self.seed_now, self.offset = state

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

        def seed(self) -> None:
            self.seed_now, self.offset = self.seed_now + 1_000, 0

    states = [(3, 8), (5, 12)]
    generators = [FakeGenerator(states[0]), FakeGenerator(states[1], second_fails)]
    monkeypatch.setattr(torch, "Generator", Own)
    expected = pytest.raises(RuntimeError, match="memory") if second_fails else nothing()
    with expected, own_random_states(generators, torch.device("cuda", 0)):
        others_draw_from = [(one.state.seed_now, one.state.offset) for one in generators]
        assert others_draw_from == [(1_003, 8), (1_005, 12)]  # another seed: nothing repeats
    assert [one.state for one in generators] == states


def test_first_line_of_an_error():
    assert first_line(RuntimeError("\n  out of order \nadvice")) == "out of order"
    assert first_line(RuntimeError()) == "RuntimeError"


# ---- refusals ----------------------------------------------------------------------------------


def capture_under_way(**attributes: object) -> torch_capture._OneCapture:
    """A capture without a GPU, with only the parts that a test gives."""
    one = torch_capture._OneCapture.__new__(torch_capture._OneCapture)
    one._pool, one._paint = types.SimpleNamespace(error=None), 0x11
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


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

    paints = [next(torch_capture._paints) for _ in range(4)]
    assert len(set(paints)) == 4
    for paint in paints:
        one = capture_under_way(_paint=paint)
        with pytest.raises(offload.CaptureError, match="enough"):
            one._launch(types.SimpleNamespace(call=lambda _: launch), added(4))
        assert seen[-1].count(paint) > 1500  # except what intermediate calls have written


def run_that_raises(error: BaseException) -> types.SimpleNamespace:
    def fail() -> None:
        raise error

    return types.SimpleNamespace(call=lambda launch: fail)


def test_an_operator_that_a_capture_forbids_is_named():
    forbidden = RuntimeError("operation not permitted when stream is capturing\nadvice of torch")
    with pytest.raises(offload.CaptureError) as raised:
        capture_under_way()._launch(run_that_raises(forbidden), added(4))
    assert str(raised.value) == (
        "model.py:4: aten::add.Tensor cannot be captured in a CUDA graph, and has to be left out "
        "of the captured model: operation not permitted when stream is capturing"
    )
    assert raised.value.__cause__ is forbidden


@pytest.mark.parametrize("kind", [offload.CaptureError, offload.BindingError, offload.OutOfMemory])
@pytest.mark.parametrize("of", ["cuda", "npu"])
def test_an_error_of_offload_in_a_launch_stays_as_it_is(kind, of):
    refusal = kind("differed")
    one = capture_under_way()
    if of == "npu":
        one = OneCapture.__new__(OneCapture)
    with pytest.raises(kind) as raised:
        one._launch(run_that_raises(refusal), added(4))
    assert raised.value is refusal
    assert refusal.__notes__ == ["model.py:4: aten::add.Tensor, in the capture"]


@pytest.mark.parametrize(
    ("pool_error", "error"),
    [("no range is left", RuntimeError("x")), (None, torch.OutOfMemoryError("out of memory"))],
)
def test_a_launch_that_gets_no_addresses_is_no_refusal(pool_error, error):
    """Torch then tries to free memory, which a capture forbids: the cause is the pool's."""
    one = capture_under_way(_pool=types.SimpleNamespace(error=pool_error))
    reason = pool_error or "out of memory"
    with pytest.raises(
        offload.ExecutionError, match=f"^model.py:4: no addresses for aten::add.Tensor: {reason}$"
    ):
        one._launch(run_that_raises(error), added(4))


@pytest.mark.parametrize("pool_error", ["no range is left", None])
def test_what_a_launch_has_freed_that_cannot_be_taken_is_no_refusal(pool_error):
    """As under a limit on torch's memory: a filler is an additional torch allocation."""

    def settle(held: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB\nadvice")

    one = capture_under_way(
        _pool=types.SimpleNamespace(error=pool_error),
        _memory=types.SimpleNamespace(settle=settle),
        _tensors=[],
    )
    run = types.SimpleNamespace(call=lambda _: lambda: None, keep=lambda *_: None, bases={})
    launch = dataclasses.replace(added(4), results=())
    reason = pool_error or "CUDA out of memory. Tried to allocate 2 MiB"
    with pytest.raises(
        offload.ExecutionError, match=f"^model.py:4: no addresses for aten::add.Tensor: {reason}$"
    ):
        one._launch(run, launch)


def test_a_capture_that_failed_says_why(monkeypatch):
    class Graph:
        def capture_end(self) -> None:
            raise RuntimeError("the capture was invalidated\nadvice of torch")

    abandoned: list[object] = []
    one = capture_under_way(_graph=Graph(), _abandon=lambda: abandoned.append(1))
    with pytest.raises(offload.CaptureError) as raised:
        one._end()
    assert str(raised.value) == (
        "the capture of the program's launches failed, so that one of them has to be left out of "
        "the captured model: the capture was invalidated"
    )
    assert abandoned == [1]


@pytest.mark.parametrize("recycled_by_try", [[{1}, {2}, {1}], [{1}, {2}, set()]])
def test_results_on_recycled_memory_are_copied_and_in_the_end_refused(monkeypatch, recycled_by_try):
    tries: list[set[int]] = []  # the copies of each

    class OneCapture:
        def __init__(self, *arguments: object) -> None:
            tries.append(set(arguments[-1]))

        def run(self) -> tuple[GraphCapture, set[int]]:
            empty = GraphCapture(1, [], [], [], [], [], None)
            return empty, recycled_by_try[len(tries) - 1]

    rewound: list[int] = []
    monkeypatch.setattr(torch_capture, "_OneCapture", OneCapture)
    bound = BoundProgram(program([IN, ACT, OUT], [], 2))
    pool = types.SimpleNamespace(rewind=lambda: rewound.append(1))
    capturer = TorchCapturer()
    if not recycled_by_try[-1]:
        assert capturer._until_unshared(bound, pool, 0, None).graph == 1
    else:
        with pytest.raises(
            offload.CaptureError,
            match=r"^v1, v2: .* in each of 3 captures.*: leave the operators that make them out of",
        ):
            capturer._until_unshared(bound, pool, 0, None)
    assert tries == [set(), {1}, {1, 2}]
    assert len(rewound) == (3 if recycled_by_try[-1] else 2)


class DrawnFrom:
    """A generator with an offset, which CPU generators do not have."""

    def __init__(self) -> None:
        self.offset = 8

    def get_offset(self) -> int:
        return self.offset


@pytest.mark.parametrize("drawn", [(), (1,), (0, 1)])
def test_a_program_draws_from_one_generator(monkeypatch, drawn):
    generators = [DrawnFrom(), DrawnFrom()]

    def warm_up(*_: object, launched: Callable[[object], None], **__: object) -> None:
        for index in drawn:
            generators[index].offset += 4
            launched(added(index=index))

    monkeypatch.setattr(torch_capture, "generators_of", lambda *_: generators)
    monkeypatch.setattr(torch_capture, "warm_up", warm_up)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", None, raising=False)
    if len(drawn) < 2:
        found = torch_capture._warm_up_drawing(None, 0, None)
        assert found == (RandomState(generators[drawn[0]], 4) if drawn else None)
        return
    with pytest.raises(
        offload.CaptureError,
        match=r"several random generators, .*: draw from torch's default one, or from one that is",
    ):
        torch_capture._warm_up_drawing(None, 0, None)


def test_a_memory_history_that_the_user_records_is_not_ended(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    with (
        pytest.raises(offload.CaptureError, match=r"memory history .*: end it with torch\.cuda"),
        PoolMemory.__new__(PoolMemory).current(),
    ):
        raise AssertionError("nothing may run")


@pytest.mark.parametrize(
    ("configured", "capability", "expected"),
    [
        ("", (9, 0), 32 << 20),
        ("", (10, 0), 32 << 20),
        ("", (8, 6), (2 * 4096 + 8 * 16) << 10),
        (":4096:2:16:8", (9, 0), (2 * 4096 + 8 * 16) << 10),
        (":16:8", (8, 0), 128 << 10),
        ("nonsense", (9, 0), 32 << 20),
    ],
)
def test_the_workspace_of_cublas_is_known_by_its_size(
    monkeypatch, configured, capability, expected
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", configured)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert torch_capture._workspace_bytes(0) == expected
