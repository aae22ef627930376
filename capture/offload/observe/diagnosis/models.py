"""Diagnoses a model by running it: eager against replay, and the enqueue test."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch

from offload.api import capture
from offload.api.captured import Captured
from offload.console.progress import Progress, reporting, stage
from offload.console.switches import measuring
from offload.console.user_code import callable_name
from offload.errors import CaptureError, DiagnosisError, OffloadError
from offload.interpreter.own_generators import drawing_alone
from offload.observe.diagnosis.contenders import TIMING, Contenders, measure
from offload.observe.diagnosis.diagnosis import (
    Diagnosis,
    NamedTiming,
    UnknownGain,
)
from offload.observe.diagnosis.evidence import (
    NotApplied,
    conclude,
)
from offload.observe.diagnosis.operators import OperatorCosts, device_ns_by_launch, operator_costs
from offload.observe.diagnosis.stopwatch import (
    Clock,
    Effort,
    SteadyClock,
    time_in_turns,
)
from offload.observe.diagnosis.subjects import check_program, check_subject, refuse_ranks
from offload.program.structure import OpaqueStructure, flatten
from offload.run import Executable

_TIMELINE_EXECUTIONS = 20
_HOST_TIME_NOTE = (
    "an operator's host time is one eager call by itself less its launch in a replay with a "
    "timeline; views, modules and Python between operators are not in it"
)


def diagnose(
    model: Callable[..., Any], *inputs: Any, progress: Progress = None, **kwargs: Any
) -> Diagnosis:
    """Determine whether a model is host-bound or device-bound, and the gain of capture.

    Calls the model, captures it, and times both alternately, some hundred calls of each, without a
    profiler. Its buffers and the input tensors are restored; parameters that the forward writes,
    and Python state, are not. Random numbers come from torch's generators, which are not restored,
    since other threads may draw from them; replays and single operators draw from separate
    generators where their operators accept one. Times hold for the given inputs, gradient mode and
    number of threads: for inference call it under `torch.no_grad()`.

    Args:
        model: an nn.Module, or any callable on tensors.
        *inputs: the model's arguments; **kwargs likewise.
        progress: None shows it on stderr, if that is a terminal; False shows nothing. A function is
            called between measurements with (done, total, what): the present work, and its
            progress. Each `what` begins at 0 and reaches its total on success. An exception of the
            function ends the diagnosis. A model that has a keyword of this name is diagnosed by
            `offload.diagnosis.diagnose_call`.
        **kwargs: see *inputs.

    Raises:
        BindingError: `progress` is something else.
        DiagnosisError: it is not a model, but for example a class or a function that makes a
            model; it does not accept these arguments; its call launches nothing,
            or exchanges tensors with other ranks; or the model and its arguments are on several
            devices.
    """
    return diagnose_call(model, inputs, kwargs, progress=progress)


def diagnose_call(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    subject: str = "",
    clock: Clock | None = None,
    effort: Effort | None = None,
    progress: Progress = None,
) -> Diagnosis:
    """Diagnose like `diagnose`, with a name for the report, a clock and a time limit.

    Raises:
        BindingError, DiagnosisError: as `diagnose`.
    """
    with reporting(progress, after_s=0), measuring():
        return _diagnose_call(
            model,
            args,
            kwargs,
            subject=subject,
            clock=clock or SteadyClock(),
            effort=effort or Effort(),
        )


def _diagnose_call(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    subject: str,
    clock: Clock,
    effort: Effort,
) -> Diagnosis:
    check_subject(model, args, kwargs)
    tensors = _tensors_of(args, kwargs)
    device = _device_of(model, tensors)
    call = functools.partial(model, *args, **kwargs)
    with _state_kept(model, tensors) as put_back:
        with stage("capturing the model", 1):
            captured = _capture(model, args, kwargs)
        if isinstance(captured, Captured):
            check_program(captured.name, captured.program)
        generator = torch.get_rng_state()
        with contextlib.ExitStack() as stack:
            run = _load(captured, stack) if isinstance(captured, Captured) else captured
            replay = run if isinstance(run, NotApplied) else functools.partial(run, *args, **kwargs)
            contenders = Contenders(call, replay, _synchronize(device))
            measured = measure(contenders, clock, effort)
            put_back()
            operators, notes = None, (*_notes(model), *_note_of_draws(generator))
            if isinstance(run, Executable):
                operators, more = _operators(run, args, kwargs, tensors, clock)
                notes += more
    conclusion = conclude(measured.findings)
    return Diagnosis(
        subject=subject or callable_name(model),
        device=device.type,
        verdict=conclusion.verdict,
        confidence=conclusion.confidence,
        reasons=conclusion.reasons,
        findings=measured.findings,
        not_applied=measured.not_applied,
        timings=measured.timings,
        n_launches=len(run.program.launches) if isinstance(run, Executable) else None,
        gain=measured.gain,
        operators=operators,
        notes=notes,
    )


def diagnose_saved(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    subject: str = "saved program",
    clock: Clock | None = None,
    effort: Effort | None = None,
    progress: Progress = None,
) -> Diagnosis:
    """Diagnose a saved Program without its model: durations of replay and operators.

    Whether the model is host-bound stays undecided, without an eager call to compare with.

    Raises:
        BindingError: the arguments do not fit the recorded call, or `progress` is not one of
            `diagnose`.
        DiagnosisError: the Program exchanges tensors with other ranks.
        BackendUnavailable, PlanError: the Program cannot be loaded here.
    """
    with reporting(progress, after_s=0), measuring():
        return _diagnose_saved(
            captured,
            args,
            kwargs,
            subject=subject,
            clock=clock or SteadyClock(),
            effort=effort or Effort(),
        )


def _diagnose_saved(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    subject: str,
    clock: Clock,
    effort: Effort,
) -> Diagnosis:
    refuse_ranks(subject, captured.program)
    reason = "the file holds the recorded program, and not the model to call eagerly"
    with _drawing_alone(captured).load() as run:
        tensors = _tensors_of(args, kwargs)
        with _state_kept(None, tensors) as put_back:
            with stage(TIMING, effort.turns) as current:
                calls = {"replay": lambda: run(*args, **kwargs)}
                replay = time_in_turns(calls, clock, effort, current.advance)
            put_back()
            operators, notes = _operators(run, args, kwargs, tensors, clock)
        conclusion = conclude(())
        return Diagnosis(
            subject=subject,
            device=run.device,
            verdict=conclusion.verdict,
            confidence=conclusion.confidence,
            reasons=(reason,),
            findings=(),
            not_applied=(NotApplied("enqueue", reason), NotApplied("replay", reason)),
            timings=(NamedTiming("replay", replay["replay"]),),
            n_launches=len(run.program.launches),
            gain=UnknownGain(reason),
            operators=operators,
            notes=notes,
        )


# ---- the model ----------------------------------------------------------------------------------


def _capture(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Captured | NotApplied:
    try:
        with capture(model) as captured:
            captured(*args, **kwargs)
    except CaptureError as error:
        return NotApplied("replay", f"capture is refused: {error}")
    return captured


def _load(captured: Captured, stack: contextlib.ExitStack) -> Executable | NotApplied:
    try:
        return stack.enter_context(_drawing_alone(captured).load())
    except OffloadError as error:
        return NotApplied("replay", f"the captured program cannot be loaded: {error}")


def _drawing_alone(captured: Captured) -> Captured:
    """The same Program on separate generators, if all its random launches accept one."""
    alone = drawing_alone(captured.bound)
    return captured if alone.refusal else Captured(alone.bound, captured.name)


def _operators(
    run: Executable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: list[torch.Tensor],
    clock: Clock,
) -> tuple[OperatorCosts | None, tuple[str, ...]]:
    """The operators' costs, and notes on them."""
    if run.program.opaque is not None:
        return None, (f"operators cannot be timed one by one: {run.program.opaque.reason}",)
    recording = stage("recording a timeline", _TIMELINE_EXECUTIONS)
    with recording as current, run.timeline() as timeline:
        for _ in range(_TIMELINE_EXECUTIONS):
            run(*args, **kwargs)
            current.advance()
    device_ns = device_ns_by_launch(timeline.executions)
    try:
        return operator_costs(run.bound, tensors, clock, device_ns), (_HOST_TIME_NOTE,)
    except (CaptureError, RuntimeError, IndexError, ValueError) as error:
        return None, (f"operators could not be timed one by one: {error}",)


