"""The host's cost of each operator of a Program: its eager call less its launch in a replay."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.console.progress import stage
from offload.costs import signature_of
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.own_generators import drawing_alone
from offload.interpreter.torch_names import split_operator
from offload.observe.diagnosis.stopwatch import Clock, Effort, time_in_turns
from offload.program import BoundProgram, Launch
from offload.timeline import ExecutionTimeline, SpanKind

_EFFORT = Effort(turns=9, sample_ns=50_000, budget_ns=50_000_000, least_turns=3)
_BUDGET_NS = 5_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of all launches of one operator signature.

    Attributes:
        signature: the operator with dtypes and shapes of its tensors, and its other arguments.
        called_as: how the eager call was made, such as `torch.addmm`.
        n_launches: launches in one call of the model.
        eager_ns: one separate call from Python.
        device_ns: one launch in a replay, on average; None without a timeline.
    """

    signature: str
    called_as: str
    n_launches: int
    eager_ns: float
    device_ns: float | None

    @property
    def host_ns(self) -> float | None:
        """The host's cost of one call: eager less device. Noise may make it negative."""
        return None if self.device_ns is None else self.eager_ns - self.device_ns

    @property
    def total_ns(self) -> float:
        """For all launches: the host's time, or if unknown the eager time."""
        return self.n_launches * (self.eager_ns if self.host_ns is None else self.host_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCosts:
    """The costs of a Program's operators.

    Attributes:
        operators: by total cost, largest first.
        n_signatures: distinct signatures in the Program.
        untimed: the reason for each signature that was not timed.
    """

    operators: tuple[OperatorCost, ...]
    n_signatures: int
    untimed: tuple[str, ...] = ()


def device_ns_by_launch(executions: Sequence[ExecutionTimeline]) -> dict[int, float]:
    """The median duration of each launch over the executions of a timeline."""
    durations: dict[int, list[int]] = {}
    for execution in executions:
        for span in execution.of_kind(SpanKind.LAUNCH):
            durations.setdefault(span.launch, []).append(span.duration_ns)
    return {launch: statistics.median(found) for launch, found in durations.items()}


def operator_costs(
    bound: BoundProgram,
    inputs: Sequence[torch.Tensor],
    clock: Clock,
    device_ns: Mapping[int, float] | None = None,
) -> OperatorCosts:
    """Time one eager call of each distinct signature, on the tensors that it has in this Program.

    The Program is run once, launch by launch, on copies of the inputs and weights that it writes,
    and draws from separate generators. Launches that cannot are left out, and make zeros.

    Args:
        bound: recorded on the CPU.
        inputs: its inputs in order.
        clock: to measure with.
        device_ns: by launch, from `device_ns_by_launch`; None without a timeline.

    Raises:
        CaptureError: a launch's results have another shape than recorded.
        RuntimeError: from torch; a launch failed.
    """
    alone = drawing_alone(bound)
    run = EagerRun(alone.bound, _private_copies(bound, inputs), fill=0)
    launches: dict[str, list[Launch]] = {}
    timed: dict[str, tuple[str, float]] = {}
    untimed: list[str] = []
    deadline_ns = clock.now_ns() + _BUDGET_NS
    own = alone.bound.program.launches
    timing = stage("timing operators", len(own))
    with timing as current, torch.no_grad(), torch._C._DisableAutocast():
        for recorded, launch in zip(bound.program.launches, own, strict=True):
            current.reach(recorded.index)
            signature = signature_of(recorded)
            if launch in alone.others:
                launches.setdefault(signature, [])
                untimed.append(f"{signature}: {alone.refusal}")
                continue
            if signature not in launches:
                if clock.now_ns() < deadline_ns:
                    timed[signature] = _time_launch(run, launch, clock)
                else:
                    untimed.append(f"{signature}: the time for measuring operators was used up")
            launches.setdefault(signature, []).append(recorded)
            outcome = run.call(launch)()
            if launch.guard is None:
                run.keep(launch, outcome)
    costs = []
    for signature, (called_as, eager_ns) in timed.items():
        ones = launches[signature]
        costs.append(
            OperatorCost(signature, called_as, len(ones), eager_ns, _mean(ones, device_ns))
        )
    costs.sort(key=lambda one: (-one.total_ns, one.signature))
    return OperatorCosts(tuple(costs), len(launches), tuple(untimed))


def _mean(launches: Iterable[Launch], device_ns: Mapping[int, float] | None) -> float | None:
    if device_ns is None:
        return None
    return statistics.mean(device_ns[launch.index] for launch in launches)


def _private_copies(
    bound: BoundProgram, inputs: Sequence[torch.Tensor]
) -> dict[int, tuple[torch.UntypedStorage, int]]:
    """The memory of inputs and weights; copies of what the Program writes, shared likewise."""
    program = bound.program
    tensors = dict(zip((view.value for view in program.inputs), inputs, strict=True))
    tensors |= {index: holders[0] for index, holders in bound.bindings.weights.items()}
    written = {index for launch in program.launches for index in launch.writes}
    copied: dict[int, torch.UntypedStorage] = {}
    for index in written & tensors.keys():
        storage = tensors[index].untyped_storage()
        copied.setdefault(storage._cdata, storage.clone())
    bases = {}
    for index, tensor in tensors.items():
        storage = tensor.untyped_storage()
        offset_bytes = (
            0
            if index in bound.bindings.weights
            else int(tensor.storage_offset()) * tensor.element_size()
        )
        bases[index] = (copied.get(storage._cdata, storage), offset_bytes)
    return bases


def _time_launch(run: EagerRun, launch: Launch, clock: Clock) -> tuple[str, float]:
    """The form of a launch's call, and the median duration of a call; its writes are undone."""
    with _content_kept(run, launch):
        called_as, call = _as_python_calls(run, launch)
        timing = time_in_turns({"eager": call}, clock, _EFFORT)["eager"]
    return called_as, timing.median_ns


@contextlib.contextmanager
def _content_kept(run: EagerRun, launch: Launch) -> Iterator[None]:
    written = [view for view in launch.views() if view.value in launch.writes]
    storages = [run.tensor(view).untyped_storage() for view in written]
    before = [storage.clone() for storage in storages]
    try:
        yield
    finally:
        for storage, content in zip(storages, before, strict=True):
            storage.copy_(content)


def _as_python_calls(run: EagerRun, launch: Launch) -> tuple[str, Callable[[], Any]]:
    """The launch as model code calls it: torch's Python function, else the overload.

    Calling an overload (`torch.ops.aten.relu`) takes longer than the function that models use
    (`torch.relu`). A function represents the overload only if its results have the same layouts;
    trailing arguments at their defaults are omitted, as in model code.
    """
    overload_call = run.call(launch)
    wanted = _layouts(overload_call())
    positional, named = _without_defaults(*run.operands(launch), overload_call)
    name = split_operator(launch.name)[0].removeprefix("aten::")
    for prefix, owner in _OWNERS:
        function = getattr(owner, name, None)
        if launch.name.startswith("aten::") and callable(function):
            call = functools.partial(function, *positional, **named)
            try:
                found = _layouts(call())
            except (TypeError, RuntimeError, ValueError):
                continue
            if found == wanted:
                return f"{prefix}.{name}", call
    return f"torch.ops: {launch.name}", overload_call


_OWNERS: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.functional", torch._C._nn),
)


def _without_defaults(
    positional: list[Any], named: dict[str, Any], overload_call: Any
) -> tuple[list[Any], dict[str, Any]]:
    arguments = overload_call.func._schema.arguments
    while positional and _is_default(arguments[len(positional) - 1], positional[-1]):
        positional = positional[:-1]
    schema = {one.name: one for one in arguments}
    return positional, {
        name: value for name, value in named.items() if not _is_default(schema[name], value)
    }


def _is_default(argument: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor) or not argument.has_default_value():
        return False
    return type(argument.default_value) is type(value) and bool(argument.default_value == value)


def _layouts(outcome: Any) -> Any:
    if isinstance(outcome, torch.Tensor):
        return outcome.dtype, tuple(outcome.shape), outcome.stride()
    if isinstance(outcome, list | tuple):
        return [_layouts(one) for one in outcome]
    return type(outcome)
