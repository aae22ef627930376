"""The results of an executable on several devices: views of memory that an execution has filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.interpreter.eager_run import tensor_at
from offload.program import BoundProgram, TensorView
from offload.program.structure import unflatten
from offload.run.placed_queue import PlacedSegment, Queued

Base = tuple[torch.UntypedStorage, int]
"""Where a Value begins: a storage, and how many bytes into it."""


class PlacedResults:
    """Where the Values that the caller sees lie, and how they are nested.

    Owner: one PlacedExecutable. Thread: any; `rebind` while no execution is under way.
    """

    def __init__(self, bound: BoundProgram, segments: Sequence[PlacedSegment]) -> None:
        """Find what the segments of a Program make, and where its weights lie."""
        self._bound = bound
        values = bound.program.values
        self._made = {
            at: TensorView(at, 0, values[at].shape, values[at].strides, values[at].dtype)
            for one in segments
            for at in one.slice.outputs
        }
        self.rebind()

    def rebind(self) -> None:
        """Use the storages that the weights have now."""
        views = self._bound.program.weight_views
        held = self._bound.bindings.weights
        self._weights = {value: _base_of(one[0], views[value][0]) for value, one in held.items()}

    def of(self, queued: Queued) -> Any:
        """Return what the model returns, once an execution has ended without an error."""
        results = []
        for one in self._bound.program.results:
            view = one.view
            if one.input_leaf >= 0:
                results.append(queued.given[one.input_leaf])
            elif (held := queued.held.get(view.value)) is not None:
                results.append(held if view == self._made.get(view.value) else _view(held, view))
            else:
                results.append(tensor_at(*self._weights[view.value], view))
        return unflatten(self._bound.result_structure, results)


def _view(held: torch.Tensor, view: TensorView) -> torch.Tensor:
    """Return a view of a Value that a tensor holds as a whole."""
    return tensor_at(*_base_of(held), view)


def _base_of(tensor: torch.Tensor, view: TensorView | None = None) -> Base:
    """Return where the Value begins of which a tensor is this view, or the whole."""
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage(), offset_bytes - (view.offset_bytes if view is not None else 0)
