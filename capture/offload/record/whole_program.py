"""From what was seen of a call to its Program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from offload.program import Caller, Overlap, Program, Result, Role
from offload.record.call_arguments import CallArguments
from offload.record.callables import Parameters
from offload.record.fake_weights import FakeWeights
from offload.record.folding import final_values, folded_values, holders_of, is_folded
from offload.record.launches import LaunchRecorder
from offload.record.storages import StorageTable
from offload.structure import Structure


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

    def program(self, overlaps: tuple[Overlap, ...], *, folds: bool = True) -> Program:
        """The Program of all launches; those that make constants are left out if it folds.

        Those that make them on the host are left out in any case.

        Args:
            overlaps: of the inputs.
            folds: constants are kept with the weights, and not made by launches.
        """
        table = self.table
        returned = {result.view.value for result in self.results}
        folded = folded_values(table, returned)
        if not folds:
            folded &= {one.value.index for one in table if one.value.on_host}
        launches = tuple(one for one in self.log.launches if not is_folded(one, folded))
        values = final_values(table, returned, folded, launches)
        weights = {
            one.value.index: one for one in table if values[one.value.index].role is Role.WEIGHT
        }
        holders = {index: (one, holders_of(one)) for index, one in weights.items()}
        stored = {} if self.fakes is None else self.fakes.files_of(weights)
        return Program(
            device=table.device.type,
            values=values,
            launches=launches,
            inputs=tuple(table.view(tensor, table.of(tensor)) for tensor in self.inputs),
            results=self.results,
            arguments_structure=self.arguments.structure,
            result_structure=self.structure,
            overlaps=overlaps,
            weights={
                index: tuple(map(self._original, tensors))
                for index, (_, tensors) in holders.items()
                if index not in stored
            },
            weight_views={
                index: tuple(table.view(tensor, tracked) for tensor in tensors)
                for index, (tracked, tensors) in holders.items()
            },
            stored=stored,
            generators=tuple(generator for generator, _ in self.log.generators),
            parameter_names=self.parameters.positional,
            keyword_only_names=self.parameters.keyword_only,
            host_reads=tuple(self.log.guards.notes),
            versions={"torch": torch.__version__},
            device_index=table.device.index,
            input_samples=self.samples,
            caller=self.caller,
        )

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.fakes is None else self.fakes.original(tensor)
