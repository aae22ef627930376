"""Collectives that write their arguments, performed by functional collectives.

The operators of `c10d` (torch/csrc/distributed/c10d/Ops.cpp) take a process group and return a
Work, on which the caller waits. Here they return a Work whose `wait` is observed, so that the
waiting launch stands where the caller waits.
"""

from __future__ import annotations

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
    started, copies = collective(dispatch, *args)
    work = _work_class()(started, copies)
    returned = len(getattr(torch.ops.c10d, name).default._schema.returns)
    return (work.boxed() if returned == 1 else (args[0], work.boxed())), work


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


def _call(dispatch: Dispatch, name: str, *args: Any, **kwargs: Any) -> Any:
    return dispatch(getattr(torch.ops._c10d_functional, name).default, args, kwargs)


def _group(boxed: Any) -> tuple[str, int]:
    """The name of a boxed process group, and its number of members."""
    group = torch.distributed.ProcessGroup.unbox(boxed)
    return group.group_name, group.size()


def _reduction(boxed: Any) -> str:
    try:
        return _native.reduce_op_name(boxed)
    except ValueError as error:
        raise CaptureError(f"{user_location()}: a reduction cannot be recorded: {error}") from None


def _without_gaps(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[Copy]]:
    """The tensors, with copies of those with gaps, in which gloo would write other elements.

    gloo receives the first element's address and the number of elements (`setOutputs` of
    c10d::ProcessGroupGloo), and uses consecutive memory.
    """
    layout = {"memory_format": torch.contiguous_format}
    plain = [
        one if one.is_contiguous() else dispatch(torch.ops.aten.clone.default, (one,), layout)
        for one in tensors
    ]
    pairs = zip(plain, tensors, strict=True)
    return plain, [(given, place) for given, place in pairs if given is not place]


def _all_reduce(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor], group: Any, operation: Any, *_: Any
) -> Started:
    name, reduction = _group(group)[0], _reduction(operation)
    started, copies = _without_gaps(dispatch, tensors)
    for tensor in started:
        _call(dispatch, "all_reduce_", tensor, reduction, name)
    return started, copies


def _all_reduce_coalesced(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor], group: Any, operation: Any, *_: Any
) -> Started:
    name, reduction = _group(group)[0], _reduction(operation)
    started, copies = _without_gaps(dispatch, tensors)
    _call(dispatch, "all_reduce_coalesced_", started, reduction, name)
    return started, copies


def _broadcast(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor], group: Any, root: int, *_: Any
) -> Started:
    started, copies = _without_gaps(dispatch, tensors)
    for tensor in started:
        _call(dispatch, "broadcast_", tensor, root, _group(group)[0])
    return started, copies


def _all_gather_base(
    dispatch: Dispatch, output: torch.Tensor, tensor: torch.Tensor, group: Any, *_: Any
) -> Started:
    name, size = _group(group)
    _call(dispatch, "all_gather_into_tensor_out", tensor, size, name, out=output)
    return [output], ()


def _all_gather(
    dispatch: Dispatch,
    outputs: Sequence[Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    group: Any,
    *_: Any,
) -> Started:
    name, size = _group(group)
    started, copies = [], list[Copy]()
    for places, tensor in zip(outputs, tensors, strict=True):
        given = _call(dispatch, "all_gather_into_tensor", tensor, size, name)
        started.append(given)
        parts = given.view(size, *tensor.shape).unbind(0)
        copies += zip(parts, places, strict=True)
    return started, copies


def _reduce_scatter_base(
    dispatch: Dispatch,
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Any,
    operation: Any,
    *_: Any,
) -> Started:
    name, size = _group(group)
    reduction = _reduction(operation)
    _call(dispatch, "reduce_scatter_tensor_out", tensor, reduction, size, name, out=output)
    return [output], ()


def _reduce_scatter(
    dispatch: Dispatch,
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
        whole = dispatch(torch.ops.aten.cat.default, (rows,), {})
        given = _call(dispatch, "reduce_scatter_tensor", whole, reduction, size, name)
        started.append(given)
        copies.append((given.view(place.shape), place))
    return started, copies


def _all_to_all_base(
    dispatch: Dispatch,
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
    given = _call(dispatch, "all_to_all_single", tensor, received, sent, name)
    return [given], [(given.view(output.shape), output)]


def _send(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor], group: Any, peer: int, tag: int
) -> Started:
    name = _group(group)[0]
    return [_call(dispatch, "isend", tensor, peer, tag, name) for tensor in tensors], ()


def _receive(
    dispatch: Dispatch, tensors: Sequence[torch.Tensor], group: Any, peer: int, tag: int
) -> Started:
    name = _group(group)[0]
    for tensor in tensors:
        _call(dispatch, "irecv", tensor, peer, tag, name)
    return tensors, ()


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
