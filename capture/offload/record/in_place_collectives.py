"""Collectives that write their arguments, performed by functional collectives.

The operators of `c10d` (torch/csrc/distributed/c10d/Ops.cpp) take a process group and return a
Work, on which the caller waits. Here they return a Work whose `wait` is observed, so that the
waiting launch stands where the caller waits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.native import _native

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A tensor that a collective returned, and the destination of its content.
Copy = tuple[torch.Tensor, torch.Tensor]

_INSTEAD = {
    "barrier": "it synchronises ranks and transfers no data: leave it out of the call",
    "monitored_barrier_": "it synchronises ranks and transfers no data: leave it out of the call",
    "reduce_": "use all_reduce, whose result the other ranks may ignore",
    "gather_": "use all_gather, whose result the other ranks may ignore",
    "scatter_": "use broadcast, of which each rank takes its part",
    "alltoall_": "use all_to_all_single",
    "recv_any_source_": "name the rank to receive from",
}


def in_place(dispatch: Dispatch, name: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Perform an operator of `c10d` by functional collectives.

    Args:
        dispatch: runs an operator and records it.
        name: the operator's name, without its namespace.
        args: its arguments.

    Returns:
        The operator's result, and the Work in it, which must be kept as long as torch may ask for
        it.

    Raises:
        CaptureError: the operator cannot be recorded; the message says what to use.
    """
    collective = _DONE_BY.get(name)
    if collective is None:
        advice = _INSTEAD.get(name, "use a functional collective")
        raise CaptureError(f"{user_location()}: c10d::{name} cannot be recorded: {advice}")
    schema = getattr(torch.ops.c10d, name).default._schema
    started, copies = collective(_Call(dispatch, _is_async(schema, args)), *args)
    work = _work_class()(started, copies)
    return (work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())), work


def _is_async(schema: Any, args: Sequence[Any]) -> bool:
    """Whether launches may follow before the caller waits; sends and receives do not say."""
    for at, one in enumerate(schema.arguments):
        if one.name == "async_op":
            return bool(args[at]) if at < len(args) else True
    return True


@functools.cache
def _work_class() -> Any:
    """The class of a Work whose wait is a launch; made when torch.distributed is available."""

    class SeenWork(torch.distributed.Work):
        """The Work on which a caller waits for a collective that is being recorded."""

        def __init__(self, started: Sequence[torch.Tensor], copies: Sequence[Copy]) -> None:
            super().__init__()
            self._started, self._copies = started, copies
            self._is_done = False

        def wait(self, timeout: Any = None) -> bool:
            """Wait once; the recorder observes it."""
            if not self._is_done:
                self._is_done = True
                for tensor in self._started:
                    torch.ops._c10d_functional.wait_tensor.default(tensor)
                with torch.no_grad():
                    for given, place in self._copies:
                        place.copy_(given)
            return True

        def is_completed(self) -> bool:
            """Return False before it was waited for."""
            return self._is_done

    return SeenWork


Started = tuple[Sequence[torch.Tensor], Sequence[Copy]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One call of an operator of `c10d`.

    Attributes:
        dispatch: runs an operator and records it.
        is_async: launches may follow before the caller waits.
    """

    dispatch: Dispatch
    is_async: bool

    def start(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a functional collective.

        Raises:
            CaptureError: torch has none, as for messages before torch 2.13.
        """
        operator = getattr(torch.ops._c10d_functional, name, None)
        if operator is None:
            raise CaptureError(
                f"{user_location()}: torch {torch.__version__} has no operator "
                f"_c10d_functional::{name}, by which this call is recorded: use torch 2.13 or later"
            )
        return self.dispatch(operator.default, args, kwargs)

    def apart(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Copy]]:
        """The tensors, with copies of those that are not exchanged in place.

        These have gaps, in which gloo would write other elements: it receives the first element's
        address and the number of elements (`setOutputs` of c10d::ProcessGroupGloo), and uses
        consecutive memory. Or they are parts of larger tensors, whose other parts may be used while
        these are exchanged: a Program orders launches by whole Values.
        """
        layout = {"memory_format": torch.contiguous_format}
        found = [
            self.dispatch(torch.ops.aten.clone.default, (one,), layout)
            if not one.is_contiguous() or (self.is_async and _is_part(one))
            else one
            for one in tensors
        ]
        pairs = zip(found, tensors, strict=True)
        return found, [(given, place) for given, place in pairs if given is not place]


