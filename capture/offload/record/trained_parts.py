"""The parts of trained state: leaves, optimizers, their groups and their state."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Tensor fields by their C getters: they are read for every parameter.
_FIELDS: Any = vars(torch._C.TensorBase)
_HOOKS_OF = _FIELDS["_backward_hooks"].__get__
_LATE_HOOKS_OF = _FIELDS["_post_accumulate_grad_hooks"].__get__

# Keys that a scheduler stores in a group and no step reads (torch/optim/lr_scheduler.py).
_NOTES = frozenset({"initial_lr"})


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that has gradients, or may have them, with its name."""

    name: str
    tensor: torch.Tensor

    def hooks(self) -> bool:
        """Whether Python runs when its gradient is computed."""
        return bool(_HOOKS_OF(self.tensor)) or bool(_LATE_HOOKS_OF(self.tensor))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """An optimizer, with its path from the step."""

    name: str
    optimizer: torch.optim.Optimizer

    def hooks(self) -> bool:
        """Whether Python runs before or after its step."""
        return any(self.all_hooks())

    def all_hooks(self) -> Iterator[dict[Any, Any]]:
        """Yield the mappings that hold its hooks."""
        yield self.optimizer._optimizer_step_pre_hooks
        yield self.optimizer._optimizer_step_post_hooks


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer for one parameter.

    Attributes:
        key: the parameter.
        of: its name.
        items: the state, by name; containers as `content_of` gives them.
    """

    stepped: Stepped
    key: Any
    of: str
    items: dict[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters of an optimizer, with its hyperparameters.

    Attributes:
        at: the group's position in the optimizer.
        values: all its entries, by key; containers as `content_of` gives them.
        params: its parameters.
    """

    stepped: Stepped
    at: int
    values: dict[str, Any]
    params: tuple[torch.Tensor, ...]

    def place(self, key: str) -> str:
        """The path of a hyperparameter."""
        return f"{self.stepped.name}.param_groups[{self.at}][{key!r}]"

    def same_place(self, other: Group) -> bool:
        """Whether it is the same group of the same optimizer."""
        return self.stepped is other.stepped and self.at == other.at

    def changed_key(self, now: dict[str, Any]) -> str:
        """The first key whose value has changed; empty if no value has."""
        for key, value in self.values.items():
            if key in _NOTES:
                continue
            if key == "params":
                if not _are_same(now.get(key, ()), self.params):
                    return key
            elif key not in now or not is_same(value, content_of(now[key])):
                return key
        return ""


def states_of(stepped: Stepped) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield for each key of an optimizer's state its current content, as `OptimizerState.items`."""
    for key, items in stepped.optimizer.state.items():
        if isinstance(items, dict):
            yield key, {name: content_of(item) for name, item in items.items()}
        else:
            yield key, {"": content_of(items)}


def content_of(value: Any) -> Any:
    """A copy of containers with their current content; other objects as they are."""
    if isinstance(value, (list, deque)):
        return [content_of(one) for one in value]
    if type(value) is tuple:
        return tuple(map(content_of, value))
    if isinstance(value, dict):
        return {key: content_of(one) for key, one in value.items()}
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what `content_of` gives."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one)


def containers_of(value: Any) -> Iterator[dict[Any, Any] | list[Any] | deque[Any]]:
    """Yield the mutable containers in a value, including itself."""
    if isinstance(value, (dict, list, deque)):
        yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, (dict, list, tuple, deque)):
            yield from containers_of(one)


def is_same(one: Any, other: Any) -> bool:
    """Whether a step computes the same with both: the same tensor object, or an equal number."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, (list, tuple)):
        same_length = type(one) is type(other) and len(one) == len(other)
        return same_length and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(is_same, one.values(), other.values()))
    return type(one) is type(other) and bool(one == other)


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def described(value: Any) -> str:
    """A value as text for the user; for a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return repr(value) if value is not None else "none"
