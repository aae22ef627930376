"""Captures of one Program in several layouts, for discovery to compare."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

from offload import _native
from offload.backends.cuda.capture import Capturer, device_of
from offload.backends.cuda.host_memory import with_host_words
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.resident_graph import CapturedProgram
from offload.backends.relocation import advice
from offload.backends.relocation.captures import GraphCapture
from offload.backends.relocation.words import WORD_BYTES, Discovery, Noise, NoiseKind
from offload.errors import CaptureError
from offload.program import Program

# What stands around the address that the proof gives to words which no kernel should read.
_DECOY_BYTES = 4096
_DECOY = struct.pack("<Q", 3) * (2 * _DECOY_BYTES // WORD_BYTES)


def capture_in_layouts(
    program: Program, capturer: Capturer, seed: int
) -> tuple[CapturedProgram, GraphCapture, GraphCapture, GraphCapture]:
    """Capture twice in one layout, and once in each of two others.

    The first of the two is let go before the same addresses are given out again. A capture in
    another layout is made in between and lives on while the second is made, so that the heap gives
    that other memory than the first: what is left of addresses of the host differs between the
    two, as all that nobody initialised should. The second is the template, and lives on while the
    last is made, so that no address of its can recur. Its pool has the decoy of the proof too.

    Args:
        program: to be captured.
        capturer: what captures it.
        seed: of the first layout; the two others have the next ones.

    Returns:
        The template, nothing of it discovered yet; the other capture in its layout; those in other
        layouts. Of the three others only the data.

    Raises:
        CaptureError: a launch cannot be captured.
        ExecutionError: the driver failed.
    """
    device = device_of(program)

    def taken(pool: _native.DiscoveryPool) -> GraphCapture:
        capture = capturer.capture(program, pool)
        with DeviceMemory(device):  # so that the driver can be asked
            return with_host_words(capture)

    pool = _native.DiscoveryPool(device, seed)
    between = _native.DiscoveryPool(device, seed + 1)
    again = _as_data(taken(pool))
    alive = taken(between)
    pool.rewind()
    template = taken(pool)
    other = _as_data(alive)
    del alive, between  # in this order: its tensors lie in the pool
    last = _as_data(taken(_native.DiscoveryPool(device, seed + 2)))
    decoy_address = pool.allocate(2 * _DECOY_BYTES) + _DECOY_BYTES
    nothing = Discovery((), (), (), ())
    captured = CapturedProgram(device, template, pool, nothing, [], decoy_address)
    return captured, again, other, last


def write_decoy(captured: CapturedProgram, memory: DeviceMemory) -> None:
    """Fill the decoy, before the proof executes anything; no capture is disturbed until then.

    Raises:
        ExecutionError: the driver failed.
    """
    memory.write(captured.decoy_address - _DECOY_BYTES, _DECOY)


def check_decoy(
    captured: CapturedProgram, memory: DeviceMemory, describe: Callable[[Noise], str]
) -> None:
    """Refuse kernels that have written to the decoy, after the proof.

    Results do not show it: such a kernel would write to memory that it was not given.

    Raises:
        CaptureError: the decoy is changed; the message names the words that had its address.
        ExecutionError: the driver failed.
    """
    if memory.read(captured.decoy_address - _DECOY_BYTES, len(_DECOY)) == _DECOY:
        return
    kinds = (NoiseKind.HOST, NoiseKind.CELL)
    words = [describe(one) for one in captured.discovery.noise if one.kind in kinds]
    raise CaptureError(
        f"a kernel writes through a word that was taken for what nobody initialised: one of "
        f"{', '.join(words)}; {advice.INITIALISE}"
    )


def _as_data(capture: GraphCapture) -> GraphCapture:
    """The capture without its graph: what was read of it stays."""
    return dataclasses.replace(capture, graph=0, keep=None)
