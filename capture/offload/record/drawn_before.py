"""Random launches of a repeated call: they give what they gave the first time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.torch_names import find_dtype
from offload.program import Argument, Launch, TensorView
from offload.program.constants import same_constant
from offload.record.operators import Overload
from offload.record.random_outcomes import RandomOutcome, by_launch
from offload.record.storages import TrackedStorage


class DrawnBefore:
    """The outcomes of a call's random launches, in order.

    Owner: the recording of the repeated call, which draws nothing.
    """

    def __init__(self, launches: Iterable[Launch], outcomes: Sequence[RandomOutcome]) -> None:
        launches = tuple(launches)
        known = by_launch(launches, outcomes)
        self._left = [(one, known[one.index]) for one in launches if one.random]

    @property
    def n_left(self) -> int:
        """The number of launches that were not repeated yet."""
        return len(self._left)

    def is_next(self, operator: Overload, arguments: list[Any]) -> bool:
        """Whether a launch is the next random one.

        Raises:
            CaptureError: the launch draws, and is not the next one.
        """
        if self._left and self._left[0][0].name == operator.name:
            return operator.draws(arguments) or not operator.is_aten
        if operator.draws(arguments):
            raise CaptureError(
                f"{user_location()}: {operator.name} draws random numbers that it does not draw "
                "when torch.compiler.is_compiling() returns False"
            )
        return False

    def give(
        self,
        func: Any,
        given: Sequence[Argument],
        touched: Sequence[tuple[torch.Tensor, TrackedStorage, bool]],
    ) -> Any:
        """Write and return what the next launch wrote and returned.

        Args:
            func: its operator.
            given: its arguments, as in a Launch.
            touched: each tensor argument, its storage, and whether the operator declares to write
                it.

        Raises:
            CaptureError: the arguments have other shapes or numbers.
        """
        launch, outcome = self._left.pop(0)
        tensors = [tensor for tensor, _, _ in touched]
        if not _are_alike(launch.arguments, tuple(given)):
            raise CaptureError(
                f"{user_location()}: {launch.name} draws other random numbers than when "
                "torch.compiler.is_compiling() returns False"
            )
        for position, content in outcome.written:
            tensors[position].copy_(content)
        for position, content in outcome.written_whole:
            touched[position][1].own_content().copy_(content)
        made = iter(outcome.made)
        written = iter(tensors[position] for position, _ in outcome.written)
        results = [
            next(written) if view is None else _on(next(made).clone(), view)
            for view in launch.results
        ]
        if len(func._schema.returns) == 1:
            return results[0]
        return tuple(results) or None


def _are_alike(one: Argument, other: Argument) -> bool:
    """Whether two recordings give a launch the same argument, ignoring where tensors lie."""
    if isinstance(one, TensorView) and isinstance(other, TensorView):
        return (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return type(one) is type(other) and same_constant(one, other)


def _on(storage: torch.UntypedStorage, view: TensorView) -> torch.Tensor:
    tensor = torch.empty(0, dtype=find_dtype(view.dtype), device=storage.device)
    return tensor.set_(storage, 0, view.shape, view.strides)
