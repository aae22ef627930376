"""The whole chain: a Program is fused, prepared, planned, instantiated and proved.

`options` has the caller's checked options, `switched` those of the environment; `budget` plans
streamed weights, `lanes` threads that run launches concurrently, `overlap` collectives that are
exchanged while launches run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch

from offload.backends import Backend, Disproved, Prepared, on_device
from offload.compile import Choice, Fused, Fusion
from offload.compile import fuse as fuse_regions
from offload.console.progress import Progress, reporting
from offload.costs import LaunchCosts
from offload.load.budget import StreamedLoad
from offload.load.device_memory import held_limit
from offload.load.fallback import load_proved
from offload.load.fusion_choice import chosen
from offload.load.graph_lanes import placed_in_lanes
from offload.load.lanes import load_on_lanes
from offload.load.normal_tensors import normal_tensors
from offload.load.options import AUTO, Options, checked, delivering, named_backend, weight_streamer
from offload.load.overlap import load_overlapped
from offload.load.place import place
from offload.load.ranks import loaded_together
from offload.load.switched import switched
from offload.load.triton_code import device_of, with_code
from offload.program import BoundProgram
from offload.run import Executable
from offload.run.lane_choice import LaneChoice

Loading = Callable[[BoundProgram, Fusion | None], Executable]


def load_program(
    bound: BoundProgram,
    device: str | torch.device | Backend | None,
    *,
    scheduling: str,
    verify: bool,
    weights_budget: int | str | None,
    share_store: bool,
    fuse: bool | Literal["auto"],
    lanes: int | Literal["auto"] = 1,
    progress: Progress,
    name: str,
    groups: Mapping[str, Any] | None = None,
    costs: LaunchCosts | None = None,
) -> Executable:
    """Make a Program resident; the arguments are those of `Captured.load`; `name` is for the user.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, FileError, ExecutionError: as
            `Captured.load`.
    """
    with (
        normal_tensors(),
        reporting(progress),
        switched(name) as asked,
        loaded_together(bound, groups, name, "" if lanes == 1 else f", lanes={lanes!r}") as ranks,
    ):
        found = ranks.bound
        backend, index = named_backend(found.program.device if device is None else device)
        backend = delivering(backend, scheduling)
        options = checked(found, backend, scheduling, weights_budget, fuse, lanes=lanes)
        options = dataclasses.replace(options, verify=verify, share_store=share_store, costs=costs)
        recorded = dataclasses.replace(found, program=on_device(found.program, index))
        recorded = with_code(recorded, backend)

        def load(bound: BoundProgram, fusion: Fusion | None) -> Executable:
            one_way = _streamed if options.is_streamed else _resident
            return load_proved(backend, lambda one: one_way(bound, one, options, fusion))

        fused, fusion = _fused(recorded, options, load)
        if options.lanes == 1 or options.one_lane or backend.lanes is not None:
            run = _with_proved_kernels(recorded, fused, fusion, options, load)
            if options.one_lane:
                run.lane_choice = LaneChoice(AUTO, refusal=options.one_lane)
        elif fused.program.groups:
            run = load_overlapped(fused, backend, options, fusion, ranks)
        else:
            run = load_on_lanes(backend.prepare(fused), backend, options, fusion)
        return asked.done(recorded, held_limit(run), verify=verify)


def _with_proved_kernels(
    recorded: BoundProgram,
    fused: BoundProgram,
    fusion: Fusion | None,
    options: Options,
    load: Loading,
) -> Executable:
    """The executable, in which launches stay as recorded where a device disproves their kernels."""
    failed: dict[str, str] = {}
    while True:
        try:
            return load(fused, fusion)
        except Disproved as disproved:
            assert fusion is not None  # as it has kernels
            failures = disproved.failures
        failed |= {
            region.key: failures[region.kernel]
            for region in fusion.regions
            if region.kernel in failures
        }
        fused, fusion = _fused(recorded, options, load, failed)


def _fused(
    bound: BoundProgram,
    options: Options,
    load: Loading,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[BoundProgram, Fusion | None]:
    """The Program with kernels in place of launches, if requested.

    Under a budget there is no packing: panels would take as many bytes beside it.

    Args:
        bound: as recorded.
        options: of the load.
        load: makes an executable.
        failed: by key, how the proof of a region failed, which therefore stays as recorded.
    """
    if not options.fuse:
        return bound, None
    kept = {}
    if options.is_streamed:
        kept["aten::embedding"] = "reads a table that may stay in its store"

    def fused(choice: Choice | None) -> Fused:
        device = device_of(bound)
        packs = options.budget is None
        return fuse_regions(bound, kept, packs=packs, choice=choice, device=device, failed=failed)

    found = chosen(bound, fused, load) if options.fuse == AUTO else fused(None)
    return found.bound, found.fusion


def _prepared(bound: BoundProgram, backend: Backend, options: Options) -> Prepared:
    """The prepared Program, without parts that rely on a proof if there is to be no proof."""
    prepared = backend.prepare(bound)
    if options.verify or prepared.prepare_unproved is None:
        return prepared
    return prepared.prepare_unproved()


def _resident(
    bound: BoundProgram, backend: Backend, options: Options, fusion: Fusion | None
) -> Executable:
    """The executable with all weights in memory."""
    prepared = _prepared(bound, backend, options)
    plan = place(prepared, backend)
    if backend.lanes is not None and options.lanes != 1 and not options.one_lane:
        prepared, plan = placed_in_lanes(prepared, plan, backend, options)
    return Executable(
        prepared, plan, backend, options.scheduling, verify=options.verify, fusion=fusion
    )


def _streamed(
    bound: BoundProgram, backend: Backend, options: Options, fusion: Fusion | None
) -> Executable:
    """The executable with weights from a store; launches are timed if the budget is short."""
    streamer = weight_streamer(bound, backend)
    prepared = _prepared(bound, backend, options)
    plan = place(prepared, backend)
    load = StreamedLoad(
        prepared,
        plan,
        backend,
        streamer,
        options.scheduling,
        verify=options.verify,
        share_store=options.share_store,
        fusion=fusion,
    )
    if options.budget == AUTO:
        return load.within_free_memory()
    return load.within(load.all_bytes if options.budget is None else options.budget)
