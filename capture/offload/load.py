"""Loading: a Program becomes an Executable on a device, its weights streamed where asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from offload.amounts import parse_bytes
from offload.backends import (
    Backend,
    OfflineBackend,
    StreamingBackend,
    backend_and_index,
    find_backend,
    on_device,
)
from offload.compile import Choice, Fused, Fusion
from offload.compile import fuse as fuse_regions
from offload.errors import (
    BackendUnavailable,
    BindingError,
)
from offload.fusion_choice import chosen
from offload.place import place
from offload.program import BoundProgram, Program
from offload.progress import Progress, telling
from offload.proved_load import load_proved
from offload.replay import Executable
from offload.streamed_load import AUTO, StreamedLoad
from offload.timeline import Scheduling

_AUTO: Literal["auto"] = "auto"


def load_program(
    bound: BoundProgram,
    device: str | torch.device | Backend | None,
    *,
    scheduling: str,
    verify: bool,
    weights_budget: int | str | None,
    share_store: bool,
    fuse: bool | Literal["auto"],
    progress: Progress,
) -> Executable:
    """Make a Program resident; the arguments are those of `Captured.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, FileError, ExecutionError: as
            `Captured.load`.
    """
    with telling(progress):
        program = bound.program
        backend, index = _backend_and_index(program.device if device is None else device)
        _refuse_foreign(program, backend)
        how = _scheduling(scheduling)
        if how is Scheduling.HOST and not backend.capabilities.schedules_launches:
            raise BackendUnavailable(
                f"device {backend.name!r} executes a model as a whole: load without "
                "scheduling='host'"
            )
        budget = _budget(weights_budget)
        bound = dataclasses.replace(bound, program=on_device(program, index))
        is_streamed = weights_budget is not None or bool(bound.bindings.stored)
        _check_fuse(fuse, backend, is_streamed=is_streamed)

        def resident(bound: BoundProgram, fusion: Fusion | None) -> Executable:
            return load_proved(
                backend, lambda one: _resident(bound, one, how, verify=verify, fusion=fusion)
            )

        bound, fusion = _fused(
            bound, fuse, resident, is_streamed=is_streamed, packs=weights_budget is None
        )
        if not is_streamed:
            return resident(bound, fusion)

        def streamed(one: Backend) -> Executable:
            store = _streaming_backend(bound, one)
            prepared = store.prepare(bound)
            plan = place(prepared, store)
            load = StreamedLoad(
                prepared, plan, store, how, verify=verify, share_store=share_store, fusion=fusion
            )
            if budget == AUTO:
                return load.within_free_memory()
            return load.within(load.all_bytes if budget is None else budget)

        return load_proved(backend, streamed)


def _resident(
    bound: BoundProgram,
    backend: Backend,
    how: Scheduling,
    *,
    verify: bool,
    fusion: Fusion | None,
) -> Executable:
    prepared = backend.prepare(bound)
    return Executable(
        prepared, place(prepared, backend), backend, how, verify=verify, fusion=fusion
    )


def _check_fuse(fuse: object, backend: Backend, *, is_streamed: bool) -> None:
    """Refuse what is no way to fuse, or none of this device or of these weights."""
    if not isinstance(fuse, bool) and fuse != _AUTO:
        raise BindingError(f"fuse: expected True, False or {_AUTO!r}, got {fuse!r}")
    if fuse and not backend.capabilities.runs_kernels:
        raise BackendUnavailable(
            f"device {backend.name!r} runs no compiled kernels: load without fuse={fuse!r}"
        )
    if fuse == _AUTO and is_streamed:
        raise BindingError(
            f"fuse={_AUTO!r} times two executables beside one another, which weights in files or "
            "under a budget leave no memory for: give fuse=True or fuse=False"
        )


def _fused(
    bound: BoundProgram,
    wanted: bool | Literal["auto"],
    resident: Callable[[BoundProgram, Fusion | None], Executable],
    *,
    is_streamed: bool,
    packs: bool,
) -> tuple[BoundProgram, Fusion | None]:
    """The Program with kernels in the place of launches, where that is wanted.

    Under a budget there is no packing (`packs`): panels would take as many bytes beside it.
    """
    if not wanted:
        return bound, None
    kept = {"aten::embedding": "reads a table that may stay in its store"} if is_streamed else {}

    def fused(choice: Choice | None) -> Fused:
        return fuse_regions(bound, kept, packs=packs, choice=choice)

    found = chosen(bound, fused, resident) if wanted == _AUTO else fused(None)
    return found.bound, found.fusion


def load_offline_model(
    path: Path, device: str | torch.device | Backend, *, scheduling: str
) -> Executable:
    """Make an offline model resident; the arguments are those of `OfflineModel.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, ExecutionError: as `OfflineModel.load`.
    """
    backend, index = _backend_and_index(device)
    how = _scheduling(scheduling)
    if not isinstance(backend, OfflineBackend):
        raise BackendUnavailable(
            f"{path}: device {backend.name!r} loads no offline models (.om): load it on npu"
        )
    prepared, its_backend = backend.open_offline(path, index)
    return Executable(prepared, place(prepared, its_backend), its_backend, how)


def _backend_and_index(device: str | torch.device | Backend) -> tuple[Backend, int | None]:
    if isinstance(device, Backend):
        if isinstance(device, type):  # which has all that a backend has
            raise BackendUnavailable(f"no backend for device {device!r}: give one that was made")
        return device, None
    kind, index = backend_and_index(device)
    return find_backend(kind), index


def _budget(given: int | str | None) -> int | Literal["auto"] | None:
    if given is None or given == _AUTO:
        return given
    return parse_bytes(given, f"weights_budget (if not {_AUTO!r})")


def _refuse_foreign(program: Program, backend: Backend) -> None:
    if backend.records() != program.device:
        raise BackendUnavailable(
            f"the program was recorded on {program.device}, and device {backend.name!r} runs "
            f"programs recorded on {backend.records()}: capture the model there"
        )
    if program.opaque is not None and not backend.capabilities.runs_opaque:
        raise BackendUnavailable(
            f"the program is one opaque launch, which device {backend.name!r} does not run: "
            f"{program.opaque.reason}"
        )


def _streaming_backend(bound: BoundProgram, backend: Backend) -> StreamingBackend:
    if isinstance(backend, StreamingBackend):
        return backend
    advice = "load without weights_budget="
    if bound.bindings.stored:
        advice = "capture the model without weights=, its weights in the device's memory"
    raise BackendUnavailable(
        f"device {backend.name!r} cannot bring weights from a store while it computes: {advice}"
    )


def _scheduling(name: str) -> Scheduling:
    try:
        return Scheduling(name)
    except ValueError:
        expected = [one.value for one in Scheduling]
        raise BindingError(f"scheduling: expected one of {expected}, got {name!r}") from None
