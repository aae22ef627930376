"""Addresses of host memory in kernels' arguments: remains of the host's stack."""

from __future__ import annotations

import bisect
import dataclasses
import struct
from pathlib import Path

from offload.backends.captured.relocation.addresses import Layout
from offload.backends.captured.relocation.captures import GraphCapture, NodeKind
from offload.backends.captured.relocation.words import HALF_BYTES, WORD_BYTES
from offload.backends.cuda.driver import is_known_address

# Above every number that may occur in arguments for another reason, such as a distance between two
# addresses. Linux gives heap, mappings and stacks of 64-bit programs higher addresses, except the
# heap of a program that is not position-independent.
_LEAST_ADDRESS = 1 << 41
_MOST_ADDRESS = 1 << 56  # of a program, with five page table levels


def with_host_words(capture: GraphCapture) -> GraphCapture:
    """The capture with `GraphCapture.host_words` and `host_upper_halves`.

    Must be called while the capture's memory exists. Such an address lies in a mapping that this
    process may read and write (its heap, a stack or an anonymous mapping, but no file of /dev), and
    the driver does not know it. So it is neither memory of a device, nor host memory that was made
    known to the driver (pinned, registered, managed).

    Raises:
        ExecutionError: the driver failed.
    """
    contents = {node.parts[0] for node in capture.nodes if node.kind is NodeKind.KERNEL}
    values: set[int] = set()
    for content in contents:
        for lead in (0, HALF_BYTES):
            n_words = max(0, len(content) - lead) // WORD_BYTES
            values.update(struct.unpack_from(f"<{n_words}Q", content, lead))
    layout = Layout(capture, guard_bytes=0)
    # Most words are addresses in the pool, or no addresses: the driver need not be queried.
    left = [
        one
        for one in values
        if _LEAST_ADDRESS <= one < _MOST_ADDRESS and not layout.candidates(one)
    ]
    ranges = [one for one in _writable_ranges() if one[1] > _LEAST_ADDRESS]
    starts = [start for start, _ in ranges]
    found = set()
    for value in left:
        place = bisect.bisect_right(starts, value) - 1
        if place >= 0 and value < ranges[place][1] and not is_known_address(value):
            found.add(value)
    upper_halves = {
        half for begin, end in ranges for half in range(begin >> 32, ((end - 1) >> 32) + 1)
    }
    return dataclasses.replace(
        capture, host_words=frozenset(found), host_upper_halves=frozenset(upper_halves)
    )


def _writable_ranges() -> list[tuple[int, int]]:
    """The (begin, end) of each mapping that this process may read and write, in order.

    Empty if the system does not report them, as in a container without /proc: such words are then
    refused.
    """
    ranges: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ranges
    for line in lines:
        place, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights.startswith("rw") and not (path and path[0].startswith("/dev/")):
            begin, end = place.split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges
