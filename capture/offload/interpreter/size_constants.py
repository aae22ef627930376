"""The Program of a Family at some sizes, with what follows from sizes alone computed once."""

from __future__ import annotations

import dataclasses

import torch

from offload.errors import ExecutionError
from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.program import BoundProgram, Launch
from offload.program.family import BoundFamily
from offload.program.folding import FOLDED_BYTES, folded_values, settle


def program_at(bound: BoundFamily, sizes: tuple[int, ...]) -> BoundProgram:
    """The Program of these sizes, with constants as additional weights.

    Args:
        bound: the Family.
        sizes: in the order of its Dims, accepted by `Family.checked`.

    Raises:
        BindingError: a number has no result at these sizes.
        ExecutionError: a launch that makes a constant failed.
    """
    whole = bound.whole_at(sizes)
    folded = folded_values(whole.program, bound.family.foldable)
    made = made_constants(whole, bound.family.foldable)
    weights = {**whole.bindings.weights, **{index: (made[index],) for index in folded}}
    bindings = dataclasses.replace(whole.bindings, weights=weights)
    settled = settle(whole.program, folded)
    return BoundProgram(settled.program, bindings.moved(settled.positions))


def made_constants(whole: BoundProgram, foldable: frozenset[int]) -> dict[int, torch.Tensor]:
    """The bytes of Values that launches make from constants alone, if they may be folded.

    Args:
        whole: with all its launches.
        foldable: its launches that make constants if all their operands are constants.

    Raises:
        ExecutionError: one of them failed.
    """
    bases = {
        index: (tensors[0].untyped_storage(), 0)
        for index, tensors in whole.bindings.weights.items()
    }
    run = EagerRun(whole, bases, fill=None)
    known = set(bases)
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad(), torch._C._DisableAutocast():
        for launch in whole.program.launches:
            new = [view.value for view in launch.made()]
            is_small = all(whole.program.values[one].size_bytes <= FOLDED_BYTES for one in new)
            if launch.index in foldable and is_small and known.issuperset(launch.reads):
                _compute(run, launch)
                known.update(new)
                made |= {one: bytes_of(run.bases[one][0]) for one in new}
    return made


def _compute(run: EagerRun, launch: Launch) -> None:
    try:
        run.keep(launch, run.call(launch)())
    except Exception as error:
        raise ExecutionError(
            f"{launch.source}: {launch.name} failed where it makes a constant of these sizes: "
            f"{error}; call with other sizes, or compute it outside of the model"
        ) from error
