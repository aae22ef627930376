"""The Recorder: watches one call through torch's dispatch and function modes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program import Launch, Overlap, Program, Result, Role, TensorView, Value
from offload.record.callables import Parameters
from offload.record.fake_weights import FakeWeights
from offload.record.launches import LaunchRecorder
from offload.record.model_state import ModelState, changed_unseen_error
from offload.record.modes import (
    FunctionMode,
    autocast_cache_off,
    dispatch_mode,
    eager_paths_taken,
    executions_refused,
    reads_avoided,
    seeding_refused,
)
from offload.record.operators import check_plain, is_tensor
from offload.record.recording_device import Allocations, default_generator, find_device
from offload.record.storages import StorageTable, TrackedStorage, alias
from offload.structure import (
    OpaqueStructure,
    Structure,
    StructureMismatch,
    constants,
    flatten,
    frozen,
    leaf_paths,
    match,
    unflatten,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A recorded call: the Program, and what is needed to check it once.

    Attributes:
        program: all launches, dead ones included.
        device: that it was recorded on.
        before: for each written storage of an input or weight, by identity, its bytes before the
            call.
        after: for the same storages the bytes of their Value after it.
        results: the tensors that the model returned.
        generator_states: each generator (the default one first), its state before and after.
        has_unwritten: some Value began without content, so reads of it must be ruled out.
    """

    program: Program
    device: torch.device
    before: Mapping[int, torch.Tensor]
    after: Mapping[int, torch.Tensor]
    results: tuple[torch.Tensor, ...]
    input_tensors: tuple[torch.Tensor, ...]
    generator_states: tuple[tuple[torch.Generator, torch.Tensor, torch.Tensor], ...]
    has_unwritten: bool


# What torch keeps on an nn.Buffer. Names that begin with an underscore are what libraries note:
# torch marks what it compiled for, transformers what it initialised.
_BUFFER_ATTRIBUTES = frozenset({"persistent"})


