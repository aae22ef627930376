"""Trained state of a step: gradients, optimizers and their state, before and after it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.set_hyperparameters import (
    KeptHyperparameters,
    assigned_tensors,
    first_assigned,
    refuse_written_numbers,
)
from offload.record.step_counters import step_numbers
from offload.record.step_numbers import StepNumbers
from offload.record.trained_parts import (
    Group,
    Leaf,
    OptimizerState,
    Stepped,
    content_of,
    is_same,
    states_of,
    tensors_of,
)
from offload.record.training_guard import TrainingGuard
from offload.record.training_refusals import hidden_leaves, refuse_kernels

if TYPE_CHECKING:
    from offload.record.launches import LaunchRecorder
    from offload.record.python_state import PythonState

# Tensors that a GradScaler makes at its first use (torch/amp/grad_scaler.py,
# `_lazy_init_scale_...`).
_SCALER_TENSORS = ("_scale", "_growth_tracker")

# Fields that its launches receive.
_SCALER_FIELDS = (
    *_SCALER_TENSORS,
    "_enabled",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
)

# Counters of schedulers (torch/optim/lr_scheduler.py).
_SCHEDULER_COUNTERS = ("last_epoch", "_step_count", "num_bad_epochs")

_OUTSIDE = "do it between the calls, in eager"


@dataclasses.dataclass(slots=True)
class _Gradient:
    """A leaf, with its gradient before and after the call."""

    leaf: Leaf
    before: torch.Tensor | None
    after: torch.Tensor | None = None
    is_read: bool = True


class TrainedState:
    """The state that a call that trains changes besides tensors written in place.

    Owner: one Recorder.
    """

    def __init__(self, state: PythonState) -> None:
        """Note the state before the call.

        Args:
            state: the state that the call can reach.
        """
        found = state.trainers
        self._optimizers = [
            Stepped(path or "optimizer", one)
            for path, one in found
            if isinstance(one, torch.optim.Optimizer)
        ]
        self._others = [
            (path, one) for path, one in found if not isinstance(one, torch.optim.Optimizer)
        ]
        self._modules = state.modules
        self._gradients = [
            _Gradient(leaf, leaf.tensor.grad) for leaf in self._leaves(state.tensors)
        ]
        self._names = {id(one.leaf.tensor): one.leaf.name for one in self._gradients}
        self._states = self._all_states()
        self._groups = self._all_groups()
        self._counters = self._all_counters()
        self._scaler_tensors = self._all_scaler_tensors()

    def _leaves(self, reached: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Leaf]:
        """Yield tensors with gradients, and frozen parameters, which may later have gradients."""
        named = [(path.removeprefix("self."), one) for path, one in reached]
        stepped_ids: set[int] = set()
        for stepped in self._optimizers:
            for at, group in enumerate(stepped.optimizer.param_groups):
                where = f"{stepped.name}.param_groups[{at}]['params']"
                named += [(f"{where}[{n}]", one) for n, one in enumerate(group["params"])]
                stepped_ids.update(map(id, group["params"]))
        seen: set[int] = set()
        for name, tensor in named:
            may_have = (
                tensor.requires_grad
                or isinstance(tensor, torch.nn.Parameter)
                or id(tensor) in stepped_ids
            )
            if tensor.is_leaf and may_have and id(tensor) not in seen:
                seen.add(id(tensor))
                yield Leaf(name, tensor)

    def _all_states(self) -> list[OptimizerState]:
        return [
            OptimizerState(stepped, one, self._name(one), items)
            for stepped in self._optimizers
            for one, items in states_of(stepped)
        ]

    def _name(self, key: object) -> str:
        return self._names.get(id(key), "a parameter")

    def _all_groups(self) -> list[Group]:
        return [
            Group(stepped, at, content_of(group), tuple(group["params"]))
            for stepped in self._optimizers
            for at, group in enumerate(stepped.optimizer.param_groups)
        ]

    def _all_counters(self) -> list[tuple[str, object]]:
        return [
            (f"{path}.{name}", getattr(one, name, None))
            for path, one in self._others
            if not isinstance(one, torch.amp.GradScaler)
            for name in _SCHEDULER_COUNTERS
        ]

    def _all_scaler_tensors(self) -> list[tuple[str, object]]:
        return [
            (f"{path}.{name}", getattr(one, name))
            for path, one in self._others
            if isinstance(one, torch.amp.GradScaler) and one.is_enabled()
            for name in _SCALER_TENSORS
        ]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors by name that a step may write besides those that the call refers to."""
        for gradient in self._gradients:
            if gradient.before is not None:
                yield f"the gradient of {gradient.leaf.name}", gradient.before
        for state in self._states:
            for key, item in state.items.items():
                for one in tensors_of(item):
                    yield f"{key} of {state.of}", one
        for group in self._groups:
            for key, item in group.values.items():
                if isinstance(item, torch.Tensor):
                    yield group.place(key), item
        for name, item in self._scaler_tensors:
            if isinstance(item, torch.Tensor):
                yield name, item

    # ---- the call ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Refuse hooks that run Python in each step.

        Raises:
            CaptureError: an optimizer, a parameter or a module has a hook that a replay would not
                call.
        """
        for name, hooks in self._hooks():
            if hooks:
                raise CaptureError(
                    f"{name} has a hook, which runs Python in each step, and a replay runs none: "
                    "take it away (handle.remove()), and do what it does in the step itself, with "
                    "torch operators"
                )

    def _hooks(self) -> Iterator[tuple[str, object]]:
        for stepped in self._optimizers:
            yield f"{stepped.name} (before or after a step)", stepped.hooks()
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            others = [one for one in hooks.values() if not _is_ours(one)]
            yield "every optimizer (register_optimizer_step_..._hook)", others
        for one in self._gradients:
            yield f"the gradient of {one.leaf.name}", one.leaf.hooks()
        for module in self._modules:
            backward = (module._backward_hooks, module._backward_pre_hooks)
            yield f"a module ({type(module).__qualname__}, backward)", any(backward)

    def numbers(self, log: LaunchRecorder) -> StepNumbers:
        """The numbers that optimizers compute from the step counters in their state."""
        return step_numbers(self._optimizers, self._states, log)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the call's gradients as its caller does, all on this thread."""
        thread = threading.get_ident()

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if threading.get_ident() == thread:
                self._refuse_unknown(optimizer)

        handle = register_optimizer_step_pre_hook(look)
        # Tensors that autocast cast before the call would be taken for constants.
        torch.clear_autocast_cache()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            torch.clear_autocast_cache()
            handle.remove()

    def _refuse_unknown(self, optimizer: torch.optim.Optimizer) -> None:
        if all(optimizer is not one.optimizer for one in self._optimizers):
            raise CaptureError(
                f"{user_location()}: a {type(optimizer).__qualname__} steps that the call does not "
                "refer to where it was looked for (its closure, globals and arguments' objects, "
                "six containers deep), so that its hyperparameters and state cannot be watched: "
                "let the step name the optimizer"
            )

    # ---- after the call ----------------------------------------------------------------------

    def end(self, log: LaunchRecorder) -> str:
        """Examine the effects of the call, while it is still recorded.

        Returns:
            State that the call made and the next call finds: the next call must be recorded. Empty:
            the call found all that it left.

        Raises:
            CaptureError: it did something that a replay would not repeat.
        """
        refuse_kernels(log)
        self._refuse_changes(log)
        if made := next(self._made(log), ""):
            return made
        with torch.no_grad():
            for one in self._gradients:
                self._keep_in_place(one, log)
            hyperparameters = KeptHyperparameters(log)
            for before, now in self._groups_now():
                hyperparameters.keep(before, now)
        return ""

    def _made(self, log: LaunchRecorder) -> Iterator[str]:
        for one in self._gradients:
            if (one.leaf.tensor.grad is None) is not (one.before is None):
                yield f"the gradient of {one.leaf.name}"
        for state, known in self._states_now():
            for key, item in state.items.items():
                is_kept = key in known and is_same(known[key], item)
                if not is_kept and (key not in known or _has_tensors(known[key], item)):
                    yield f"{key} of {state.of} (state of {state.stepped.name})"
        for before, group in self._groups_now():
            yield from first_assigned(before, group, log)
        now = self._all_scaler_tensors()
        for (name, item), (_, other) in zip(now, self._scaler_tensors, strict=True):
            if item is not other:
                yield name

    def _refuse_changes(self, log: LaunchRecorder) -> None:
        counted = zip(self._counters, self._all_counters(), strict=True)
        for (name, before), (_, now) in counted:
            if before != now:
                raise CaptureError(
                    f"the call steps a scheduler ({name}: {before!r} became {now!r}), which a "
                    f"replay would not do again: {_OUTSIDE}, with a tensor as learning rate"
                )
        groups = self._all_groups()
        is_same_number = len(groups) == len(self._groups)
        if not (is_same_number and all(map(Group.same_place, groups, self._groups))):
            raise CaptureError("the call adds a group of parameters to an optimizer: " + _OUTSIDE)
        for known, group in self._groups_now():
            assigned = assigned_tensors(known, group, log)
            unassigned = {key: known.values.get(key) for key in assigned}
            if key := known.changed_key({**group.values, **unassigned}):
                raise CaptureError(
                    f"the call changes {group.place(key)}, which a replay would not do again: "
                    f"{_OUTSIDE}, with a tensor in its place"
                )
        refuse_written_numbers(self._groups, log)
        self._refuse_numbers()
        self._refuse_hidden_leaves(log)

    def _groups_now(self) -> Iterator[tuple[Group, Group]]:
        """Yield each group before the call, and now."""
        return zip(self._groups, self._all_groups(), strict=True)

    def _refuse_numbers(self) -> None:
        """Refuse state that is a Python number: no replay would count it."""
        for state, known in self._states_now():
            for key, item in state.items.items():
                is_known = is_same(known.get(key, item), item)
                if not is_known and not _has_tensors(known[key], item):
                    raise CaptureError(
                        f"the step changes {key!r} of {state.of}, which {state.stepped.name} "
                        f"keeps as a Python number ({known[key]!r} became {item!r}): keep it as a "
                        "tensor that is written in place, as torch's own optimizers do"
                    )

    def _states_now(self) -> Iterator[tuple[OptimizerState, dict[Any, Any]]]:
        """Yield all current state, each with its items before the call."""
        before = {(id(one.stepped), id(one.key)): one.items for one in self._states}
        for state in self._all_states():
            yield state, before.get((id(state.stepped), id(state.key)), {})

    def _refuse_hidden_leaves(self, log: LaunchRecorder) -> None:
        for name, leaf in hidden_leaves(log, self._names):
            raise CaptureError(
                f"{name} ({list(leaf.shape)}) has a gradient, and the call does not refer to it "
                "where it was looked for (six containers or objects deep), so that the gradient "
                "cannot be watched: give its parameters to the optimizer, or let the step name "
                "the module that holds them"
            )

    def _keep_in_place(self, one: _Gradient, log: LaunchRecorder) -> None:
        """Let executions leave the gradient that the call made in the leaf's `.grad`."""
        made, leaf = one.leaf.tensor.grad, one.leaf.tensor
        if made is None or made is one.before:
            plain = made if made is not None and made.layout is torch.strided else None
            tracked = None if plain is None else log.table.find(plain)
            one.after, one.is_read = made, tracked is not None
            return
        tracked = log.table.find(made)
        if tracked is not None and tracked.is_state:
            raise CaptureError(
                f"the gradient of {one.leaf.name} was set to a tensor that existed before the "
                "call: copy it (param.grad.copy_(...))"
            )
        assert one.before is not None  # otherwise it would be new
        kept = torch.empty_like(made.detach())
        kept.copy_(one.before)
        log.table.add_held(kept, f"the gradient of {one.leaf.name}")
        log.recorded_copy(kept, made.detach())
        leaf.grad = kept
        one.after, one.is_read = kept, False

    def put_back(self) -> None:
        """Restore the gradients of leaves, unless a copy has replaced them."""
        for one in self._gradients:
            if one.after is None:
                one.leaf.tensor.grad = one.before

    def guard(self) -> TrainingGuard:
        """The guard by which each execution compares with the recorded step, and restores state."""
        return TrainingGuard(
            [(one.leaf, one.after, one.is_read) for one in self._gradients],
            states=self._all_states(),
            groups=self._all_groups(),
            optimizers=self._optimizers,
            modules=self._modules,
            attributes=[
                (f"{path}.{name}", one, name)
                for path, one in self._others
                if isinstance(one, torch.amp.GradScaler)
                for name in (_SCALER_FIELDS if one.is_enabled() else ("_enabled",))
            ],
        )


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("offload.")


def _has_tensors(*values: Any) -> bool:
    return any(True for value in values for _ in tensors_of(value))
