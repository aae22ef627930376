"""Options of a load, checked before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from offload.backends import Backend, WeightStreamer, backend_and_index, find_backend
from offload.console.amounts import parse_bytes
from offload.costs import LaunchCosts
from offload.errors import BackendUnavailable, BindingError
from offload.load.ranks import refuse_with_ranks
from offload.program import BoundProgram, Program, TritonKernel
from offload.timeline import Scheduling

AUTO: Literal["auto"] = "auto"
"""The budget of all free memory; fusion and lanes where they are quicker."""

_WITH_COLLECTIVES = 2
"""The lanes of a Program with collectives: launches, and concurrent exchanges of process groups."""

MOST_LANES = 64
"""The limit of the planner."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of one load, with the names of `Captured.load`.

    Attributes:
        scheduling: what delivers launches.
        fuse: whether kernels replace launches, or only quicker kernels do.
        budget: of all memory for weights, in bytes; None: they are used in place.
        is_streamed: some weights may have to be copied from a store.
        verify: whether captured graphs are proved and launches timed.
        share_store: whether executables share weights in the host's memory.
        lanes: the most lanes that run launches concurrently; 2 with collectives: these run beside
            launches; `auto`: several where that is quicker.
        one_lane: why only one lane is possible; empty: not known yet.
        costs: kept durations of launches, by which lanes are planned; None: they are measured.
    """

    scheduling: Scheduling
    fuse: bool | Literal["auto"]
    budget: int | Literal["auto"] | None
    is_streamed: bool
    verify: bool = True
    share_store: bool = True
    lanes: int | Literal["auto"] = 1
    one_lane: str = ""
    costs: LaunchCosts | None = None


def checked(
    bound: BoundProgram,
    backend: Backend,
    scheduling: str,
    weights_budget: int | str | None,
    fuse: bool | Literal["auto"],
    *,
    lanes: int | Literal["auto"] = 1,
) -> Options:
    """Check the options of a load against the Program and the backend.

    Raises:
        BackendUnavailable: the backend does not run such a Program, or not in this way.
        BindingError: an option is invalid, or options exclude one another.
    """
    _refuse_foreign(bound.program, backend)
    refuse_with_ranks(
        bound.program, weights_budget=weights_budget, fuse=fuse if fuse == AUTO else False
    )
    how = named_scheduling(scheduling)
    if backend.dispatch is backend:
        how = Scheduling.HOST
    if how is Scheduling.HOST and not backend.capabilities.schedules_launches:
        raise BackendUnavailable(
            f"device {backend.name!r} executes a model as a whole: load without scheduling='host'"
        )
    budget = _budget(weights_budget)
    is_streamed = budget is not None or bool(bound.bindings.stored)
    if bound.bindings.before_execution is not None:
        _check_training(budget)
    _check_fuse(fuse, backend, is_streamed=is_streamed)
    _check_triton(bound.program, backend)
    _check_lanes(lanes)
    one_lane = "" if lanes == 1 else _one_lane(bound, backend, how, is_streamed=is_streamed)
    if bound.program.groups and lanes not in (1, _WITH_COLLECTIVES, AUTO) and not one_lane:
        raise BindingError(
            f"lanes={lanes!r}: the program exchanges tensors with other ranks: expected 1, for "
            f"launches in recorded order, {_WITH_COLLECTIVES}, for a lane of launches and one of "
            f"collectives beside it, or {AUTO!r}, for the quicker of the two"
        )
    if one_lane and lanes != AUTO:
        kind = BindingError if _has_lanes(backend) else BackendUnavailable
        raise kind(f"lanes={lanes!r}: {one_lane}: load without lanes=, or with lanes={AUTO!r}")
    return Options(how, fuse, budget, is_streamed, lanes=lanes, one_lane=one_lane)


def _check_lanes(lanes: object) -> None:
    """Refuse an invalid number of lanes."""
    is_number = isinstance(lanes, int) and not isinstance(lanes, bool)
    if not (is_number and 1 <= lanes <= MOST_LANES) and lanes != AUTO:  # type: ignore[operator]
        raise BindingError(
            f"lanes: expected a number from 1 to {MOST_LANES}, or {AUTO!r}, got {lanes!r}"
        )


def _one_lane(bound: BoundProgram, backend: Backend, how: Scheduling, *, is_streamed: bool) -> str:
    """Why any Program runs on one lane with these options; empty if it need not."""
    if not _has_lanes(backend):
        return (
            f"device {backend.name!r} orders launches by itself, or its operators cannot be "
            "limited to one thread"
        )
    if bound.program.opaque is not None:
        return (
            "the program is one opaque launch, with no second launch to run beside it: "
            f"{bound.program.opaque.reason}"
        )
    return _one_order(bound, how, is_streamed=is_streamed)


def _one_order(bound: BoundProgram, how: Scheduling, *, is_streamed: bool) -> str:
    """Why launches that could run concurrently keep their order; empty if they need not."""
    if how is Scheduling.HOST:
        return "the host delivers launches one by one"
    if is_streamed:
        return "weights are streamed as launches run, in the order in which one lane reads them"
    if bound.bindings.before_execution is not None and not bound.program.groups:
        return "training steps do not run on several lanes yet"
    return ""


def _has_lanes(backend: Backend) -> bool:
    return backend.capabilities.runs_lanes or backend.lanes is not None


def _check_training(budget: object) -> None:
    """Refuse options that are not supported yet for a step that trains.

    Raises:
        BindingError: an option is not supported; the message names it, and why.
    """
    if budget is not None:
        raise BindingError(
            "weights_budget: the program is a training step, which writes every weight, and "
            "streamed weights are only read from their store: load without weights_budget="
        )


def _check_triton(program: Program, backend: Backend) -> None:
    """Refuse Triton kernels on a device that runs none."""
    found = backend.capabilities
    if not found.computes or (found.runs_kernels and backend.records() == "cuda"):
        return
    for launch in program.launches:
        if isinstance(launch.callee, TritonKernel):
            raise BackendUnavailable(
                f"{launch.source}: {launch.name} is a Triton kernel, and device {backend.name!r} "
                "runs none as launches: load with device='cuda' and without scheduling='host'"
            )


def _check_fuse(fuse: object, backend: Backend, *, is_streamed: bool) -> None:
    """Refuse an invalid way to fuse, or one unsupported by the device or for streamed weights."""
    if not isinstance(fuse, bool) and fuse != AUTO:
        raise BindingError(f"fuse: expected True, False or {AUTO!r}, got {fuse!r}")
    if fuse and not backend.capabilities.runs_kernels:
        raise BackendUnavailable(
            f"device {backend.name!r} runs no compiled kernels: load without fuse={fuse!r}"
        )
    if fuse == AUTO and backend.records() != "cpu":
        raise BindingError(
            f"fuse={AUTO!r} times the launches of an execution one by one, which the CPU can: give "
            "fuse=True or fuse=False"
        )
    if fuse == AUTO and is_streamed:
        raise BindingError(
            f"fuse={AUTO!r} times two executables beside one another, which weights in files or "
            "under a budget leave no memory for: give fuse=True or fuse=False"
        )


def named_backend(device: str | torch.device | Backend) -> tuple[Backend, int | None]:
    """The backend that a caller names, and the index of its device; None: no index is named.

    Raises:
        BackendUnavailable: there is no backend of this name.
    """
    if isinstance(device, Backend):
        if isinstance(device, type):  # a class that has all that a backend has
            raise BackendUnavailable(
                f"no backend for device {device!r}: give an instance of the class"
            )
        return device, None
    if isinstance(device, tuple):
        raise BackendUnavailable(
            f"no backend for device {device!r}: several devices are a list, as device=['cpu', "
            "CpuBackend(threads=1)]"
        )
    kind, index = backend_and_index(device)
    return find_backend(kind), index


def delivering(backend: Backend, scheduling: str) -> Backend:
    """The backend with the requested delivery: that of `dispatch` if another runs whole models.

    Raises:
        BindingError: there is no such scheduling.
    """
    is_whole = not backend.capabilities.schedules_launches
    if (
        named_scheduling(scheduling) is Scheduling.HOST
        and is_whole
        and backend.dispatch is not None
    ):
        return backend.dispatch
    return backend


def _budget(given: int | str | None) -> int | Literal["auto"] | None:
    if given is None or given == AUTO:
        return given
    return parse_bytes(given, f"weights_budget (if not {AUTO!r})")


def _refuse_foreign(program: Program, backend: Backend) -> None:
    if backend.records() != program.device:
        raise BackendUnavailable(
            f"the program was recorded on {program.device}, and device {backend.name!r} runs "
            f"programs recorded on {backend.records()}: capture the model there"
        )
    if program.groups and not backend.capabilities.runs_collectives:
        raise BackendUnavailable(
            f"the program exchanges tensors with other ranks, which device {backend.name!r} does "
            "not run: load it on the CPU, whose process groups are gloo's"
        )
    if program.opaque is not None and backend.opaque is None:
        raise BackendUnavailable(
            f"the program is one opaque launch, which device {backend.name!r} does not run: "
            f"{program.opaque.reason}"
        )


def weight_streamer(bound: BoundProgram, backend: Backend) -> WeightStreamer:
    """The streamer of the Program's weights from a store.

    Raises:
        BackendUnavailable: the device has no streamer.
    """
    if backend.weights is not None:
        return backend.weights
    advice = "load without weights_budget="
    if bound.bindings.stored:
        advice = "capture the model without weights=, its weights in the device's memory"
    raise BackendUnavailable(
        f"device {backend.name!r} cannot stream weights from a store while it computes: {advice}"
    )


def named_scheduling(name: str) -> Scheduling:
    """The Scheduling that a caller names; `auto` is that of one task.

    Raises:
        BindingError: there is no scheduling of this name.
    """
    try:
        return Scheduling.OFFLOAD if name == AUTO else Scheduling(name)
    except ValueError:
        expected = [*(one.value for one in Scheduling), AUTO]
        raise BindingError(f"scheduling: expected one of {expected}, got {name!r}") from None
