"""Batches of the host on a device with queues: copies of neighbours beside the execution."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from offload.errors import BindingError, ExecutionError
from offload.program import BoundProgram
from offload.program.structure import OpaqueStructure, flatten, unflatten
from offload.run.arguments import tensors_of_call

Call = Callable[..., Any]


class Event(Protocol):
    """The end of what a queue was given: torch.Event."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Queue(contextlib.AbstractContextManager[Any], Protocol):
    """What does work in order, and within its block takes what torch is asked: torch.Stream."""

    def wait_stream(self, other: Any) -> None:
        """Begin what comes next when the other one has ended what it was given so far."""
        ...

    def record_event(self) -> Event:
        """The end of what it was given so far."""
        ...


class Queues(Protocol):
    """The three queues of a device through which batches go, and copies on the current one.

    Attributes:
        uploads, executions, downloads: a queue for each stage.
    """

    uploads: Queue
    executions: Queue
    downloads: Queue

    def upload(self, tensor: Any) -> Any:
        """A copy on the device of a tensor of the host; what it is copied from, and the copy."""
        ...

    def download(self, tensor: Any) -> Any:
        """A copy on the host, whose content is there when the queue has ended it."""
        ...


class TorchQueues:
    """Streams of torch's: executions on the one that is current where this is made.

    What torch's allocators promise for it: memory that was allocated on a stream is used on another
    one only behind an event, and is let go when the last use has ended
    (docs: "CUDA semantics", on streams and `Tensor.record_stream`).
    """

    def __init__(self, device: torch.device) -> None:
        """Make two streams beside the current one."""
        self._device = device
        self.executions: Queue = torch.accelerator.current_stream(device)
        self.uploads: Queue = torch.Stream(device)
        self.downloads: Queue = torch.Stream(device)

    def upload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From pinned memory: the tensor itself, or a copy of it, which the processor makes."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned, pinned.to(self._device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """To pinned memory."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


@dataclasses.dataclass(slots=True)
class StagedBatch:
    """A batch that the device's queues were given. It keeps all memory that they use.

    Attributes:
        ended: behind its last stage.
        value: what the model returns, on the host where the batch came from there.
        kept: what the stages read and wrote.
    """

    ended: Event
    value: Any
    kept: list[Any]

    def done(self) -> bool:
        """Whether its last stage has ended."""
        return self.ended.query()

    def result(self) -> Any:
        """Wait for the last stage, and give what the model returns.

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
        """Wait: what a queue was given it does, in memory that must stay until then."""
        with contextlib.suppress(RuntimeError):
            self.ended.synchronize()
        self.kept.clear()


class StagedBatches:
    """Gives batches to a device's queues, stage behind stage.

    Each stage of a batch waits for the one before it, and for its own queue: so copies of
    neighbours and executions overlap. Who takes results waits for the last stage alone.

    Thread: one at a time.
    """

    def __init__(
        self, run: Call, queues: Queues, is_uploaded: Callable[..., Callable[[Any], bool]]
    ) -> None:
        """Give an executable its queues.

        Args:
            run: enqueues an execution on the current queue, and returns its result.
            queues: of its device.
            is_uploaded: (args, kwargs) of a batch: tells of its tensors whether they are copied to
                the device.
        """
        self._run, self._queues, self._is_uploaded = run, queues, is_uploaded

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StagedBatch:
        """Give a batch to the queues.

        Raises:
            BindingError: an argument does not fit.
        """
        queues, is_uploaded = self._queues, self._is_uploaded(args, kwargs)
        kept: list[Any] = []
        with queues.uploads:
            try:
                tensors, structure = flatten((args, kwargs), is_uploaded, share_same=True)
            except OpaqueStructure as error:
                raise BindingError(f"map: a batch cannot be taken apart: {error}") from None
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


def uploaded_tensors(
    bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], bool]:
    """Tells of the tensors of a batch whether they are copied to the device of a Program.

    Those of the host are, but for host constants.

    Raises:
        BindingError: an argument does not fit; or a tensor that launches write is on the host,
            where nobody would see what they write.
    """
    program, on_host = bound.program, set()
    written = program.written_values
    for view, tensor in zip(program.inputs, tensors_of_call(bound, args, kwargs), strict=True):
        if program.values[view.value].on_host:
            on_host.add(id(tensor))
        elif view.value in written and tensor.device.type == "cpu":
            raise BindingError(
                f"map: {program.values[view.value].name} is written by the program: expected a "
                f"tensor on {program.device}, got one on the host, of which a copy would be written"
            )
    return lambda thing: (
        _is_tensor(thing) and thing.device.type == "cpu" and id(thing) not in on_host
    )


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