class Recorder:
    """Records exactly one call, between `begin` and `finish` (or `abandon`).

    Owner: one with-block. Thread: the one that calls the model; other threads' work is not seen,
    and what depends on it is refused.
    """

    def __init__(
        self,
        *,
        host_reads: str,
        function: object,
        parameters: Parameters,
        fakes: FakeWeights | None = None,
    ) -> None:
        """Begin before the call.

        Args:
            host_reads: `avoid` or `guard`.
            function: what is called.
            parameters: its names.
            fakes: record under fake tensors; nothing is executed, and the result has no content.
        """
        with torch.no_grad():
            self.table = StorageTable(ModelState(function))
        self._avoids_reads = host_reads == "avoid"
        self._fakes = fakes
        self._log = LaunchRecorder(self.table, guards_reads=not self._avoids_reads, fakes=fakes)
        self._parameters = parameters
        self._context = contextlib.ExitStack()
        self._inputs: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        self._arguments = Structure("constant")
        self._call: tuple[Any, Any] = ((), {})

    # ---- the call ----------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Start recording a call with these arguments.

        Returns:
            The arguments to call with: aliases of the tensors, nested alike.

        Raises:
            CaptureError: an argument cannot be recorded.
        """
        try:
            tensors, structure = flatten((args, kwargs), is_tensor, share_same=False)
        except OpaqueStructure as error:
            raise CaptureError(f"an argument cannot be taken apart: {error}") from error
        names = [_argument_name(path) for _, path in sorted(leaf_paths(structure, "input").items())]
        for tensor, name in zip(tensors, names, strict=True):
            check_plain(tensor, name)
            attributes = sorted(
                one
                for one in vars(tensor)
                if one not in _BUFFER_ATTRIBUTES and not one.startswith("_")
            )
            if attributes:
                raise CaptureError(
                    f"{name} carries the attributes {attributes}, which the next tensor "
                    "given there may not have: pass what they hold as arguments of their own, and "
                    "the tensor's .detach()"
                )
        self._choose_device(tensors, names)
        self._originals = tensors
        self._arguments = frozen(structure)
        with torch.no_grad():
            twin = alias if self._fakes is None else self._fakes.input
            self._inputs = [twin(tensor) for tensor in tensors]
            for tensor, name in zip(self._inputs, names, strict=True):
                self.table.add_input(tensor, name)
        for first, second, _ in self._common_memory():
            for leaf in (first, second):  # if one is written, both may change
                self._tracked_input(leaf).keep_before()
        own = [one for one in constants(structure) if type(one) is torch.Generator]
        for generator in (default_generator(self.table.device), *own, *self.table.state.generators):
            self._log.note_generator(generator)
        self._call = unflatten(structure, self._inputs)
        try:
            self._enter()
        except BaseException:
            self._context.close()
            raise
        return self._call

    def _choose_device(self, tensors: list[torch.Tensor], names: list[str]) -> None:
        device = find_device(tensors or self.table.state.tensors())
        for tensor, name in zip(tensors, names, strict=True):
            if tensor.device != device:
                raise CaptureError(
                    f"{name} is on {tensor.device}, and the model or another input on {device}: "
                    "move the model and its inputs to one device"
                )
        self.table.device = device
        self._log.allocations = Allocations(device)

    def _enter(self) -> None:
        enter = self._context.enter_context
        try:
            enter(self._log.allocations)  # first: the rest replaces what all threads share
        except RuntimeError:
            raise CaptureError(
                "another thread is recording a call: one call of a process is recorded at a time"
            ) from None
        enter(reads_avoided(self._avoids_reads))
        enter(torch.no_grad())
        enter(autocast_cache_off())
        enter(executions_refused())
        enter(seeding_refused(self._log))
        enter(eager_paths_taken())
        enter(FunctionMode(self._log))
        enter(dispatch_mode(self._log))

    def abandon(self) -> CaptureError | None:
        """Stop without a Program: the call raised.

        Returns:
            What the recorder refused first, if the call raised because of it.
        """
        self._context.close()
        return self._log.refusal

    def finish(self, result: Any) -> tuple[Any, Recording]:
        """End the recording with what the call returned.

        Returns:
            The result to hand to the caller, with the caller's own tensors in the place of
            aliases, and the Recording.

        Raises:
            CaptureError: the result, or a change that the call made, cannot be replayed.
        """
        self._context.close()
        if self._log.refusal is not None:  # the forward swallowed it and took another path
            raise self._log.refusal
        with torch.no_grad():
            self._check_arguments_unchanged()
            try:
                tensors, structure = flatten(result, is_tensor, share_same=True)
            except OpaqueStructure as error:
                raise CaptureError(f"the result cannot be taken apart: {error}") from error
            results = tuple(self._result(tensor) for tensor in tensors)
            overlaps = self._overlaps()
            leaves = {leaf for one in overlaps for leaf in (one.first, one.second)}
            overlapping = {self._tracked_input(leaf).storage._cdata for leaf in leaves}
            self._check_state(overlapping)
            program = self._program(results, structure, overlaps)
            recording = self._recording(program, tuple(tensors), overlapping)
            handed_out = [
                self._handed_out(one, tensor, program)
                for one, tensor in zip(results, tensors, strict=True)
            ]
        same = all(one is other for one, other in zip(handed_out, tensors, strict=True))
        return (result if same else unflatten(structure, handed_out)), recording

    def _handed_out(self, result: Result, tensor: torch.Tensor, program: Program) -> torch.Tensor:
        """The caller's own tensor, or one on its memory that knows nothing of its twin."""
        if result.input_leaf >= 0:
            return self._originals[result.input_leaf]
        is_view = program.values[result.view.value].role is Role.INPUT
        return tensor.detach() if is_view else tensor

    def _check_state(self, overlapping: Set[int]) -> None:
        """Refuse changes of inputs and weights that no launch made.

        Args:
            overlapping: storages of inputs that a launch wrote through another input.

        Raises:
            CaptureError: naming the input, attribute or tensor that changed.
        """
        self.table.state.check({one.storage._cdata: one.written for one in self.table})
        for tracked in self.table:
            if tracked.storage._cdata in overlapping:
                continue
            is_known = self.table.state.knows(tracked.storage._cdata)
            if tracked.watch is None or tracked.written or is_known:
                continue
            if tracked.watch.changed_unseen():
                raise changed_unseen_error(tracked.value.name)

    def _check_arguments_unchanged(self) -> None:
        """Refuse what the call did to its arguments in Python: a replay would not do it again."""
        advice = (
            "return new tensors instead, or pass a cache of fixed size that is written in place"
        )
        try:
            tensors = [
                tensor
                for expected, given, where in zip(
                    self._arguments.children, self._call, ("args", "kwargs"), strict=True
                )
                for tensor in match(expected, given, is_tensor, where)
            ]
        except StructureMismatch as error:
            raise CaptureError(f"the call changed its arguments: {error}; {advice}") from None
        names = leaf_paths(self._arguments, "input")
        for leaf, (tensor, given) in enumerate(zip(tensors, self._inputs, strict=True)):
            tracked = self.table.find(given)
            same = tracked is not None and (
                tensor is given
                and tuple(given.shape) == tracked.value.shape
                and given.stride() == tracked.value.strides
            )
            if not same:
                raise CaptureError(
                    f"the call replaced {_argument_name(names[leaf])}, or changed its storage or "
                    f"shape in place (resize_, set_, transpose_ and the like): {advice}"
                )

    def _result(self, tensor: torch.Tensor) -> Result:
        check_plain(tensor, "a result")
        for leaf, given in enumerate(self._inputs):
            if tensor is given:
                tracked = self.table.find(tensor)
                assert tracked is not None
                return Result(self.table.view(tensor, tracked), leaf)
        return Result(self.table.view(tensor, self._log.track(tensor, "the result")))

    def _program(
        self, results: tuple[Result, ...], structure: Structure, overlaps: tuple[Overlap, ...]
    ) -> Program:
        values, folded = self._final_values({result.view.value for result in results})
        weights = {
            one.value.index: one
            for one in self.table
            if values[one.value.index].role is Role.WEIGHT
        }
        stored = {}
        if self._fakes is not None:
            files = {index: self._fakes.file_of(one.storage) for index, one in weights.items()}
            stored = {index: file for index, file in files.items() if file is not None}
        holders = {index: (one, self._holders(one)) for index, one in weights.items()}
        return Program(
            device=self.table.device.type,
            values=values,
            launches=tuple(one for one in self._log.launches if not self._is_folded(one, folded)),
            inputs=tuple(self._input_view(tensor) for tensor in self._inputs),
            results=results,
            arguments_structure=self._arguments,
            result_structure=structure,
            overlaps=overlaps,
            weights={
                index: tuple(map(self._original, tensors))
                for index, (_, tensors) in holders.items()
                if index not in stored
            },
            weight_views={
                index: tuple(self.table.view(tensor, tracked) for tensor in tensors)
                for index, (tracked, tensors) in holders.items()
            },
            stored=stored,
            generators=tuple(generator for generator, _ in self._log.generators),
            parameter_names=self._parameters.positional,
            keyword_only_names=self._parameters.keyword_only,
            host_reads=tuple(self._log.host_reads),
            versions={"torch": torch.__version__},
        )

    def _holders(self, tracked: TrackedStorage) -> tuple[torch.Tensor, ...]:
        return tracked.holders or (tracked.content(),)

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._fakes is None else self._fakes.original(tensor)

    def _final_values(self, returned: Set[int]) -> tuple[tuple[Value, ...], Set[int]]:
        """All Values with the roles that the whole call gives them, and which were folded."""
        values, folded = [], set()
        for tracked in sorted(self.table, key=lambda one: one.value.index):
            value = tracked.value
            if value.role is Role.ACTIVATION and value.index in returned:
                value = dataclasses.replace(value, role=Role.OUTPUT)
            elif value.role is Role.ACTIVATION and tracked.constant:
                value = dataclasses.replace(value, role=Role.WEIGHT)
                folded.add(value.index)
            values.append(value)
        return tuple(values), folded

    def _recording(
        self, program: Program, results: tuple[torch.Tensor, ...], overlapping: Set[int]
    ) -> Recording:
        written = [
            one
            for one in self.table
            if one.is_state
            and one.storage.device.type != "meta"
            and (one.written or one.storage._cdata in overlapping)
        ]
        return Recording(
            program,
            device=self.table.device,
            before={one.storage._cdata: _kept(one) for one in written},
            after={one.storage._cdata: one.own_content().clone() for one in written},
            results=results,
            input_tensors=tuple(self._inputs),
            generator_states=tuple(
                (generator, before, generator.get_state())
                for generator, before in self._log.generators
            ),
            has_unwritten=any(one.unwritten_at_birth for one in self.table),
        )

    @staticmethod
    def _is_folded(launch: Launch, folded: Set[int]) -> bool:
        """Whether all that a launch does is to make constants, which are kept as weights."""
        made = {view.value for view in launch.made()}
        return bool(made) and made <= folded and set(launch.writes) == made

    def _input_view(self, tensor: torch.Tensor) -> TensorView:
        tracked = self.table.find(tensor)
        assert tracked is not None
        return self.table.view(tensor, tracked)

    def _tracked_input(self, leaf: int) -> TrackedStorage:
        tracked = self.table.find(self._inputs[leaf])
        assert tracked is not None
        return tracked

    def _common_memory(self) -> Iterator[tuple[int, int, int]]:
        """Pairs of inputs on common bytes, with the distance of their addresses."""
        spans = [
            (leaf, tensor.data_ptr(), self._tracked_input(leaf).value.size_bytes)
            for leaf, tensor in enumerate(self._originals)
        ]
        for position, (first, start, size) in enumerate(spans):
            for second, other, other_size in spans[position + 1 :]:
                if start < other + other_size and other < start + size:
                    yield first, second, other - start

    def _overlaps(self) -> tuple[Overlap, ...]:
        """Pairs of inputs on common bytes of which at least one is written."""
        return tuple(
            Overlap(first, second, distance_bytes)
            for first, second, distance_bytes in self._common_memory()
            if self._tracked_input(first).written or self._tracked_input(second).written
        )


def _kept(tracked: TrackedStorage) -> torch.Tensor:
    if tracked.watch is None or tracked.watch.before is None:
        raise CaptureError(
            f"{tracked.value.name} was written by an operator that does not declare it, and is too "
            "large to have been watched: write it with torch operators"
        )
    return tracked.watch.before


def _argument_name(path: str) -> str:
    """`input[0][1]` becomes `args[1]`, and `input[1]['mask']` becomes `kwargs['mask']`."""
    kind = "args" if path.startswith("input[0]") else "kwargs"
    return kind + path[len("input[0]") :]
