"""Makes the Program and Bindings of an observed call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set

import torch

from offload.console.user_code import user_location
from offload.program import (
    Bindings,
    BoundProgram,
    Caller,
    Launch,
    Opaque,
    Overlap,
    Program,
    Result,
    Role,
    TensorView,
    Value,
    plain_structure,
)
from offload.program.folding import fold, folded_values
from offload.program.structure import Structure
from offload.record.call_arguments import CallArguments
from offload.record.callables import Parameters
from offload.record.fake_weights import FakeWeights
from offload.record.folding import holders_of
from offload.record.launches import LaunchRecorder
from offload.record.repeatable_call import RepeatableCall
from offload.record.storages import StorageTable, TrackedStorage


@dataclasses.dataclass(frozen=True, slots=True)
class WholeProgram:
    """The whole observed call as a Program, for comparison with another recording of it.

    Attributes:
        program: with the launches that make constants, and Values that may be unused.
        bindings: its live objects.
        foldable: its launches that make constants if all their arguments are constants.
        arguments, results: their nesting, with the recorded objects.
    """

    program: Program
    bindings: Bindings
    foldable: frozenset[int]
    arguments: Structure
    results: Structure


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedCall:
    """An observed call.

    Attributes:
        table: its storages.
        log: its launches.
        arguments: the caller's arguments.
        inputs: the tensors that represented the caller's.
        samples: the contents of the caller's tensors before the call.
        parameters: the callable's parameters' names.
        fakes: the fake tensors of the recording; None: tensors with content.
        results, structure: its results and their nesting.
        caller: how it was called.
        root: gives the module that was called while it lives; None for a function.
    """

    table: StorageTable
    log: LaunchRecorder
    arguments: CallArguments
    inputs: Sequence[torch.Tensor]
    samples: tuple[bytes, ...]
    parameters: Parameters
    fakes: FakeWeights | None
    results: tuple[Result, ...]
    structure: Structure
    caller: Caller
    root: Callable[[], torch.nn.Module | None] | None

    def bound_program(self, overlaps: tuple[Overlap, ...], *, folds: bool = True) -> BoundProgram:
        """The Program of all launches; launches that make constants are left out if it folds.

        Launches that make them on the host are always left out.

        Args:
            overlaps: of the inputs.
            folds: constants are kept with the weights instead of made by launches.
        """
        return self._folded(self._whole(overlaps), folds=folds)

    def launches(self, overlaps: tuple[Overlap, ...]) -> WholeProgram:
        """The whole observed call."""
        whole = self._whole(overlaps)
        bindings = self._bindings(whole.weight_views.keys())
        foldable = frozenset(self.log.foldable)
        return WholeProgram(whole, bindings, foldable, self.arguments.structure, self.structure)

    def opaque_program(
        self,
        overlaps: tuple[Overlap, ...],
        call: RepeatableCall,
        reason: str,
        *,
        state: Sequence[TrackedStorage],
        is_random: bool,
    ) -> BoundProgram:
        """The call as one launch.

        Args:
            overlaps: of the inputs.
            call: the callable of the launch.
            reason: why it is one launch, for the user.
            state: the inputs and weights that the callable may read.
            is_random: the state of a generator has moved.
        """
        whole = self._whole(overlaps)
        outputs = {one.index for one in whole.values if one.role is Role.OUTPUT}
        results = []
        for result in self.results:
            index = result.view.value
            results.append(result.view if index in outputs else None)
            outputs.discard(index)
        made = {one.value for one in results if one is not None}
        written = {one.value.index for one in state if one.written}
        launch = Launch(
            index=0,
            callee=Opaque(0, reason),
            arguments=self._input_views(),
            results=tuple(results),
            reads=tuple(sorted(one.value.index for one in state)),
            writes=tuple(sorted(written | made)),
            random=is_random,
            guard=None,
            guards_shape=False,
            source=user_location(),
        )
        bound = self._folded(whole, folds=False, instead=[launch])
        return dataclasses.replace(
            bound, bindings=dataclasses.replace(bound.bindings, callables=(call,))
        )

    def _folded(
        self, whole: Program, *, folds: bool, instead: Sequence[Launch] | None = None
    ) -> BoundProgram:
        """The part of the whole Program that launches need."""
        folded = folded_values(whole, self.log.foldable, has_content=self.fakes is None)
        if not folds:
            folded = frozenset(one for one in folded if whole.values[one].on_host)
        rewritten = fold(whole, folded, instead)
        bindings = self._bindings(whole.weight_views.keys() | folded)
        return BoundProgram(rewritten.program, bindings.moved(rewritten.positions))

    def _input_views(self) -> tuple[TensorView, ...]:
        return tuple(self.table.view(one, self.table.of(one)) for one in self.inputs)

    def _whole(self, overlaps: tuple[Overlap, ...]) -> Program:
        """The whole observed call as a Program, with unused Values."""
        return Program(
            device=self.table.device.type,
            values=self._values(),
            launches=tuple(self.log.launches),
            inputs=self._input_views(),
            results=self.results,
            arguments_structure=plain_structure(self.arguments.structure),
            result_structure=plain_structure(self.structure),
            overlaps=overlaps,
            weight_views={
                one.value.index: tuple(self.table.view(tensor, one) for tensor in holders_of(one))
                for one in self._tracked()
                if one.value.role is Role.WEIGHT
            },
            parameter_names=self.parameters.positional,
            keyword_only_names=self.parameters.keyword_only,
            host_reads=tuple(self.log.guards.notes),
            notes=tuple(self.log.notes),
            versions={"torch": torch.__version__},
            device_index=self.table.device.index,
            caller=self.caller,
            groups=self.log.collectives.groups,
        )

    def _tracked(self) -> list[TrackedStorage]:
        return sorted(self.table, key=lambda one: one.value.index)

    def _values(self) -> tuple[Value, ...]:
        """All Values with the roles that the whole call gives them."""
        returned = {result.view.value for result in self.results}
        return tuple(
            dataclasses.replace(one.value, role=Role.OUTPUT)
            if one.value.role is Role.ACTIVATION and one.value.index in returned
            else one.value
            for one in self._tracked()
        )

    def _bindings(self, weights: Set[int]) -> Bindings:
        """The Bindings of the whole Program, where these Values are weights."""
        held = {one.value.index: one for one in self.table if one.value.index in weights}
        stored = {} if self.fakes is None else self.fakes.files_of(held)
        return Bindings(
            weights={
                index: tuple(map(self._original, holders_of(one)))
                for index, one in held.items()
                if index not in stored
            },
            stored=stored,
            generators=tuple(generator for generator, _ in self.log.generators),
            triton=dict(self.log.triton),
            input_samples=self.samples,
            arguments=self.arguments.structure,
            results=self.structure,
            root=self.root,
        )

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.fakes is None else self.fakes.original(tensor)
