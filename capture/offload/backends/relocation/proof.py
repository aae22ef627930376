"""The proof at load: a resident graph computes the same bits wherever its slots lie.

1. A resident of the graph in which no two Values share memory executes an input: what it gives is
   the expected result. It differs from what is loaded in the address of every activation, so a
   placement or a lifetime that is wrong shows.
2. A resident that is placed as the loaded one executes another valid input, and draws other
   random numbers. Its memory, which is kept, then holds another execution's data everywhere.
   Where the memory is still there in which the graph was captured, both take place in it.
3. Every slot moves, noise is set to other values, and the second resident executes the first
   input. The results must be equal bit for bit, and the memory of step 2 must be what it was: a
   word that was missed would have read or written it there. Where results differ it executes
   again at the same addresses, to tell a graph that never computes the same bits, and one that
   reads its noise: then the noise is divided until the bytes are found that matter.

Noise gets the values of the other capture in the same layout. Every byte of it changes, that being
what made it noise; and what is read by mistake is as valid as before. A value that was made up
could be a size, an index, an address or a counter that another kernel waits for, and the device
would fault or never end. Only the values of that capture are safe in this way: an address in
another layout leads nowhere any more.

What is not shown: that the graph computes what the model does (its results are compared with eager
where models are tested); and addresses of weights that no launch writes, which stay where they are
in all three steps, since copies could take as much memory as the model. They have been moved once
already, from the addresses that they were captured at, where nothing is mapped any more.
Weights in files are read where the resident itself brings them, as a model of torch_npu does. Else
they are not: in all three steps those of one dtype are one block of made-up content, since a model
may be larger than the device, and the copies that bring streamed weights are no part of what
executes here; `streamed_copies.check_copies` proves their order by the graph's edges.

Inputs are made up: floating-point numbers are drawn from [0, 1), truth values likewise, and
integers are 0, which is an index into anything. Where that leaves no second input to tell apart,
the memory of step 2 is filled with zeros. Integers at old addresses become 1, which is an index
into nearly anything, and is only read if the proof fails. What launches write is a copy, so no
state changes. Only weights whose addresses are constants, as those of an opaque Program, are
written where they are: they are put back after each execution, and what it has left there is
compared as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from offload.backends.relocation import fixed_weights
from offload.backends.relocation.fixed_weights import FixedWeights
from offload.backends.relocation.weight_stand_ins import WeightStandIns
from offload.backends.relocation.words import Noise
from offload.errors import CaptureError
from offload.made_up_inputs import made_up_inputs, overlapping_inputs
from offload.plan import Place, Plan
from offload.program import Program, Role, Value

_NONE_STREAMED: Mapping[int, int] = MappingProxyType({})


class Memory(fixed_weights.Memory, Protocol):
    """What the proof needs of a device's memory, which holds zeros when it is allocated."""

    def fill(self, address: int, size_bytes: int) -> None:
        """Write zeros."""

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host."""


class PatchedResident(Protocol):
    """A resident whose slots can be moved."""

    def patch(self, patches: list[tuple[int, int]]) -> None:
        """Write addresses into words."""


class ProvableResident(PatchedResident, Protocol):
    """What the proof needs of a resident."""

    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None:
        """Write bytes of a node (its index, part and offset in bytes) where no address lies."""

    def execute(self) -> None:
        """Run everything."""

    def finish(self) -> None:
        """Wait for it."""

    def close(self) -> None:
        """Give back what it holds."""


R_co = TypeVar("R_co", bound=PatchedResident, covariant=True)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Placed(Generic[R_co]):
    """A resident, and where it is placed.

    Attributes:
        plan: that it was made for.
        resident: what executes.
        relocations: its (word, slot, offset in bytes).
        home: by slot the memory that it was captured in, where that is still there: the first two
            executions take place in it. Other slots get memory of the proof's own.
        shared: slots whose memory in `home` is also that of Values that do not move, so that every
            execution writes there.
        draw: tells the resident, before each execution, which state of generators it draws from:
            0 or 1, with the first or the second input.
    """

    plan: Plan
    resident: R_co
    relocations: Sequence[tuple[int, int, int]]
    home: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shared: Set[int] = frozenset()
    draw: Callable[[int], object] = lambda _: None


def apart(program: Program, plan: Plan) -> Plan:
    """The Plan with a feature map in which no two Values share a byte."""
    feature_map = plan.feature_map
    places = list(plan.places)
    end_bytes = 0
    for value in program.values:
        place = places[value.index]
        if place is not None and place.slot == feature_map.index:
            places[value.index] = Place(place.slot, end_bytes)
            unit = plan.alignment_bytes
            end_bytes += -(-value.size_bytes // unit) * unit
    slots = list(plan.slots)
    slots[feature_map.index] = dataclasses.replace(feature_map, size_bytes=end_bytes)
    return dataclasses.replace(
        plan, slots=tuple(slots), places=tuple(places), feature_map_bytes=end_bytes
    )


def prove(
    program: Program,
    loaded: Placed[ProvableResident],
    unshared: Placed[ProvableResident],
    memory: Memory,
    *,
    noise: Sequence[Noise] = (),
    describe: Callable[[Noise], str] = repr,
    fixed: Sequence[Value] = (),
    streamed: Mapping[int, int] = _NONE_STREAMED,
) -> None:
    """Execute three times, as the module says.

    Args:
        program: what is resident.
        loaded: a resident by the Plan that is loaded.
        unshared: the same graph by the Plan that `apart` gives.
        memory: of the device.
        noise: of the graph.
        describe: the kernel and parameter of noise, for messages.
        fixed: weights that executions may write where they are.
        streamed: by Value the address of weights that the resident itself brings.

    Raises:
        CaptureError: results or written state differ, or old memory was written; noise that is
            read is named by kernel and parameter.
        ExecutionError: the device failed, or has no memory for the proof.
    """
    first, second = (made_up_inputs(program, variant) for variant in range(2))
    weights = _Weights(
        FixedWeights(program, memory, fixed, streamed),
        WeightStandIns(program, memory, streamed),
        frozenset(value.index for value in fixed),
    )
    bases = _Bases(program, unshared, memory, first, weights)
    bases.execute(unshared)
    expected = bases.outcome()
    bases.free()
    old = _Bases(program, loaded, memory, second, weights, state=1)
    old.execute(loaded)
    if first == second:
        old.clear()
    old.write_inputs(made_up_inputs(program, 1, integer=1))
    before = old.content()
    new = _Bases(program, dataclasses.replace(loaded, home={}), memory, first, weights)
    new.take_feature_map(old)
    _set_noise(loaded, noise, changed=noise)
    new.execute(loaded)
    found, after = new.outcome(), old.content()
    if found != expected and after == before:

        def outcome_with(changed: Sequence[Noise]) -> dict[str, bytes]:
            new.begin_again(old, first)
            _set_noise(loaded, noise, changed)
            new.execute(loaded)
            return new.outcome()

        _check_steady(found, outcome_with(noise))
        if noise and outcome_with(()) == expected:
            _refuse_noise(noise, describe, lambda some: outcome_with(some) != expected)
    _compare(expected, found, "gives another result at other addresses: {} differs")
    _compare(before, after, "was moved and still writes to its old addresses, in {}")
    old.free()
    new.free()
    weights.fixed.free()
    weights.stand_ins.free()


def timed_rounds(
    program: Program,
    placed: Placed[PatchedResident],
    memory: Memory,
    take: Callable[[], T],
    n_rounds: int,
) -> list[T]:
    """What executions take, on inputs and weights that are made up as for the proof.

    Args:
        program: what is resident.
        placed: a resident of it.
        memory: of the device.
        take: executes the resident once and gives its times.
        n_rounds: how often; each begins with the same content.

    Returns:
        By round what `take` gave.

    Raises:
        OutOfMemory: the device has no memory for it.
        ExecutionError: the device failed.
    """
    inputs = made_up_inputs(program, 0)
    fixed = FixedWeights(program, memory, (), _NONE_STREAMED)
    stand_ins = WeightStandIns(program, memory, _NONE_STREAMED)
    weights = _Weights(fixed, stand_ins, frozenset())
    bases = _Bases(program, placed, memory, inputs, weights)
    rounds = []
    for _ in range(n_rounds):
        bases.clear()
        bases.begin(inputs)
        bases.patch(placed)
        with weights.fixed.restored():
            rounds.append(take())
    bases.free()
    weights.fixed.free()
    weights.stand_ins.free()
    return rounds


def _compare(expected: dict[str, bytes], found: dict[str, bytes], message: str) -> None:
    for name, content in expected.items():
        if content != found[name]:
            pairs = zip(content, found[name], strict=True)
            place = next(place for place, (one, other) in enumerate(pairs) if one != other)
            raise CaptureError(
                f"the captured graph {message.format(name)} from byte {place} on; it cannot be "
                "relocated safely"
            )


def _set_noise(
    placed: Placed[ProvableResident], noise: Sequence[Noise], changed: Sequence[Noise]
) -> None:
    """Give some of the noise the values of the other capture, and the rest its own."""
    contents = {(one.node, one.part, one.offset_bytes): one.first for one in noise}
    contents |= {(one.node, one.part, one.offset_bytes): one.again for one in changed}
    for place, content in contents.items():
        placed.resident.overwrite(place, content)


def _refuse_noise(
    noise: Sequence[Noise],
    describe: Callable[[Noise], str],
    is_read: Callable[[Sequence[Noise]], bool],
) -> NoReturn:
    """Refuse noise that results depend on, by the fewest words that halving finds."""
    while len(noise) > 1:
        middle = len(noise) // 2
        halves = (noise[:middle], noise[middle:])
        found = next((half for half in halves if is_read(half)), None)
        if found is None:
            break  # they matter together
        noise = found
    more = f" (or one of {len(noise) - 1} other words)" if len(noise) > 1 else ""
    raise CaptureError(
        f"{describe(noise[0])}{more} differs between two captures in one layout "
        f"(0x{noise[0].first[::-1].hex()}, 0x{noise[0].again[::-1].hex()}), so it was taken for "
        "padding, and the results depend on it: what the kernel would be given is not known"
    )


def _check_steady(found: dict[str, bytes], again: dict[str, bytes]) -> None:
    """Tell a graph that never computes the same bits from one that cannot be moved."""
    if found != again:
        (name, *_) = (name for name, content in found.items() if content != again[name])
        raise CaptureError(
            f"the captured graph computes other bits each time that it is executed, in {name}: an "
            "operator adds in any order, for example. Whether it can be relocated cannot be "
            "proved; load(verify=False) leaves the proof out"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Weights:
    """Where weights are read, and what puts back those that cannot be moved."""

    fixed: FixedWeights
    stand_ins: WeightStandIns
    stay: Set[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Memory of a placement; `lent`: not the proof's own; `shared`: written by every execution."""

    address: int
    size_bytes: int
    name: str
    is_feature_map: bool = False
    is_lent: bool = False
    is_shared: bool = False


