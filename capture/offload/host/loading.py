"""Load a Family: as one executable of all sizes, or one for each choice of sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch

from offload.backends import Backend
from offload.console.progress import Progress, reporting
from offload.errors import BindingError
from offload.host.captured_sizes import CapturedSizes
from offload.host.executable_for_each_size import ExecutableForEachSize
from offload.host.host_cores import (
    HostCores,
    asked_host_cores,
    chosen_host_cores,
    refuse_host_cores,
)
from offload.host.padded_executable import PaddedExecutable
from offload.host.promoted_sizes import FusedLoad, FusedSizes
from offload.host.promotion_work import Promoting
from offload.host.scheduling_choice import (
    DELIVERED_BY_HOST,
    LOADED_EACH,
    Trial,
    chosen_on_device,
    chosen_scheduling,
    promoted_note,
    tried,
)
from offload.host.sized_executable import SizedExecutable
from offload.host.sizes import Sizes
from offload.interpreter.settled_family import SettledFamily
from offload.interpreter.size_constants import program_at
from offload.load.normal_tensors import normal_tensors
from offload.load.options import AUTO, checked, named_backend, named_scheduling
from offload.load.switched import switched
from offload.program import BoundProgram
from offload.program.family import BoundFamily
from offload.run import Executable
from offload.timeline import Scheduling

_HOST_CORES_ASKED = "launch by launch, since host_cores= asks for stages on the host"


class LoadProgram(Protocol):
    """Makes the Program of one choice of sizes resident."""

    def __call__(
        self,
        bound: BoundProgram,
        fuse: bool | Literal["auto"] = ...,
        progress: Progress = ...,
        device: str | torch.device | Backend | None = ...,
    ) -> Executable:
        """Load by the Family's options, except those given here."""


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyLoad:
    """The options of loading a Family; the names are those of `Captured.load`.

    Attributes:
        bound: the Family.
        settle: returns it ready for execution.
        sizes: the memory of instances, and the buckets.
        load: makes the Program of one choice of sizes resident.
        fuse: as in `Captured.load`.
        scheduling: likewise; None: not requested.
        verify: likewise.
        progress: likewise.
        name: for people.
        host_cores: likewise.
    """

    bound: BoundFamily
    settle: Callable[[], SettledFamily]
    sizes: Sizes
    load: LoadProgram
    fuse: bool | Literal["auto"]
    scheduling: str | None
    verify: bool
    progress: Progress
    name: str
    host_cores: HostCores = None

    @property
    def recorded(self) -> BoundProgram:
        """Return its Program at the recorded sizes."""
        return BoundProgram(self.bound.family.program, self.bound.bindings)

    @property
    def asked_for(self) -> str:
        """The requested scheduling, by name."""
        return Scheduling.OFFLOAD if self.scheduling is None else self.scheduling

    def at(self, chosen: Mapping[str, int]) -> Executable:
        """Return an executable of one choice of sizes."""
        return self.load(program_at(self.bound, self.bound.family.checked(chosen)))

    def delivered_at(self, chosen: Mapping[str, int], dispatch: Backend) -> Executable:
        """Likewise; the host delivers its launches one by one."""
        program = program_at(self.bound, self.bound.family.checked(chosen))
        return self.load(program, device=dispatch)

    def all_sizes(
        self,
        backend: Backend,
        how: Scheduling,
        promoting: Promoting | None = None,
        note: str = "",
    ) -> SizedExecutable:
        """Return an executable of all sizes, on a backend whose residents change sizes."""
        assert backend.sizes is not None
        cores = asked_host_cores(self.host_cores, backend.sizes, self.bound.family)
        if cores == AUTO:
            one = dataclasses.replace(self, progress=False)
            cores, why = chosen_host_cores(
                self.bound.family,
                lambda cores: dataclasses.replace(one, host_cores=cores).all_sizes(backend, how),
            )
            note = "\n".join(filter(None, (note, why)))
        return SizedExecutable(
            self.settle(),
            self.sizes,
            backend,
            self.at,
            how,
            verify=self.verify,
            promoting=promoting,
            note=note,
            host_cores=cores,
        )