def _group(boxed: Any) -> tuple[str, int]:
    """The name of a boxed process group, and its number of members."""
    group = torch.distributed.ProcessGroup.unbox(boxed)
    return group.group_name, group.size()


def _reduction(boxed: Any) -> str:
    try:
        return _native.reduce_op_name(boxed)
    except ValueError as error:
        raise CaptureError(f"{user_location()}: a reduction cannot be recorded: {error}") from None


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _all_reduce(
    call: _Call, tensors: Sequence[torch.Tensor], group: Any, operation: Any, *_: Any
) -> Started:
    name, reduction = _group(group)[0], _reduction(operation)
    started, copies = call.apart(tensors)
    for tensor in started:
        call.start("all_reduce_", tensor, reduction, name)
    return started, copies


def _all_reduce_coalesced(
    call: _Call, tensors: Sequence[torch.Tensor], group: Any, operation: Any, *_: Any
) -> Started:
    name, reduction = _group(group)[0], _reduction(operation)
    started, copies = call.apart(tensors)
    call.start("all_reduce_coalesced_", started, reduction, name)
    return started, copies


def _broadcast(
    call: _Call, tensors: Sequence[torch.Tensor], group: Any, root: int, *_: Any
) -> Started:
    started, copies = call.apart(tensors)
    for tensor in started:
        call.start("broadcast_", tensor, root, _group(group)[0])
    return started, copies


def _all_gather_base(
    call: _Call, output: torch.Tensor, tensor: torch.Tensor, group: Any, *_: Any
) -> Started:
    name, size = _group(group)
    sent = call.apart([tensor])[0][0]
    started, copies = call.apart([output])
    call.start("all_gather_into_tensor_out", sent, size, name, out=started[0])
    return started, copies


def _all_gather(
    call: _Call,
    outputs: Sequence[Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    group: Any,
    *_: Any,
) -> Started:
    name, size = _group(group)
    started, copies = [], list[Copy]()
    for places, tensor in zip(outputs, call.apart(tensors)[0], strict=True):
        given = call.start("all_gather_into_tensor", tensor, size, name)
        started.append(given)
        parts = given.view(size, *tensor.shape).unbind(0)
        copies += zip(parts, places, strict=True)
    return started, copies


def _reduce_scatter_base(
    call: _Call,
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any,
    operation: Any,
    *_: Any,
) -> Started:
    name, size = _group(group)
    reduction = _reduction(operation)
    sent = call.apart([tensor])[0][0]
    started, copies = call.apart([output])
    call.start("reduce_scatter_tensor_out", sent, reduction, size, name, out=started[0])
    return started, copies


def _reduce_scatter(
    call: _Call,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    group: Any,
    operation: Any,
    *_: Any,
) -> Started:
    name, size = _group(group)
    reduction = _reduction(operation)
    started, copies = [], list[Copy]()
    for place, parts in zip(outputs, inputs, strict=True):
        rows = [part.unsqueeze(0) for part in parts]
        whole = call.dispatch(torch.ops.aten.cat.default, (rows,), {})
        given = call.start("reduce_scatter_tensor", whole, reduction, size, name)
        started.append(given)
        copies.append((given.view(place.shape), place))
    return started, copies


def _all_to_all_base(
    call: _Call,
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any,
    *split: Any,
) -> Started:
    name, size = _group(group)
    received, sent = (
        list(given) or [whole.size(0) // size] * size
        for given, whole in zip(split[:2], (output, tensor), strict=True)
    )
    taken = call.apart([tensor])[0][0]
    given = call.start("all_to_all_single", taken, received, sent, name)
    return [given], [(given.view(output.shape), output)]


def _send(call: _Call, tensors: Sequence[torch.Tensor], group: Any, peer: int, tag: int) -> Started:
    name = _group(group)[0]
    return [call.start("isend", tensor, peer, tag, name) for tensor in call.apart(tensors)[0]], ()


def _receive(
    call: _Call, tensors: Sequence[torch.Tensor], group: Any, peer: int, tag: int
) -> Started:
    name = _group(group)[0]
    started, copies = call.apart(tensors)
    for tensor in started:
        call.start("irecv", tensor, peer, tag, name)
    return started, copies


_DONE_BY: dict[str, Callable[..., Started]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _broadcast,
    "_allgather_base_": _all_gather_base,
    "allgather_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_": _reduce_scatter,
    "alltoall_base_": _all_to_all_base,
    "send": _send,
    "recv_": _receive,
}
