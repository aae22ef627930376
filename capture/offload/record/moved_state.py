"""Optimizers' state and hyperparameters whose tensors are not those that launches write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.errors import BindingError
from offload.record.trained_parts import (
    Group,
    OptimizerState,
    Stepped,
    content_of,
    described,
    is_same,
)

_AGAIN = "or capture the step again"


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is kept, as `holder[key]`, and the tensor that launches use."""

    name: str
    holder: dict[Any, Any]
    key: Any
    ours: torch.Tensor

    @property
    def theirs(self) -> Any:
        """The object in that place now."""
        return self.holder.get(self.key)


class MovedState:
    """The state of optimizers as the recorded step left it.

    Owner: a TrainingGuard. Thread: any, one at a time.
    """

    def __init__(
        self,
        states: Sequence[OptimizerState],
        groups: Sequence[Group],
        optimizers: Sequence[Stepped],
    ) -> None:
        """Take all states and groups of the optimizers."""
        self._states, self._groups = tuple(states), tuple(groups)
        self._optimizers = tuple(optimizers)

    def take(self) -> None:
        """Copy contents of other tensors to those that launches use, and put these in their places.

        Raises:
            BindingError: a content does not fit, a number differs, or tensors are shared otherwise
                than in the recorded step; nothing was changed.
        """
        n_groups = sum(len(one.optimizer.param_groups) for one in self._optimizers)
        if n_groups != len(self._groups):
            raise BindingError(
                f"optimizers: expected {len(self._groups)} groups of parameters, as in the "
                f"recorded step, got {n_groups}: capture the step again"
            )
        if self._is_unmoved():
            return
        places = [*self._hyperparameters(), *self._kept()]
        _check_shared(places)
        moved = [(one, one.theirs) for one in places if one.theirs is not one.ours]
        self._check_apart(moved)
        used = {one.ours.untyped_storage()._cdata for one in places}
        contents = [
            theirs.detach().clone() if theirs.untyped_storage()._cdata in used else theirs.detach()
            for _, theirs in moved
        ]
        for (place, _), content in zip(moved, contents, strict=True):
            place.ours.detach().copy_(content)
            place.holder[place.key] = place.ours

    def _check_apart(self, moved: Sequence[tuple[_Place, torch.Tensor]]) -> None:
        """Check that no state is now memory that steps change: its content would be copied once.

        Raises:
            BindingError: a tensor shares memory with a parameter or its gradient.
        """
        groups = (group for one in self._optimizers for group in one.optimizer.param_groups)
        parameters = [each for group in groups for each in group["params"]]
        stepped = {
            each.untyped_storage()._cdata
            for parameter in parameters
            for each in (parameter, parameter.grad)
            if isinstance(each, torch.Tensor) and each.layout is torch.strided
        }
        for place, theirs in moved:
            if theirs.untyped_storage()._cdata in stepped:
                raise BindingError(
                    f"{place.name}: expected a tensor of its own, as in the recorded step, got "
                    f"memory of a parameter or gradient: give it a copy, {_AGAIN}"
                )

    def _is_unmoved(self) -> bool:
        """Whether all places certainly hold what they held."""
        for state in self._states:
            now = state.stepped.optimizer.state.get(state.key)
            if not isinstance(now, dict) or len(now) != len(state.items):
                return False
            if not all(now.get(key) is ours for key, ours in state.items.items()):
                return False
        return not any(
            group.changed_key(group.stepped.optimizer.param_groups[group.at])
            for group in self._groups
        )

    def _hyperparameters(self) -> Iterator[_Place]:
        for group in self._groups:
            now = group.stepped.optimizer.param_groups[group.at]
            found = dict(now)
            for key, ours in group.values.items():
                if isinstance(ours, torch.Tensor) and _may_take(ours, found.get(key)):
                    found[key] = ours
                    yield _Place(group.place(key), now, key, ours)
            if key := group.changed_key(found):
                raise BindingError(_other_hyperparameter(group, key, now))

    def _kept(self) -> Iterator[_Place]:
        for state in self._states:
            now = state.stepped.optimizer.state.get(state.key, {})
            if not isinstance(now, dict):
                now = {"": now}
            of = f"of {state.of} (state of {state.stepped.name})"
            for key, ours in state.items.items():
                theirs = now.get(key)
                if _may_take(ours, theirs):
                    yield _Place(f"{key} {of}", now, key, ours)
                elif not is_same(ours, content_of(theirs)):
                    raise BindingError(
                        f"{key} {of}: expected {described(ours)}, as in the recorded step, got "
                        f"{described(theirs)}: load a state of the same optimizer, {_AGAIN}"
                    )
            if more := sorted(map(str, now.keys() - state.items.keys())):
                raise BindingError(
                    f"state of {state.stepped.name} for {state.of}: got {', '.join(more)}, which "
                    "the recorded step did not have: capture the step again"
                )


def _check_shared(places: Sequence[_Place]) -> None:
    """Check that places share tensors exactly as in the recorded step.

    Raises:
        BindingError: they do not; it names two of them.
    """
    by_ours: dict[int, _Place] = {}
    by_theirs: dict[int, _Place] = {}
    for place in places:
        recorded = by_ours.setdefault(id(place.ours), place)
        if recorded.theirs is not place.theirs:
            raise BindingError(
                f"{place.name}: expected the tensor that {recorded.name} is, as in the recorded "
                f"step, got another: use one tensor for both, {_AGAIN}"
            )
        now = by_theirs.setdefault(id(place.theirs), place)
        if now.ours is not place.ours:
            raise BindingError(
                f"{place.name}: expected a tensor of its own, as in the recorded step, got that of "
                f"{now.name}: give it a copy, {_AGAIN}"
            )


def _other_hyperparameter(group: Group, key: str, now: dict[str, Any]) -> str:
    if key == "params":
        return f"{group.place(key)}: other parameters than in the recorded step: capture again"
    advice = "capture the step again"
    if key == "lr" and isinstance(group.values[key], float) and "fused" in group.values:
        # torch's fused optimizers read a tensor on the host for every other hyperparameter.
        advice += (
            "; for a learning rate that changes between steps give the optimizer fused=True and a "
            f"tensor (lr=torch.tensor({group.values[key]!r})), which a scheduler writes in place"
        )
    return (
        f"{group.place(key)}: expected {described(group.values[key])}, with which the step was "
        f"recorded, got {described(now.get(key))}: {advice}"
    )


def _may_take(ours: Any, theirs: Any) -> bool:
    """Whether the content of another tensor can be copied into the one that launches use."""
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
