"""Programs resident on the simulated Ascend device, made of kernels on arrays of numbers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Literal

import npu_device
from ascend_kernels import gather_kernel
from ascend_simulator import AscendSimulator

from offload.native import _native

COUNT = 4  # numbers in each tensor
SIZE_BYTES = 8 * COUNT
NUMBERS = [3, -1, 40, 0]
INPUT, OUTPUT, FEATURE_MAP = 0, 1, 2
TRIGGERS = [_native.Trigger.IO, _native.Trigger.IO, _native.Trigger.FEATURE_MAP]
LOOK_ALIKE = 0x7F40_0000_1000
REFRESHES = ["host", "kernel", "operators"]
NOWHERE = 0xBAD0_BAD0_BAD0_BAD0
HUGE_FIRST = 0


def read(address: int, count: int = COUNT) -> list[int]:
    """Return the current content of memory, whatever work waits."""
    return list((ctypes.c_int64 * count).from_address(address))


def plus(added: int) -> list[int]:
    return [number + added for number in NUMBERS]


def add_one(block: bytes, _n_blocks: int = 1) -> None:
    look_alike, destination, source, count = struct.unpack("<4Q", block)
    assert look_alike == LOOK_ALIKE, "somebody patched an integer"
    (ctypes.c_int64 * count).from_address(destination)[:] = [
        number + 1 for number in read(source, count)
    ]


def gather_by(
    ascend: AscendSimulator, refresh: str
) -> tuple[tuple[int, int] | Literal["operators"] | None, object]:
    """Return what refreshes a resident's table, and the objects to keep alive for it."""
    if refresh == "operators":
        npu_device.operators().sim_operators_reset()
        return "operators", None
    kernel = gather_kernel(ascend) if refresh == "kernel" else None
    return None if kernel is None else (kernel.function, kernel.n_blocks), kernel


class Chain:
    """Kernels in sequence that each add one; slots: 0 input, 1 output, 2 the memory between."""

    def __init__(
        self,
        ascend: AscendSimulator,
        n_kernels: int = 3,
        *,
        form: str | None = None,
        refresh: str = "host",
        workspace_bytes: int = 0,
        copies_on_device: bool = True,
        function: Callable[[bytes, int], object] = add_one,
        keep: object = None,
    ) -> None:
        self.ascend = ascend
        binary = _native.AscendBinary(0, ascend.binary({"add_one": (32, function)}))
        gather, kept = gather_by(ascend, refresh)
        if workspace_bytes:
            npu_device.set_more_workspace(workspace_bytes)
        gathers = refresh != "host"
        places = [
            (INPUT, 0),
            *((FEATURE_MAP, SIZE_BYTES * index) for index in range(n_kernels - 1)),
            (OUTPUT, 0),
        ]
        relocations, words = [], []
        for index in range(n_kernels):
            for offset, (slot, offset_bytes) in ((8, places[index + 1]), (16, places[index])):
                relocations.append((len(words), slot, offset_bytes))
                words.append((index, offset))
        block = struct.pack("<4Q", LOOK_ALIKE, NOWHERE, NOWHERE, COUNT)
        self.relocations = [(base, base, 0) for base in range(3)] if gathers else relocations
        if gathers and n_kernels == 1:
            self.relocations = self.relocations[:2]
        self.resident = _native.AscendResident(
            device=0,
            arena_bytes=0,
            kernels=[(binary.function("add_one"), 1, index, block) for index in range(n_kernels)],
            words=words,
            relocations=relocations,
            triggers=TRIGGERS,
            n_launches=n_kernels,
            form=form,
            copies_on_device=copies_on_device,
            gather=gather,
            keep=(binary, kept, keep),
        )
        self.bases = [0, 0, 0]

    def allocate(self, numbers: Sequence[int] = (0,) * COUNT) -> int:
        """Allocate device memory that holds these numbers."""
        address = self.ascend.make("aclrtMalloc", 8 * len(numbers), HUGE_FIRST)
        (ctypes.c_int64 * len(numbers)).from_address(address)[:] = list(numbers)
        return address

    def bind(self, **bases: int) -> None:
        """Patch the words of slots by name (input, output, feature_map)."""
        slots = {"input": INPUT, "output": OUTPUT, "feature_map": FEATURE_MAP}
        changed = {slots[name]: address for name, address in bases.items()}
        self.resident.patch(
            [
                (word, changed[slot] + offset_bytes)
                for word, slot, offset_bytes in self.relocations
                if slot in changed
            ]
        )

    def bind_first(self) -> tuple[int, int]:
        """Bind every slot; return the addresses of input and output."""
        x, y = self.allocate(NUMBERS), self.allocate()
        self.bind(input=x, output=y, feature_map=self.allocate([0] * COUNT * 8))
        return x, y

    def run(self) -> None:
        """Execute and wait."""
        self.resident.execute()
        self.resident.finish()


def live(ascend: AscendSimulator) -> dict[str, int]:
    """Return the number of live objects of each kind."""
    kinds = ("stream", "event", "model")
    descriptions, executors = npu_device.live_operator_objects()
    return {kind: ascend.live(kind) for kind in kinds} | {
        "bytes": ascend.live_bytes,
        "arguments": ascend.argument_bytes,
        "streams in use": ascend.streams_in_use(),
        "ours": _native.ascend_streams(),
        "descriptions": descriptions,
        "executors": executors,
    }
