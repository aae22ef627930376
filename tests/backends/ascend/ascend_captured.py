"""A captured Ascend model of three kernels whose argument blocks are patched in place."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_client import Client, peek

from offload.native import _native

INPUT, OUTPUT, FEATURE_MAP = 0, 1, 2
KERNEL, ADDED = 1, 100
PIECE_BYTES = 64
# For each word its kernel, byte, slot and offset in the slot. The feature map has two pieces.
WORDS = [
    (0, 0, INPUT, 0),
    (0, 8, FEATURE_MAP, 0),
    (1, 0, FEATURE_MAP, 0),
    (1, 8, FEATURE_MAP, PIECE_BYTES),
    (2, 0, FEATURE_MAP, PIECE_BYTES),
    (2, 8, OUTPUT, 0),
]


class Captured:
    """Three kernels in sequence that each add 100, captured: x, two pieces of memory, y."""

    def __init__(
        self,
        npu: Client,
        stream: int,
        words: Sequence[tuple[int, ...]] = WORDS,
        *,
        has_table: bool = False,
    ) -> None:
        self.ascend, self.npu, self.stream = npu.ascend, npu, stream
        self.x, self.y = npu.words(1), npu.words(0)
        self.far = npu.words(0)  # allocated before the first piece, so that they are not adjacent
        self.near = npu.words(0)
        self.n_released = 0
        with npu.capture(stream) as models:
            npu.add(stream, self.x, self.near, ADDED)
            npu.add(stream, self.near, self.far, ADDED)
            npu.add(stream, self.far, self.y, ADDED)
        (self.model,) = models
        self.tasks = _native.ascend_captured_tasks(0, self.model)
        self.table = self.make_table() if has_table else None
        if self.table is not None:
            self.table.install(0)
        self.resident = _native.AscendCapturedResident(
            device=0,
            model=self.model,
            copies=_native.AscendMovingCopies(device=0, tensors=[]),
            slots=[],
            n_launches=3,
            release=self.release,
            blocks=[(address, content) for *_, address, content in self.tasks],
            words=[(block, offset) for block, offset, _, _ in words],
            places=[(slot, offset) for _, _, slot, offset in words],
            feature_map_slot=FEATURE_MAP,
            home=self.near,
            table=self.table,
        )

    def make_table(self) -> _native.AscendCapturedTable:
        """Make the table of all kernels, without giving it to them."""
        return _native.AscendCapturedTable(
            device=0,
            model=self.model,
            kernels=[(number, *task[4:]) for number, task in enumerate(self.tasks)],
            words=[(block, offset, slot != FEATURE_MAP) for block, offset, slot, _ in WORDS],
        )

    def release(self) -> None:
        self.n_released += 1
        if self.n_released == 1:
            self.ascend.call("aclmdlRIDestroy", self.model)
            self.table = None  # as for a model that torch hands back

    def bind(self, **bases: int) -> None:
        """Patch the words of slots by name (input, output, feature_map)."""
        slots = {"input": INPUT, "output": OUTPUT, "feature_map": FEATURE_MAP}
        changed = {slots[name]: address for name, address in bases.items()}
        self.resident.patch(
            [
                (word, changed[slot] + offset_bytes)
                for word, (_, _, slot, offset_bytes) in enumerate(WORDS)
                if slot in changed
            ]
        )

    def bind_home(self) -> None:
        self.bind(input=self.x, output=self.y, feature_map=self.near)

    def run(self) -> tuple[int, int]:
        """Execute and wait; return the number of argument copies and their bytes."""
        before = self.resident.refresh_counts
        self.resident.set_stream(self.stream)
        self.resident.execute()
        self.resident.finish()
        after = self.resident.refresh_counts
        return (
            after["copies"] - before["copies"],
            after["bytes_copied"] - before["bytes_copied"],
        )

    def blocks(self) -> list[tuple[int, ...]]:
        """Return the content of the device's argument blocks."""
        addresses = [address for *_, address, _ in self.tasks]
        if self.table is not None:
            addresses = self.table.addresses
        return [peek(address, 3) for address in addresses]
