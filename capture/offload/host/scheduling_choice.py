"""`scheduling="auto"` of a Family: one task or launch by launch, by measured executions."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from offload.errors import BindingError, CaptureError, ExecutionError, PlanError
from offload.host.promotion import Choice, Prepared
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


MOST_EXECUTIONS = 100
"""The assumed number of executions of each choice of sizes: it is loaded as one task if that pays
by then. `Sizes(promoted=)` needs no such assumption."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """The measured executions at the recorded sizes.

    Attributes:
        sizes: the recorded ones.
        preparation_ns: the duration of loading them as one task.
        one_task_ns, launches_ns: the median duration of an execution.
    """

    sizes: Choice
    preparation_ns: int
    one_task_ns: float
    launches_ns: float

    def as_prepared(self) -> Prepared:
        """Convert to a measurement of promotions."""
        return Prepared(self.preparation_ns, 1 - self.one_task_ns / self.launches_ns)

    def text(self, family: Family) -> str:
        """Describe it for people."""
        sizes = ", ".join(f"{one.name} = {one.recorded}" for one in family.dims)
        return (
            f"at {sizes} an execution took {self.one_task_ns / 1e3:,.1f} us as one task, and "
            f"{self.launches_ns / 1e3:,.1f} us launch by launch (medians, made-up inputs)"
        )

    def text_with_loading(self, family: Family) -> str:
        """Likewise, with the duration of loading the task."""
        return f"{self.text(family)}; loading the task took {self.preparation_ns / 1e9:.3g} s"


def tried(
    family: Family,
    load_one_task: Callable[[], Executable],
    load_launches: Callable[[], Executable],
) -> Trial | str:
    """Measure executions at the recorded sizes, or say for people why that is unknown.

    Args:
        family: the Family.
        load_one_task: makes an executable that runs as one task.
        load_launches: makes an executable whose launches the host delivers.
    """
    if family.program.leaves_something:
        return (
            "the program writes inputs or weights, draws random numbers, or calls an operator "
            "whose other effects are not known; so would a trial"
        )
    begin_ns = time.perf_counter_ns()
    try:
        with load_one_task() as one_task:
            preparation_ns = time.perf_counter_ns() - begin_ns
            with load_launches() as launches:
                found = taken_in_turns_ns("timing schedulings", one_task, launches)
    except (BindingError, CaptureError, PlanError, ExecutionError) as error:
        return f"a trial failed: {error}"
    one_task_ns, launches_ns = (statistics.median(times) for times in found)
    recorded = tuple(one.recorded for one in family.dims)
    return Trial(recorded, preparation_ns, one_task_ns, launches_ns)


def chosen_on_device(family: Family, found: Trial | str) -> tuple[Scheduling, str]:
    """Choose the scheduling on a device that loads each choice of sizes as one task; say why."""
    if isinstance(found, str):
        return Scheduling.HOST, f"scheduled launch by launch, untried: {found}"
    saved_ns = found.launches_ns - found.one_task_ns
    if saved_ns <= 0:
        return Scheduling.HOST, f"scheduled launch by launch: {found.text(family)}"
    n_executions = found.preparation_ns / saved_ns
    why = (
        f"{found.text_with_loading(family)}, so that it pays after {n_executions:,.0f} executions "
        "of its sizes"
    )
    if n_executions <= MOST_EXECUTIONS:
        return Scheduling.OFFLOAD, f"scheduled as one task for each choice of sizes: {why}"
    return Scheduling.HOST, (
        f"scheduled launch by launch: {why}, and not within {MOST_EXECUTIONS}; with "
        "sizes=Sizes(promoted='1GiB') sizes that repeat so often get one"
    )


def promoted_note(family: Family, found: Trial | str) -> str:
    """Say why repeated sizes are promoted on a device, and what is known of the gain."""
    how = "scheduled launch by launch, and sizes that repeat as tasks"
    if isinstance(found, str):
        return f"{how}, untried: {found}"
    return f"{how}: {found.text_with_loading(family)}"


def chosen_scheduling(
    family: Family, load: Callable[[Scheduling], Executable]
) -> tuple[Scheduling, str]:
    """Choose the faster scheduling of a Family, and say why; tried executables are closed.

    Args:
        family: both are tried at its recorded sizes, in turns, on made-up inputs.
        load: makes an executable of all sizes with this scheduling.
    """
    found = tried(family, lambda: load(Scheduling.OFFLOAD), lambda: load(Scheduling.HOST))
    if isinstance(found, str):
        return Scheduling.OFFLOAD, f"scheduled as one task, untried: {found}"
    if found.launches_ns < found.one_task_ns:
        return Scheduling.HOST, f"scheduled launch by launch: {found.text(family)}"
    return Scheduling.OFFLOAD, f"scheduled as one task: {found.text(family)}"
