"""Addresses of the host's own memory in kernels' arguments: what is left there of its stack."""

from __future__ import annotations

import bisect
import dataclasses
import struct
from pathlib import Path

from offload.backends.captured.relocation.addresses import Layout
from offload.backends.captured.relocation.captures import GraphCapture, NodeKind
from offload.backends.captured.relocation.words import HALF_BYTES, WORD_BYTES
from offload.backends.cuda.graph import is_known_address

# Above every number that may stand in arguments for another reason, a distance of two addresses
# say; Linux gives heap, mappings and stacks of 64-bit programs higher addresses, but for the heap
# of one that is not position-independent.
_LEAST_ADDRESS = 1 << 41
_MOST_ADDRESS = 1 << 56  # of a program, where pages have five levels


def with_host_words(capture: GraphCapture) -> GraphCapture:
    """The capture, saying what is the host's: `GraphCapture.host_words` and `host_upper_halves`.

    To be asked while the capture's memory is there. Such an address lies in a mapping that this
    process may read and write, its heap, a stack or an anonymous one, but in no file of /dev, and
    the driver does not know it. So it is no memory of a device, nor memory of the host that was
    made known to the driver (pinned, registered, managed).

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
    # Most words are addresses in the pool, or no address at all: nobody need be asked about them.
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
    """(begin, end) of each mapping that this process may read and write, in order.

    None where the system does not tell, as in a container without /proc: such words are refused.
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
