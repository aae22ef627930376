"""What proofs execute: a resident, its placement, and memory for all its slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Generic, Protocol, TypeVar

from offload.backends.captured.relocation.contents import ComparedMemory, Stretch
from offload.backends.captured.relocation.fixed_weights import FixedWeights
from offload.backends.captured.relocation.weight_stand_ins import WeightStandIns
from offload.interpreter.made_up_inputs import no_result, overlapping_inputs
from offload.plan import Plan
from offload.program import Program, Role

_TILE_BYTES = 2**20  # content is made once, and repeated


class Memory(ComparedMemory, Protocol):
    """The operations on device memory that the proof needs; new memory holds zeros."""

    def fill(self, address: int, size_bytes: int) -> None:
        """Write zeros."""

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host."""


class PatchedResident(Protocol):
    """A resident whose slots can be moved."""

    def patch(self, patches: list[tuple[int, int]]) -> None:
        """Write addresses into words."""


class ProvableResident(PatchedResident, Protocol):
    """The operations on a resident that the proof needs."""

    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None:
        """Write bytes of a node (its index, part and offset in bytes) that hold no address."""

    def execute(self) -> None:
        """Execute everything."""

    def finish(self) -> None:
        """Wait for it."""

    def close(self) -> None:
        """Release its resources."""


