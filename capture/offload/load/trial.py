"""Trial executions on made-up inputs: whether they work, and how long they take.

The executable draws from separate generators (`own_generators.drawing_alone`), and written weights
are restored.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from offload.console.progress import advance, stage
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.made_up_inputs import input_tensors, made_up_inputs
from offload.plan import row_reads
from offload.program import BoundProgram, Program
from offload.program.structure import unflatten
from offload.run import Executable
from offload.run.ticket import Ticket
from offload.timeline import SpanKind, Timeline

# The assumed time of an untimed launch besides its reads and writes.
_LAUNCH_NS = 1_000.0

# Calls in turns: the duration of a turn's timed calls, and of the untimed calls before them.
_TURN_NS, _BEFORE_NS = 2e6, 1.5e6
_TURNS_NS = 4e8  # of all turns, if more than the minimum
_LEAST_TURNS, _MOST_TURNS = 5, 40
_N_PAUSES = 9
_WARM_UP = 2
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 100
_ROUNDS_NS = 5e8  # of executions, if more than the minimum


class Called(Protocol):
    """A callable with the arguments of its program."""

    @property
    def bound(self) -> BoundProgram:
        """The program with its live objects."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute."""

    def submit(self, *args: Any, **kwargs: Any) -> Ticket:
        """Queue an execution."""


def execute_made_up(run: Executable, n_executions: int) -> None:
    """Execute on made-up inputs; written weights are restored.

    Raises:
        BindingError: a guard refuses the inputs.
        ExecutionError: a launch fails on them.
    """
    call = made_up_call(run)
    with weights_kept(run.bound), _gradients_as_needed(run):
        for _ in range(n_executions):
            call()
            advance()


def _gradients_as_needed(*runs: Called) -> contextlib.AbstractContextManager[None]:
    """Switch gradients off for a trial, without warnings, except for steps that train."""
    trains = any(run.bound.bindings.before_execution is not None for run in runs)
    return contextlib.nullcontext() if trains else torch.no_grad()


def made_up_call(run: Called) -> Callable[[], object]:
    """A call of an executable with made-up inputs, the same each time."""
    args, kwargs = _made_up_arguments(run)
    return lambda: run(*args, **kwargs)


def _made_up_arguments(run: Called) -> tuple[tuple[Any, ...], dict[str, Any]]:
    program = run.bound.program
    index = program.device_index
    on = torch.device(program.device if index is None else f"{program.device}:{index}")
    tensors = [
        one if program.values[view.value].on_host else one.to(on)
        for one, view in zip(
            input_tensors(run.bound, made_up_inputs(run.bound, 0)), program.inputs, strict=True
        )
    ]
    args, kwargs = unflatten(run.bound.arguments_structure, tensors)
    return args, kwargs


def made_up_stream(run: Called, n_executions: int) -> Callable[[], object]:
    """`n_executions` submissions with made-up inputs, and the wait for all of them."""
    args, kwargs = _made_up_arguments(run)

    def stream() -> None:
        for ticket in [run.submit(*args, **kwargs) for _ in range(n_executions)]:
            ticket.wait()

    return stream


def taken_in_turns_ns(what: str, *runs: Executable) -> list[list[int]]:
    """The times of calls on made-up inputs, in nanoseconds, each executable in turn.

    On a device that queues work, the times of submissions until the device has finished.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    calls = [
        made_up_stream(run, n_executions=1) if run.queues_work else made_up_call(run)
        for run in runs
    ]
    with _gradients_as_needed(*runs):
        for _ in range(_WARM_UP):
            times_ns = [[_time_ns(call)] for call in calls]
        rounds_ns = sum(times[0] for times in times_ns)
        n_rounds = min(max(int(_ROUNDS_NS / rounds_ns), _LEAST_ROUNDS), _MOST_ROUNDS)
        with stage(what, n_rounds) as current:
            for _ in range(n_rounds):
                for call, times in zip(calls, times_ns, strict=True):
                    times.append(_time_ns(call))
                current.advance()
    return [times[1:] for times in times_ns]


def taken_anew_in_turns_ns(
    what: str, runs: Sequence[tuple[Executable, Callable[[], None]]]
) -> list[list[int]]:
    """As `taken_in_turns_ns`, for submissions and the wait for their end.

    Args:
        what: shown as progress.
        runs: each executable, and a function called before each of its executions, untimed.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    streams = [(made_up_stream(run, 1), before) for run, before in runs]
    times_ns: list[list[int]] = [[] for _ in runs]
    n_rounds = _WARM_UP + _LEAST_ROUNDS
    with _gradients_as_needed(*(run for run, _ in runs)), stage(what, n_rounds) as current:
        at = 0
        while at < n_rounds:
            for (stream, before), times in zip(streams, times_ns, strict=True):
                before()
                times.append(_time_ns(stream))
            at += 1
            current.advance()
            if at == _WARM_UP:
                round_ns = sum(times[-1] for times in times_ns)
                n_more = min(max(int(_ROUNDS_NS / round_ns), _LEAST_ROUNDS), _MOST_ROUNDS)
                n_rounds = _WARM_UP + n_more
    return [times[_WARM_UP:] for times in times_ns]


