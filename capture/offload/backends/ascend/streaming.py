"""Weights on an Ascend device under a budget: their memory, the host store, copies in a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.backends.ascend.streamed_steps import Step, launch_graph, streamed_steps
from offload.backends.ascend.torch_memory import TorchMemoryUnit
from offload.backends.captured.device_streaming import (
    LinkMeter,
    refuse_unstored,
    stream_arguments,
)
from offload.backends.captured.streamed_copies import streamed_graph
from offload.backends.loaded import Prepared
from offload.backends.weight_sources import managed_tensors
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.plan.topology import Link, MemoryLayout
from offload.program import BoundProgram, Program

link_meter = LinkMeter(_native.ascend_link_samples)


class AscendWeights:
    """Copies weights from host memory, inside the model; see `WeightStreamer`."""

    gathers_rows = False

    def __init__(self, device_of: Callable[[Program], int], alignment_bytes: int) -> None:
        """Take the weights' alignment on devices; `device_of` gives a Program's device index."""
        self._device_of = device_of
        self._alignment_bytes = alignment_bytes

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """Measure copies from the host, once per process.

        Raises:
            BackendUnavailable: the program's weights are not in files.
            ExecutionError: the runtime failed, or has no memory for the measurement.
        """
        refuse_unstored(bound)
        return link_meter.link(self._device_of(bound.program))

    def memory_layout(self, program: Program) -> MemoryLayout:
        """Return the layout of torch_npu's allocator; a weight is streamed as a whole."""
        return MemoryLayout(self._alignment_bytes, unit=TorchMemoryUnit())

    def free_bytes(self, program: Program) -> int:
        """Free bytes of the Program's device, including memory cached by torch's allocator."""
        device = self._device_of(program)
        _, _, free_bytes = _native.ascend_device(device)
        npu: Any = getattr(torch, "npu", None)
        if npu is None or not npu.is_available():
            return free_bytes
        return free_bytes + int(npu.memory_reserved(device)) - int(npu.memory_allocated(device))

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Return the same: kernels read the weights' addresses from the table."""
        return prepared


@dataclasses.dataclass(frozen=True, slots=True)
class WeightMemory:
    """Memory of a device for the weights of one executable.

    Attributes:
        tensor: uint8, contiguous; its storage is the whole memory.
        release: frees it, even if tensors still view it.
    """

    tensor: torch.Tensor
    release: Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedWeights:
    """Weights in an executable's own memory, and the copies in its model; empty by default.

    Attributes:
        stream: transfers them; None: all weights are used in place.
        steps: the steps on the streams of a model.
        for_next_pass: the transfers at its end, which belong to the next execution.
        memory: (address, bytes) of all weights.
        storages: the bytes of each weight that the stream manages.
        tensors: for each of them the recorded tensor, in this memory.
    """

    stream: _native.AscendWeightStream | None = None
    steps: tuple[Step, ...] = ()
    for_next_pass: tuple[int, ...] = ()
    memory: tuple[int, int] = (0, 0)
    storages: Mapping[int, torch.UntypedStorage] = dataclasses.field(default_factory=dict)
    tensors: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def steps_of_model(self) -> _native.AscendStreamedSteps | None:
        """Return the steps for the streams of one model, with separate events.

        Raises:
            ExecutionError: events cannot be created.
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
    """Make the weights' memory and the host store, and order copies and launches; read nothing.

    Args:
        bound: its weights are in files.
        streaming: the plan; None: the weights stay where they are.
        device: its index.
        touches: for each launched node, in order, the Values that it may read or write.
        launches: for each node its launch.
        memory: allocates this many bytes on the device.

    Raises:
        BackendUnavailable: the weights have no store on the host, or the device is missing.
        PlanError: the host has no room for the store.
        CaptureError: a node uses a streamed weight that its launch does not read.
        OutOfMemory: the device has no room for the weights.
        ExecutionError: no stream can be created, or the store cannot be pinned.
        FileError: a file is missing, or shorter than it was.
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
    """Return the bytes of each weight, as separate storages that keep the memory."""
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
    """Describe the resources of weight copies besides memory, for people."""
    if stream is None or streaming is None or not streaming.transfers:
        return ()
    if stream.outputs_are_early:
        when = "outputs are ready before the last copies, which are for the next execution"
    else:
        when = (
            "outputs are ready when the last copies have ended, since this runtime has no events "
            "that cross the boundary of a model (ACL_EVENT_EXTERNAL)"
        )
    return (
        "the model copies weights on a second stream beside that of its launches, and runs on a "
        f"third one; {when}",
    )
