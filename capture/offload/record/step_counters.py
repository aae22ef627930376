"""The step counters in optimizers' state, and what each execution checks of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from offload.program import Argument, TensorView
from offload.record.step_numbers import READING, StepNumbers
from offload.record.trained_parts import OptimizerState, Stepped

if TYPE_CHECKING:
    from offload.record.launches import LaunchRecorder


def step_numbers(
    optimizers: Iterable[Stepped], states: Sequence[OptimizerState], log: LaunchRecorder
) -> StepNumbers:
    """The numbers that optimizers compute from the step counters in their state.

    Where all counters of an optimizer hold the same number, each execution first checks that they
    do: then results of one counter serve all.

    Args:
        optimizers: those that the call steps.
        states: the state of all their parameters before the call.
        log: receives the checks.
    """
    alike: dict[int, str] = {}
    for stepped in optimizers:
        counters = _read_counters(stepped, states)
        if len(counters) > 1 and len({float(one) for one in counters}) == 1:
            _guard_same(
                log,
                counters,
                f"the step counters of {stepped.name}, which were equal when the step was recorded",
            )
            alike.update((id(one), stepped.name) for one in counters)
        if isinstance(stepped.optimizer, torch.optim.RAdam):
            for one in counters[: 1 if stepped.name in alike.values() else None]:
                _guard_least(
                    log, one, f"a step counter of {stepped.name}, at least its recorded value"
                )

    def shared(counter: torch.Tensor) -> Hashable | None:
        added = _added_to(log, counter) if id(counter) in alike else None
        return None if added is None else (alike[id(counter)], added)

    return StepNumbers(_counters_of(states), shared)


def _read_counters(stepped: Stepped, states: Iterable[OptimizerState]) -> list[torch.Tensor]:
    """The counters of an optimizer that may be read on the host: fused ones do not read any."""
    if not isinstance(stepped.optimizer, READING) or all(
        group.get("fused") for group in stepped.optimizer.param_groups
    ):
        return []
    own = [one for one in states if one.stepped is stepped]
    return [one for one in _counters_of(own, "step") if one.device.type == "cpu"]


def _counters_of(states: Iterable[OptimizerState], key: str = "") -> Iterator[torch.Tensor]:
    """Yield the numbers in optimizers' state that lie where the parameters do.

    A counter on the host beside a parameter on a device is read there, and refused.
    """
    for state in states:
        if not isinstance(state.key, torch.Tensor):
            continue
        for name, item in state.items.items():
            is_number = isinstance(item, torch.Tensor) and not item.dim()
            if is_number and key in ("", name) and item.device == state.key.device:
                yield item


def _guard_same(log: LaunchRecorder, counters: Sequence[torch.Tensor], what: str) -> None:
    """Record that every execution must find the same number in all these counters."""
    stacked = log.dispatch(torch.ops.aten.stack.default, (list(counters),), {})
    tracked = log.table.of(stacked)
    first = stacked[:1].expand_as(stacked)
    views = log.table.view(stacked, tracked), log.table.view(first, tracked)
    log.guard_equal(views, (tracked,), what)


def _guard_least(log: LaunchRecorder, counter: torch.Tensor, what: str) -> None:
    """Record that every execution must find at least the number that a counter holds now."""
    now = counter.detach().clone()
    log.table.add_weight(now)
    larger = log.dispatch(torch.ops.aten.maximum.default, (counter, now), {})
    _guard_same(log, [counter, larger], what)


def _added_to(log: LaunchRecorder, counter: torch.Tensor) -> tuple[object, ...] | None:
    """The call's additions to a counter so far, for comparison; None: it wrote otherwise."""
    index = log.table.of(counter).value.index
    added: list[object] = []
    for launch in log.launches:
        if index not in launch.writes:
            continue
        _, *others = launch.arguments
        if launch.name == "aten::add_.Tensor" and all(_is_fixed(log, one) for one in others):
            added.append(tuple(others))
        elif launch.name.startswith("aten::_foreach_add_."):
            added.append(launch.index)  # the same for each tensor of its list
        else:
            return None
    return tuple(added)


def _is_fixed(log: LaunchRecorder, argument: Argument) -> bool:
    """Whether an argument is the same number in each execution."""
    if not isinstance(argument, TensorView):
        return True
    return log.numbers is not None and log.numbers.has(argument.value)
