"""Shared by captures through torch; mainly the warm-up, in which libraries choose algorithms."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from offload.backends.base import Disproved
from offload.backends.captured.opaque_weights import weights_at_risk
from offload.errors import CaptureError, ExecutionError, OffloadError, OutOfMemory
from offload.interpreter.device_failures import AFTER_A_FAULT, failure_of_torch, first_line
from offload.interpreter.eager_run import EagerRun, Enqueue, bytes_of, host_storage
from offload.interpreter.made_up_inputs import (
    index_weights,
    input_tensors,
    made_up_inputs,
    replaced_inputs,
    stored_indices,
)
from offload.interpreter.memory_pools import MemoryPool
from offload.program import BoundProgram, DeviceFunction, Kernel, Launch, Role, Value

Bases = dict[int, tuple[torch.UntypedStorage, int]]
"""By Value its storage, and the byte at which it begins there."""


def warm_up(
    bound: BoundProgram,
    device: torch.device,
    inputs: Sequence[torch.Tensor] | None,
    *,
    free_workspaces: Callable[[], None] = lambda: None,
    launching: Callable[[Launch], object] = lambda _: None,
    launched: Callable[[Launch], object] = lambda _: None,
    enqueue: Enqueue | None = None,
) -> None:
    """Run each launch once on private copies of what is written; all memory is freed afterwards.

    Weights in files are zeros from their first launch to their last, except small integer ones,
    which may be an index.

    The weights of an opaque Program are written in place, and restored.

    Args:
        bound: the Program to be captured.
        device: to run on; the device's current stream is used.
        inputs: a call's tensors in the Program's order; None: those of `made_up_inputs`.
        free_workspaces: lets libraries free what they have allocated.
        launching: called with each launch before it is made, with its weights in memory.
        launched: called with it after it was made.
        enqueue: launches compiled kernels, which are compared with the launches that they replace.

    Raises:
        CaptureError: a launch failed; the message names it.
        Disproved: compiled kernels differ from the launches that they replace.
        OutOfMemory: the device has no memory for it.
        ExecutionError: the device failed.
        FileError: an integer weight cannot be read.
        OffloadError: another one that the callable of an opaque launch raises, with a note of it.
    """
    program = bound.program
    closing = contextlib.closing(MemoryPool(device))
    with closing as pool, pool.use(), contextlib.ExitStack() as tensors:
        with memory_for("inputs and what is written, in the warm-up"):
            run = EagerRun(bound, _private_bases(bound, device, inputs), 0, enqueue)
            tensors.callback(run.bases.clear)  # before the pool, which must be the last
        last_uses = last_uses_of(bound)
        disproved: dict[int, str] = {}
        indices = index_weights(bound.bindings)
        for launch in program.launches:
            with memory_for(f"weights of {launch.name} in files, in the warm-up"):
                _take_stored(bound, launch, run.bases, device, indices)
            launching(launch)
            failure = functools.partial(_failure, launch=launch, inputs=_inputs_text(bound, inputs))
            with failures_of(launch, "the warm-up", failure), _weights_kept(bound):
                outcome = run.call(launch)()
                run.keep(launch, outcome)
                if isinstance(launch.callee, Kernel):
                    _prove(bound, launch, run, outcome, disproved)
            launched(launch)
            del outcome
            for value in last_uses.get(launch.index, ()):
                run.bases.pop(value, None)
        _wait(device, _inputs_text(bound, inputs))
        run.bases.clear()
        free_workspaces()
    if disproved:
        raise Disproved(disproved)


def _wait(device: torch.device, inputs: str) -> None:
    """Wait for the device's current stream; ExecutionError, which names `inputs`, if it fails."""
    torch_device: Any = torch.get_device_module(device)
    try:
        torch_device.current_stream(device).synchronize()
    except RuntimeError as error:
        raise ExecutionError(
            f"the device failed in the warm-up, which runs on {inputs}: "
            f"{first_line(error)}; {AFTER_A_FAULT}"
        ) from error


def _prove(
    bound: BoundProgram,
    launch: Launch,
    run: EagerRun,
    outcome: Sequence[torch.Tensor],
    disproved: dict[int, str],
) -> None:
    """Compare compiled kernels with the launches that they replace; note how they differ."""
    assert isinstance(launch.callee, Kernel)
    function = bound.bindings.kernels[launch.callee.index]
    assert isinstance(function, DeviceFunction)
    given = [run.tensor(view) for view in launch.views()]
    failure = function.prove(given, outcome[: len(launch.callee.replaces.results)])
    if failure:
        disproved[launch.callee.index] = failure


@contextlib.contextmanager
def failures_of(
    launch: Launch, where: str, failure: Callable[[Exception], OffloadError]
) -> Iterator[None]:
    """While a launch is made, convert what torch and the user's code raise to offload's errors.

    Args:
        launch: of the Program.
        where: where it is made, in words, for notes on offload's errors.
        failure: converts any other error.
    """
    try:
        yield
    except OffloadError as error:
        error.add_note(f"{launch.source}: {launch.name}, in {where}")
        raise
    except Exception as error:  # in an opaque launch any that the user's code raises
        raise failure(error) from error


