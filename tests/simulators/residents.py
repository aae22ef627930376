"""Programs resident on the simulated device, as discovery would make them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from graphs import Cuda, read, write
from simulator import Simulator

from offload import _native

COUNT = 4  # numbers in each tensor
SIZE_BYTES = 8 * COUNT
SIZES = [8, 8, 4]  # destination, source, count
INPUT, OUTPUT, FEATURE_MAP = 0, 1, 2


def elementwise(simulator: Simulator, name: str, function: Callable[[int], int]) -> int:
    """A kernel that writes `function` of each of its source's numbers."""

    def run(arguments: bytes) -> None:
        destination, source, count = struct.unpack("<QQi", arguments[:20])
        write(destination, [function(number) for number in read(source, count)])

    return simulator.kernel(name, SIZES, run)


class Chain:
    """Kernels in a row that each add one: slot 0 the input, 1 the output, 2 what lies between.

    The captured graph and the addresses that it was captured at are gone once it is made.
    """

    def __init__(
        self,
        cuda: Cuda,
        arena: _native.CudaArena,
        n_kernels: int = 3,
        *,
        as_library_kernel: bool = False,
        one_launch: bool = False,
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
        )
        cuda.destroy(graph)

    def _relocate(self, word: int, place: int) -> None:
        slots = {0: (INPUT, 0), self.n_kernels: (OUTPUT, 0)}
        between = (FEATURE_MAP, SIZE_BYTES * (place - 1))
        self.relocations.append((word, *slots.get(place, between)))

    def patches(self, bases: Sequence[int | None]) -> list[tuple[int, int]]:
        """The words of the slots that have a base here, and what they hold for it."""
        found = []
        for word, slot, offset_bytes in self.relocations:
            base = bases[slot]
            if base is not None:
                found.append((word, base + offset_bytes))
        return found

    def bind(
        self, x: int | None = None, y: int | None = None, feature_map: int | None = None
    ) -> None:
        """Patch the words of what moves."""
        self.resident.patch(self.patches([x, y, feature_map]))

    def bind_first(self, x: int, y: int) -> None:
        """Patch every word; the feature map is the resident's own."""
        self.bind(x, y, self.resident.arena_address)
