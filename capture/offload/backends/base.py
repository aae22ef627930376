"""The seam: what a backend is to the rest of offload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from offload import _native
from offload.machine import Machine
from offload.plan import Plan
from offload.program import Program, TensorView
from offload.torch_names import find_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do; the conformance suite reads it.

    Attributes:
        computes: results are computed (the null backend computes none).
        moves_feature_map: the feature map's address may be new at every execution.
    """

    computes: bool = True
    moves_feature_map: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchReport:
    """How a launch is carried out.

    Attributes:
        mode: `thunk` or `out` (it writes where the Plan says), `call` (as recorded: in place, or
            into memory of its own), `copied` (as recorded, then copied: its out-variant failed its
            proof), `unproved` (not executed yet), `none` (nothing is computed).
        outside_bytes: bytes that it allocates outside the arena, counted at the first execution.
    """

    mode: str
    outside_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A Program on a device.

    Attributes:
        resident: the native object that replay drives.
        operator_allocated: the Values that operators allocate themselves.
        launch_reports: asks the resident how each launch is carried out, in program order.
    """

    resident: _native.Resident
    operator_allocated: frozenset[int]
    launch_reports: Callable[[], tuple[LaunchReport, ...]]


def native_layout(view: TensorView) -> _native.TensorLayout:
    """A view's shape, strides and dtype for the native side."""
    return _native.TensorLayout(
        view.shape, view.strides, find_dtype(view.dtype), view.conjugate, view.negative
    )


class Backend(Protocol):
    """One kind of device. A backend holds no state of its own."""

    name: str
    capabilities: Capabilities

    def machine(self) -> Machine:
        """Describe the device.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
        """

    def records(self) -> str:
        """The device type on which Programs for it are recorded."""

    def operator_allocated(self, program: Program) -> frozenset[int]:
        """The Values whose operator can only return memory of its own."""

    def instantiate(self, program: Program, plan: Plan) -> Loaded:
        """Make the Program resident, placed as the Plan says. Runs nothing.

        Raises:
            PlanError: the Plan does not fit the Program.
            CaptureError: an operator does not exist on this device.
        """
