"""Weights on a CUDA device under a budget: their memory, the host store, the link."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload import _native
from offload.backends.cuda.copy_costs import fit_line
from offload.backends.cuda.graph import call
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.backends.host_memory import PAGE_BYTES, require_free
from offload.backends.weight_sources import (
    managed_tensors,
    managed_weights,
    native_transfers,
    native_weights,
)
from offload.errors import BackendUnavailable
from offload.program import Program
from offload.streaming import Link, Streaming

_links: dict[int, Link] = {}


def refuse_unstored(program: Program) -> None:
    """Refuse a Program whose weights have no store on the host.

    Raises:
        BackendUnavailable: they lie on the device, or it is opaque: its weights cannot move.
    """
    if program.opaque is not None:
        raise BackendUnavailable(
            "a program that is one opaque launch keeps its weights where they are, so that none "
            f"can be streamed ({program.opaque.reason}): load without weights_budget="
        )
    if not program.stored:
        raise BackendUnavailable(
            "the model's weights lie on the device already, and streaming brings them from the "
            "host: capture with weights=, the folder or files that hold them"
        )


def make_stream(
    program: Program, streaming: Streaming, device: int, tensor_device: torch.device
) -> tuple[_native.CudaWeightStream, Mapping[int, torch.Tensor]]:
    """The weights' memory on the device and the host store; nothing is read yet.

    Returns:
        The stream, and for each weight that it manages the tensor that was recorded, there.

    Raises:
        PlanError: the host has no room for the store.
        OutOfMemory: the device has no room for the weights.
        ExecutionError: the driver does not register the store.
        FileError: a file is gone, or shorter than it was.
    """
    refuse_unstored(program)
    sources = managed_weights(program)
    require_free(
        store_bytes(streaming),
        "the store of the streamed weights needs",
        "give a larger weights_budget=, so that fewer are streamed, or free some memory",
    )
    stream = with_memory_of_torch(
        lambda: _native.CudaWeightStream(
            device=device,
            memory_bytes=streaming.memory_bytes,
            granule_bytes=streaming.granule_bytes,
            weights=native_weights(program, streaming, sources),
            transfers=native_transfers(streaming, sources),
            n_launches=len(program.launches),
        )
    )
    numbers = range(len(sources))
    memory = [stream.tensor(number, str(tensor_device)) for number in numbers]
    return stream, managed_tensors(program, sources, memory)


def store_bytes(streaming: Streaming) -> int:
    """What the host store of streamed weights takes: each begins on a page."""
    sizes_bytes = (streaming.pieces[one.piece].size_bytes for one in streaming.transfers)
    return sum(-(-n_bytes // PAGE_BYTES) * PAGE_BYTES for n_bytes in sizes_bytes)


def measure_link(device: int) -> Link:
    """What a copy to this device takes: measured once in a process.

    Raises:
        ExecutionError: the driver failed, or has no memory to measure with.
    """
    if device not in _links:
        fixed_ns, ns_per_byte = fit_line(_native.cuda_link_samples(device))
        _links[device] = Link(bytes_per_second=1e9 / max(ns_per_byte, 1e-6), overhead_ns=fixed_ns)
    return _links[device]


def free_bytes(device: int) -> int:
    """Memory that weights could take, what torch's allocator only keeps for later included."""
    with DeviceMemory(device):  # for its context
        free, _ = call("cuMemGetInfo")
    if not torch.cuda.is_available():
        return int(free)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
