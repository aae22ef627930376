"""What each execution of a step that trains compares with the recorded one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from offload.errors import BindingError

# Fields of tensors by C's getters: they are asked of every parameter at each execution.
_FIELDS: Any = vars(torch._C.TensorBase)
_GRADIENT_OF = _FIELDS["grad"].__get__
_REQUIRES_GRADIENT = _FIELDS["requires_grad"].__get__
_HOOKS_OF = _FIELDS["_backward_hooks"].__get__
_LATE_HOOKS_OF = _FIELDS["_post_accumulate_grad_hooks"].__get__
_TRAINING_OF = operator.attrgetter("training")

# What a scheduler notes in a group, and no step reads (torch/optim/lr_scheduler.py).
_NOTES = frozenset({"initial_lr"})

_AGAIN = "or capture the step again"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that has gradients, with its name."""

    name: str
    tensor: torch.Tensor

    def hooks(self) -> bool:
        """Whether Python runs when its gradient has come."""
        return bool(_HOOKS_OF(self.tensor)) or bool(_LATE_HOOKS_OF(self.tensor))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """An optimizer, with how the step reaches it."""

    name: str
    optimizer: torch.optim.Optimizer

    def hooks(self) -> bool:
        """Whether Python runs before a step of it, or behind."""
        one = self.optimizer
        return bool(one._optimizer_step_pre_hooks) or bool(one._optimizer_step_post_hooks)


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer keeps for one parameter.

    Attributes:
        key: the parameter.
        of: its name.
        items: what is kept, by name.
    """

    stepped: Stepped
    key: Any
    of: str
    items: dict[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters of an optimizer, with its hyperparameters.

    Attributes:
        at: which group of the optimizer's.
        values: all that it holds, by key.
        params: its parameters.
    """

    stepped: Stepped
    at: int
    values: dict[str, Any]
    params: tuple[torch.Tensor, ...]

    def place(self, key: str) -> str:
        """How a hyperparameter is reached."""
        return f"{self.stepped.name}.param_groups[{self.at}][{key!r}]"

    def same_place(self, other: Group) -> bool:
        """Whether it is the same group of the same optimizer."""
        return self.stepped is other.stepped and self.at == other.at

    def changed_key(self, now: dict[str, Any]) -> str:
        """The first key under which there is another value now; empty if there is none."""
        for key, value in self.values.items():
            if key in _NOTES:
                continue
            if key == "params":
                if not _are_same(now.get(key, ()), self.params):
                    return key
            elif key not in now or not _is_same(value, now[key]):
                return key
        return ""


