"""Inputs and weights of a recorded call: unseen changes, and state that a whole call may read."""

from __future__ import annotations

from collections.abc import Iterator, Set

from offload.record.host_constants import may_be_host_constant
from offload.record.model_state import changed_unseen_error
from offload.record.operators import check_plain
from offload.record.storages import StorageTable, TrackedStorage


def unseen_changes(table: StorageTable, overlapping: Set[int]) -> Iterator[TrackedStorage]:
    """Yield storages of inputs and weights that changed although no launch wrote them.

    Args:
        table: the storages met in the call, and the model's state.
        overlapping: storages of inputs that a launch wrote through another input.

    Raises:
        CaptureError: the changed storage is a host constant, or lies on another device.
    """
    state = table.state
    tracked_here = list(table)
    for tracked in tracked_here:
        content = tracked.value.host_content
        if content is not None and bytes(tracked.own_content().tolist()) != content:
            raise changed_unseen_error(tracked.value.name)
    for tensor in state.changed({one.storage._cdata for one in tracked_here if one.written}):
        if tensor.device != table.device:
            raise changed_unseen_error(state.name(tensor.untyped_storage()._cdata))
        yield table.find(tensor) or table.add_weight(tensor)
    for tracked in tracked_here:
        if tracked.watch is None or tracked.written or tracked.storage._cdata in overlapping:
            continue
        if not state.knows(tracked.storage._cdata) and tracked.watch.differs():
            yield tracked


def reachable_state(table: StorageTable, *, is_compiled: bool) -> list[TrackedStorage]:
    """Return inputs, and every weight on the device that the callable holds or was seen to use.

    Host constants that it holds are tracked as well, and thus guarded. For compiled code, whose
    reads are not observable, every tensor on the CPU is.

    Raises:
        CaptureError: one of them is a tensor that cannot be described.
    """
    for tensor in table.state.tensors():
        if not tensor.untyped_storage().nbytes() or table.find(tensor) is not None:
            continue
        is_here = tensor.device == table.device
        is_read_unseen = is_compiled and not is_here and tensor.device.type == "cpu"
        if is_here or is_read_unseen or may_be_host_constant(tensor):
            check_plain(tensor, table.state.name(tensor.untyped_storage()._cdata))
            add = table.add_read_unseen if is_read_unseen else table.add_weight
            add(tensor)
    return [one for one in table if one.is_state and not one.known]