def _notes(model: Callable[..., Any]) -> tuple[str, ...]:
    parameters = model.parameters() if _is_module(model) else ()
    if torch.is_grad_enabled() and any(one.requires_grad for one in parameters):
        return (
            "eager recorded for autograd, which a replay never does: for inference compare under "
            "torch.no_grad()",
        )
    return ()


def _note_of_draws(before: torch.Tensor) -> tuple[str, ...]:
    """The note on torch's CPU generator, whose state was `before`."""
    if torch.equal(before, torch.get_rng_state()):
        return ()
    return (
        "torch's random generator has advanced: the model drew from it in each eager call (or "
        "another thread did), and it is not restored, since other threads may draw from it",
    )


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)


def _tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in the order of a Program's inputs.

    Raises:
        DiagnosisError: they cannot be listed.
    """
    try:
        tensors, _ = flatten((tuple(args), dict(kwargs)), _is_tensor, share_same=False)
    except OpaqueStructure as error:
        raise DiagnosisError(f"the arguments' tensors cannot be listed: {error}") from error
    return tensors


def _device_of(model: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.device:
    """The device of the model and its inputs; of several the one that is not the CPU.

    Raises:
        DiagnosisError: they are on the meta device, or on several accelerators.
    """
    held = list(model.parameters()) + list(model.buffers()) if _is_module(model) else []
    devices = {one.device for one in (*held, *tensors)} - {torch.device("cpu")}
    if any(device.type == "meta" for device in devices) or len(devices) > 1:
        raise DiagnosisError(
            "expected the model and its inputs on one device that computes, got "
            f"{', '.join(sorted(str(device) for device in devices))}: move them with .to(device)"
        )
    return devices.pop() if devices else torch.device("cpu")


def _is_module(model: object) -> TypeGuard[torch.nn.Module]:
    return isinstance(model, torch.nn.Module)


def _synchronize(device: torch.device) -> Callable[[], object] | None:
    if device.type == "cpu":
        return None
    return functools.partial(torch.accelerator.synchronize, device)


@contextlib.contextmanager
def _state_kept(
    model: Callable[..., Any] | None, tensors: list[torch.Tensor]
) -> Iterator[Callable[[], None]]:
    """Restore buffers and inputs at the end; yields the function that restores them."""
    buffers = list(model.buffers()) if _is_module(model) else []
    kept = [(one, one.detach().clone()) for one in (*buffers, *tensors)]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)

    try:
        yield put_back
    finally:
        put_back()
