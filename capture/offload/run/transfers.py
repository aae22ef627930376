"""Memories of devices, and copies between them, with a thread per direction."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.errors import ExecutionError, OutOfMemory
from offload.interpreter.torch_names import find_dtype
from offload.native import _native
from offload.program import Value
from offload.run.deferred import when_ended
from offload.run.ticket import Ticket

# Values that cross together lie in one block, each at a multiple of this: the alignment of torch's
# CUDA allocator (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp).
ALIGNMENT_BYTES = 512


class Memory:
    """The memory of the tensors of one or more devices. Compared by identity.

    Blocks that cross between memories belong to a separate stream, on which only transfers are
    enqueued: torch's allocators reuse a block behind the work of its own stream only, and every use
    of such a block has ended when it is dropped.

    Attributes:
        device: torch's, with an index unless it is the CPU.
        pinned: whether blocks are page-locked: host memory beside a device's.
        failure: the error of a failed copy to or from the device; empty without one. Such a device
            does not recover, and torch_npu silently drops work given to it.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """Begin without allocations."""
        self.device, self.pinned = device, pinned
        self.failure = ""
        self._stream: Any = None
        self._lock = threading.Lock()

    @property
    def is_host(self) -> bool:
        """Whether it is the processor's memory."""
        return self.device.type == "cpu"

    @property
    def stream(self) -> Any:
        """The stream of transfers; None for the host."""
        if self.is_host:
            return None
        with self._lock:
            if self._stream is None:
                torch.empty(0, device=self.device)  # starts the device, unlike a stream
                self._stream = torch.Stream(self.device)
            return self._stream

    def empty(self, value: Value) -> torch.Tensor:
        """Allocate memory for a Value on torch's current stream: for what the caller receives.

        Raises:
            OutOfMemory: there is no room for it.
        """
        with _out_of_memory(self.device, value.size_bytes):
            return torch.empty_strided(
                value.shape, value.strides, dtype=find_dtype(value.dtype), device=self.device
            )

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes that belong to the stream of transfers.

        Raises:
            OutOfMemory: there is no room for them.
        """
        stream = self.stream
        on_stream = contextlib.nullcontext() if stream is None else stream
        is_pinned = self.pinned and size_bytes > 0
        with _out_of_memory(self.device, size_bytes), torch.inference_mode(False), on_stream:
            return torch.empty(
                size_bytes, dtype=torch.uint8, device=self.device, pin_memory=is_pinned
            )

    def block(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Allocate adjacent memory for Values, in order, in one block of `block_bytes`.

        Raises:
            OutOfMemory: there is no room for them.
        """
        whole = self.bytes(block_bytes(values)).untyped_storage()
        found, begin = [], 0
        for one in values:
            dtype = find_dtype(one.dtype)
            tensor = torch.empty(0, dtype=dtype, device=self.device)
            found.append(tensor.set_(whole, begin // dtype.itemsize, one.shape, one.strides))
            begin += _aligned(one.size_bytes)
        return found

    def check(self) -> None:
        """Refuse a device whose copy has failed.

        Raises:
            ExecutionError: with the error of that copy.
        """
        if self.failure:
            raise ExecutionError(
                f"{self.device} failed in an earlier copy, and cannot be used in this process any "
                f"more: {self.failure}"
            )

    def mark(self) -> Any:
        """Record an event behind this thread's work on the device; None for the host."""
        return (
            None if self.is_host else torch.accelerator.current_stream(self.device).record_event()
        )


def block_bytes(values: Sequence[Value]) -> int:
    """Return the size of a block of adjacent Values."""
    return sum(_aligned(one.size_bytes) for one in values)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous copy: from the first byte of one tensor to that of another.

    Attributes:
        source, copy: where they lie, and where they go.
        size_bytes: how many.
    """

    source: torch.Tensor
    copy: torch.Tensor
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CopySpan:
    """The time span of a transfer.

    Attributes:
        number: of the execution, from 1 on.
        what: what was copied, for people.
        link: origin and target, for people.
        size_bytes: how many bytes.
        begin_ns, end_ns: of the native clock.
    """

    number: int
    what: str
    link: str
    size_bytes: int
    begin_ns: int
    end_ns: int


class Links:
    """Copies between memories: in order on each link, links in parallel.

    Owner: one executable. Thread: any. A forked child makes no copies.
    """

    def __init__(self) -> None:
        """Begin without threads: the first copy on a link starts its thread."""
        self._links: dict[tuple[Memory, Memory], _native.CopyLink] = {}
        self._streams: dict[tuple[Memory, Memory], Any] = {}  # each used by its link's thread
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.n_copies = 0  # that have ended well
        self._recorded: list[CopySpan] | None = None

    def copy(
        self,
        origin: Memory,
        target: Memory,
        pieces: Sequence[Piece],
        what: str,
        *,
        number: int,
        after: Sequence[Ticket] = (),
        ready: Sequence[Any] = (),
    ) -> Ticket:
        """Copy once tickets have ended; the pieces stay alive until then.

        Args:
            origin: the memory of the sources.
            target: the memory of the copies.
            pieces: from one to the other.
            what: what is copied, for people.
            number: of the execution, for timelines.
            after: the tickets of writers of the sources, and of readers of the targets' old
                content.
            ready: torch's events behind device work that must have ended; None is ignored.

        Returns:
            A ticket that is done when the copies are there. It has an ExecutionError where the
            device failed, and a DependencyError where one of `after` has failed.
        """
        ticket = Ticket()

        def carry_out() -> None:
            if not ticket._begin():
                return  # it was cancelled
            try:
                self.carry_out(origin, target, pieces, lambda: what, number=number, ready=ready)
            except BaseException as error:
                ticket._set_error(error)
            else:
                ticket._set_result(None)

        def begin() -> None:
            if any(ticket._fail_as(one) for one in after) or ticket.done():
                return
            try:
                self._check_process()  # in a forked child the lock may be held forever
                self.link(origin, target).submit(carry_out)
            except ExecutionError as error:  # closed, or the interpreter exits
                ticket._set_error(error)

        when_ended(after, begin)
        return ticket

    def carry_out(
        self,
        origin: Memory,
        target: Memory,
        pieces: Sequence[Piece],
        what: Callable[[], str],
        *,
        number: int,
        ready: Sequence[Any] = (),
    ) -> None:
        """Copy on the link's thread, which calls this; arguments as of `copy`.

        Raises:
            ExecutionError: the device failed, a tensor's memory is gone, or this is the child of a
                fork.
        """
        self._check_process()
        begin_ns = time.monotonic_ns()  # the native clock's: std::chrono::steady_clock
        try:
            if (origin, target) not in self._streams:
                self._streams[origin, target] = stream_between(origin, target)
            copy_pieces(origin, target, pieces, self._streams[origin, target], ready)
        except Exception as error:
            if isinstance(error, RuntimeError):
                for memory in (origin, target):
                    if not memory.is_host:
                        memory.failure = memory.failure or str(error)
            if isinstance(error, ExecutionError):
                raise
            raise ExecutionError(f"copying {what()} failed: {error}") from error
        self.n_copies += 1
        recorded = self._recorded
        if recorded is not None:
            size_bytes = sum(one.size_bytes for one in pieces)
            link = f"{origin.device} to {target.device}"
            ends_ns = begin_ns, time.monotonic_ns()
            recorded.append(CopySpan(number, what(), link, size_bytes, *ends_ns))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[CopySpan]]:
        """Yield a list that receives the copies that end inside a with-block.

        Raises:
            ExecutionError: another recording is active.
        """
        if self._recorded is not None:
            raise ExecutionError("another timeline of this executable is being recorded")
        found: list[CopySpan] = []
        self._recorded = found
        try:
            yield found
        finally:
            self._recorded = None

    def link(self, origin: Memory, target: Memory) -> _native.CopyLink:
        """Return the queue of copies from one memory to another."""
        with self._lock:
            found = self._links.get((origin, target))
            if found is None:
                found = self._links[origin, target] = _native.CopyLink()
            return found

    def close(self) -> None:
        """Wait for running copies; later ones have an ExecutionError."""
        if os.getpid() != self._process:
            return
        with self._lock:
            links = list(self._links.values())
            self._process = -1
        for one in links:
            one.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ExecutionError(
                "no copies between devices are made once the executable is closed, nor in a "
                "process that was forked since it was loaded: load it there"
            )


def stream_between(origin: Memory, target: Memory) -> Any:
    """Return a new stream of torch's for copies, so that links do not wait for one another.

    None between memories of the host.
    """
    on = target if origin.is_host else origin
    return None if on.is_host else torch.Stream(on.device)


def copy_pieces(
    origin: Memory,
    target: Memory,
    pieces: Sequence[Piece],
    stream: Any,
    ready: Sequence[Any] = (),
) -> None:
    """Copy on this thread, and return when the copies have ended.

    Args:
        origin: the memory of the sources.
        target: the memory of the copies.
        pieces: from one to the other.
        stream: as `stream_between` returned it; no other thread uses it meanwhile.
        ready: torch's events behind device work that the copies wait for; None is ignored.
    """
    with torch.no_grad():
        if stream is None:
            for one in pieces:
                _copy(one)
            return
        with stream:
            for event in ready:
                if event is not None:
                    stream.wait_event(event)
            for one in pieces:
                _copy(one)
        # The stream and not an event: after a failed copy torch_npu records no event, and a wait
        # for one does not end.
        stream.synchronize()


def _copy(one: Piece) -> None:
    if not one.size_bytes:
        return
    source, copy = (_bytes(tensor, one.size_bytes) for tensor in (one.source, one.copy))
    devices = {source.device.type, copy.device.type}
    on_host = source if source.device.type == "cpu" else copy
    is_queued = "cpu" not in devices or (len(devices) > 1 and on_host.is_pinned())
    copy.copy_(source, non_blocking=is_queued)


def _bytes(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """View this many bytes from the tensor's first element on, even if made in inference mode.

    Raises:
        ExecutionError: its memory was freed or shrunk; `set_` would enlarge it again, unwritten.
    """
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < begin + size_bytes:
        raise ExecutionError(
            "a tensor's memory was freed or shrunk between the submission and its copy to another "
            "device: leave it until the ticket is done"
        )
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(tensor.untyped_storage(), begin, (size_bytes,), (1,))


@contextlib.contextmanager
def _out_of_memory(device: torch.device, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{device} has no {size_bytes} bytes for what crosses: {error}"
        ) from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{device} has no {size_bytes} bytes for what crosses: {error}"
        ) from error
