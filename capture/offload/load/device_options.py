"""Options of a load on several devices, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

from offload.costs import LaunchCosts
from offload.errors import BindingError
from offload.load.placed_devices import Device
from offload.plan.task_placement import Objective
from offload.run.device_choice import Placement

# Energies of executions stay finite, and so differ.
_MOST_WATTS = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Watts:
    """The power of a device, in watts.

    Attributes:
        idle: while it executes nothing.
        busy: while it executes; at least `idle`.
    """

    idle: float
    busy: float

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            BindingError: one is negative, not a number or above 1e9, or `idle` exceeds `busy`.
        """
        is_right = _is_finite(self.idle) and _is_finite(self.busy)
        if not (is_right and 0 <= self.idle <= self.busy <= _MOST_WATTS):
            raise BindingError(
                f"Watts: expected numbers with 0 <= idle <= busy <= {_MOST_WATTS:.0e}, got "
                f"idle={self.idle!r}, busy={self.busy!r}"
            )


def _is_finite(given: object) -> bool:
    """Whether something is a number that a float can hold; a boolean does not count."""
    if not isinstance(given, numbers.Real) or isinstance(given, bool):
        return False
    try:
        return math.isfinite(given)
    except OverflowError:
        return False


def one_device(device: Device | list[Device] | None) -> Device | None:
    """The named device; None: no device is named, or several are."""
    return None if isinstance(device, list) else device


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of a load on several devices.

    Attributes:
        devices: the first has the caller's memory.
        objective: the quantity to minimise.
        placement: when devices are chosen.
        watts: of each device, for the least energy; None: they are measured.
        max_slowdown: for energy, the allowed multiple of the least latency of a call.
        costs: kept durations of launches; None: they are measured.
    """

    devices: tuple[Device, ...]
    objective: Objective
    placement: Placement
    watts: tuple[Watts, ...] | None = None
    max_slowdown: float | None = None
    costs: LaunchCosts | None = None


_MAX_SLOWDOWN = 1.1


def several_devices(
    device: Device | list[Device] | None,
    objective: str | None,
    placement: str | None,
    watts: Sequence[Watts] | None,
    max_slowdown: float | None,
    *,
    costs: LaunchCosts | None = None,
    **options: object,
) -> DeviceOptions:
    """Return the options of a load on several devices, which excludes the other options.

    Raises:
        BindingError: another option is given, there is no list of devices, or the objective or
            placement is unknown; or watts do not fit the devices or the objective.
    """
    if not isinstance(device, list) or not device:
        raise BindingError(
            "objective=, placement=, watts= and max_slowdown= are for several devices: expected a "
            f"list of at least one, as device=['cpu', CpuBackend(threads=1)], got {device!r}"
        )
    for name, option in options.items():
        if option is not None:
            raise BindingError(f"{name}={option!r}: leave it out of a load on several devices")
    wanted = _checked_objective(objective or Objective.LATENCY)
    is_energy = wanted is Objective.ENERGY
    if not is_energy and (watts is not None or max_slowdown is not None):
        raise BindingError(f"watts= and max_slowdown= are for objective='energy', got {wanted}")
    kind = _checked_placement(placement or Placement.STATIC)
    if is_energy and kind is not Placement.STATIC:
        raise BindingError(
            f"placement={kind!s}: segments are moved to where they end first, not to where they "
            "take the least energy: expected placement='static' with objective='energy'"
        )
    slowdown = _checked_slowdown(_MAX_SLOWDOWN if max_slowdown is None else max_slowdown)
    return DeviceOptions(
        tuple(device),
        wanted,
        kind,
        None if watts is None else _checked_watts(watts, len(device)),
        slowdown if is_energy else None,
        costs,
    )


def _checked_watts(watts: Sequence[Watts], n_devices: int) -> tuple[Watts, ...]:
    found = tuple(watts) if isinstance(watts, (list, tuple)) else (watts,)
    if len(found) != n_devices or not all(isinstance(one, Watts) for one in found):
        raise BindingError(
            f"watts: expected offload.Watts(idle=, busy=) for each of {n_devices} devices, got "
            f"{watts!r}"
        )
    return found


def _checked_slowdown(slowdown: float) -> float:
    if not (_is_finite(slowdown) and slowdown >= 1):
        raise BindingError(f"max_slowdown: expected a number of 1 or more, got {slowdown!r}")
    return float(slowdown)


def _checked_objective(objective: str) -> Objective:
    if objective not in list(Objective):
        raise BindingError(f"objective: expected one of {', '.join(Objective)}, got {objective!r}")
    return Objective(objective)


def _checked_placement(placement: str) -> Placement:
    if placement not in list(Placement):
        raise BindingError(f"placement: expected one of {', '.join(Placement)}, got {placement!r}")
    return Placement(placement)