def load_family(
    asked: FamilyLoad, device: str | torch.device | Backend | None
) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize:
    """Make a Family resident.

    Args:
        asked: the options.
        device: as `Captured.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, ExecutionError: as
            `Captured.load`.
    """
    with normal_tensors():
        return _loaded(asked, device)


def _loaded(
    asked: FamilyLoad, device: str | torch.device | Backend | None
) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize:
    """Likewise, outside of inference mode."""
    recorded = asked.recorded
    backend, _ = named_backend(recorded.program.device if device is None else device)
    promoting = _promoting(asked, backend)
    _check_host_cores(asked, backend)
    if backend.sizes is None:
        return _on_device(asked, backend, promoting)
    if asked.sizes.pad:
        note = LOADED_EACH if asked.scheduling == AUTO else ""
        return PaddedExecutable(asked.bound, asked.sizes, asked.at, promoting, note)

    def load_all(how: Scheduling) -> SizedExecutable:
        if asked.scheduling != AUTO:
            return asked.all_sizes(backend, how, promoting)
        load = functools.partial(asked.all_sizes, backend)
        how, note = chosen_scheduling(asked.bound.family, load)
        return asked.all_sizes(backend, how, promoting, note)

    return _reported(asked, backend, load_all)


def _check_host_cores(asked: FamilyLoad, backend: Backend) -> None:
    """Refuse `host_cores` where launches have no stages on the host.

    Raises:
        BindingError: several cores are requested there, or the option is not a number of cores.
    """
    changer = backend.sizes or (backend.dispatch.sizes if backend.dispatch else None)
    if asked.sizes.pad:
        refuse_host_cores(asked.host_cores, "buckets are executables of one choice of sizes each")
    elif changer is None or (backend.sizes is None and asked.scheduling == Scheduling.OFFLOAD):
        refuse_host_cores(asked.host_cores, "each choice of sizes is loaded as a task of its own")
    else:
        asked_host_cores(asked.host_cores, changer, asked.bound.family)


def _reported(
    asked: FamilyLoad, backend: Backend, load: Callable[[Scheduling], SizedExecutable]
) -> SizedExecutable:
    """Load with the checked scheduling, and report as the environment requests."""
    recorded = asked.recorded
    with reporting(asked.progress), switched(asked.name) as switches:
        run = load(checked(recorded, backend, asked.asked_for, None, fuse=False).scheduling)
        switches.done(recorded, run, verify=asked.verify)
        return run


def _on_device(
    asked: FamilyLoad, backend: Backend, promoting: Promoting | None
) -> SizedExecutable | PaddedExecutable | ExecutableForEachSize:
    """Load where the host delivers launches at any sizes, or each choice is one task."""
    bound, sizes, dispatch = asked.bound, asked.sizes, backend.dispatch
    is_chosen = asked.scheduling == AUTO
    if promoting is not None and dispatch is not None:
        return _promoted_on_device(asked, dispatch, promoting)
    if sizes.pad:
        return PaddedExecutable(bound, sizes, asked.at, None, LOADED_EACH if is_chosen else "")
    how, note = named_scheduling(asked.asked_for), LOADED_EACH if is_chosen else ""
    if dispatch is not None and is_chosen and asked.host_cores not in (None, 1):
        how, note = Scheduling.HOST, _HOST_CORES_ASKED
    elif dispatch is not None and is_chosen:
        how, note = chosen_on_device(bound.family, _tried(asked, dispatch))
    elif dispatch is not None and asked.scheduling is None:
        how, note = Scheduling.HOST, DELIVERED_BY_HOST
    if dispatch is None or how is Scheduling.OFFLOAD:
        shares_arena = backend.capabilities.shares_arena
        return ExecutableForEachSize(bound, sizes, asked.load, note, shares_arena=shares_arena)
    return _reported(asked, dispatch, lambda how: asked.all_sizes(dispatch, how, note=note))


