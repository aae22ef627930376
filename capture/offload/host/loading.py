"""Loading a Family: as one executable of all sizes, or as one for each choice of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.backends import Backend
from offload.console.progress import Progress, telling
from offload.errors import BindingError
from offload.host.executable_for_each_size import ExecutableForEachSize
from offload.host.padded_executable import PaddedExecutable
from offload.host.sized_executable import SizedExecutable
from offload.host.sizes import Sizes
from offload.interpreter.settled_family import SettledFamily
from offload.interpreter.size_constants import program_at
from offload.load.options import checked, named_backend
from offload.load.switched import switched
from offload.program import BoundProgram
from offload.program.family import BoundFamily
from offload.run import Executable
from offload.timeline import Scheduling

Load = Callable[[BoundProgram], Executable]


def load_family(
    bound: BoundFamily,
    settle: Callable[[], SettledFamily],
    device: str | torch.device | Backend | None,
    sizes: Sizes,
    load: Load,
    *,
    scheduling: str,
    verify: bool,
    progress: Progress,
    name: str,
) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize:
    """Make a Family resident; the arguments are those of `Captured.load`, `name` is for people.

    Args:
        bound: the Family.
        settle: gives it ready to be executed.
        device: as `Captured.load`.
        sizes: how much is kept, and by which buckets.
        load: makes the Program of one choice of sizes resident.
        scheduling: as `Captured.load`, and so are the rest.
        verify: likewise.
        progress: likewise.
        name: for people.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, ExecutionError: as
            `Captured.load`.
    """
    recorded = BoundProgram(bound.family.program, bound.bindings)
    backend, _ = named_backend(recorded.program.device if device is None else device)

    def load_at(chosen: Mapping[str, int]) -> Executable:
        return load(program_at(bound, bound.family.checked(chosen)))

    if sizes.pad:
        return PaddedExecutable(bound, sizes, load_at)
    if backend.sizes is None:
        if scheduling == Scheduling.OFFLOAD or backend.dispatch is None:
            return ExecutableForEachSize(bound, sizes, load)
        backend = backend.dispatch

    with telling(progress), switched(name) as asked:
        options = checked(recorded, backend, scheduling, None, fuse=False)
        run = SizedExecutable(settle(), sizes, backend, load_at, options.scheduling, verify=verify)
        asked.done(recorded, run, verify=verify)
        return run


def refuse_for_families(**options: object) -> None:
    """Refuse options of a load that are for one choice of sizes.

    Raises:
        BindingError: one is given.
    """
    for name, given in options.items():
        if given:
            raise BindingError(
                f"{name}={given!r} is for a program of one size, and sizes may vary here: capture "
                "without dynamic_shapes, or leave it out"
            )
