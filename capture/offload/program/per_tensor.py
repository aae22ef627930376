"""Launches of multi-tensor operators, divided by the tensors of their lists.

An operator of the family `aten::_foreach_` computes each index of its lists alone, and so do
torch's fused optimizers (aten/src/ATen/native/ForeachOpsKernels.cpp, FusedAdam.cpp, FusedSGD.cpp,
FusedAdagrad.cpp). So a launch for some of the indices gives these tensors the bits that a launch
for all gives them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from offload.program.launch import Argument, Launch
from offload.program.values import ITEM_BYTES, TensorView

_FAMILY = "aten::_foreach_"
_FUSED = ("aten::_fused_sgd_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_adagrad_")

# These take a tensor with a number for each index (native_functions.yaml: `Tensor scalars`).
_WITH_NUMBERS = frozenset(
    f"{_FAMILY}{name}.Tensor" for name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_")
)


def n_tensors(launch: Launch) -> int:
    """The number of indices by which a launch can be divided; 1: it cannot.

    It cannot where an index touches what another one writes.
    """
    is_family = launch.name.startswith(_FAMILY)
    if not is_family and launch.name.partition(".")[0] not in _FUSED:
        return 1
    lists = [one for one in launch.arguments if isinstance(one, tuple) and one]
    sizes = {len(one) for one in lists}
    if len(sizes) != 1 or len(launch.results) not in (0, *sizes):
        return 1
    (size,) = sizes
    parts = [of_tensors(launch, (at,)) for at in range(size)]
    written = [value for part in parts for value in set(part.writes)]
    n_touching = Counter(value for part in parts for value in set(part.touched()))
    return size if all(n_touching[value] == 1 for value in written) else 1


def merges(launch: Launch) -> bool:
    """Whether a launch can be made for several of its indices, not only for one or all."""
    return launch.name not in _WITH_NUMBERS


def of_tensors(launch: Launch, indices: Sequence[int]) -> Launch:
    """The launch for some of its indices.

    Args:
        launch: one of a family that `n_tensors` divides.
        indices: ascending; one alone where the launch does not merge.
    """
    lists = [one for one in launch.arguments if isinstance(one, tuple) and one]
    if list(indices) == list(range(len(lists[0]))):
        return launch
    arguments = tuple(_chosen(launch, one, indices) for one in launch.arguments)
    results = tuple(launch.results[at] for at in indices) if launch.results else ()
    named = {view.value for view in launch.views()}
    part = dataclasses.replace(launch, arguments=arguments, results=results)
    kept = {view.value for view in part.views()} | {view.value for view in part.made()}
    return dataclasses.replace(
        part,
        reads=tuple(one for one in launch.reads if one in kept or one not in named),
        writes=tuple(one for one in launch.writes if one in kept),
    )


def _chosen(launch: Launch, argument: Argument, indices: Sequence[int]) -> Argument:
    if isinstance(argument, tuple) and argument:
        return tuple(argument[at] for at in indices)
    if isinstance(argument, TensorView) and launch.name in _WITH_NUMBERS:
        (at,) = indices
        distance_bytes = at * argument.strides[0] * ITEM_BYTES[argument.dtype]
        return dataclasses.replace(
            argument, offset_bytes=argument.offset_bytes + distance_bytes, shape=(1,)
        )
    return argument


_NOT_FINITE = "aten::_amp_foreach_non_finite_check_and_unscale_"


def one_by_one(launch: Launch) -> tuple[Launch, ...]:
    """A launch over a list as launches in a row, one for each tensor; others alone.

    A `GradScaler` unscales gradients and sets one number where an element is not finite, and never
    resets it, so that launches for one tensor each leave the same
    (aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp). All of them write that number, so
    `n_tensors` cannot divide it.
    """
    if launch.name != _NOT_FINITE:
        return (launch,)
    tensors, *rest = launch.arguments
    assert isinstance(tensors, tuple)
    in_common = {view.value for view in rest if isinstance(view, TensorView)}
    return tuple(
        dataclasses.replace(
            launch,
            arguments=((one,), *rest),
            reads=tuple(v for v in launch.reads if v in in_common or v == one.value),
            writes=tuple(v for v in launch.writes if v in in_common or v == one.value),
        )
        for one in tensors
    )
