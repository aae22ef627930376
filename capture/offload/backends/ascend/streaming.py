"""Weights on an Ascend device under a budget: their memory, the host store, copies in a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.backends.ascend.streamed_steps import Step, launch_graph, streamed_steps
from offload.backends.ascend.torch_memory import TorchMemoryUnit
from offload.backends.base import Prepared
from offload.backends.captured.device_streaming import (
    LinkMeter,
    refuse_unstored,
    stream_arguments,
)
from offload.backends.captured.streamed_copies import streamed_graph
from offload.backends.weight_sources import managed_tensors
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.plan.topology import Link, MemoryLayout
from offload.program import BoundProgram, Program

link_meter = LinkMeter(_native.ascend_link_samples)


class AscendWeights:
    """Copies weights from the host's memory, inside of the model; see `WeightStreamer`."""

    gathers_rows = False

    def __init__(self, device_of: Callable[[Program], int], alignment_bytes: int) -> None:
        """Of devices on which each weight is aligned so; `device_of` gives a Program's index."""
        self._device_of = device_of
        self._alignment_bytes = alignment_bytes

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """What a copy from the host takes, measured once in a process.

        Raises:
            BackendUnavailable: the program's weights are not in files.
            ExecutionError: the runtime failed, or has no memory to measure with.
        """
        refuse_unstored(bound)
        return link_meter.link(self._device_of(bound.program))

    def memory_layout(self, program: Program) -> MemoryLayout:
        """As torch_npu's allocator gives it; a weight is streamed as a whole."""
        return MemoryLayout(self._alignment_bytes, unit=TorchMemoryUnit())

    def free_bytes(self, program: Program) -> int:
        """Of the Program's device, what torch's allocator only keeps for later included."""
        device = self._device_of(program)
        _, _, free_bytes = _native.ascend_device(device)
        npu: Any = getattr(torch, "npu", None)
        if npu is None or not npu.is_available():
            return free_bytes
        return free_bytes + int(npu.memory_reserved(device)) - int(npu.memory_allocated(device))

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """The same: kernels read the weights' addresses from the table."""
        return prepared


@dataclasses.dataclass(frozen=True, slots=True)
class WeightMemory:
    """Memory of a device for the weights of one executable.

    Attributes:
        tensor: uint8, contiguous; its storage is all of it.
        release: gives it back, whatever tensors are on it.
    """

    tensor: torch.Tensor
    release: Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedWeights:
    """Weights in a memory of an executable's own, and the copies in its model; none by default.

    Attributes:
        stream: brings them; None: all weights lie where the caller has them.
        steps: what the streams of a model are told.
        for_next_pass: the transfers at its end, which the next execution begins with.
        memory: (address, bytes) of all of them.
        storages: for each weight that the stream manages its bytes.
        tensors: for each of them the tensor that was recorded, there.
    """

    stream: _native.AscendWeightStream | None = None
    steps: tuple[Step, ...] = ()
    for_next_pass: tuple[int, ...] = ()
    memory: tuple[int, int] = (0, 0)
    storages: Mapping[int, torch.UntypedStorage] = dataclasses.field(default_factory=dict)
    tensors: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def steps_of_model(self) -> _native.AscendStreamedSteps | None:
        """The steps with events of their own, which tell the streams of one model.

        Raises:
            ExecutionError: there are no events.
        """
        if self.stream is None:
            return None
        return _native.AscendStreamedSteps(
            self.stream, [(one.kind, one.stream, one.index) for one in self.steps]
        )


def stream_weights(
    bound: BoundProgram,
    streaming: Streaming | None,
    device: int,
    *,
    touches: Sequence[Sequence[int]],
    launches: Sequence[int],
    memory: Callable[[int], WeightMemory],
) -> StreamedWeights:
    """Make the weights' memory and the host store, and order copies and launches; nothing is read.

    Args:
        bound: its weights are in files.
        streaming: the plan; None: the weights stay where they are.
        device: its index.
        touches: for each thing that is launched, in order, the Values that it may read or write.
        launches: for each of them the launch that it belongs to.
        memory: makes memory of so many bytes on the device.

    Raises:
        BackendUnavailable: the weights have no store on the host, or the device is missing.
        PlanError: the host has no room for the store.
        CaptureError: what is launched uses a streamed weight that its launch does not read.
        OutOfMemory: the device has no room for the weights.
        ExecutionError: there is no stream, or the store cannot be pinned.
        FileError: a file is gone, or shorter than it was.
    """
    program = bound.program
    if streaming is None:
        return StreamedWeights()
    held_bytes = functools.partial(_native.ascend_held_bytes, device)
    arguments = stream_arguments(bound, streaming, held_bytes)
    graph = launch_graph(program, touches, launches)
    streamed = streamed_graph(program, graph, streaming)
    steps = streamed_steps(program, graph, streaming, streamed)
    place = memory(streaming.memory_bytes)
    stream = _native.AscendWeightStream(
        device=device,
        memory=place.tensor.data_ptr(),
        release=place.release,
        **arguments,
    )
    storages = _storages(bound, streaming, place.tensor.untyped_storage())
    return StreamedWeights(
        stream=stream,
        steps=steps,
        for_next_pass=tuple(one.transfer for one in streamed.copies if one.for_next_pass),
        memory=(place.tensor.data_ptr(), place.tensor.nbytes),
        storages=dict(zip(bound.bindings.stored, storages, strict=True)),
        tensors=managed_tensors(program, bound.bindings.stored, storages),
    )


def _storages(
    bound: BoundProgram, streaming: Streaming, memory: torch.UntypedStorage
) -> list[torch.UntypedStorage]:
    """The bytes of each weight, as storages of their own that keep the memory."""
    program = bound.program
    begins = {
        piece.value: piece.memory_offset_bytes for piece in streaming.pieces if piece.size_bytes
    }
    storages = []
    for value in bound.bindings.stored:
        begin = begins.get(value, 0)
        storages.append(memory[begin : begin + program.values[value].size_bytes])
    return storages


def streaming_notes(
    stream: _native.AscendWeightStream | None, streaming: Streaming | None
) -> tuple[str, ...]:
    """What copies of weights take besides memory, for people."""
    if stream is None or streaming is None or not streaming.transfers:
        return ()
    if stream.outputs_are_early:
        when = "outputs are ready before the last copies, which are for the next execution"
    else:
        when = (
            "outputs are ready when the last copies have ended, since this runtime makes no events "
            "that cross the border of a model (ACL_EVENT_EXTERNAL)"
        )
    return (
        "weights are copied by the model, on a stream of its own beside that of its launches; it "
        f"runs on one more; {when}",
    )
