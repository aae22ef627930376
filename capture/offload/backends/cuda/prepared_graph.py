"""From a Program to its captured graph, with every word explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.captures import GraphCapture, NodeKind, launch_names
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.fixed_values import choices, refuse
from offload.backends.captured.relocation.known_kernels import KnownKernels
from offload.backends.captured.relocation.touches import node_graph, with_scratch
from offload.backends.captured.relocation.words import CapturesDiffer, Discovery, Word
from offload.backends.cuda.capture import Capturer
from offload.backends.cuda.driver import describe_address, is_known_address
from offload.backends.cuda.fixed_memory import (
    FixedMemory,
    add_copies,
    take_memory,
    within_launches,
)
from offload.backends.cuda.layouts import as_data, capture_in_layouts, capture_once
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.random_cells import random_cells
from offload.backends.cuda.resident_graph import TemplateGraph
from offload.backends.loaded import Prepared
from offload.errors import CaptureError
from offload.program import BoundProgram, Kernel, Program, TritonKernel

_MAXIMUM_TRIES = 3


def prepare_captured(
    bound: BoundProgram, capturer: Capturer, known: KnownKernels | None = None
) -> Prepared:
    """Capture a Program's launches in three layouts, and find its words; in one if all are known.

    Args:
        bound: to be captured.
        capturer: captures it.
        known: kernels of proved graphs; None: no kernel is taken to be known.

    Raises:
        CaptureError: a launch cannot be captured, or can be neither relocated nor made to work on
            copies, or is captured differently each time; the message names the kernel.
        OutOfMemory: the device has no memory for copies.
        ExecutionError: the driver failed.
    """
    declared = (Kernel, TritonKernel)
    are_declared = all(isinstance(one.callee, declared) for one in bound.program.launches)
    if known is not None and (known or are_declared) and bound.program.opaque is None:
        found = _known(bound, capturer, known)
        if found is not None:
            return found
    differ = ""  # its text; the error itself would keep its frames, and so the captures
    for attempt in range(_MAXIMUM_TRIES):
        try:
            return _prepared(bound, _explained(bound, capturer, 3 * attempt))
        except CapturesDiffer as error:
            differ = str(error)
    raise CaptureError(
        f"{differ}; {_MAXIMUM_TRIES} captures all differed: expected the same kernels, edges and "
        f"allocations each time; {advice.SAME_KERNELS}"
    )


def _known(bound: BoundProgram, capturer: Capturer, known: KnownKernels) -> Prepared | None:
    """Prepare by one capture; None if that does not explain everything."""
    captured = capture_once(bound, capturer)
    with DeviceMemory(captured.device):  # makes a context current
        found = known.discovery_of(captured.capture, len(bound.program.values), is_known_address)
    if found is None:
        return None
    prepared = _prepared(bound, dataclasses.replace(captured, discovery=found, is_known=True))
    n_kernels = sum(one.kind is NodeKind.KERNEL for one in captured.capture.nodes)
    note = (
        f"one capture was enough to find the addresses: its {n_kernels} kernel nodes run compiled "
        "kernels, or kernels of graphs that were proved before"
    )
    return dataclasses.replace(prepared, notes=(note,))


def _explained(bound: BoundProgram, capturer: Capturer, seed: int) -> TemplateGraph:
    """Captured with the least memory at fixed addresses that leaves no word unexplained."""
    captured = _discovered(bound, capturer, seed, FixedMemory())
    if not captured.discovery.unexplained:
        return captured
    program, device = bound.program, captured.device
    capture, found, pool = as_data(captured.capture), captured.discovery, captured.pool
    del captured  # its tensors may overlap later ones: the pool keeps the order of allocations
    for choice in choices(program, capture, found):
        memory = take_memory(device, capture, pool, choice)
        captured = _discovered(bound, capturer, seed, memory)
        if not captured.discovery.unexplained:
            return captured
        del captured, memory
    raise refuse(program, capture, found)


def _discovered(
    bound: BoundProgram, capturer: Capturer, seed: int, fixed: FixedMemory
) -> TemplateGraph:
    captured, *others = capture_in_layouts(bound, capturer, seed, fixed)
    return dataclasses.replace(captured, discovery=_words(bound.program, captured, others))


def _words(program: Program, captured: TemplateGraph, others: Sequence[GraphCapture]) -> Discovery:
    with DeviceMemory(captured.device):  # makes a context current
        return discover(
            [captured.capture, *others],
            len(program.values),
            launch_names(program),
            is_known_address,
            describe_address=describe_address,
            leaves_unexplained=True,
            decoy_address=captured.decoy_address,
        )


def _prepared(bound: BoundProgram, captured: TemplateGraph) -> Prepared:
    """The planner's input, and the graph with its copies."""
    program, found, fixed = bound.program, captured.discovery, captured.fixed
    capture = captured.capture
    copies: list[Word] = []
    cells, stale = random_cells(program, capture, found, decoy_address=captured.decoy_address)
    if fixed.fixed:
        capture, copies = add_copies(captured.device, program, capture, captured.pool, fixed)
    words = (*found.words, *copies)
    whole = with_scratch(program, found.scratch_bytes)
    state = dataclasses.replace(
        captured,
        capture=within_launches(program, capture, copies),
        discovery=dataclasses.replace(found, words=words, noise=(*found.noise, *stale)),
        random_cells=cells,
    )
    graph = node_graph(whole, capture, words)
    return Prepared(
        dataclasses.replace(bound, program=whole), fixed.activations(program), graph, state
    )
