"""The comparison of each execution of a step that trains with the recorded step."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.errors import BindingError
from offload.interpreter.outside_graphs import outside_graphs
from offload.native import _native
from offload.program import Watched
from offload.record.moved_state import MovedState
from offload.record.trained_parts import (
    Group,
    Leaf,
    OptimizerState,
    Stepped,
    containers_of,
    described,
    is_same,
)

_TRAINING_OF = operator.attrgetter("training")

# By the module attribute that holds hooks: what they run before or after.
_MODULE_HOOKS = {
    "_forward_hooks": "forward",
    "_forward_pre_hooks": "forward",
    "_backward_hooks": "backward",
    "_backward_pre_hooks": "backward",
}
_WATCHED_PARTS = ("_parameters", "_buffers", "_modules", *_MODULE_HOOKS)

_AGAIN = "or capture the step again"


class TrainingGuard:
    """Compares the state that a step finds with that of the recorded step, and repairs what it can.

    State that `load_state_dict` has put into an optimizer is copied into the tensors that the
    launches write, and these replace it. Parameters and state written in place need no copy. The
    caller puts gradients in place: a gradient that the step creates returns to its place, and a
    gradient that the step adds to is filled with zeros where it was dropped (`zero_grad()`), as
    eager would add to zero.

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
        """Take the state that the recorded step left.

        Args:
            gradients: of each leaf, its gradient between steps, and whether the step reads it.
            states: all state of the optimizers.
            groups: all groups of the optimizers.
            optimizers: the optimizers that the step can reach.
            modules: the modules that it can reach.
            attributes: other state that must be the same object or an equal number: its name for
                the user, its holder, and the attribute.
        """
        self._gradients = tuple(gradients)
        self._requires = [leaf.tensor.requires_grad for leaf, _, _ in gradients]
        self._n_hooks = [_native.n_accumulation_hooks(leaf.tensor) for leaf, _, _ in gradients]
        self._optimizers, self._modules = tuple(optimizers), tuple(modules)
        self._moved = MovedState(states, groups, optimizers)
        self._training = list(map(_TRAINING_OF, modules))
        self._parts = [
            {name: dict(one.items()) for name, one in _parts_of(module)} for module in modules
        ]
        self._numbers = [dict(_numbers_of(module)) for module in modules]
        self._attributes = [
            (name, owner, attribute, getattr(owner, attribute))
            for name, owner, attribute in attributes
        ]

    @outside_graphs
    def __call__(self) -> Watched:
        """Compare and repair, before an execution.

        Returns:
            The state to watch from now on: while it does not change, a call would find everything
            as this call did.

        Raises:
            BindingError: eager would differ from the recording; the message names the difference.
        """
        if not torch.is_grad_enabled():
            raise BindingError(
                "gradients are switched off here (torch.no_grad, torch.inference_mode), and a "
                "training step needs them: call it outside"
            )
        self._check_gradients()
        self._check_leaves()
        if list(map(_TRAINING_OF, self._modules)) != self._training:
            self._refuse_mode()
        for module, recorded in zip(self._modules, self._parts, strict=True):
            _check_parts(module, recorded)
        for module, numbers in zip(self._modules, self._numbers, strict=True):
            _check_numbers(module, numbers)
        for name, owner, attribute, recorded in self._attributes:
            _check_number(name, recorded, getattr(owner, attribute))
        for stepped in self._optimizers:
            if stepped.hooks():
                raise BindingError(
                    f"{stepped.name} has a hook, which the recorded step did not have: remove it, "
                    f"{_AGAIN}, without it"
                )
        self._moved.take()
        return self._watched()

    def _watched(self) -> Watched:
        optimizers = [one.optimizer for one in self._optimizers]
        containers = [
            *(one for module in self._modules for _, one in _parts_of(module)),
            *(one for stepped in self._optimizers for one in stepped.all_hooks()),
            *containers_of([(one.state, one.param_groups) for one in optimizers]),
        ]
        attributes = [
            *((vars(module), "training") for module in self._modules),
            *(
                (vars(module), name)
                for module, numbers in zip(self._modules, self._numbers, strict=True)
                for name in numbers
            ),
            *((vars(one), name) for one in optimizers for name in ("state", "param_groups")),
            *((vars(owner), name) for _, owner, name, _ in self._attributes),
        ]
        leaves = [(leaf.tensor, kept, is_read) for leaf, kept, is_read in self._gradients]
        sees_all = all(name in owner for owner, name in attributes) and all(
            isinstance(one, (dict, list)) for one in containers
        )
        seen = [one for one in containers if isinstance(one, (dict, list))]
        return seen, [one for one in attributes if one[1] in one[0]], leaves, sees_all

    # ---- leaves ------------------------------------------------------------------------------

    def _check_gradients(self) -> None:
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

    def _check_leaves(self) -> None:
        recorded = zip(self._gradients, self._requires, self._n_hooks, strict=True)
        for (leaf, _, _), requires, n_hooks in recorded:
            if leaf.tensor.requires_grad is not requires:
                expected, got = "requires gradients", "does not"
                if not requires:
                    expected, got = "requires no gradients", "does"
                raise BindingError(
                    f"{leaf.name}: expected a tensor that {expected}, as in the recorded step, got "
                    f"one that {got}: call {leaf.name}.requires_grad_({requires}), {_AGAIN} with "
                    f"it {'frozen' if requires else 'trained'}"
                )
            if leaf.hooks() or _native.n_accumulation_hooks(leaf.tensor) != n_hooks:
                raise BindingError(
                    f"the gradient of {leaf.name} has a hook, which the recorded step did not "
                    "have, and an execution runs no Python: remove it (handle.remove())"
                )

    def _refuse_mode(self) -> None:
        for module, recorded in zip(self._modules, self._training, strict=True):
            if module.training is not recorded:
                raise BindingError(
                    f"a module ({type(module).__qualname__}): expected training={recorded}, as in "
                    f"the recorded step, got training={module.training}: call "
                    f"model.{'train' if recorded else 'eval'}() before the step, {_AGAIN}"
                )


