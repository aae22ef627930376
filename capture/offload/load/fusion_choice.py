"""`load(fuse="auto")`: regions become kernels where executions show that kernels are quicker."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from offload.compile import CacheRefused, Choice, Fused, Fusion, choice_key, open_cache
from offload.errors import BindingError, CaptureError, ExecutionError, OutOfMemory
from offload.interpreter.own_generators import drawing_alone
from offload.load.trial import launch_times_ns, taken_in_turns_ns, weights_kept
from offload.program import BoundProgram, Kernel
from offload.run import Executable

Load = Callable[[BoundProgram, Fusion | None], Executable]
"""Makes an executable of a Program, with kernels in place of launches or without."""


def chosen(bound: BoundProgram, fuse: Callable[[Choice | None], Fused], load: Load) -> Fused:
    """Fuse regions that are quicker as kernels; the choice is cached, and not timed again.

    Args:
        bound: as recorded.
        fuse: fuses it, without the regions that a choice excludes.
        load: makes an executable.
    """
    everything = fuse(None)
    if not everything.fusion.regions:
        return everything
    keys = {region.key for region in everything.fusion.regions}
    key = choice_key(bound.program, keys, torch.get_num_threads())
    cache = open_cache()  # which holds these kernels
    found = cache.find_choice(key)
    choice = _timed(bound, everything, fuse, load) if found is None else found
    if found is None and not choice.refusal:
        with contextlib.suppress(CacheRefused):  # then it is determined again
            cache.keep_choice(key, choice)
    if choice.kept or choice.refusal:
        return fuse(choice)
    return dataclasses.replace(
        everything, fusion=dataclasses.replace(everything.fusion, choice=choice)
    )


def _timed(
    bound: BoundProgram,
    everything: Fused,
    fuse: Callable[[Choice | None], Fused],
    load: Load,
) -> Choice:
    """Time each region, and then whole calls with the regions that are quicker as kernels."""
    recorded = drawing_alone(bound)
    if recorded.refusal:
        return Choice({}, refusal=f"it cannot be executed on made-up inputs: {recorded.refusal}")
    try:
        with load(recorded.bound.unguarded(), None) as without, weights_kept(bound):
            with load(_alone(everything.bound), everything.fusion) as run:
                kept = _slower(without, run)
                if len(kept) in (0, len({region.key for region in everything.fusion.regions})):
                    return _compared(without, run, kept)
            fused = fuse(Choice(kept))
            with load(_alone(fused.bound), fused.fusion) as run:
                return _compared(without, run, kept)
    except (BindingError, CaptureError, ExecutionError, OutOfMemory) as error:
        return Choice({}, refusal=f"it could not be timed on made-up inputs: {error}")


def _alone(bound: BoundProgram) -> BoundProgram:
    """A Program for trials: they change only what launches write, which is restored."""
    return drawing_alone(bound).bound.unguarded()


def _slower(without: Executable, run: Executable) -> dict[str, str]:
    """By key, why regions stay as recorded: as kernels they take longer, summed over all places."""
    assert run.fusion is not None  # as it was loaded
    with without.timeline() as recorded, run.timeline() as fused:
        _alternate(without, run)
    launch_ns = {at: statistics.median(of) for at, of in launch_times_ns(recorded).items()}
    kernel_ns = {at: statistics.median(of) for at, of in launch_times_ns(fused).items()}
    places = {
        launch.callee.index: launch.index
        for launch in run.program.launches
        if isinstance(launch.callee, Kernel)
    }
    as_recorded: dict[str, float] = defaultdict(float)
    as_kernels: dict[str, float] = defaultdict(float)
    failures: dict[str, str] = {}
    for region in run.fusion.regions:
        as_recorded[region.key] += sum(launch_ns[at] for at in range(region.first, region.end))
        as_kernels[region.key] += kernel_ns[places[region.kernel]]
        if failure := run.fusion.proofs[region.kernel].failure:
            failures[region.key] = f"its kernel failed its proof on made-up inputs: {failure}"
    slower = {
        key: f"{ns / 1e3:,.1f} us as recorded, {as_kernels[key] / 1e3:,.1f} us as kernels"
        for key, ns in as_recorded.items()
        if as_kernels[key] > ns
    }
    return slower | failures


def _compared(without: Executable, run: Executable, kept: Mapping[str, str]) -> Choice:
    """The choice that keeps these regions as recorded, or all if calls are no quicker."""
    assert run.fusion is not None  # as it was loaded
    recorded_ns, fused_ns = (statistics.median(times) for times in _alternate(without, run))
    if fused_ns > recorded_ns:
        why = "whole calls are no quicker with kernels"
        kept = {region.key: why for region in run.fusion.regions} | dict(kept)
    return Choice(kept, fused_ns, recorded_ns, torch.get_num_threads())


def _alternate(*runs: Executable) -> list[list[int]]:
    return taken_in_turns_ns("timing kernels", *runs)
