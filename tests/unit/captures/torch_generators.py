"""Torch's captures without a GPU, for random kernels: where and when their cells are made.

The docstring of offload.backends.cuda.generator_cells describes each version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch_pools import FakeAllocator

DEFAULT_STREAM, CAPTURED_STREAM = 0, 7
GPU = torch.device("cuda", 0)

Cells = tuple[int, int]


class FakePool:
    """A `MemPool`, or a pool that a graph makes for itself."""

    def __init__(self, number: int) -> None:
        self.id = (0, number)
        self.blocks: dict[int, int] = {}  # by address, in bytes

    def snapshot(self, include_traces: bool) -> list[dict[str, Any]]:
        """One segment, in which half a block is free."""
        assert not include_traces
        live = [
            {"address": address, "requested_size": size_bytes, "state": "active_allocated"}
            for address, size_bytes in self.blocks.items()
        ]
        return [{"blocks": [*live, {"address": 1, "requested_size": 0, "state": "inactive"}]}]


@dataclasses.dataclass
class FakeState:
    """A `CUDAGeneratorState`: with cells shared by all captures, or separate for each."""

    graphs: set[int] = dataclasses.field(default_factory=set)
    cells: Cells | None = None
    of_captures: dict[int, Cells] = dataclasses.field(default_factory=dict)


class FakeTorch(FakeAllocator):
    """Torch 2.11: its allocator, generators and graphs; subclasses adapt it to other versions.

    Attributes:
        default: the device's default generator.
        registered: arguments of `register_generator_state`, in order.
        filled: the addresses that torch's kernels wrote to before a capture.
        graph_pool: the pool of the next capture.
        n_captures: number of captures begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph_pool = FakePool(0)
        self.default = FakeGenerator(self)
        self.registered: list[object] = []
        self.filled: list[int] = []
        self.n_captures = 0
        self.capture: FakeGraph | None = None
        self.stream = CAPTURED_STREAM
        self._elsewhere = FakePool(-1)
        self._pools = [self._elsewhere, self.graph_pool]
        self._next = 0x7000_0000_0000
        self._filters: list[tuple[FakePool, Callable[[int], bool]]] = []

    def _pool(self, *_: object, **__: object) -> Any:
        self.n_made += 1
        self._pools.append(FakePool(self.n_made))
        return self._pools[-1]

    @contextlib.contextmanager
    def use(self, pool: Any, device: object) -> Iterator[None]:
        """Serve the thread's requests, on any stream."""
        served = (pool, lambda stream: True)
        self._filters.append(served)
        with super().use(pool, device):
            yield
        self._filters.remove(served)

    def allocate(self, size_bytes: int, stream: int | None = None) -> int:
        """Allocate from the pool of the latest filter that takes the stream."""
        on = self.stream if stream is None else stream
        taking = (pool for pool, takes in reversed(self._filters) if takes(on))
        address, self._next = self._next, self._next + 512
        next(taking, self._elsewhere).blocks[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        """Free a block of any pool."""
        for pool in self._pools:
            pool.blocks.pop(address, None)

    def pair(self, stream: int | None = None) -> Cells:
        """Two int64 tensors of one element."""
        return self.allocate(8, stream), self.allocate(8, stream)

    def begin(self, graph: FakeGraph) -> None:
        """The effect of `capture_begin` on the allocator and the stream."""
        assert self.capture is None
        self.n_captures += 1
        self.capture = graph
        self._filters.append((self.graph_pool, lambda stream: stream == CAPTURED_STREAM))

    def end(self) -> None:
        """The effect of `capture_end` on them."""
        self.capture = None
        self._filters = [one for one in self._filters if one[0] is not self.graph_pool]

    # ---- differences of versions
    # ------------------------------------------------------------------

    def register(self, graph: FakeGraph, generator: FakeGenerator) -> None:
        """`CUDAGeneratorState::register_graph`."""
        if self.capture is not None:
            raise RuntimeError("Cannot register the state during capturing stage.")
        state = generator.state
        if not state.graphs:
            state.cells = self.pair()
        state.graphs.add(id(graph))
        graph.states.append(state)

    def prologue(self, graph: FakeGraph) -> None:
        """The effect of `capture_begin` on generators before the capture."""
        self.register(graph, self.default)
        for state in graph.states:
            self.filled += state.cells or ()

    def begun(self, graph: FakeGraph) -> None:
        """Its effect once the capture has begun."""

    def asked(self, generator: FakeGenerator) -> None:
        """`philox_offset_per_thread` in a capture, which `get_state` calls."""

    def drawn(self, generator: FakeGenerator) -> Cells:
        """`philox_cuda_state` in a capture."""
        assert self.capture is not None
        if id(self.capture) not in generator.state.graphs:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture")
        assert generator.state.cells is not None
        return generator.state.cells

    def forgotten(self, graph: FakeGraph) -> None:
        """`~CUDAGraph`; later versions do it in `reset`."""
        for state in graph.states:
            state.graphs.discard(id(graph))
            if not state.graphs:
                for address in state.cells or ():
                    self.free(address)
                state.cells = None


class Torch212(FakeTorch):
    """Torch 2.12 and 2.13: one pair for each capture, made at its beginning."""

    def register(self, graph: FakeGraph, generator: FakeGenerator) -> None:
        """`CUDAGeneratorImpl::register_graph` notes the state."""
        graph.states.append(generator.state)

    def prologue(self, graph: FakeGraph) -> None:
        """Also notes the default generator; fills nothing."""
        self.register(graph, self.default)

    def begun(self, graph: FakeGraph) -> None:
        """Call `init_capture_state` of each."""
        for state in graph.states:
            state.of_captures[id(graph)] = self.pair(DEFAULT_STREAM)

    def asked(self, generator: FakeGenerator) -> None:
        """`get_capture_state` makes no pair."""
        if id(self.capture) not in generator.state.of_captures:
            raise RuntimeError("RNG state is not initialized for this capture")

    def drawn(self, generator: FakeGenerator) -> Cells:
        """The pair of this capture."""
        self.asked(generator)
        return generator.state.of_captures[id(self.capture)]

    def forgotten(self, graph: FakeGraph) -> None:
        """`remove_capture_state`."""
        for state in graph.states:
            for address in state.of_captures.pop(id(graph), ()):
                self.free(address)


class Torch214(Torch212):
    """The same, made when a capture first asks for it."""

    def register(self, graph: FakeGraph, generator: FakeGenerator) -> None:
        """Prints that it does nothing, on the error stream, where Python cannot filter it."""
        warnings.warn("register_generator_state() is deprecated", DeprecationWarning, stacklevel=2)

    def prologue(self, graph: FakeGraph) -> None:
        """No generator is registered."""

    def asked(self, generator: FakeGenerator) -> None:
        """`get_capture_state` makes a missing pair, and registers the state."""
        assert self.capture is not None
        states = generator.state.of_captures
        if id(self.capture) not in states:
            states[id(self.capture)] = self.pair(DEFAULT_STREAM)
            self.capture.states.append(generator.state)


class TorchWithoutRegistering(Torch214):
    """Torch as the deprecation in 2.14 announces."""

    registers = False


class FakeGenerator:
    """A `torch.Generator` of the device."""

    device = GPU

    def __init__(self, of: FakeTorch) -> None:
        self._torch, self.state = of, FakeState()

    def get_state(self) -> str:
        """Seed and offset; in a capture those of the capture."""
        if self._torch.capture is not None:
            self._torch.asked(self)
        return "seed and offset"

    def draw(self) -> Cells:
        """The arguments of a random kernel of a captured launch."""
        return self._torch.drawn(self)


class FakeGraph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self, of: FakeTorch) -> None:
        self._torch = of
        self.states: list[FakeState] = []

    def __getattr__(self, name: str) -> Any:
        if name != "register_generator_state" or not getattr(self._torch, "registers", True):
            raise AttributeError(name)
        return self._register

    def _register(self, generator: FakeGenerator) -> None:
        self._torch.registered.append(generator)
        self._torch.register(self, generator)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """As torch's, in the order of each version."""
        assert capture_error_mode == "thread_local"
        self._torch.prologue(self)
        self._torch.begin(self)
        self._torch.begun(self)

    def capture_end(self) -> None:
        """As torch's."""
        self._torch.end()

    def reset(self) -> None:
        """Forgets the states, as `~CUDAGraph` does."""
        self._torch.forgotten(self)
        self.states = []


def take_for_cuda(monkeypatch: pytest.MonkeyPatch, found: FakeTorch) -> FakeTorch:
    """Replace torch by a fake for the rest of the test."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: found.module)
    monkeypatch.setattr(torch, "Generator", lambda device: FakeGenerator(found))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: FakeGraph(found))
    return found
