"""Shared by devices that copy streamed weights from a store on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from offload.backends.captured.fitted_lines import fit_line
from offload.backends.host_memory import PAGE_BYTES, require_free
from offload.backends.weight_sources import native_transfers, native_weights
from offload.errors import BackendUnavailable
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.plan.topology import Link
from offload.program import BoundProgram


class StreamArguments(TypedDict):
    """Arguments of every device's weight stream."""

    memory_bytes: int
    granule_bytes: int
    weights: list[_native.StreamedWeight]
    transfers: list[tuple[int, int, int, int, int, int]]
    n_launches: int
    shares_store: bool


def stream_arguments(
    bound: BoundProgram,
    streaming: Streaming,
    held_bytes: Callable[[list[tuple[str, int, int]]], int],
) -> StreamArguments:
    """The plan and the sources of a Program's weights, for the native side.

    Args:
        bound: its weights are in files.
        streaming: their places and transfers.
        held_bytes: as of `require_store`.

    Raises:
        BackendUnavailable: the weights have no store on the host.
        PlanError: the host has no room for the store.
        FileError: a file is missing, or shorter than before.
    """
    refuse_unstored(bound)
    require_store(bound, streaming, held_bytes)
    program = bound.program
    return StreamArguments(
        memory_bytes=streaming.memory_bytes,
        granule_bytes=streaming.granule_bytes,
        weights=native_weights(program, streaming, bound.bindings.stored),
        transfers=native_transfers(program, streaming, bound.bindings.stored),
        n_launches=len(program.launches),
        shares_store=streaming.shares_store,
    )


def refuse_unstored(bound: BoundProgram) -> None:
    """Refuse a Program whose weights have no store on the host.

    Raises:
        BackendUnavailable: they are on the device, or it is opaque: its weights cannot move.
    """
    program = bound.program
    if program.opaque is not None:
        raise BackendUnavailable(
            "a program that is one opaque launch keeps its weights where they are, so they cannot "
            f"be streamed ({program.opaque.reason}): load without weights_budget="
        )
    if not bound.bindings.stored:
        raise BackendUnavailable(
            "the model's weights lie on the device already, and streaming copies them from the "
            "host: capture with weights=, the folder or files that hold them (an opened program "
            "has its weights on the device)"
        )


def require_store(
    bound: BoundProgram,
    streaming: Streaming,
    held_bytes: Callable[[list[tuple[str, int, int]]], int],
) -> None:
    """Refuse a plan whose store does not fit into the host's free memory.

    Args:
        bound: its weights are in files.
        streaming: the plan.
        held_bytes: the bytes of such ranges, as (path, offset, bytes), that other executables
            already hold.

    Raises:
        PlanError: it does not fit; the message says how much is missing and what to do.
    """
    held = held_bytes(_stored_ranges(bound, streaming)) if streaming.shares_store else 0
    require_free(
        store_bytes(streaming) - held,
        "the store of the streamed weights needs",
        "give a larger weights_budget=, so that fewer are streamed, or free some memory",
    )


def _stored_ranges(bound: BoundProgram, streaming: Streaming) -> list[tuple[str, int, int]]:
    """The places of the streamed pieces in files."""
    pieces = [piece for piece in streaming.pieces if piece.streamed]
    places = [bound.bindings.stored[piece.value] for piece in pieces]
    return [
        (place.path, place.offset_bytes + piece.offset_bytes, piece.size_bytes)
        for place, piece in zip(places, pieces, strict=True)
    ]


def store_bytes(streaming: Streaming) -> int:
    """The bytes of a host store of streamed weights that shares nothing."""
    sizes_bytes = (piece.size_bytes for piece in streaming.pieces if piece.streamed)
    return sum(-(-n_bytes // PAGE_BYTES) * PAGE_BYTES for n_bytes in sizes_bytes)


class LinkMeter:
    """The costs of copies from the host to the devices of one kind, measured once per process.

    Owner: a backend's module. Thread: any; two concurrent callers may both measure.
    """

    def __init__(self, sample: Callable[[int], Sequence[tuple[int, float]]]) -> None:
        """Begin without measurements.

        Args:
            sample: returns durations in ns of copies to the device of an index, by their bytes.
        """
        self._sample = sample
        self._links: dict[int, Link] = {}

    def link(self, device: int) -> Link:
        """The costs of a copy to this device.

        Raises:
            BackendUnavailable: the device is missing.
            ExecutionError: it failed, or has no memory to measure with.
        """
        if device not in self._links:
            fixed_ns, ns_per_byte = fit_line(self._sample(device))
            self._links[device] = Link(
                bytes_per_second=1e9 / max(ns_per_byte, 1e-6), overhead_ns=fixed_ns
            )
        return self._links[device]

    def forget(self) -> None:
        """Drop the measurements; the next request measures again."""
        self._links.clear()