def _is_same(one: Any, other: Any) -> bool:
    """Whether a step computes the same with it: a tensor is the same one, a number is equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, (list, tuple)):
        same_length = type(one) is type(other) and len(one) == len(other)
        return same_length and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _hold(held: Sequence[dict[Any, Any]], values: Sequence[object]) -> bool:
    """Whether mappings hold these objects, in their order."""
    now = chain.from_iterable(map(dict.values, held))
    return sum(map(len, held)) == len(values) and all(map(operator.is_, now, values))


class TrainingGuard:
    """Compares what a step finds with what the recorded one found, and puts in order what it can.

    Gradients: one that the step makes anew is given its place again. One that the step adds to is
    filled with zeros where it was dropped (`zero_grad()`), since that is what eager would add to.
    State that `load_state_dict` has put into an optimizer is copied into the tensors that the
    launches write, and these are put in its place. Parameters and state that are written in place
    are seen without that.

    Owner: the Bindings of the Program. Thread: any, one at a time.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[Leaf, torch.Tensor | None, bool]],
        *,
        states: Sequence[OptimizerState],
        groups: Sequence[Group],
        optimizers: Sequence[Stepped],
        modules: Sequence[torch.nn.Module],
        attributes: Sequence[tuple[str, object, str]] = (),
    ) -> None:
        """Take what the recorded step left.

        Args:
            gradients: of each leaf, what its gradient is between steps, and whether the step
                reads it.
            states: all that the optimizers keep.
            groups: all groups of the optimizers.
            optimizers: those that the step can reach.
            modules: those that it can reach.
            attributes: what else is to be the same object or an equal number: its name for people,
                who has it, and as which attribute.
        """
        self._gradients = tuple(gradients)
        self._leaves = [leaf.tensor for leaf, _, _ in gradients]
        self._kept = [kept for _, kept, _ in gradients]
        self._states, self._groups = tuple(states), tuple(groups)
        self._optimizers, self._modules = tuple(optimizers), tuple(modules)
        self._training = [one.training for one in modules]
        self._attributes = [
            (name, owner, attribute, getattr(owner, attribute))
            for name, owner, attribute in attributes
        ]
        held: Iterator[dict[str, Any]] = (
            one for module in modules for one in (module._parameters, module._buffers)
        )
        self._held_tensors = [one for one in held if one]
        self._tensors = list(chain.from_iterable(map(dict.values, self._held_tensors)))
        self._look()

    def _look(self) -> None:
        """Note the objects that hold all this now, to be compared by identity."""
        self._held_states = [(one.optimizer, one.optimizer.state) for one in self._optimizers]
        all_states = [one.optimizer.state for one in self._optimizers]
        self._held_items = list(chain.from_iterable(map(dict.values, all_states)))
        self._items = list(chain.from_iterable(one.values() for one in self._held_items))
        self._held_groups = [one.stepped.optimizer.param_groups[one.at] for one in self._groups]
        self._values = list(chain.from_iterable(one.values() for one in self._held_groups))

    def __call__(self) -> None:
        """Before an execution.

        Raises:
            BindingError: eager would do something else than was recorded; the message names what
                differs.
        """
        if not torch.is_grad_enabled():
            raise BindingError(
                "gradients are switched off here (torch.no_grad, torch.inference_mode), where a "
                "step that trains has none: call it outside"
            )
        if not all(map(operator.is_, map(_GRADIENT_OF, self._leaves), self._kept)):
            self._order_gradients()
        if not all(map(_REQUIRES_GRADIENT, self._leaves)):
            self._refuse_frozen()
        if any(map(_HOOKS_OF, self._leaves)) or any(map(_LATE_HOOKS_OF, self._leaves)):
            self._refuse_hooks()
        if list(map(_TRAINING_OF, self._modules)) != self._training:
            self._refuse_mode()
        if not _hold(self._held_tensors, self._tensors):
            self._refuse_replaced()
        for name, owner, attribute, recorded in self._attributes:
            if not _is_same(recorded, getattr(owner, attribute)):
                raise BindingError(
                    f"{name}: expected {_described(recorded)}, as in the recorded step, got "
                    f"{_described(getattr(owner, attribute))}: set it back, {_AGAIN}"
                )
        for stepped in self._optimizers:
            if stepped.hooks():
                raise BindingError(
                    f"{stepped.name} has a hook, which the recorded step had not: remove it, "
                    f"{_AGAIN}, without it"
                )
        if not self._has_same_optimizers():
            self._order_optimizers()

    def _has_same_optimizers(self) -> bool:
        return (
            all(optimizer.state is state for optimizer, state in self._held_states)
            and all(
                group.stepped.optimizer.param_groups[group.at] is held
                for group, held in zip(self._groups, self._held_groups, strict=True)
                if group.at < len(group.stepped.optimizer.param_groups)
            )
            and _hold([state for _, state in self._held_states], self._held_items)
            and _hold(self._held_items, self._items)
            and _hold(self._held_groups, self._values)
            and all(
                _are_same(held["params"], group.params)
                for group, held in zip(self._groups, self._held_groups, strict=True)
            )
            and sum(len(one.optimizer.param_groups) for one in self._optimizers)
            == len(self._groups)
        )

    # ---- gradients ---------------------------------------------------------------------------

    def _order_gradients(self) -> None:
        for leaf, kept, is_read in self._gradients:
            found = leaf.tensor.grad
            if found is kept:
                continue
            if kept is None:
                raise BindingError(
                    f"the gradient of {leaf.name}: expected None, as before and after the recorded "
                    "step, got a tensor: set it to None (zero_grad()) before the call"
                )
            if is_read and found is not None:
                raise BindingError(
                    f"the gradient of {leaf.name}: expected the tensor that the recorded step adds "
                    "to, got another: write it in place (param.grad.copy_(...)), set it to None, "
                    f"{_AGAIN}"
                )
        # Nothing is changed before all was compared.
        with torch.no_grad():
            for leaf, kept, is_read in self._gradients:
                if leaf.tensor.grad is kept or kept is None:
                    continue
                if is_read:
                    kept.zero_()
                leaf.tensor.grad = kept

    def _refuse_frozen(self) -> None:
        name = next(leaf.name for leaf, _, _ in self._gradients if not leaf.tensor.requires_grad)
        raise BindingError(
            f"{name}: expected a tensor that requires gradients, as in the recorded step, got one "
            f"that does not: call {name}.requires_grad_(), {_AGAIN} with it frozen"
        )

    def _refuse_hooks(self) -> None:
        for leaf, _, _ in self._gradients:
            if leaf.hooks():
                raise BindingError(
                    f"the gradient of {leaf.name} has a hook, which the recorded step had not, and "
                    "an execution runs no Python: remove it (handle.remove())"
                )

    def _refuse_mode(self) -> None:
        for module, recorded in zip(self._modules, self._training, strict=True):
            if module.training is not recorded:
                raise BindingError(
                    f"a module ({type(module).__qualname__}): expected training={recorded}, as in "
                    f"the recorded step, got training={module.training}: call "
                    f"model.{'train' if recorded else 'eval'}() before the step, {_AGAIN}"
                )

    def _refuse_replaced(self) -> None:
        recorded = {id(one) for one in self._tensors}
        names = [
            f"{name} of a {type(module).__qualname__}"
            for module in self._modules
            for name, one in (*module._parameters.items(), *module._buffers.items())
            if id(one) not in recorded
        ]
        raise BindingError(
            f"{', '.join(names[:3]) or 'a parameter or buffer'}: expected the tensors of the "
            "recorded step, which executions write, got others (an assignment, or "
            f"load_state_dict(assign=True)): write them in place (param.copy_(...)), {_AGAIN}"
        )

    # ---- optimizers --------------------------------------------------------------------------

    def _order_optimizers(self) -> None:
        n_groups = sum(len(one.optimizer.param_groups) for one in self._optimizers)
        if n_groups != len(self._groups):
            raise BindingError(
                f"optimizers: expected {len(self._groups)} groups of parameters, as in the "
                f"recorded step, got {n_groups}: capture the step again"
            )
        moved = [*self._moved_hyperparameters(), *self._moved_states()]
        # Nothing is changed before all was compared.
        with torch.no_grad():
            for holder, key, ours, theirs in moved:
                ours.copy_(theirs)
                holder[key] = ours
        self._look()

    def _moved_hyperparameters(self) -> list[tuple[dict[Any, Any], Any, torch.Tensor, Any]]:
        moved = []
        for group in self._groups:
            now = group.stepped.optimizer.param_groups[group.at]
            key, found = group.changed_key(now), dict(now)
            while key and _may_take(group.values[key], found.get(key)):
                moved.append((now, key, group.values[key], found[key]))
                found[key] = group.values[key]
                key = group.changed_key(found)
            if key:
                raise BindingError(_other_hyperparameter(group, key, now))
        return moved

    def _moved_states(self) -> list[tuple[dict[Any, Any], Any, torch.Tensor, Any]]:
        moved = []
        for state in self._states:
            now = state.stepped.optimizer.state.get(state.key, {})
            for key, ours in state.items.items():
                theirs = now.get(key)
                if _is_same(ours, theirs):
                    continue
                if not _may_take(ours, theirs):
                    raise BindingError(
                        f"{key} of {state.of} (state of {state.stepped.name}): expected "
                        f"{_described(ours)}, as in the recorded step, got {_described(theirs)}: "
                        f"load a state of the same optimizer, {_AGAIN}"
                    )
                moved.append((now, key, ours, theirs))
            if more := sorted(map(str, now.keys() - state.items.keys())):
                raise BindingError(
                    f"state of {state.stepped.name} for {state.of}: got {', '.join(more)}, which "
                    "the recorded step had not: capture the step again"
                )
        return moved


def _other_hyperparameter(group: Group, key: str, now: dict[str, Any]) -> str:
    if key == "params":
        return f"{group.place(key)}: other parameters than in the recorded step: capture again"
    advice = "capture the step again"
    if isinstance(group.values[key], float):
        advice += (
            "; for a value that changes between steps give the optimizer fused=True and a tensor "
            f"({key}=torch.tensor({group.values[key]!r})), which a scheduler writes in place"
        )
    return (
        f"{group.place(key)}: expected {_described(group.values[key])}, with which the step was "
        f"recorded, got {_described(now.get(key))}: {advice}"
    )


def _may_take(ours: Any, theirs: Any) -> bool:
    """Whether the content of another tensor can be copied into the one that launches use."""
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return repr(value) if value is not None else "none"