def _promoted_on_device(
    asked: FamilyLoad, dispatch: Backend, promoting: Promoting
) -> SizedExecutable | PaddedExecutable:
    """Load launch by launch, with repeated sizes as tasks."""
    note = ""
    if asked.scheduling == AUTO:
        found = _tried(asked, dispatch)
        note = promoted_note(asked.bound.family, found)
        if isinstance(found, Trial):
            known = {found.sizes: found.as_prepared()}
            promoting = dataclasses.replace(promoting, known=known)
    if asked.sizes.pad:
        load_at = functools.partial(asked.delivered_at, dispatch=dispatch)
        return PaddedExecutable(asked.bound, asked.sizes, load_at, promoting, note)
    return _reported(asked, dispatch, lambda how: asked.all_sizes(dispatch, how, promoting, note))


def _tried(asked: FamilyLoad, dispatch: Backend) -> Trial | str:
    recorded_sizes = {one.name: one.recorded for one in asked.bound.family.dims}
    with reporting(asked.progress):
        return tried(
            asked.bound.family,
            lambda: asked.at(recorded_sizes),
            lambda: asked.all_sizes(dispatch, Scheduling.HOST),
        )


def _promoting(asked: FamilyLoad, backend: Backend) -> Promoting | None:
    """Return the promotion of repeated sizes; None without promotion.

    Raises:
        BackendUnavailable: the device runs no kernels, and `fuse` requests them.
        BindingError: an option requires or excludes another; or the Program leaves more than
            results.
    """
    if asked.sizes.promoted is None:
        if asked.fuse:
            raise BindingError(
                f"fuse={asked.fuse!r}: kernels are made for one choice of sizes, and sizes may "
                "vary here: give the memory that sizes that repeat may take, as in "
                "sizes=Sizes(promoted='256MiB'), or leave it out"
            )
        return None
    checked(asked.recorded, backend, asked.asked_for, None, asked.fuse)
    is_device = backend.sizes is None and backend.dispatch is not None
    if not asked.fuse and not is_device:
        raise BindingError(
            "sizes.promoted: an executable for fixed sizes is quicker only by its kernels: give "
            "fuse=True or fuse='auto', or leave it out"
        )
    if asked.fuse and is_device:
        raise BindingError(
            f"fuse={asked.fuse!r}: on {backend.name}, sizes that repeat are executed as one task, "
            "of the launches as recorded: leave out fuse or sizes.promoted"
        )
    if asked.scheduling not in (None, AUTO) and is_device:
        raise BindingError(
            f"scheduling={asked.scheduling!r}: with sizes.promoted, sizes that repeat are "
            "executed as one task, and all others launch by launch: leave out one of the two"
        )
    if asked.bound.family.program.leaves_something:
        raise BindingError(
            "sizes.promoted: the program writes inputs or weights, draws random numbers, or calls "
            "an operator whose other effects are not known; so would the trial of an executable "
            "beside the calls: load without promoted="
        )
    if asked.fuse:
        fused = FusedLoad(asked.bound, asked.fuse, functools.partial(_load_fused, asked))
        return Promoting(lambda publish: FusedSizes(fused, publish))
    return Promoting(
        lambda publish: CapturedSizes(
            asked.bound,
            lambda program: asked.load(program, progress=False),
            publish,
            shares_arena=backend.capabilities.shares_arena,
        )
    )


def _load_fused(asked: FamilyLoad, program: BoundProgram, progress: Progress) -> Executable:
    return asked.load(program, asked.fuse, progress)


def refuse_for_families(**options: object) -> None:
    """Refuse load options that apply to one choice of sizes.

    Raises:
        BindingError: such an option is given.
    """
    for name, given in options.items():
        if given:
            raise BindingError(
                f"{name}={given!r} is for a program of one size, and sizes may vary here: capture "
                "without dynamic_shapes, or leave it out"
            )
