"""From what was seen of a call to its Program and Bindings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

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
    rewrite,
)
from offload.program.structure import Structure
from offload.record.call_arguments import CallArguments
from offload.record.callables import Parameters
from offload.record.fake_weights import FakeWeights
from offload.record.folding import final_values, folded_values, holders_of, is_folded
from offload.record.launches import LaunchRecorder
from offload.record.recorded_call import RecordedCall
from offload.record.storages import StorageTable, TrackedStorage


@dataclasses.dataclass(frozen=True, slots=True)
class SeenCall:
    """What was seen of a call.

    Attributes:
        table: its storages.
        log: its launches.
        arguments: what the caller gave.
        inputs: the tensors that stood for the caller's.
        samples: what those of the caller held before it.
        parameters: the callable's parameters' names.
        fakes: those that it was recorded under; None: tensors with content.
        results, structure: what it returned.
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
        """The Program of all launches; those that make constants are left out if it folds.

        Those that make them on the host are left out in any case.

        Args:
            overlaps: of the inputs.
            folds: constants are kept with the weights, and not made by launches.
        """
        folded = self._folded(folds=folds)
        launches = [one for one in self.log.launches if not is_folded(one, folded)]
        return self._rewritten(overlaps, launches, folded)

    def opaque_program(
        self,
        overlaps: tuple[Overlap, ...],
        call: RecordedCall,
        reason: str,
        *,
        state: Sequence[TrackedStorage],
        is_random: bool,
    ) -> BoundProgram:
        """The call as one launch.

        Args:
            overlaps: of the inputs.
            call: what the launch calls.
            reason: why it is one launch, for people.
            state: the inputs and weights that the callable may read.
            is_random: the state of a generator has moved.
        """
        folded = self._folded(folds=False)
        outputs = {one.index for one in self._values(folded) if one.role is Role.OUTPUT}
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
        bound = self._rewritten(overlaps, [launch], folded)
        return dataclasses.replace(
            bound, bindings=dataclasses.replace(bound.bindings, callables=(call,))
        )

    def _folded(self, *, folds: bool) -> Set[int]:
        folded = folded_values(self.table, self._returned, self.log.launches)
        return (
            folded
            if folds
            else folded & {one.value.index for one in self.table if one.value.on_host}
        )

    @property
    def _returned(self) -> Set[int]:
        return {result.view.value for result in self.results}

    def _values(self, folded: Set[int]) -> tuple[Value, ...]:
        """All Values with their roles, where launches that make constants are left out."""
        launches = (one for one in self.log.launches if not is_folded(one, folded))
        return final_values(self.table, self._returned, folded, launches)

    def _input_views(self) -> tuple[TensorView, ...]:
        return tuple(self.table.view(one, self.table.of(one)) for one in self.inputs)

    def _rewritten(
        self, overlaps: tuple[Overlap, ...], launches: Sequence[Launch], folded: Set[int]
    ) -> BoundProgram:
        """The Program of these launches, of all that was seen the part that they need."""
        values = self._values(folded)
        holders = {
            one.value.index: (one, holders_of(one))
            for one in self.table
            if values[one.value.index].role is Role.WEIGHT
        }
        weight_views = {
            index: tuple(self.table.view(tensor, tracked) for tensor in tensors)
            for index, (tracked, tensors) in holders.items()
        }
        rewritten = rewrite(self._all(overlaps), launches, values, weight_views)
        bindings = self._bindings(holders)
        return BoundProgram(rewritten.program, bindings.moved(rewritten.positions))

    def _all(self, overlaps: tuple[Overlap, ...]) -> Program:
        """Whatever was seen, as a Program whose Values are not all of use."""
        return Program(
            device=self.table.device.type,
            values=self._values(frozenset()),
            launches=tuple(self.log.launches),
            inputs=self._input_views(),
            results=self.results,
            arguments_structure=plain_structure(self.arguments.structure),
            result_structure=plain_structure(self.structure),
            overlaps=overlaps,
            parameter_names=self.parameters.positional,
            keyword_only_names=self.parameters.keyword_only,
            host_reads=tuple(self.log.guards.notes),
            versions={"torch": torch.__version__},
            device_index=self.table.device.index,
            caller=self.caller,
        )

    def _bindings(
        self, holders: Mapping[int, tuple[TrackedStorage, tuple[torch.Tensor, ...]]]
    ) -> Bindings:
        weights = {index: tracked for index, (tracked, _) in holders.items()}
        stored = {} if self.fakes is None else self.fakes.files_of(weights)
        return Bindings(
            weights={
                index: tuple(map(self._original, tensors))
                for index, (_, tensors) in holders.items()
                if index not in stored
            },
            stored=stored,
            generators=tuple(generator for generator, _ in self.log.generators),
            input_samples=self.samples,
            arguments=self.arguments.structure,
            results=self.structure,
            root=self.root,
        )

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.fakes is None else self.fakes.original(tensor)
