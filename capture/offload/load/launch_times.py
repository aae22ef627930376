"""Durations of a Program's launches for planners: stored if all are known, else measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.costs import LaunchCosts
from offload.errors import BindingError
from offload.program import Program


def check_costs(costs: object, *, plans: bool) -> None:
    """Check `load(costs=)`.

    Args:
        costs: the option's value.
        plans: whether the load plans with durations of launches.

    Raises:
        BindingError: it is no LaunchCosts, or the load does not plan with durations.
    """
    if costs is None:
        return
    if not isinstance(costs, LaunchCosts):
        raise BindingError(
            f"costs: expected offload.LaunchCosts(...), got a {type(costs).__qualname__}"
        )
    if not plans:
        raise BindingError(
            "costs= is for loads that plan by durations of launches: give it with lanes=, or with "
            "a list of devices"
        )


def known_or_measured_ns(
    costs: LaunchCosts | None,
    machine: str,
    device: str,
    program: Program,
    measure: Callable[[], Sequence[float]],
) -> tuple[tuple[float, ...], bool]:
    """The duration of each launch in ns, and whether they were stored rather than measured.

    Args:
        costs: stored durations, to which measured ones are added. None: everything is measured.
        machine: the name of the processor.
        device: the device of the launches, with all that their durations depend on.
        program: the Program of the launches.
        measure: measures the launches, in order.

    Raises:
        CostModelError: the costs are of another machine. Errors of `measure` pass through, and
            nothing is added.
    """
    if costs is None:
        return tuple(measure()), False
    known = costs.known_ns(machine, device, program)
    if known is not None:
        return known, True
    measured = tuple(measure())
    costs.take(machine, device, program, measured)
    return measured, False