class _Bases:
    """Memory for one placement: what each slot's base is."""

    def __init__(
        self,
        program: Program,
        placed: Placed[Any],
        memory: Memory,
        inputs: Sequence[bytes],
        weights: _Weights,
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
                self._bases[place.slot] = self._take(place.slot, value.size_bytes, value.name)
            elif value.role is Role.WEIGHT:
                address = weights.stand_ins.addresses[value.index]
                if value.index in written - weights.stay:
                    original, address = address, self._allocate(value.size_bytes, value.name)
                    self._copies.append((address, original, value.size_bytes))
                self._bases[place.slot] = address
        feature_map = plan.feature_map
        self._bases[feature_map.index] = self._take(
            feature_map.index, feature_map.size_bytes, feature_map.name
        )
        self._place_inputs(inputs)
        self._copy_weights()

    def _copy_weights(self) -> None:
        for address, original, size_bytes in self._copies:
            self._memory.copy(address, original, size_bytes)

    def _take(self, slot: int, size_bytes: int, name: str) -> int:
        """The memory in which a slot was captured where that is there, else memory of its own."""
        home = self._placed.home.get(slot)
        block = _Block(
            self._memory.allocate(size_bytes) if home is None else home,
            size_bytes,
            name,
            is_feature_map=slot == self._plan.feature_map.index,
            is_lent=home is not None,
            is_shared=home is not None and slot in self._placed.shared,
        )
        self._blocks.append(block)
        return block.address

    def _allocate(self, size_bytes: int, name: str) -> int:
        block = _Block(self._memory.allocate(size_bytes), size_bytes, name)
        self._blocks.append(block)
        return block.address

    def _place_inputs(self, inputs: Sequence[bytes]) -> None:
        """Each input in a block of its own, but those that must overlap as they were recorded.

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
                block = self._take(place.slot, max(ends), names)
            else:
                block = self._allocate(max(ends), names)
            for leaf, offset in leaves:
                place = self._plan.places[self._value(leaf)]
                assert place is not None  # check_plan has seen to it
                self._bases[place.slot] = block + offset - lowest
        self.write_inputs(inputs)

    def write_inputs(self, inputs: Sequence[bytes]) -> None:
        for view, content in zip(self._program.inputs, inputs, strict=True):
            if self._program.values[view.value].on_host:
                continue
            place = self._plan.places[view.value]
            assert place is not None  # check_plan has seen to it
            self._memory.write(self._bases[place.slot], content)

    def _value(self, leaf: int) -> int:
        return self._program.inputs[leaf].value

    def patch(self, placed: Placed[PatchedResident]) -> None:
        placed.resident.patch(
            [(word, self._bases[slot] + offset) for word, slot, offset in placed.relocations]
        )

    def execute(self, placed: Placed[ProvableResident]) -> None:
        self.patch(placed)
        placed.draw(self._state)
        with self._weights.restored():
            placed.resident.execute()
            placed.resident.finish()

    def take_feature_map(self, other: _Bases) -> None:
        """Begin with what another execution has left, which is valid to read by mistake."""
        slot = self._plan.feature_map
        self._memory.copy(self._bases[slot.index], other._bases[slot.index], slot.size_bytes)

    def begin_again(self, other: _Bases, inputs: Sequence[bytes]) -> None:
        """Be what it was before it executed, at the same addresses."""
        self.clear()
        self.begin(inputs)
        self.take_feature_map(other)

    def begin(self, inputs: Sequence[bytes]) -> None:
        """Write what an execution begins with."""
        self._copy_weights()
        self.write_inputs(inputs)

    def clear(self) -> None:
        for block in self._blocks:
            self._memory.fill(block.address, block.size_bytes)

    def outcome(self) -> dict[str, bytes]:
        """All that a caller can see: outputs, and inputs and weights as they are afterwards."""
        blocks = [block for block in self._blocks if not block.is_feature_map]
        return self._read(blocks) | self._weights.content

    def content(self) -> dict[str, bytes]:
        """What stays as it is while another placement executes, unless a word was missed."""
        return self._read([block for block in self._blocks if not block.is_shared])

    def _read(self, blocks: Sequence[_Block]) -> dict[str, bytes]:
        return {
            f"{block.name} (block {index})": self._memory.read(block.address, block.size_bytes)
            for index, block in enumerate(blocks)
        }

    def free(self) -> None:
        for block in self._blocks:
            if not block.is_lent:
                self._memory.free(block.address)
        self._blocks.clear()
