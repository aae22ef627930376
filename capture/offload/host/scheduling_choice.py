"""`scheduling="auto"` of a Family: as one task or launch by launch, by what executions take."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from offload.errors import BindingError, CaptureError, ExecutionError
from offload.load.trial import taken_in_turns_ns
from offload.program.family import Family
from offload.run import Executable
from offload.timeline import Scheduling

LOADED_EACH = (
    "scheduled as one task: each choice of sizes is loaded by itself, which would take as long for "
    "launches from the host"
)

DELIVERED_BY_HOST = (
    "scheduled launch by launch: as one task each choice of sizes would be loaded by itself"
)


def chosen_scheduling(
    family: Family, load: Callable[[Scheduling], Executable]
) -> tuple[Scheduling, str]:
    """How executions of a Family are quicker, and for people why; one that is tried is closed.

    Args:
        family: at whose recorded sizes both are tried, in turns, on made-up inputs.
        load: makes an executable that is scheduled so.
    """
    if family.program.leaves_something:
        return Scheduling.OFFLOAD, (
            "scheduled as one task, untried: the program writes inputs or weights, draws random "
            "numbers, or calls an operator of which it is not known what else it does; so would a "
            "trial"
        )
    try:
        with load(Scheduling.OFFLOAD) as one_task, load(Scheduling.HOST) as launches:
            found = taken_in_turns_ns("timing schedulings", one_task, launches)
    except (BindingError, CaptureError, ExecutionError) as error:
        return Scheduling.OFFLOAD, f"scheduled as one task, untried: a trial failed: {error}"
    one_task_ns, launches_ns = (statistics.median(times) for times in found)
    is_host = launches_ns < one_task_ns
    sizes = ", ".join(f"{one.name} = {one.recorded}" for one in family.dims)
    return Scheduling.HOST if is_host else Scheduling.OFFLOAD, (
        f"scheduled {'launch by launch' if is_host else 'as one task'}: at {sizes} an execution "
        f"took {one_task_ns / 1e3:,.1f} us as one task, and {launches_ns / 1e3:,.1f} us launch by "
        "launch (medians, made-up inputs)"
    )
