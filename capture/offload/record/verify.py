"""The check of a fresh Program: one run on the recorded inputs, with all state as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from offload.console.progress import advance, stage
from offload.distributed import Rendezvous
from offload.errors import CaptureError, ExecutionError, OffloadError, OutOfMemory
from offload.interpreter.eager_run import EagerRun, bytes_of
from offload.interpreter.own_generators import drawing_alone
from offload.interpreter.torch_names import find_dtype
from offload.program import BoundProgram, Launch, Role, Value
from offload.program.constants import same_constant
from offload.record.launch_meetings import LaunchMeetings
from offload.record.random_outcomes import RandomOutcome, by_launch
from offload.record.recording import Recording
from offload.record.recording_device import current
from offload.record.same_outcome import as_dtype, is_close
from offload.record.seeding import seeding_noticed

# Two fills without a common byte: results that depend on unwritten memory differ.
_FILLS = (0xFF, 0x01)


class OutcomeDiffers(CaptureError):
    """The recorded launches do not give the call's results."""


def verify(recording: Recording, bound: BoundProgram, rendezvous: Rendezvous | None = None) -> None:
    """Run a Program on the recorded call's inputs and compare with the model's results.

    Inputs and weights are unchanged: the program writes copies, and weights that an opaque program
    writes in place are restored. No generator is moved: random launches give their outcomes in the
    call, or draw from the check's own generators. An opaque program that draws is not run: it would
    draw from generators that other threads use.

    Where ranks exchange tensors, all of them run their programs together and equally often.

    Args:
        recording: the recorded call.
        bound: the Program to check.
        rendezvous: where the ranks meet; None: there are no other ranks.

    Raises:
        OutcomeDiffers: a result or a changed input, buffer or parameter differs from the recorded
            call.
        CaptureError: a result depends on memory that no launch wrote; an opaque call seeds a
            generator; or a launch failed.
        OutOfMemory: the device has no memory for another run.
        ExecutionError: the device failed, or another rank has ended, or is late.
    """
    program = bound.program
    opaque = program.opaque is not None
    if opaque and program.is_random:
        return
    refused: list[CaptureError] = []
    with (
        current(recording.device),
        torch.no_grad(),
        # The callable of an opaque program restores the autocast state of its recording.
        seeding_noticed(refused.append) if opaque else torch._C._DisableAutocast(),
    ):
        outcomes = {} if opaque else by_launch(program.launches, recording.outcomes)
        first = _Run(recording, bound, _FILLS[0], outcomes, rendezvous).outcome()
        if refused:
            raise refused[0]
        _compare_with_model(recording, first)
        if recording.has_unwritten or program.groups:
            _compare_fills(*_filled(recording, bound, outcomes, first, rendezvous))