R_co = TypeVar("R_co", bound=PatchedResident, covariant=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Placed(Generic[R_co]):
    """A resident and its placement.

    Attributes:
        plan: of the resident.
        resident: executes.
        relocations: its (word, slot, offset in bytes).
        home: by slot, the memory of the capture if it still exists: the first two executions use
            it. Other slots get separate memory.
        shared: slots whose memory in `home` is also that of Values that do not move, so that every
            execution writes there.
        draw: called before each execution with the generator state that it draws from: 0 or 1, with
            the first or the second input.
    """

    plan: Plan
    resident: R_co
    relocations: Sequence[tuple[int, int, int]]
    home: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shared: Set[int] = frozenset()
    draw: Callable[[int], object] = lambda _: None


@dataclasses.dataclass(frozen=True, slots=True)
class BoundWeights:
    """The places of weights, and what restores those that cannot be moved."""

    fixed: FixedWeights
    stand_ins: WeightStandIns
    stay: Set[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Memory of a placement.

    `dtype`: of everything in it; `lent`: not allocated by the proof; `shared`: written by every
    execution.
    """

    address: int
    size_bytes: int
    name: str
    dtype: str = ""
    is_feature_map: bool = False
    is_lent: bool = False
    is_shared: bool = False


class ProofBases:
    """Memory for one placement: the base of each slot."""

    def __init__(
        self,
        program: Program,
        placed: Placed[Any],
        memory: Memory,
        inputs: Sequence[bytes],
        weights: BoundWeights,
        *,
        state: int = 0,
    ) -> None:
        self._state = state
        self._weights = weights.fixed
        self._program = program
        self._plan = plan = placed.plan
        self._placed = placed
        self._memory = memory
        self._blocks: list[_Block] = []
        self._copies: list[tuple[int, int, int]] = []  # of weights: (address, original, bytes)
        self._bases = [0] * len(plan.slots)
        written = {index for launch in program.launches for index in launch.writes}
        for value in program.values:
            place = plan.places[value.index]
            if place is None:
                continue
            if value.role is Role.OUTPUT:
                self._bases[place.slot] = self._take(
                    place.slot, value.size_bytes, value.name, value.dtype
                )
            elif value.role is Role.WEIGHT:
                address = weights.stand_ins.addresses[value.index]
                if value.index in written - weights.stay:
                    original = address
                    address = self._allocate(value.size_bytes, value.name, value.dtype)
                    self._copies.append((address, original, value.size_bytes))
                self._bases[place.slot] = address
        feature_map = plan.feature_map
        self._bases[feature_map.index] = self._take(
            feature_map.index, feature_map.size_bytes, feature_map.name
        )
        self._place_inputs(inputs)
        self._copy_weights()
        self._spoil_outputs()

    def _spoil_outputs(self) -> None:
        """Give outputs numbers that are not results: memory of zeros may hold the right bits."""
        for value in self._program.of_role(Role.OUTPUT):
            place = self._plan.places[value.index]
            if place is None:
                continue
            tile = no_result(value.dtype, min(_TILE_BYTES, value.size_bytes))
            for at in range(0, value.size_bytes, _TILE_BYTES):
                self._memory.write(self._bases[place.slot] + at, tile[: value.size_bytes - at])

    def _copy_weights(self) -> None:
        for address, original, size_bytes in self._copies:
            self._memory.copy(address, original, size_bytes)

    def _take(self, slot: int, size_bytes: int, name: str, dtype: str = "") -> int:
        """The memory of the capture for a slot if it exists, else separate memory."""
        home = self._placed.home.get(slot)
        block = _Block(
            self._memory.allocate(size_bytes) if home is None else home,
            size_bytes,
            name,
            dtype,
            is_feature_map=slot == self._plan.feature_map.index,
            is_lent=home is not None,
            is_shared=home is not None and slot in self._placed.shared,
        )
        self._blocks.append(block)
        return block.address

    def _allocate(self, size_bytes: int, name: str, dtype: str = "") -> int:
        block = _Block(self._memory.allocate(size_bytes), size_bytes, name, dtype)
        self._blocks.append(block)
        return block.address

    def _place_inputs(self, inputs: Sequence[bytes]) -> None:
        """Place each input in a separate block, except those that must overlap as recorded.

        Host constants have no place: the graph holds their values.
        """
        together = [
            leaves
            for leaves in overlapping_inputs(self._program)
            if not self._program.values[self._value(leaves[0][0])].on_host
        ]
        for leaves in together:
            lowest = min(offset for _, offset in leaves)
            ends = [offset - lowest + len(inputs[leaf]) for leaf, offset in leaves]
            names = ", ".join(self._program.values[self._value(leaf)].name for leaf, _ in leaves)
            place = self._plan.places[self._value(leaves[0][0])]
            if len(leaves) == 1 and place is not None:
                dtype = self._program.values[self._value(leaves[0][0])].dtype
                block = self._take(place.slot, max(ends), names, dtype)
            else:
                block = self._allocate(max(ends), names)
            for leaf, offset in leaves:
                place = self._plan.places[self._value(leaf)]
                assert place is not None  # ensured by check_plan
                self._bases[place.slot] = block + offset - lowest
        self.write_inputs(inputs)

    def write_inputs(self, inputs: Sequence[bytes]) -> None:
        """Write the inputs to their places in this placement."""
        for view, content in zip(self._program.inputs, inputs, strict=True):
            if self._program.values[view.value].on_host:
                continue
            place = self._plan.places[view.value]
            assert place is not None  # ensured by check_plan
            self._memory.write(self._bases[place.slot], content)

    def _value(self, leaf: int) -> int:
        return self._program.inputs[leaf].value

    def patch(self, placed: Placed[PatchedResident]) -> None:
        """Give the resident all these addresses."""
        placed.resident.patch(
            [(word, self._bases[slot] + offset) for word, slot, offset in placed.relocations]
        )

    def execute(self, placed: Placed[ProvableResident]) -> None:
        """Patch and execute; fixed weights are restored."""
        self.patch(placed)
        placed.draw(self._state)
        with self._weights.restored():
            placed.resident.execute()
            placed.resident.finish()

    def take_feature_map(self, other: ProofBases) -> None:
        """Begin with the content that another execution left, which is valid to read by mistake."""
        slot = self._plan.feature_map
        self._memory.copy(self._bases[slot.index], other._bases[slot.index], slot.size_bytes)

    def begin_again(self, other: ProofBases, inputs: Sequence[bytes]) -> None:
        """Restore the state before the execution, at the same addresses."""
        self.begin(inputs)
        self.take_feature_map(other)

    def begin(self, inputs: Sequence[bytes]) -> None:
        """Write the initial content of an execution."""
        self._copy_weights()
        self.write_inputs(inputs)
        self._spoil_outputs()

    def clear(self) -> None:
        """Fill all memory of this placement with zeros."""
        for block in self._blocks:
            self._memory.fill(block.address, block.size_bytes)

    def outcome(self) -> list[Stretch]:
        """Everything that a caller can see: outputs, and the final inputs and weights."""
        blocks = [block for block in self._blocks if not block.is_feature_map]
        return [*_stretches(blocks), *self._weights.left]

    def content(self) -> list[Stretch]:
        """Content that another placement's execution does not change, unless a word was missed."""
        return _stretches([block for block in self._blocks if not block.is_shared])

    def free(self) -> None:
        """Free the proof's own memory."""
        for block in self._blocks:
            if not block.is_lent:
                self._memory.free(block.address)
        self._blocks.clear()


def _stretches(blocks: Sequence[_Block]) -> list[Stretch]:
    return [
        Stretch(f"{block.name} (block {index})", block.address, block.size_bytes, block.dtype)
        for index, block in enumerate(blocks)
    ]
