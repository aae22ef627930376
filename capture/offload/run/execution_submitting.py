"""Submissions to an executable of one Program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.backends import Loaded
from offload.interpreter.outside_graphs import outside_graphs
from offload.native import _native
from offload.program import BoundProgram
from offload.run.deferred import Deferred, defer
from offload.run.ordered_results import Batch
from offload.run.staged_batches import StagedBatches, TorchQueues, uploaded_tensors
from offload.run.submitting import (
    Args,
    Kwargs,
    Submitting,
    tickets_in,
)
from offload.run.ticket import Ticket

Surroundings = _native.Surroundings


class ExecutionSubmitting(_native.CallableReplay, Submitting):
    """The part of an Executable that takes submissions and gives them to its native replay."""

    bound: BoundProgram
    _loaded: Loaded
    _native: _native.Replay
    _deferred: Deferred

    @outside_graphs
    def submit(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Queue an execution and return at once; arguments as in a call.

        Inputs, buffers and the model's own tensors must not be written until the ticket is done.
        Until then they are kept alive, and torch refuses to resize their storages; changes of the
        tensor objects (`set_`, `.data =`) do not change which memory is read and written. Memory
        that is moved (`share_memory_`), and weights with other storages (`param.data =`), before
        the execution begins are a BindingError of the ticket; neither may be done later.
        `streaming.replace` may be called before that. Host constants are compared here, and may
        change afterwards.

        A ticket among the arguments stands for its result, and is a dependency. Where its result is
        not known yet (of a task, or where operators allocate what a model returns) the arguments
        are taken and checked once it is, and a mismatch is an error of the new ticket. Until then
        a changed tensor object or a resized storage is what the execution reads.

        Raises:
            BindingError: an argument does not fit, or a host constant has another value.
            ExecutionError: the executable is closed.
        """
        ticket = self._new_ticket()
        if not self._deferred and self._submit(
            ticket, None, (), *args, out=out, feature_map=feature_map, **kwargs
        ):
            return ticket
        kwargs = {**kwargs, "out": out, "feature_map": feature_map}
        return self._submitted_later(ticket, args, kwargs, ())

    @outside_graphs
    def _submitted(
        self,
        args: Args,
        kwargs: Kwargs,
        after: Sequence[Ticket],
        surroundings: Surroundings | None = None,
    ) -> Ticket:
        """Queue an execution, with the state of this thread or in earlier surroundings."""
        ticket = self._new_ticket()
        if not self._deferred and self._submit(ticket, surroundings, tuple(after), *args, **kwargs):
            return ticket
        return self._submitted_later(ticket, args, kwargs, after, surroundings)

    def _submitted_later(
        self,
        ticket: Ticket,
        args: Args,
        kwargs: Kwargs,
        after: Sequence[Ticket],
        surroundings: Surroundings | None = None,
    ) -> Ticket:
        surroundings = surroundings or self._surroundings()

        def place() -> None:
            self._submit(ticket, surroundings, (), *args, **kwargs)

        ticket._waits_for = (*tickets_in(args, kwargs), *after)
        defer(self._deferred, ticket, ticket._waits_for, place)
        return ticket

    def _new_ticket(self) -> Ticket:
        return Ticket()

    def _beginning(self) -> Callable[[Args, Kwargs], Batch]:
        device = self._loaded.device
        if device is None or device.type == "cpu" or self._loaded.streams is None:
            return super()._beginning()
        is_uploaded = functools.partial(uploaded_tensors, self.bound)
        return StagedBatches(self, TorchQueues(device), is_uploaded).begin