def _filled(
    recording: Recording,
    bound: BoundProgram,
    outcomes: dict[int, RandomOutcome],
    first: _Outcome,
    rendezvous: Rendezvous | None,
) -> tuple[_Outcome, _Outcome]:
    """The outcomes over two fills, with random launches reading as in executions.

    The first run is one of them if it has drawn nothing; otherwise there are two more, in which
    each launch that takes a generator draws from the numbers of the recorded call. With other
    ranks, which may have drawn, there are always two more.
    """
    if not outcomes and not bound.program.groups:
        return first, _Run(recording, bound, _FILLS[1], outcomes, rendezvous).outcome()
    runs = []
    for fill in _FILLS:
        alone = drawing_alone(bound, recording.generator_states)
        given = {launch.index: outcomes[launch.index] for launch in alone.others}
        runs.append(_Run(recording, alone.bound, fill, given, rendezvous).outcome())
    return runs[0], runs[1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of one run: result tensors, and by storage each written Value with its bytes."""

    results: list[torch.Tensor]
    state: dict[int, tuple[Value, torch.Tensor]]


class _Run:
    """One execution of a Program by plain torch calls, on private copies of what it writes."""

    def __init__(
        self,
        recording: Recording,
        bound: BoundProgram,
        fill: int,
        outcomes: Mapping[int, RandomOutcome],
        rendezvous: Rendezvous | None,
    ) -> None:
        self._meetings = LaunchMeetings(rendezvous)
        self._program = bound.program
        self._bindings = bound.bindings
        self._outcomes = outcomes
        self._recording = recording
        self._bases: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._identities: dict[int, int] = {}
        self._place_inputs(recording)
        for index, holders in self._bindings.weights.items():
            storage = holders[0].untyped_storage()
            before = recording.before.get(storage._cdata)
            self._identities[index] = storage._cdata
            if before is not None and self._program.opaque is None:
                storage = _copy(before)
            self._bases[index] = (storage, 0)
        self._eager = EagerRun(bound, self._bases, fill)
        self._sizes_bytes = [value.size_bytes for value in self._program.values]

    def _place_inputs(self, recording: Recording) -> None:
        for view, tensor in zip(self._program.inputs, recording.input_tensors, strict=True):
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            storage = tensor.untyped_storage()
            before = recording.before.get(storage._cdata)
            self._identities[view.value] = storage._cdata
            self._bases[view.value] = (storage if before is None else _copy(before), offset_bytes)
        for starts in self._common_memory():
            self._join(starts)

    def _common_memory(self) -> Iterator[dict[int, int]]:
        """Yield overlapping inputs with a written member: by Value, its distance from the first."""
        distances: dict[int, list[tuple[int, int]]] = {}
        for one in self._program.overlaps:
            first, second = (self._program.inputs[leaf].value for leaf in (one.first, one.second))
            distances.setdefault(first, []).append((second, one.distance_bytes))
            distances.setdefault(second, []).append((first, -one.distance_bytes))
        while distances:
            starts = {next(iter(distances)): 0}
            found = list(starts)
            while found:
                value = found.pop()
                for other, distance_bytes in distances.pop(value, ()):
                    if other not in starts:
                        starts[other] = starts[value] + distance_bytes
                        found.append(other)
            yield starts

    def _join(self, starts: Mapping[int, int]) -> None:
        """Make overlapping inputs overlap in the private copy too."""
        sizes = {value: self._program.values[value].size_bytes for value in starts}
        low = min(starts.values())
        high = max(start + sizes[value] for value, start in starts.items())
        joined = torch.UntypedStorage(high - low, device=self._program.device)
        content = bytes_of(joined)
        for value, start in starts.items():
            storage, offset = self._bases[value]
            at, size = start - low, sizes[value]
            content[at : at + size] = bytes_of(storage)[offset : offset + size]
            self._bases[value] = (joined, at)

    def outcome(self) -> _Outcome:
        """Run all launches; return result tensors, and the bytes of written inputs and weights."""
        checking = stage("checking launches", len(self._program.launches))
        with checking, self._weights_as_before():
            return self._outcome()

    @contextmanager
    def _weights_as_before(self) -> Iterator[None]:
        """Run an opaque program with the weights from before the call; restore those after it."""
        written = [] if self._program.opaque is None else self._written_weights()
        try:
            for storage in written:
                bytes_of(storage).copy_(self._recording.before[storage._cdata])
            yield
        finally:
            for storage in written:
                bytes_of(storage).copy_(self._recording.after[storage._cdata])

    def _written_weights(self) -> list[torch.UntypedStorage]:
        storages = (holders[0].untyped_storage() for holders in self._bindings.weights.values())
        return [one for one in storages if one._cdata in self._recording.before]

    def _outcome(self) -> _Outcome:
        for launch in self._program.launches:
            try:
                self._run(launch)
            except OffloadError as error:
                error.add_note(f"{launch.source}: {launch.name}, run again on the same inputs")
                raise
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(
                    f"{launch.source}: {launch.name} ran out of memory when the recorded program "
                    f"was run again on the same inputs, which needs as much as the call: {error}"
                ) from error
            except torch.AcceleratorError as error:
                raise ExecutionError(
                    f"{launch.source}: the device failed at {launch.name}, or before, when the "
                    f"recorded program was run again on the same inputs: {error}"
                ) from error
            except Exception as error:
                raise CaptureError(
                    f"{launch.source}: {launch.name} failed when the recorded program was run "
                    f"again on the same inputs: {error}"
                ) from error
            advance()
        results = [self._eager.tensor(result.view) for result in self._program.results]
        if self._program.opaque is not None:  # results may be views of weights that are restored
            results = [one.clone() for one in results]
        written = {index for launch in self._program.launches for index in launch.writes}
        state = {
            self._identities[value.index]: (value, self._content(value))
            for value in self._program.values
            if value.role in (Role.INPUT, Role.WEIGHT) and value.index in written
        }
        return _Outcome(results, state)

    def _content(self, value: Value) -> torch.Tensor:
        storage, base_bytes = self._bases[value.index]
        content = bytes_of(storage)[base_bytes : base_bytes + value.size_bytes]
        return content if self._program.opaque is None else content.clone()

    def _run(self, launch: Launch) -> None:
        known = self._outcomes.get(launch.index)
        if known is not None:
            known.put(launch, self._eager, self._sizes_bytes)
            return
        outcome = self._meetings.called(launch, self._eager.call(launch))
        if launch.guard is None:
            self._eager.keep(launch, outcome)
        elif not same_constant(launch.guard, outcome):
            raise CaptureError(
                f"{launch.source}: {launch.name} read {outcome!r} at the second run, "
                f"{launch.guard!r} at the first: the value does not depend on the inputs alone"
            )


def _copy(content: torch.Tensor) -> torch.UntypedStorage:
    return content.clone().untyped_storage()


def _compare_with_model(recording: Recording, outcome: _Outcome) -> None:
    hint = (
        "the forward depends on something besides its arguments (Python state, time, a seed that "
        "it sets itself) or does work that the recorder cannot see"
    )
    pairs = zip(outcome.results, recording.results, strict=True)
    for position, (replayed, returned) in enumerate(pairs):
        if not is_close(replayed, returned):
            raise OutcomeDiffers(
                f"result {position} differs when the recorded program is run again on the same "
                f"inputs, or reads uninitialised memory: {hint}"
            )
    for identity, (value, content) in outcome.state.items():
        dtype = find_dtype(value.dtype)
        if not is_close(as_dtype(content, dtype), as_dtype(recording.after[identity], dtype)):
            raise OutcomeDiffers(f"{value.name} has other content after a second run: {hint}")


def _compare_fills(first: _Outcome, second: _Outcome) -> None:
    pairs = [
        (f"result {position}", one, other)
        for position, (one, other) in enumerate(zip(first.results, second.results, strict=True))
    ]
    pairs += [
        (value.name, content, second.state[identity][1])
        for identity, (value, content) in first.state.items()
    ]
    for name, one, other in pairs:
        if not is_close(one, other):
            raise CaptureError(
                f"{name} depends on uninitialised memory (torch.empty read before it is filled): "
                "fill it first, with torch.zeros for example"
            )
