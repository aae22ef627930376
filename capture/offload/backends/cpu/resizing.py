"""Programs whose sizes vary on the CPU: one resident, resized in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import torch

from offload.backends.cpu.builder import Builder, plan_apart
from offload.backends.loaded import Loaded, Prepared
from offload.interpreter.settled_family import SettledFamily, SizeConstants
from offload.native import _native
from offload.plan import Plan, Slot, SlotKind, check_plan
from offload.program import Bindings, BoundProgram, Role, TensorView
from offload.program.varying_numbers import (
    Varying,
    expression_of,
    scalars,
    values_bytes,
    varying_of,
)


class CpuSizes:
    """Loads Programs whose sizes vary; see `SizeChanger`."""

    one_host_core = (
        "on the CPU operators infer shapes and tile inside the launch, which computes on the "
        "cores that stages would use"
    )

    def on_host_cores(self, n_cores: int) -> CpuSizes:
        """Return itself: sizes change on the calling thread."""
        return self

    def instantiate(self, settled: SettledFamily, prepared: Prepared, plan: Plan) -> Loaded:
        """As `Backend.instantiate`, for a Family at the recorded sizes."""
        check_plan(prepared.program, plan)
        builder = SizedBuilder(
            prepared.bound, plan, prepared.operator_allocated, settled.constant_values
        )
        return builder.loaded()

    def constants(self, settled: SettledFamily) -> _native.SizeConstants | None:
        """Return what computes size constants; None without size constants."""
        if settled.constants is None:
            return None
        return host_constants(settled.constants, settled.bound.bindings)


def host_constants(constants: SizeConstants, bindings: Bindings) -> _native.SizeConstants:
    """Return launches on the CPU that compute size constants.

    Raises:
        CaptureError, OutOfMemory: as `Backend.instantiate`.
    """
    program, given = constants.program, constants.weights.keys()
    plan = plan_apart(program, given, {*constants.results})
    made = frozenset(range(len(program.values))) - given
    bound = BoundProgram(program, bindings)
    resident, _, _ = SizedBuilder(bound, plan, made, ()).resident()
    return _native.SizeConstants(
        resident=resident,
        values=values_bytes(program),
        results=[(one, one) for one in constants.results],
        given=sorted(constants.weights.items()),
    )


class SizedBuilder(Builder):
    """Translates a Program with varying numbers, and states which of them vary."""

    def __init__(
        self,
        bound: BoundProgram,
        plan: Plan,
        operator_allocated: Set[int],
        constants: Sequence[int],
    ) -> None:
        """Begin without tensors; `constants` are the Values that depend only on sizes."""
        super().__init__(bound, plan, frozenset(operator_allocated))
        self._constants = [(plan.slot_of(value), value) for value in constants]

    def resident(
        self,
    ) -> tuple[_native.CpuResident, Mapping[int, torch.Tensor], _native.WeightStream | None]:
        """As `Builder.resident`."""
        resident, weights, stream = super().resident()
        _native.set_sizes(resident, **self._varying())
        return resident, weights, stream

    def _varying(self) -> dict[str, Any]:
        """Return the description of varying numbers for the native side."""
        return {
            "views": self._varying_views(),
            "made": self._varying_results(),
            "scalars": self._varying_scalars(),
            "slots": self._varying_slots(),
            "constants": self._constants,
            "feature_map": self._feature_map(),
        }

    def _key(self, view: TensorView) -> Hashable:
        """Separate views that are equal at the recorded sizes: they may differ at other sizes."""
        return view, tuple(varying_of(view))

    def _memory(self, slot: Slot, operator_slots: Set[int]) -> _native.CpuMemory:
        if any(slot.index == index for index, _ in self._constants):
            return _native.CpuMemory.OF_SIZES
        return super()._memory(slot, operator_slots)

    def _feature_map(self) -> int | None:
        kinds = [slot.kind for slot in self._plan.slots]
        return kinds.index(SlotKind.FEATURE_MAP) if SlotKind.FEATURE_MAP in kinds else None

    def _varying_views(self) -> list[tuple[int, int, list[int], Varying]]:
        """Return the views with varying places (in the feature map) or varying numbers."""
        feature_map = self._feature_map()
        return [
            (tensor, view.value, [*view.shape, *view.strides, view.offset_bytes], varying)
            for tensor, view in enumerate(self._views)
            if (varying := varying_of(view)) or _slot_of(self._plan, view.value) == feature_map
        ]

    def _varying_results(self) -> list[tuple[int, int, Varying]]:
        found = []
        for launch in self._program.launches:
            if any(view.value in self._operator_allocated for view in launch.made()):
                made = [view for view in launch.made() if self._plan.places[view.value]]
                found += [(launch.index, at, varying_of(view)) for at, view in enumerate(made)]
        return [one for one in found if one[2]]

    def _varying_scalars(self) -> list[tuple[int, int, int | None, int]]:
        return [
            (launch.index, path[0], path[1] if len(path) > 1 else None, expression)
            for launch in self._program.launches
            for path, number in scalars(launch.arguments)
            if (expression := expression_of(number)) is not None
        ]

    def _varying_slots(self) -> list[tuple[int, int]]:
        values = self._program.values
        feature_map = self._feature_map()
        slots = [(place.slot if place else None, at) for at, place in enumerate(self._plan.places)]
        return [
            (slot, value)
            for slot, value in slots
            if slot is not None
            and slot != feature_map
            and (slot, value) not in self._constants
            and (
                values[value].role is Role.INPUT
                or expression_of(values[value].size_bytes) is not None
            )
        ]


def _slot_of(plan: Plan, value: int) -> int | None:
    place = plan.places[value]
    return None if place is None else place.slot
