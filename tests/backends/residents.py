"""Programs resident on the simulated device, as discovery would make them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from graphs import Cuda, read, write
from simulator import Simulator

from offload.native import _native

COUNT = 4  # numbers in each tensor
SIZE_BYTES = 8 * COUNT
SIZES = [8, 8, 4]  # destination, source, count
NUMBERS = [3, -1, 40, 0]
INPUT, OUTPUT, FEATURE_MAP = 0, 1, 2


def elementwise(simulator: Simulator, name: str, function: Callable[[int], int]) -> int:
    """A kernel that writes `function` of each of its source's numbers."""

    def run(arguments: bytes) -> None:
        destination, source, count = struct.unpack("<QQi", arguments[:20])
        write(destination, [function(number) for number in read(source, count)])

    return simulator.kernel(name, SIZES, run)


class Chain:
    """Kernels in sequence that each add one; slots: 0 input, 1 output, 2 the memory between.

    The captured graph and the addresses of the capture are gone once it is made.
    """

    def __init__(
        self,
        cuda: Cuda,
        arena: _native.CudaArena,
        n_kernels: int = 3,
        *,
        as_library_kernel: bool = False,
        one_launch: bool = False,
        launch_names: Sequence[str] = (),
        keep: object = None,
    ):
        simulator = cuda.simulator
        self.n_kernels = n_kernels
        kernel = elementwise(simulator, "add_one", lambda number: number + 1)
        if as_library_kernel:
            kernel = simulator.library_kernel(kernel)
        pool = _native.DiscoveryPool(0, 1)
        places = [pool.allocate(SIZE_BYTES) for _ in range(n_kernels + 1)]
        stream = cuda.stream()
        with cuda.capture(stream) as graph:
            for index in range(n_kernels):
                cuda.launch(kernel, stream, [places[index + 1], places[index], COUNT], SIZES)
        self.relocations: list[tuple[int, int, int]] = []
        for index in range(n_kernels):
            self._relocate(2 * index, index + 1)
            self._relocate(2 * index + 1, index)
        self.resident = _native.CudaResident(
            device=0,
            graph=graph.handle,
            arena=arena,
            arena_bytes=SIZE_BYTES * (n_kernels - 1),
            node_handles=graph.nodes,
            words=[(word // 2, 0, 8 * (word % 2)) for word in range(2 * n_kernels)],
            relocations=self.relocations,
            launches=[0] * n_kernels if one_launch else list(range(n_kernels)),
            n_launches=1 if one_launch else n_kernels,
            launch_names=launch_names,
            keep=keep,
        )
        cuda.destroy(graph)

    def _relocate(self, word: int, place: int) -> None:
        slots = {0: (INPUT, 0), self.n_kernels: (OUTPUT, 0)}
        between = (FEATURE_MAP, SIZE_BYTES * (place - 1))
        self.relocations.append((word, *slots.get(place, between)))

    def patches(self, bases: Sequence[int | None]) -> list[tuple[int, int]]:
        """The words of the slots that have a base here, and their values at it."""
        found = []
        for word, slot, offset_bytes in self.relocations:
            base = bases[slot]
            if base is not None:
                found.append((word, base + offset_bytes))
        return found

    def bind(
        self, x: int | None = None, y: int | None = None, feature_map: int | None = None
    ) -> None:
        """Patch the words of slots that moved."""
        self.resident.patch(self.patches([x, y, feature_map]))

    def bind_first(self, x: int, y: int) -> None:
        """Patch every word; the feature map is the resident's own."""
        self.bind(x, y, self.resident.arena_address)


class CalledReplay(_native.CallableReplay):
    """A replay that is called like an Executable."""

    def __init__(self, native: _native.Replay):
        self.native = native
        self._bind(native, None)

    def submit(self, *args: Any, **kwargs: Any) -> _native.Ticket:
        """Queue an execution."""
        ticket = _native.Ticket()
        assert self._submit(ticket, None, (), *args, **kwargs)
        return ticket

    def __getattr__(self, name: str) -> Any:
        """Delegate to the replay."""
        return getattr(self.native, name)


def make_replay_of(
    chain: Chain,
    current_stream: Callable[[int], int],
    *,
    host_scheduled: bool = False,
    output_alignment_bytes: int = 1,
    copied_output: bool = False,
    **input_fields: Any,
) -> CalledReplay:
    """A replay of a chain: one input, one output, both on tensors of int64."""
    layout = _native.TensorLayout([COUNT], [1], torch.int64, False, False)
    fields = {"slot": INPUT, "written": False, "returned_as_view": False, **input_fields}
    spec = _native.CallSpec(
        device="cpu",
        inputs=[_native.InputSpec(name="x", **fields)],
        outputs=[
            _native.OutputSpec(
                name="y",
                slot=OUTPUT,
                operator_allocated=False,
                alignment_bytes=output_alignment_bytes,
                copied=copied_output,
            )
        ],
        results=[
            _native.ResultSpec(
                source=_native.ResultSource.OUTPUT,
                index=0,
                is_argument=False,
            )
        ],
        weights=[],
        overlaps=[],
        feature_map_slot=FEATURE_MAP,
        alignment_bytes=8,
        shapes=_native.CallShapes(
            inputs=[layout],
            outputs_bytes=[SIZE_BYTES],
            results=[_native.ResultShape(offset_bytes=0, layout=layout, covers_output=True)],
            feature_map_bytes=2 * SIZE_BYTES,
        ),
    )
    native = _native.Replay(
        spec=spec,
        triggers=[_native.Trigger.IO, _native.Trigger.IO, _native.Trigger.FEATURE_MAP],
        resident=chain.resident,
        host_scheduled=host_scheduled,
        positional=[(True, None)],
        keyword={},
        match=lambda args, kwargs: list(args),
        result_form="tensor",
        build_result=lambda tensors: tensors[0],
        match_buffers=lambda out: [out],
        check_feature_map=lambda feature_map: None,
        current_stream=current_stream,
    )
    return CalledReplay(native)


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


class Gather:
    """A copy of a host table of two addresses to the device, and a kernel that adds what they hold.

    Slots: 0 and 1 are the inputs, 2 the output, 3 the arena, which holds the table.
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


def plus(number: int) -> list[int]:
    return [one + number for one in NUMBERS]


def run(resident: _native.CudaResident) -> int:
    """Execute to the end; return how many nodes were updated for it."""
    before = resident.n_set_params
    resident.execute()
    resident.finish()
    return resident.n_set_params - before