def quickest_ns(run: Executable, n_executions: int) -> tuple[float, ...]:
    """The least time of each launch, in nanoseconds, without waits for weights.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    with run.timeline() as timeline:
        execute_made_up(run, n_executions)
    return tuple(float(min(times)) for _, times in sorted(launch_times_ns(timeline).items()))


def typical_ns(run: Executable, n_executions: int) -> tuple[float, ...]:
    """The median time of each launch, in nanoseconds; the executable was executed before.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    with run.timeline() as timeline:
        execute_made_up(run, n_executions)
    times = launch_times_ns(timeline)
    return tuple(float(statistics.median(of)) for _, of in sorted(times.items()))


def estimated_ns(program: Program, memory_bytes_per_ns: float) -> tuple[float, ...]:
    """The estimated time of each launch, from bytes read and written; for tables, of rows."""
    tables = row_reads(program)
    sizes_bytes = [
        tables[value.index].most_bytes if value.index in tables else value.size_bytes
        for value in program.values
    ]
    return tuple(
        _LAUNCH_NS
        + sum(sizes_bytes[index] for index in {*launch.reads, *launch.writes}) / memory_bytes_per_ns
        for launch in program.launches
    )


def calls_in_turns_ns(
    runs: Sequence[Called],
    what: str,
    made_up: Callable[[Called], Callable[[], object]] = made_up_call,
    agree: Callable[[Sequence[float]], list[float]] = list,
) -> list[float]:
    """The median time of a call among consecutive calls, in nanoseconds.

    Executables take turns, so that disturbances of the machine affect all of them; a turn begins
    with untimed calls. `what` is shown as progress; `made_up` makes the calls. `agree` makes the
    measurements of ranks equal on all ranks, which then make equally many calls.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    with _gradients_as_needed(*runs):
        return _calls_in_turns_ns([made_up(run) for run in runs], what, agree)


def calls_after_pauses_ns(runs: Sequence[Called], what: str, pause_s: float) -> list[float]:
    """The median time of a call after a pause, in nanoseconds, each executable in turn.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    times_ns: list[list[int]] = [[] for _ in runs]
    n_calls = _N_PAUSES * len(runs)
    with _gradients_as_needed(*runs), stage(what, n_calls, expected_s=n_calls * pause_s) as current:
        calls = [made_up_call(run) for run in runs]
        for _ in range(_N_PAUSES):
            for call, times in zip(calls, times_ns, strict=True):
                time.sleep(pause_s)
                times.append(_time_ns(call))
                current.advance()
    return [statistics.median(times) for times in times_ns]


def call_and_submission_ns(run: Executable, n_calls: int) -> tuple[float, float]:
    """The median times of a call, and of a submission with its wait.

    Raises:
        BindingError, ExecutionError: as `execute_made_up`.
    """
    args, kwargs = _made_up_arguments(run)
    with _gradients_as_needed(run):
        calls_ns = [_time_ns(lambda: run(*args, **kwargs)) for _ in range(n_calls)]
        submitted_ns = [
            _time_ns(lambda: run.submit(*args, **kwargs).result()) for _ in range(n_calls)
        ]
    return statistics.median(calls_ns), statistics.median(submitted_ns)


def _calls_in_turns_ns(
    calls: Sequence[Callable[[], object]],
    what: str,
    agree: Callable[[Sequence[float]], list[float]],
) -> list[float]:
    quickest_ns = agree([min(_time_ns(call) for _ in range(3)) for call in calls])
    n_calls = [max(1, round(_TURN_NS / ns)) for ns in quickest_ns]
    n_before = [max(1, round(_BEFORE_NS / ns)) for ns in quickest_ns]
    round_ns = sum(map(_turn_ns, quickest_ns, n_calls, n_before))
    n_turns = min(max(int(_TURNS_NS / round_ns), _LEAST_TURNS), _MOST_TURNS)
    times_ns: list[list[float]] = [[] for _ in calls]
    with stage(what, n_turns, expected_s=n_turns * round_ns / 1e9) as current:
        for _ in range(n_turns):
            for turn in zip(calls, n_calls, n_before, times_ns, strict=True):
                _take_turn(*turn)
            current.advance()
    return agree([statistics.median(times) for times in times_ns])


def _take_turn(
    call: Callable[[], object], n_calls: int, n_before: int, times_ns: list[float]
) -> None:
    for _ in range(n_before):
        call()
    begin_ns = time.perf_counter_ns()
    for _ in range(n_calls):
        call()
    times_ns.append((time.perf_counter_ns() - begin_ns) / n_calls)


def _turn_ns(call_ns: float, n_calls: int, n_before: int) -> float:
    return call_ns * (n_calls + n_before)


def _time_ns(call: Callable[[], object]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


def launch_times_ns(timeline: Timeline) -> dict[int, list[int]]:
    """The times of each launch in the executions of a timeline, in nanoseconds."""
    times: dict[int, list[int]] = {}
    for execution in timeline.executions:
        for span in execution.of_kind(SpanKind.LAUNCH):
            times.setdefault(span.launch, []).append(span.duration_ns)
    return times


@contextlib.contextmanager
def weights_kept(bound: BoundProgram) -> Iterator[None]:
    """Restore weights in memory that the Program writes."""
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
