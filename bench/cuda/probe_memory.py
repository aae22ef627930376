"""Owners of the memory that words of captured kernels point into, queried from the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cuda.bindings import driver

# The range of possible addresses, as in discovery.
_LEAST_ADDRESS, _MOST_ADDRESS = 1 << 16, 1 << 57

Place = tuple[str, int]
"""A kernel's name, and the value of a word of its arguments."""


def memory_of(address: int) -> dict[str, int] | None:
    """Return the driver's information on an address; None for an unknown address.

    Returns:
        `type` (CUmemorytype: 1 is the host's, 2 a device's), `range_start`, `range_bytes` and
        `device`; attributes that the driver refuses are missing.
    """
    attributes = {
        "type": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        "range_start": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        "range_bytes": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        "device": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    }
    known = {}
    for name, attribute in attributes.items():
        code, value = driver.cuPointerGetAttribute(attribute, address)
        if not int(code):
            known[name] = int(value)
    return known if "type" in known else None


def memory_by_kernel(
    places: Iterable[Place], is_known: Callable[[int], bool]
) -> dict[str, list[dict[str, Any]]]:
    """Return by kernel the memory that constant words point into, except memory known to be kept.

    Args:
        places: words that are the same in every capture.
        is_known: whether an address is the pool's, say, or a weight's.

    Returns:
        By kernel the result of `memory_of` for each range, and `words`: how many point into it.
    """
    counts: dict[Place, int] = {}
    for place in places:
        if _LEAST_ADDRESS <= place[1] < _MOST_ADDRESS:
            counts[place] = counts.get(place, 0) + 1
    memory = {value: memory_of(value) for value in {value for _, value in counts}}
    found: dict[str, dict[tuple[tuple[str, int], ...], int]] = {}
    for (kernel, value), n_words in counts.items():
        known = memory[value]
        if known is not None and not is_known(value):
            ranges = found.setdefault(kernel, {})
            key = tuple(known.items())
            ranges[key] = ranges.get(key, 0) + n_words
    return {
        kernel: [dict(key) | {"words": n_words} for key, n_words in ranges.items()]
        for kernel, ranges in found.items()
    }
