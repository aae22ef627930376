"""Captures with torch beside others: threads, generators, what the warm-up finds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch
from small_programs import ACT, IN, OUT, added, program

import offload
from offload.backends.captured.random_draws import RandomState, own_random_states
from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.torch_warm_up import last_uses_of
from offload.backends.cuda import torch_capture
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.interpreter.device_failures import first_line
from offload.program import BoundProgram


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

    def query(self) -> bool:
        """Whether work has ended: a memory pool of an earlier test may be collected meanwhile."""
        return True


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