def captured_bases(
    bound: BoundProgram, given: Callable[[Value], torch.UntypedStorage | None]
) -> Bases:
    """The initial memory of a capture: host constants as recorded, and what `given` returns.

    Args:
        bound: the captured Program.
        given: the memory of an input or weight; None: a weight stays in the model's memory.
    """
    bases: Bases = {}
    for value in bound.program.values:
        if value.host_content is not None:
            bases[value.index] = (host_storage(value.host_content), 0)
        elif value.role in (Role.INPUT, Role.WEIGHT):
            memory = given(value)
            if memory is None:
                memory = bound.bindings.weights[value.index][0].untyped_storage()
            bases[value.index] = (memory, 0)
    return bases


def _failure(error: Exception, launch: Launch, inputs: str) -> OffloadError:
    """The error of a launch in the warm-up as offload's error; `inputs` describes its inputs."""
    what, why = f"{launch.source}: {launch.name}", first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(f"{what} ran out of memory in the warm-up: {why}")
    if isinstance(error, torch.AcceleratorError):  # possibly of an earlier launch
        return ExecutionError(
            f"{what}: the device failed at this launch or before, in the warm-up, which runs on "
            f"{inputs}: {why}; {AFTER_A_FAULT}"
        )
    return CaptureError(
        f"{what} failed in the warm-up, which runs on {inputs} (the model must support them): {why}"
    )


def _inputs_text(bound: BoundProgram, given: Sequence[torch.Tensor] | None) -> str:
    program = bound.program
    if given is not None:
        return "the inputs that were given"
    if not program.inputs:
        return "no inputs, since the model has none"
    made_up = "made-up inputs (numbers between 0 and 1, every integer 0: "
    if not bound.bindings.input_samples:
        return f"{made_up}a file holds no inputs)"
    if any(view.end_bytes for view in program.inputs) and not any(bound.bindings.input_samples):
        return f"{made_up}those of the recorded call had no content)"
    text = "the inputs of the recorded call (their first bytes, repeated in large ones"
    replaced = [
        program.values[program.inputs[leaf].value].name for leaf in sorted(replaced_inputs(bound))
    ]
    if replaced:
        text += f"; numbers near 0 for those that were all 0: {', '.join(replaced)}"
    return f"{text})"


def _private_bases(
    bound: BoundProgram, device: torch.device, inputs: Sequence[torch.Tensor] | None
) -> Bases:
    """Inputs, and weights in place; copies of what the Program writes.

    Host constants are as recorded, whatever the model's tensors hold now.
    """
    program = bound.program
    written = {index for launch in program.launches for index in launch.writes}
    bases: Bases = {
        value.index: (host_storage(value.host_content), 0)
        for value in program.values
        if value.host_content is not None
    }
    if inputs is None:
        inputs = input_tensors(bound, made_up_inputs(bound, 0))
    for given, view in zip(inputs, program.inputs, strict=True):
        if view.value in bases:
            continue
        size_bytes = program.values[view.value].size_bytes
        content = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        if size_bytes:
            begin = int(given.storage_offset()) * given.element_size()
            content.copy_(bytes_of(given.untyped_storage())[begin : begin + size_bytes])
        bases[view.value] = (content.untyped_storage(), 0)
    for index, holders in bound.bindings.weights.items():
        if index in bases:
            continue
        storage = holders[0].untyped_storage()
        is_copied = index in written and program.opaque is None
        bases[index] = (copied(storage) if is_copied else storage, 0)
    return bases


@contextlib.contextmanager
def _weights_kept(bound: BoundProgram) -> Iterator[None]:
    """Restore what an opaque Program may write in place, also if its call fails."""
    storages = [
        bound.bindings.weights[value.index][0].untyped_storage() for value in weights_at_risk(bound)
    ]
    kept = [copied(storage) for storage in storages]
    try:
        yield
    finally:
        for storage, content in zip(storages, kept, strict=True):
            bytes_of(storage).copy_(bytes_of(content))


def _take_stored(
    bound: BoundProgram, launch: Launch, bases: Bases, device: torch.device, indices: Set[int]
) -> None:
    """Allocate the weights in files that a launch is the first to use: all may be too large.

    Zeros, except for `indices`, the Values that may be an index.

    Raises:
        FileError: as `stored_indices`.
    """
    program = bound.program
    for value in bound.bindings.stored.keys() & {*launch.reads, *launch.writes}:
        if value not in bases:
            size_bytes = program.values[value].size_bytes
            content = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            if value in indices:
                held = bytearray(stored_indices(bound.bindings.stored[value]))
                content.copy_(torch.frombuffer(held, dtype=torch.uint8))
            bases[value] = (content.untyped_storage(), 0)


def last_uses_of(bound: BoundProgram) -> dict[int, list[int]]:
    """By launch the activations, and weights in files, that no later launch uses."""
    program = bound.program
    last: dict[int, int] = {}
    for launch in program.launches:
        for value in (*launch.reads, *launch.writes):
            last[value] = launch.index
    dead: dict[int, list[int]] = {}
    for value, index in last.items():
        is_passing = program.values[value].role in (Role.ACTIVATION, Role.SCRATCH)
        if is_passing or value in bound.bindings.stored:
            dead.setdefault(index, []).append(value)
    return dead


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage with the same bytes, made on the current stream."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    copy.copy_(bytes_of(storage))
    return copy.untyped_storage()


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Convert torch's failure to allocate memory.

    Raises:
        OutOfMemory: the device has no memory left; the message says for what.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise failure_of_torch(error, f"no memory for {what}") from error


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection: it could free memory of another stream, which a capture forbids."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
