"""Batches from the host on a device with queues: copies overlap executions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from offload.errors import BindingError, ExecutionError
from offload.program import BoundProgram
from offload.program.structure import OpaqueStructure, flatten, unflatten
from offload.run.arguments import tensors_of_call

Call = Callable[..., Any]


class Event(Protocol):
    """The end of work given to a queue: torch.Event."""

    def query(self) -> bool:
        """Whether the work has ended."""
        ...

    def synchronize(self) -> None:
        """Wait until the work has ended."""
        ...


class Queue(contextlib.AbstractContextManager[Any], Protocol):
    """Executes work in order; within its block torch's work goes to it: torch.Stream."""

    def wait_stream(self, other: Any) -> None:
        """Begin later work after the other queue's present work has ended."""
        ...

    def record_event(self) -> Event:
        """Record the end of the work given so far."""
        ...


class Queues(Protocol):
    """The three queues of a device for batches, and copies on the current queue.

    Attributes:
        uploads, executions, downloads: a queue for each stage.
    """

    uploads: Queue
    executions: Queue
    downloads: Queue

    def upload(self, tensor: Any) -> Any:
        """Copy a tensor of the host to the device; return the copy's source and the copy."""
        ...

    def download(self, tensor: Any) -> Any:
        """Copy a tensor to the host; its content is there when the queue has ended the copy."""
        ...


class TorchQueues:
    """torch's streams; executions run on the stream that is current at construction.

    Relies on torch's allocators: memory allocated on one stream is used on another only behind an
    event, and is released when the last use has ended (docs: "CUDA semantics", on streams and
    `Tensor.record_stream`).
    """

    def __init__(self, device: torch.device) -> None:
        """Make two streams beside the current one."""
        self._device = device
        self.executions: Queue = torch.accelerator.current_stream(device)
        self.uploads: Queue = torch.Stream(device)
        self.downloads: Queue = torch.Stream(device)

    def upload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pinned source (the tensor itself, or the processor's copy) and the copy."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned, pinned.to(self._device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


@dataclasses.dataclass(slots=True)
class StagedBatch:
    """A batch in the device's queues. It keeps all memory that they use.

    Attributes:
        ended: an event behind its last stage.
        value: what the model returns, on the host if the batch came from there.
        kept: the operands of the stages.
    """

    ended: Event
    value: Any
    kept: list[Any]

    def done(self) -> bool:
        """Whether its last stage has ended."""
        return self.ended.query()

    def result(self) -> Any:
        """Wait for the last stage, and return what the model returns.

        Raises:
            ExecutionError: the device failed.
        """
        try:
            self.ended.synchronize()
        except RuntimeError as error:
            raise ExecutionError(f"the device failed in a batch of map: {error}") from error
        self.kept.clear()
        return self.value

    def cancel(self) -> None:
        """Wait: queued work runs to its end, in memory that must stay until then."""
        with contextlib.suppress(RuntimeError):
            self.ended.synchronize()
        self.kept.clear()


class StagedBatches:
    """Queues batches on a device, stage by stage.

    Each stage of a batch waits for the previous stage, and for its own queue: so copies of
    neighbouring batches and executions overlap. A result waits only for the last stage.

    Thread: one at a time.
    """

    def __init__(
        self, run: Call, queues: Queues, is_uploaded: Callable[..., Callable[[Any], bool]]
    ) -> None:
        """Combine an executable and its queues.

        Args:
            run: enqueues an execution on the current queue, and returns its result.
            queues: of its device.
            is_uploaded: maps (args, kwargs) of a batch to a predicate: whether a tensor is copied
                to the device.
        """
        self._run, self._queues, self._is_uploaded = run, queues, is_uploaded

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StagedBatch:
        """Queue a batch.

        Raises:
            BindingError: an argument does not fit.
        """
        is_uploaded = self._is_uploaded(args, kwargs)
        with _ended_on_errors(self._queues):
            return self._queued(args, kwargs, is_uploaded)

    def _queued(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_uploaded: Callable[[Any], bool]
    ) -> StagedBatch:
        queues = self._queues
        kept: list[Any] = []
        with queues.uploads:
            try:
                tensors, structure = flatten((args, kwargs), is_uploaded, share_same=True)
            except OpaqueStructure as error:
                raise BindingError(
                    f"map: a batch cannot be flattened into tensors: {error}"
                ) from None
            pairs = [queues.upload(one) for one in tensors]
            kept += pairs
        args, kwargs = unflatten(structure, [on_device for _, on_device in pairs])
        queues.executions.wait_stream(queues.uploads)
        with queues.executions:
            value = self._run(*args, **kwargs)
        kept.append(value)
        if not pairs:
            return StagedBatch(queues.executions.record_event(), value, kept)
        queues.downloads.wait_stream(queues.executions)
        results, structure = flatten(value, _is_tensor, share_same=True)
        with queues.downloads:
            value = unflatten(structure, [queues.download(one) for one in results])
        return StagedBatch(queues.downloads.record_event(), value, kept)


@contextlib.contextmanager
def _ended_on_errors(queues: Queues) -> Iterator[None]:
    """Where an error ends the block, wait for the queued work.

    The work uses memory that the error's traceback keeps until then.
    """
    try:
        yield
    except BaseException:
        for queue in (queues.uploads, queues.executions, queues.downloads):
            with contextlib.suppress(RuntimeError):  # from a device that has failed
                queue.record_event().synchronize()
        raise


def uploaded_tensors(
    bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], bool]:
    """Return a predicate: whether a batch's tensor is copied to the device of a Program.

    Tensors on the host are copied, except host constants.

    Raises:
        BindingError: an argument does not fit; or a tensor that launches write is on the host,
            where the caller would not see the writes.
    """
    program, on_host = bound.program, set()
    written = program.written_values
    for view, tensor in zip(program.inputs, tensors_of_call(bound, args, kwargs), strict=True):
        if program.values[view.value].on_host:
            on_host.add(id(tensor))
        elif view.value in written and tensor.device.type == "cpu":
            raise BindingError(
                f"map: {program.values[view.value].name} is written by the program: expected a "
                f"tensor on {program.device}, got one on the host, and a copy of it would be "
                "written"
            )
    return lambda thing: (
        _is_tensor(thing) and thing.device.type == "cpu" and id(thing) not in on_host
    )


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
