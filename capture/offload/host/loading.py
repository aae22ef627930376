"""Loading a Family: as one executable of all sizes, or as one for each choice of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.backends import Backend
from offload.console.progress import Progress, telling
from offload.errors import BindingError
from offload.host.executable_for_each_size import ExecutableForEachSize
from offload.host.host_cores import (
    HostCores,
    asked_host_cores,
    chosen_host_cores,
    refuse_host_cores,
)
from offload.host.padded_executable import PaddedExecutable
from offload.host.promoted_sizes import FusedLoad
from offload.host.scheduling_choice import DELIVERED_BY_HOST, LOADED_EACH, chosen_scheduling
from offload.host.sized_executable import SizedExecutable
from offload.host.sizes import Sizes
from offload.interpreter.settled_family import SettledFamily
from offload.interpreter.size_constants import program_at
from offload.load.options import AUTO, checked, named_backend
from offload.load.switched import switched
from offload.program import BoundProgram
from offload.program.family import BoundFamily, Family
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
    fused: FusedLoad | None,
    scheduling: str | None,
    verify: bool,
    progress: Progress,
    name: str,
    host_cores: HostCores = None,
) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize:
    """Make a Family resident; the arguments are those of `Captured.load`, `name` is for people.

    Args:
        bound: the Family.
        settle: gives it ready to be executed.
        device: as `Captured.load`.
        sizes: how much is kept, and by which buckets.
        load: makes the Program of one choice of sizes resident.
        fused: likewise, with kernels; None: none of its sizes gets any.
        scheduling: as `Captured.load`, and so are the rest.
        verify: likewise.
        progress: likewise.
        name: for people.
        host_cores: as `Captured.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, ExecutionError: as
            `Captured.load`.
    """
    recorded = BoundProgram(bound.family.program, bound.bindings)
    backend, _ = named_backend(recorded.program.device if device is None else device)

    def load_at(chosen: Mapping[str, int]) -> Executable:
        return load(program_at(bound, bound.family.checked(chosen)))

    asked_for = Scheduling.OFFLOAD if scheduling is None else scheduling
    if fused is not None:
        checked(recorded, backend, asked_for, None, fused.fuse)
        _refuse_writing(bound.family)
    is_chosen, note = scheduling == AUTO, ""
    if sizes.pad:
        refuse_host_cores(host_cores, "buckets are executables of one choice of sizes each")
        return PaddedExecutable(bound, sizes, load_at, fused, LOADED_EACH if is_chosen else "")
    if backend.sizes is None:
        if scheduling == Scheduling.OFFLOAD or backend.dispatch is None:
            refuse_host_cores(host_cores, "each choice of sizes is loaded as a task of its own")
            return ExecutableForEachSize(bound, sizes, load, LOADED_EACH if is_chosen else "")
        backend = backend.dispatch
        note = DELIVERED_BY_HOST if scheduling != Scheduling.HOST else ""
        is_chosen = False
    assert backend.sizes is not None  # dispatch has it
    cores = asked_host_cores(host_cores, backend.sizes, bound.family)

    def load_all(
        how: Scheduling, fused: FusedLoad | None = None, note: str = "", cores: int = 1
    ) -> SizedExecutable:
        return SizedExecutable(
            settle(),
            sizes,
            backend,
            load_at,
            how,
            verify=verify,
            fused=fused,
            note=note,
            host_cores=cores,
        )

    with telling(progress), switched(name) as asked:
        how = checked(recorded, backend, asked_for, None, fuse=False).scheduling
        if is_chosen:
            how, note = chosen_scheduling(bound.family, load_all)
        if cores == AUTO:
            cores, why = chosen_host_cores(bound.family, lambda cores: load_all(how, cores=cores))
            note = "\n".join(filter(None, (note, why)))
        run = load_all(how, fused, note, cores)
        asked.done(recorded, run, verify=verify)
        return run


def _refuse_writing(family: Family) -> None:
    """Refuse a Program that leaves more than results, of which no sizes can be promoted.

    Raises:
        BindingError: it does.
    """
    if family.program.leaves_something:
        raise BindingError(
            "sizes.promoted: the program writes inputs or weights, draws random numbers, or calls "
            "an operator of which it is not known what else it does; so would the proof of kernels "
            "beside the calls: load without promoted="
        )


def fuses(sizes: Sizes, fuse: object) -> bool:
    """Whether sizes that repeat get kernels; no others do.

    Raises:
        BindingError: one of the options is given without the other.
    """
    if fuse and sizes.promoted is None:
        raise BindingError(
            f"fuse={fuse!r}: kernels are made for one choice of sizes, and sizes may vary here: "
            "say how much memory those that repeat may take, as in "
            "sizes=Sizes(promoted='256MiB'), or leave it out"
        )
    if sizes.promoted is not None and not fuse:
        raise BindingError(
            "sizes.promoted: an executable of some sizes alone is quicker by its kernels: say "
            "fuse=True or fuse='auto', or leave it out"
        )
    return bool(fuse)


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
