"""Executions that nobody asked for, on made-up inputs: whether they work, and what they take.

The executable draws from generators of its own (`own_generators.drawing_alone`), and weights that
are written are put back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from offload.console.progress import advance, stage
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.made_up_inputs import input_tensors, made_up_inputs
from offload.program import BoundProgram
from offload.program.structure import unflatten
from offload.run import Executable
from offload.timeline import SpanKind, Timeline

_WARM_UP = 2
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 100
_ROUNDS_NS = 5e8  # of executions, where these are more than the least


def execute_made_up(run: Executable, n_executions: int) -> None:
    """Execute on made-up inputs; weights that are written are put back.

    Raises:
        BindingError: a guard refuses the inputs.
        ExecutionError: a launch does.
    """
    call = made_up_call(run)
    with weights_kept(run.bound):
        for _ in range(n_executions):
            call()
            advance()


def made_up_call(run: Executable) -> Callable[[], object]:
    """A call of an executable with made-up inputs, which are the same each time."""
    tensors = input_tensors(run.bound, made_up_inputs(run.bound, 0))
    args, kwargs = unflatten(run.bound.arguments_structure, tensors)
    return lambda: run(*args, **kwargs)


def taken_in_turns_ns(what: str, *runs: Executable) -> list[list[int]]:
    """What calls on made-up inputs take, in nanoseconds, each executable in turn.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    calls = [made_up_call(run) for run in runs]
    for _ in range(_WARM_UP):
        times_ns = [[_time_ns(call)] for call in calls]
    rounds_ns = sum(times[0] for times in times_ns)
    n_rounds = min(max(int(_ROUNDS_NS / rounds_ns), _LEAST_ROUNDS), _MOST_ROUNDS)
    with stage(what, n_rounds) as told:
        for _ in range(n_rounds):
            for call, times in zip(calls, times_ns, strict=True):
                times.append(_time_ns(call))
            told.advance()
    return [times[1:] for times in times_ns]


def _time_ns(call: Callable[[], object]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


def quickest_ns(run: Executable, n_executions: int) -> tuple[float, ...]:
    """What each launch takes at least, in nanoseconds, waits for weights left out.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    with run.timeline() as timeline:
        execute_made_up(run, n_executions)
    return tuple(float(min(times)) for _, times in sorted(launch_times_ns(timeline).items()))


def launch_times_ns(timeline: Timeline) -> dict[int, list[int]]:
    """By launch, what it took in each execution of a timeline, in nanoseconds."""
    times: dict[int, list[int]] = {}
    for execution in timeline.executions:
        for span in execution.of_kind(SpanKind.LAUNCH):
            times.setdefault(span.launch, []).append(span.duration_ns)
    return times


@contextlib.contextmanager
def weights_kept(bound: BoundProgram) -> Iterator[None]:
    """Put back weights in memory that the Program writes."""
    written = {index for launch in bound.program.launches for index in launch.writes}
    storages = [
        tensors[0].untyped_storage()
        for index, tensors in bound.bindings.weights.items()
        if index in written
    ]
    contents = [bytes_of(storage).clone() for storage in storages]
    try:
        yield
    finally:
        for storage, content in zip(storages, contents, strict=True):
            bytes_of(storage).copy_(content)