def _parts_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    own = vars(module)
    for name in _WATCHED_PARTS:
        yield name, own[name] if name in own else getattr(module, name)


def _numbers_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that torch's own layers compute with, such as a dropout's probability.

    In other modules such attributes may serve any purpose, such as counters of a training.
    """
    if not type(module).__module__.startswith("torch.nn."):
        return
    for name, value in vars(module).items():
        is_number = value is None or type(value) in (bool, float)
        if is_number and name != "training" and not name.startswith("_"):
            yield name, value


def _check_numbers(module: torch.nn.Module, recorded: dict[str, Any]) -> None:
    for name, value in recorded.items():
        _check_number(
            f"{name} of a {type(module).__qualname__}", value, vars(module).get(name, "nothing")
        )


def _check_number(name: str, recorded: object, now: object) -> None:
    if not is_same(recorded, now):
        raise BindingError(
            f"{name}: expected {described(recorded)}, as in the recorded step, got "
            f"{described(now)}: set it back, {_AGAIN}"
        )


def _check_parts(module: torch.nn.Module, recorded: dict[str, dict[str, Any]]) -> None:
    """Check that a module has the tensors, submodules and hooks of the recorded step.

    Raises:
        BindingError: it does not; the message names what it has instead.
    """
    for name, now in _parts_of(module):
        before = recorded[name]
        if not before and not now:
            continue
        if before.keys() == now.keys() and all(now[key] is one for key, one in before.items()):
            continue
        of = f"a {type(module).__qualname__}"
        if name in _MODULE_HOOKS:
            raise BindingError(
                f"{of} has other hooks ({_MODULE_HOOKS[name]}) than in the recorded step, and an "
                f"execution runs no Python: remove what was added (handle.remove()), {_AGAIN}"
            )
        others = [key for key, one in now.items() if key not in before or before[key] is not one]
        others += [key for key in before if key not in now]
        expected = "submodules"
        advice = f"put them back, {_AGAIN}"
        if name != "_modules":
            expected = "tensors"
            advice = f"write them in place (param.copy_(...)), {_AGAIN}"
        raise BindingError(
            f"{', '.join(others[:3])} of {of}: expected the {expected} of the recorded step, which "
            "executions use, got others (an assignment, or load_state_dict(assign=True)): "
            f"{advice}"
        )
