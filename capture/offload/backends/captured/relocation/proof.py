"""The proof at load: a resident graph computes the same bits at any addresses of its slots.

1. A resident of the graph in which no two Values share memory executes an input: this gives the
   expected result. Every activation has another address than in the loaded one, so a wrong
   placement or live range shows. It executes the same again: if the bits differ, kernels are not
   deterministic, and the distance between results is measured (see `steadiness`).
2. A resident placed like the loaded one executes another input, if another valid one is known, and
   draws other random numbers. Its memory, which is kept, then holds another execution's data
   everywhere. If the memory of the capture still exists, both steps use it.
3. Every slot moves, noise is set to other values, and the second resident executes the first input.
   The results must be equal bit for bit, except those that were not in step 1, which must be as
   near as was measured; and the memory of step 2 must be unchanged: a missed word would have read
   or written it there. If results differ it executes again at the same addresses, to distinguish a
   graph that does not always compute the same bits, for which everything is repeated with more
   executions in step 1, from one that reads its noise: the noise is then bisected to find the bytes
   that matter.

Everything is compared on the device (see `contents`): results with copies there, and the memory of
step 2 by sums of its former content, so that nothing grows on the host.

Noise gets the values of the other capture in the same layout. Every byte of it changes, by its
definition; and what is read by mistake is as valid as before. A made-up value could be a size, an
index, an address or a counter that another kernel waits for, and the device would fault or never
finish. Only the values of that capture are safe in this way: an address in another layout is no
longer mapped. Noise that is recognised otherwise is set to the address of a decoy: device memory
that holds the same small number everywhere. A kernel that reads it, or through it, finds other
content, and causes no fault.

A kernel may find an address elsewhere than in words: in a texture, or a variable of its module. If
no step uses the memory of the capture, all three would find the same there. So it is filled with
zeros for the first two and with the decoy's number for the third, and must hold that afterwards.

The proof does not show that the graph computes what the model does (tests of models compare results
with eager). It does not move weights that no launch writes: they stay in place in all three steps,
since copies could take as much memory as the model. They have already been moved once, from their
addresses in the capture, which the third step gives other content. Weights in files are read if the
resident itself streams them, as a model of torch_npu does. Otherwise some share a block of made-up
content in all three steps (`WeightStandIns`), since a model may be larger than the device, and the
copies of streamed weights do not execute here; `streamed_copies.check_copies` proves their
order by the graph's edges. A word of an input or an activation stays undetected if its target holds
the same bits in every execution, as when a threshold, rounding or a cast to integers turns all
made-up numbers into zeros.

Inputs are those of the recorded call, as far as it left a sample; others are made up: see
`made_up_inputs`. An operator that fails on the device because of its values would disable the
device for the whole process. If some input is then the same in both executions, results that depend
on it alone would already be there: the memory of step 2 is filled with zeros. Outputs begin with
numbers that are not results, since results may be zeros too. Inputs at old addresses then get other
content, which is only read if the proof fails. Launches write copies, so no state changes. Only
weights whose addresses are constants, as those of an opaque Program, are written in place: they are
restored after each execution, and their new state is compared as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, TypeVar

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.contents import (
    Difference,
    Kept,
    Stretch,
    Summed,
)
from offload.backends.captured.relocation.fixed_weights import FixedWeights
from offload.backends.captured.relocation.proof_bases import (
    BoundWeights,
    Memory,
    PatchedResident,
    Placed,
    ProofBases,
    ProvableResident,
)
from offload.backends.captured.relocation.steadiness import (
    N_PLAIN,
    N_UNSTEADY,
    Steadiness,
    measure,
)
from offload.backends.captured.relocation.weight_stand_ins import WeightStandIns
from offload.backends.captured.relocation.words import Noise
from offload.errors import CaptureError
from offload.interpreter.made_up_inputs import made_up_inputs
from offload.plan import Place, Plan
from offload.program import BoundProgram, Program, Value

T = TypeVar("T")

_NONE_STREAMED: Mapping[int, int] = MappingProxyType({})


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
    bound: BoundProgram,
    loaded: Placed[ProvableResident],
    unshared: Placed[ProvableResident],
    memory: Memory,
    *,
    noise: Sequence[Noise] = (),
    describe: Callable[[Noise], str] = repr,
    fixed: Sequence[Value] = (),
    streamed: Mapping[int, int] = _NONE_STREAMED,
    before_moved: Callable[[], None] = lambda: None,
    before_plain: Callable[[], None] = lambda: None,
) -> Steadiness:
    """Execute the three steps of the module's description.

    Args:
        bound: the resident Program.
        loaded: a resident by the Plan that is loaded.
        unshared: the same graph by the Plan from `apart`.
        memory: of the device.
        noise: of the graph.
        describe: the kernel and parameter of noise, for messages.
        fixed: weights that executions may write in place.
        streamed: by Value, the address of weights that the resident itself streams.
        before_moved: called before every slot moves, to change the memory of the capture, if it
            still exists and no execution should read it.
        before_plain: called before the first execution, to undo that.

    Returns:
        What had the same bits in plain executions, and the distances of the rest.

    Raises:
        CaptureError: results or written state differ, or old memory was written; noise that is read
            is named by kernel and parameter.
        ExecutionError: the device failed, or has no memory for the proof.
    """
    proof = _Proof(bound, loaded, unshared, memory, noise, describe, before_moved)
    weights = BoundWeights(
        FixedWeights(bound, memory, fixed, streamed),
        WeightStandIns(bound, memory, streamed),
        frozenset(value.index for value in fixed),
    )
    for n_plain in (N_PLAIN, N_UNSTEADY):
        before_plain()
        found, differs = proof.attempt(weights, n_plain)
        if not differs:
            break
    else:
        raise CaptureError(
            f"the captured graph computes different bits of {differs} at each execution, but did "
            f"not in {N_UNSTEADY} executions at the captured addresses: an operator adds in no "
            "fixed order, for example. Whether it can be relocated cannot be proved; "
            f"{advice.NOT_PROVED}"
        )
    weights.fixed.free()
    weights.stand_ins.free()
    return found


@dataclasses.dataclass(frozen=True)
class _Proof:
    """The compared executions; attributes as the arguments of `prove`."""

    bound: BoundProgram
    loaded: Placed[ProvableResident]
    unshared: Placed[ProvableResident]
    memory: Memory
    noise: Sequence[Noise]
    describe: Callable[[Noise], str]
    before_moved: Callable[[], None]

    def attempt(self, weights: BoundWeights, n_plain: int) -> tuple[Steadiness, str]:
        """All three steps, with at least `n_plain` executions in the first.

        Returns:
            The steadiness of results; and the name of a result whose bits differed in the last step
            only, in both executions of it. Then nothing is proved.
        """
        first, second = (made_up_inputs(self.bound, variant) for variant in range(2))
        _set_noise(self.loaded, self.noise, changed=())
        expected, steadiness = self._expected(weights, first, n_plain)
        program = self.bound.program
        old = ProofBases(program, self.loaded, self.memory, second, weights, state=1)
        old.execute(self.loaded)
        if not first or any(one == other for one, other in zip(first, second, strict=True)):
            old.clear()
        old.write_inputs(made_up_inputs(self.bound, 2))
        before = Summed(self.memory, old.content())
        moved = dataclasses.replace(self.loaded, home={})
        new = ProofBases(program, moved, self.memory, first, weights)
        new.take_feature_map(old)
        _set_noise(self.loaded, self.noise, changed=self.noise)
        self.before_moved()
        new.execute(self.loaded)
        differs = expected.difference(new.outcome(), steadiness.allowed)
        change = before.change()
        unsteady = ""
        if differs is not None and change is None:
            unsteady = self._explained(old, new, first, expected, steadiness)
        if not unsteady:
            _refuse(differs, "gives a different result at other addresses: {} differs")
            _refuse(change, "was moved and still writes to its old addresses, in {}")
        old.free()
        new.free()
        expected.free()
        return steadiness, unsteady

    def _expected(
        self, weights: BoundWeights, inputs: Sequence[bytes], n_plain: int
    ) -> tuple[Kept, Steadiness]:
        """The result of plain executions, and their distances."""
        bases = ProofBases(self.bound.program, self.unshared, self.memory, inputs, weights)

        def execute_again() -> Sequence[Stretch]:
            bases.clear()
            bases.begin(inputs)
            bases.execute(self.unshared)
            return bases.outcome()

        if self.unshared.home:  # remains of the capture exist
            execute_again()
        else:
            bases.execute(self.unshared)
        expected = Kept(self.memory, bases.outcome())
        steadiness = measure(self.memory, expected, execute_again, n_plain)
        bases.free()
        return expected, steadiness

    def _explained(
        self,
        old: ProofBases,
        new: ProofBases,
        inputs: Sequence[bytes],
        expected: Kept,
        steadiness: Steadiness,
    ) -> str:
        """Why results differ although old memory is unchanged; "" if no reason is found.

        Returns:
            The result whose bits differ each time, although it was steady in plain executions.

        Raises:
            CaptureError: noise is read.
        """
        found = Kept(self.memory, new.outcome())

        def outcome_with(changed: Sequence[Noise]) -> Sequence[Stretch]:
            new.begin_again(old, inputs)
            _set_noise(self.loaded, self.noise, changed)
            new.execute(self.loaded)
            return new.outcome()

        def differs_with(changed: Sequence[Noise]) -> bool:
            return expected.difference(outcome_with(changed), steadiness.allowed) is not None

        again = found.difference(outcome_with(self.noise), steadiness.allowed)
        if again is None and self.noise and not differs_with(()):
            _refuse_noise(self.noise, self.describe, differs_with)
        found.free()
        return "" if again is None else again.name


def timed_rounds(
    bound: BoundProgram,
    placed: Placed[PatchedResident],
    memory: Memory,
    take: Callable[[], T],
    n_rounds: int,
) -> list[T]:
    """The durations of executions, on made-up inputs and weights as in the proof.

    Args:
        bound: the resident Program.
        placed: a resident of it.
        memory: of the device.
        take: executes the resident once and returns its times.
        n_rounds: the number of executions; each begins with the same content.

    Returns:
        The result of `take` in each round.

    Raises:
        OutOfMemory: the device has no memory for it.
        ExecutionError: the device failed.
    """
    inputs = made_up_inputs(bound, 0)
    fixed = FixedWeights(bound, memory, (), _NONE_STREAMED)
    stand_ins = WeightStandIns(bound, memory, _NONE_STREAMED)
    weights = BoundWeights(fixed, stand_ins, frozenset())
    bases = ProofBases(bound.program, placed, memory, inputs, weights)
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


def _refuse(difference: Difference | None, message: str) -> None:
    if difference is None:
        return
    apart = difference.spread
    expected = (
        "the same bits"
        if apart is None
        else (
            f"a difference below {apart.largest:.3g}, since executions of the same input at "
            "the captured addresses differ less"
        )
    )
    raise CaptureError(
        f"the captured graph {message.format(difference.name)} from byte {difference.offset_bytes} "
        f"on: expected {expected}, so it cannot be relocated safely; {advice.FIND_THE_LAUNCH}"
    )


def _set_noise(
    placed: Placed[ProvableResident], noise: Sequence[Noise], changed: Sequence[Noise]
) -> None:
    """Set some of the noise to the values of the other capture, and the rest to its own."""
    contents = {(one.node, one.part, one.offset_bytes): one.first for one in noise}
    contents |= {(one.node, one.part, one.offset_bytes): one.again for one in changed}
    for place, content in contents.items():
        placed.resident.overwrite(place, content)


def _refuse_noise(
    noise: Sequence[Noise],
    describe: Callable[[Noise], str],
    is_read: Callable[[Sequence[Noise]], bool],
) -> NoReturn:
    """Refuse noise that results depend on, naming the fewest words that bisection finds."""
    while len(noise) > 1:
        middle = len(noise) // 2
        halves = (noise[:middle], noise[middle:])
        found = next((half for half in halves if is_read(half)), None)
        if found is None:
            break  # they matter only together
        noise = found
    more = f" (or one of {len(noise) - 1} other words)" if len(noise) > 1 else ""
    raise CaptureError(
        f"{describe(noise[0])}{more} {noise[0].kind} (0x{noise[0].first[::-1].hex()}, "
        f"0x{noise[0].again[::-1].hex()}), so it was treated as padding, but the results depend "
        f"on it: which value the kernel needs is not known; {advice.INITIALISE}"
    )
