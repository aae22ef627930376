"""Build the CPU's residents: storages, tensors on them, and launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import torch

from offload.backends.cpu.lanes import loaded_lanes, set_lanes
from offload.backends.cpu.out_variants import out_variant
from offload.backends.cpu.streaming import gathered_tables, make_stream
from offload.backends.loaded import LaunchReport, Loaded, LoadedWeights
from offload.backends.refusals import refuse_shared
from offload.backends.weight_sources import managed_weights
from offload.errors import CaptureError
from offload.interpreter.native_layouts import native_layout
from offload.interpreter.torch_names import split_operator, symbol_object
from offload.native import _native
from offload.plan import Lifetime, Place, Plan, Slot, SlotKind, value_lifetimes
from offload.program import (
    Argument,
    BoundProgram,
    Kernel,
    KernelFunction,
    Launch,
    Program,
    Symbol,
    TensorView,
)


def _derives_from(launch: Launch, value: int) -> bool:
    """Whether a launch derives values from only this weight, after each write to it."""
    return (
        isinstance(launch.callee, Kernel) and launch.callee.derives and set(launch.reads) == {value}
    )


def _needs_no(launch: Launch, value: int) -> bool:
    """Whether a kernel uses derived values instead of a weight."""
    views = list(launch.views())
    return isinstance(launch.callee, Kernel) and all(
        at in launch.callee.packed for at, view in enumerate(views) if view.value == value
    )


def plan_apart(program: Program, given: Set[int], kept: Set[int]) -> Plan:
    """Return a Plan that gives each Value separate memory.

    Args:
        program: the planned program.
        given: the Values whose memory the caller provides; operators allocate all others.
        kept: the Values that are used after the end.
    """
    last = dict.fromkeys(kept, len(program.launches) + 1)
    for one in program.launches:
        for value in (*one.reads, *one.writes):
            last[value] = max(last.get(value, 0), one.index + 1)
    slots = [
        Slot(
            value.index,
            SlotKind.INPUT if value.index in given else SlotKind.OPERATOR,
            value.size_bytes,
            value.name,
        )
        for value in program.values
    ]
    return Plan(
        tuple(slots),
        tuple(Place(slot.index, 0) for slot in slots),
        tuple(Lifetime(0, last.get(slot.index, 0)) for slot in slots),
        alignment_bytes=1,
        feature_map_bytes=0,
        lower_bound_bytes=0,
        unshared_bytes=0,
        method="each by itself",
        n_launches=len(program.launches),
    )


def _replaced(launch: Launch) -> _native.CpuReplaced:
    """Return the launches that a kernel replaces, as recorded, each result in separate memory."""
    assert isinstance(launch.callee, Kernel)
    program = launch.callee.replaces
    inputs = [view.value for view in program.inputs]
    results = [result.view.value for result in program.results]
    plan = plan_apart(program, {*inputs}, {*results})
    made = frozenset(range(len(program.values))) - {*inputs}
    resident, _, _ = Builder(BoundProgram(program), plan, made).resident()
    first_result = len(list(launch.views()))
    words = range(first_result, first_result + len(results))
    return _native.CpuReplaced(resident, inputs, list(zip(words, results, strict=True)))


def add_described(add: Callable[..., None], launch: Launch, description: dict[str, Any]) -> None:
    """Add a launch to a resident by its description.

    Raises:
        CaptureError: the operator does not exist in this torch, or takes other arguments.
    """
    try:
        add(**description)
    except (TypeError, ValueError) as error:
        raise CaptureError(f"{launch.source}: {error}") from error


class Builder:
    """Translates one Program and Plan into a CpuResident."""

    def __init__(self, bound: BoundProgram, plan: Plan, operator_allocated: frozenset[int]) -> None:
        self._program = bound.program
        self._bound = bound
        self._plan = plan
        self._operator_allocated = operator_allocated
        self._index: dict[Hashable, int] = {}
        self._views: list[TensorView] = []  # of the tensors
        self._tensors: list[_native.CpuTensor] = []
        self._under_way: dict[int, _native.Collective] = {}  # by the Value that is awaited
        self._numbers: Mapping[int, int] = {}  # in the stream, by Value
        self._tables = gathered_tables(bound, plan.streaming) if plan.streaming is not None else {}

    def loaded(self) -> Loaded:
        """Return the launches on their storages, and the handling of weights."""
        resident, weights, stream = self.resident()
        packed = self._program.packed_weights
        return Loaded(
            resident,
            self._operator_allocated,
            lambda: tuple(LaunchReport(mode, size) for mode, size in resident.launch_modes),
            weights=LoadedWeights(
                check=functools.partial(refuse_shared, self._bound, packed),
                tensors=weights,
                stream=stream,
                derive_again=resident.derive_again if packed else None,
            ),
            lanes=loaded_lanes(resident, self._plan),
        )

    def resident(
        self,
    ) -> tuple[_native.CpuResident, Mapping[int, torch.Tensor], _native.WeightStream | None]:
        """Return the launches on their storages, the streamed weights, and their stream."""
        launches = [self._described(launch) for launch in self._program.launches]
        slots = self._slots()
        stream: _native.WeightStream | None = None
        weights: Mapping[int, torch.Tensor] = {}
        if self._plan.streaming is not None:
            stream, weights = make_stream(self._bound, self._plan.streaming)
            self._numbers = {value: at for at, value in enumerate(managed_weights(self._bound))}
        resident = _native.CpuResident(slots, self._tensors, stream)
        for launch, description in zip(self._program.launches, launches, strict=True):
            if description is None:
                self._add_kernel(resident, launch)
                continue
            if launch.is_collective:
                self._add_collective(resident, launch, description)
                continue
            add_described(resident.add, launch, description)
        self._require_gradients(resident)
        if stream is not None:
            resident.set_packed_weights(self._packed_weights())
        set_lanes(resident, self._program, self._plan, self._operator_allocated)
        return resident, weights, stream

    def _slots(self) -> list[_native.CpuSlot]:
        operator_slots = {
            place.slot
            for index in self._operator_allocated
            if (place := self._plan.places[index]) is not None
        }
        return [
            _native.CpuSlot(slot.size_bytes, self._memory(slot, operator_slots))
            for slot in self._plan.slots
        ]

    def _memory(self, slot: Slot, operator_slots: Set[int]) -> _native.CpuMemory:
        if slot.kind is SlotKind.DERIVED:
            return _native.CpuMemory.KEPT
        if slot.index in operator_slots:
            return _native.CpuMemory.OPERATOR
        return _native.CpuMemory.PATCHED

    def _add_kernel(self, resident: _native.CpuResident, launch: Launch) -> None:
        assert isinstance(launch.callee, Kernel)
        function = self._bound.bindings.kernels[launch.callee.index]
        assert isinstance(function, KernelFunction)  # as made for the CPU
        words = []
        for view in (*launch.views(), *launch.made()):
            place = self._plan.places[view.value]
            assert place is not None  # checked by check_plan
            words.append((place.slot, place.offset_bytes))
        resident.add_kernel(
            function=function.address,
            words=words,
            prove=function.prove,
            make_replaced=functools.partial(_replaced, launch),
            name=launch.name,
            source=launch.source,
            releases=self._releases(launch),
            sources=self._sources(launch) if launch.callee.derives else (),
        )

    def _add_collective(
        self, resident: _native.CpuResident, launch: Launch, description: dict[str, Any]
    ) -> None:
        """Add a launch that starts a collective, or one that awaits it."""
        if launch.waits:
            (view,) = launch.views()
            _native.add_wait(resident, collective=self._under_way.pop(view.value), **description)
            return
        try:
            started = _native.add_start(resident, **description)
        except (TypeError, ValueError) as error:
            raise CaptureError(f"{launch.source}: {launch.name}: {error}") from error
        self._under_way |= dict.fromkeys(launch.writes, started)

    def _sources(self, launch: Launch) -> list[tuple[torch.Tensor, ...] | int]:
        holders = self._bound.bindings.weights
        values = [view.value for view in launch.views()]
        return [
            self._numbers[value] if value in self._numbers else tuple(holders[value])
            for value in values
        ]

    def _packed_weights(self) -> list[tuple[int, list[int]]]:
        """Return the streamed weights of which launches need only derived values.

        Returns:
            The weight's number in the stream, and the launches that read it until their proofs end.
        """
        program = self._program
        seen = {result.view.value for result in program.results}
        readers: dict[int, list[Launch]] = {}
        for launch in program.launches:
            for value in {*launch.reads, *launch.writes} & self._numbers.keys():
                readers.setdefault(value, []).append(launch)
        packed = []
        for value, launches in readers.items():
            others = [one for one in launches if not _derives_from(one, value)]
            is_derived = len(others) < len(launches)
            if is_derived and value not in seen and all(_needs_no(one, value) for one in others):
                packed.append((self._numbers[value], [one.index for one in others]))
        return packed

    def _described(self, launch: Launch) -> dict[str, Any] | None:
        """Describe a launch for the resident; None for a kernel, which is described separately."""
        if isinstance(launch.callee, Kernel):
            return None
        if not launch.is_collective:
            return self._describe(launch)
        described: dict[str, Any] = {"releases": self._releases(launch), "source": launch.source}
        if launch.waits:
            return described
        return described | {
            "operator_name": launch.name,
            "arguments": tuple(self._argument(argument) for argument in launch.arguments),
            "outputs": [self._tensor(view) for view in launch.made()],
        }

    def _describe(self, launch: Launch) -> dict[str, Any]:
        name, overload = split_operator(launch.name)
        is_allocated = any(view.value in self._operator_allocated for view in launch.made())
        out_overload = None if is_allocated else out_variant(launch)
        outputs = [] if out_overload is None else [self._tensor(view) for view in launch.made()]
        return {
            "operator_name": name,
            "overload": overload,
            "arguments": tuple(self._argument(argument) for argument in launch.arguments),
            "out_overload": out_overload,
            "outputs": outputs,
            "made": self._made(launch) if out_overload is None else [],
            "releases": self._releases(launch),
            "guard": launch.guard,
            "guards_shape": launch.guards_shape,
            "source": launch.source,
            "table": self._tables.get(launch.index),
        }

    def _made(self, launch: Launch) -> list[_native.CpuMade]:
        made = []
        for position, view in enumerate(launch.results):
            place = None if view is None else self._plan.places[view.value]
            if view is not None and place is not None:
                layout = native_layout(view)
                made.append(_native.CpuMade(position, place.slot, view.offset_bytes, layout))
        return made

    def _releases(self, launch: Launch) -> list[int]:
        """Return the slots of operator-allocated activations that no later launch uses."""
        places = [
            self._plan.places[index]
            for index in {*launch.reads, *launch.writes} & self._operator_allocated
            if self._ends[index] == launch.index + 1
        ]
        slots = [self._plan.slots[place.slot] for place in places if place is not None]
        return sorted(slot.index for slot in slots if slot.kind is SlotKind.OPERATOR)

    @functools.cached_property
    def _ends(self) -> Sequence[int]:
        """The end of each Value's live range, as a count of launches in recorded order."""
        if self._plan.launch_lanes is None:
            return [one.last for one in self._plan.lifetimes]
        return [one.last for one in value_lifetimes(self._program)]

    def _tensor(self, view: TensorView) -> int:
        key = self._key(view)
        if key not in self._index:
            place = self._plan.places[view.value]
            assert place is not None  # checked by check_plan
            offset_bytes = place.offset_bytes + view.offset_bytes
            self._index[key] = len(self._tensors)
            self._tensors.append(_native.CpuTensor(place.slot, offset_bytes, native_layout(view)))
            self._views.append(view)
        return self._index[key]

    def _require_gradients(
        self, resident: _native.CpuResident | _native.DispatchedResident
    ) -> None:
        """Let tensors require gradients that required them as arguments of composite operators."""
        tensors = [at for at, view in enumerate(self._views) if view.requires_grad]
        if tensors:
            resident.require_gradients(tensors)

    def _key(self, view: TensorView) -> Hashable:
        """Return the identity of a view; different keys have separate tensors."""
        return view

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, TensorView):
            return _native.TensorIndex(self._tensor(argument))
        if isinstance(argument, tuple):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, Symbol):
            return symbol_object(argument, self._bound.bindings)
        return argument
