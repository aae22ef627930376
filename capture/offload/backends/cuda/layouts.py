"""Captures one Program in several layouts, for comparison by discovery."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import torch

from offload.backends.captured.relocation import advice
from offload.backends.captured.relocation.captures import GraphCapture
from offload.backends.captured.relocation.contents import CHUNK_BYTES
from offload.backends.captured.relocation.words import WORD_BYTES, Discovery, Noise, NoiseKind
from offload.backends.cuda.capture import Capturer, device_of
from offload.backends.cuda.fixed_memory import FixedMemory
from offload.backends.cuda.host_memory import with_host_words
from offload.backends.cuda.memory import DeviceMemory, with_memory_of_torch
from offload.backends.cuda.resident_graph import TemplateGraph
from offload.errors import CaptureError
from offload.native import _native
from offload.program import BoundProgram, Program

_LARGE_PROGRAM_BYTES = 2**30
"""Bytes of Values from which a pool also has a large chunk: mapping the small chunks one by one
would take longer than 0.1 s.
"""

_LARGE_CHUNK_BYTES = 2**26

_DECOY_WORD = struct.pack("<Q", 3)  # as a number small, as an address invalid, as an index valid


def discovery_pool(program: Program, seed: int) -> _native.DiscoveryPool:
    """A pool of discovery for a Program; torch's cached memory is available to it.

    Raises:
        OutOfMemory: the device has no memory left.
        ExecutionError: the driver failed.
    """
    n_bytes = sum(value.size_bytes for value in program.values)
    large_chunk_bytes = _LARGE_CHUNK_BYTES if n_bytes >= _LARGE_PROGRAM_BYTES else 0
    device = device_of(program)
    return with_memory_of_torch(lambda: _native.DiscoveryPool(device, seed, large_chunk_bytes))


def capture_in_layouts(
    bound: BoundProgram,
    capturer: Capturer,
    seed: int,
    fixed: FixedMemory = FixedMemory(),  # noqa: B008  (immutable)
) -> tuple[TemplateGraph, GraphCapture, GraphCapture, GraphCapture]:
    """Capture twice in one layout, and once in each of two others.

    The first of the two is released before the same addresses are given out again. A capture in
    another layout is made in between and lives while the second is made, so that the heap gives the
    second other memory than the first: remains of host addresses then differ between the two, as
    all uninitialised bytes should. The second is the template, and lives while the last is made, so
    that none of its addresses recurs. Its pool also has the decoy of the proof. If some memory has
    the same addresses in all of them, no two captures live at once, since torch's allocator
    identifies memory by its address; the pools do, so that no other address recurs.

    Args:
        bound: to be captured.
        capturer: captures it.
        seed: of the first layout; the two others have the next ones.
        fixed: memory that is the same in all layouts.

    Returns:
        The template, before discovery; the other capture in its layout; those in other layouts.
        Only the template has more than data.

    Raises:
        CaptureError: a launch cannot be captured.
        CapturesDiffer: other Values lie in the fixed memory.
        ExecutionError: the driver failed.
    """
    program = bound.program
    device = device_of(program)

    def new_pool(number: int) -> _native.DiscoveryPool:
        pool = discovery_pool(program, seed + number)
        fixed.fix(pool)
        return pool

    def taken(pool: _native.DiscoveryPool) -> GraphCapture:
        capture = capturer.capture(bound, pool)
        with DeviceMemory(device):  # makes a context current
            return fixed.apart(with_host_words(capture))

    pool, between = new_pool(0), new_pool(1)
    again = as_data(taken(pool))
    if fixed.fixed:
        beside = new_pool(2)
        other, last = as_data(taken(between)), as_data(taken(beside))
        pool.rewind()
        template = taken(pool)
    else:
        alive = taken(between)
        pool.rewind()
        template = taken(pool)
        other = as_data(alive)
        del alive, between  # in this order: its tensors are in the pool
        last = as_data(taken(new_pool(2)))
    decoy_address = _decoy_address(pool, device)
    nothing = Discovery((), (), (), ())
    captured = TemplateGraph(device, template, pool, nothing, [], decoy_address, fixed)
    return captured, again, other, last


def capture_once(bound: BoundProgram, capturer: Capturer) -> TemplateGraph:
    """Capture in one layout, with the decoy of the proof, before discovery.

    Raises:
        CaptureError: a launch cannot be captured.
        ExecutionError: the driver failed.
    """
    device = device_of(bound.program)
    pool = discovery_pool(bound.program, 0)
    capture = capturer.capture(bound, pool)
    return TemplateGraph(
        device, capture, pool, Discovery((), (), (), ()), [], _decoy_address(pool, device)
    )


def _decoy_address(pool: _native.DiscoveryPool, device: int) -> int:
    chunk_bytes = _native.cuda_granularity_bytes(device)
    return pool.allocate(2 * chunk_bytes) + chunk_bytes


def clear_decoy(captured: TemplateGraph, memory: DeviceMemory) -> None:
    """Fill with zeros the memory at all addresses that the template was captured with.

    The pool shows one or two chunks of memory there, which the decoy fills. No capture is affected
    before the proof, and no execution should read or write there.

    Raises:
        ExecutionError: the driver failed.
    """
    for address, n_bytes in captured.pool.shown():
        memory.fill(address, n_bytes)


def write_decoy(captured: TemplateGraph, memory: DeviceMemory) -> None:
    """Fill it with the decoy's numbers, before the proof executes what should not read them.

    Raises:
        ExecutionError: the driver failed.
    """
    for address, n_bytes in captured.pool.shown():
        memory.write(address, _DECOY_WORD * (n_bytes // WORD_BYTES))


def check_decoy(
    captured: TemplateGraph, memory: DeviceMemory, describe: Callable[[Noise], str]
) -> None:
    """Refuse kernels that have written to the decoy, after the proof.

    Results do not reveal this: such a kernel would write to memory of others.

    Raises:
        CaptureError: the decoy has changed; the message names the words that had its address.
        ExecutionError: the driver failed.
    """
    (word,) = struct.unpack("<q", _DECOY_WORD)
    if all(
        bool((content.view(torch.int64) == word).all())
        for address, n_bytes in captured.pool.shown()
        for content in memory.chunks(address, n_bytes, CHUNK_BYTES)
    ):
        return
    kinds = (NoiseKind.HOST, NoiseKind.CELL)
    words = [describe(one) for one in captured.discovery.noise if one.kind in kinds]
    if not words:
        raise CaptureError(
            "a kernel writes to memory of its capture, and none of its words holds an address of "
            f"that memory (a texture or a variable of its module may); {advice.FIND_THE_LAUNCH}"
        )
    raise CaptureError(
        "a kernel writes through a word that was treated as uninitialised: one of "
        f"{', '.join(words)}; {advice.INITIALISE}"
    )


def as_data(capture: GraphCapture) -> GraphCapture:
    """The capture's data, without its graph."""
    return dataclasses.replace(capture, graph=0, keep=None)
