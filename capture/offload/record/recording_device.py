"""The device of a recording: its allocations and its default generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.interpreter.memory_pools import MemoryPool, segments_of
from offload.native import _native
from offload.record.host_constants import may_be_host_constant


def find_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The accelerator of these tensors; the CPU if they lie on no accelerator.

    Raises:
        CaptureError: they lie on more than one accelerator.
    """
    found = {tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}
    if len(found) > 1:
        names = ", ".join(sorted(str(one) for one in found))
        raise CaptureError(
            f"the model and its inputs lie on {names}: a program is recorded for one device, so "
            "move all of them to one"
        )
    return found.pop() if found else torch.device("cpu")


def recording_device(inputs: Sequence[torch.Tensor], held: Iterable[torch.Tensor]) -> torch.device:
    """The device of a recording: that of the call's inputs.

    Without inputs, or if all of them may be host constants, the device of the tensors that the
    model holds; if that holds for these too, torch's default device.

    Raises:
        CaptureError: they lie on more than one accelerator.
    """
    if not all(map(may_be_host_constant, inputs)):
        return find_device(inputs)
    found = (*inputs, *held)
    if all(map(may_be_host_constant, found)):
        return find_device([torch.empty(0)])
    return find_device(found)


def refuse_capturing(device: torch.device) -> None:
    """Refuse a caller that is capturing a graph, before any part of the call runs.

    A recording reads its inputs on the host, which would end that capture, and a call that is only
    captured computes nothing that could be recorded.

    Raises:
        CaptureError: a graph is being captured on the device's current stream.
    """
    if device.type in ("cpu", "meta"):
        return
    is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if is_capturing is None:
        return
    with current(device):  # torch asks its stream
        try:
            refused = is_capturing()
        except RuntimeError:  # a runtime without captures
            return
    if refused:
        raise CaptureError(
            "a graph is being captured on the current stream: record the call before the capture "
            "begins"
        )


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device is the current one of its type."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module: Any = torch.get_device_module(device)
    context: contextlib.AbstractContextManager[Any] = module.device(device.index or 0)
    return context


class Allocations(contextlib.AbstractContextManager["Allocations"]):
    """Observes torch's allocations on a device while a call is recorded.

    Owner: one recording; one is active in a process at a time. On the CPU every allocation of every
    thread is seen; on an accelerator those of the recording thread, which meanwhile go to a
    separate pool (`torch.cuda.MemPool`). Other threads' allocations are not redirected: a pool for
    all threads would also take allocations of a graph that another thread captures, and free them
    under that graph; and torch counts the allocations of a device, but not those of a pool, so that
    the difference is unknown. The pool lives until `close`, at the recording's end: a refused
    recording itself lives as long as its error.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = _native.AllocationObserver()
        self._device = device
        self._pool: MemoryPool | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Allocations:
        """Begin.

        Raises:
            RuntimeError: another recording is active.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._host)
            if self._device.type != "cpu":
                self._pool = MemoryPool(self._device)
                stack.enter_context(self._pool.use())
            if self._device.type == "cuda":
                stack.callback(_free_workspaces)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def close(self) -> None:
        """Release the pool; no queries follow."""
        if self._pool is not None:
            self._pool.close()

    def contains(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage's memory was allocated since the start."""
        address = storage.data_ptr()
        if storage.device.type == "cpu" or self._pool is None:
            return self._host.contains(address)
        segments = segments_of(self._pool, self._device)
        return any(
            one["address"] <= address < one["address"] + one["total_size"] for one in segments
        )


def _free_workspaces() -> None:
    """Let torch free the workspaces of cuBLAS: those made in a pool would stay when it ends.

    Torch keeps one for each handle and stream, and makes it again for the next product. Freed after
    the end of its pool, it would return to the device only when torch's cache is emptied, and serve
    nothing until then.
    """
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    with contextlib.suppress(RuntimeError):  # from a device that has failed
        clear()
