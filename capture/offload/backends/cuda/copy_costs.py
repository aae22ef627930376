"""What re-setting a node and copying cost on a device: fitted to what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from offload.machine import CopyCosts

_LEAST_NS = 1.0  # of a call; a clock too coarse to see one must not make it free


def fit_copy_costs(
    set_node_ns: Sequence[float],
    submit_ns: Sequence[float],
    device_ns: Sequence[tuple[int, float]],
) -> CopyCosts:
    """Medians of the host's times, and a line through the device's.

    Args:
        set_node_ns: samples of re-setting one node.
        submit_ns: samples of enqueuing one copy.
        device_ns: samples of one copy on the device, as (bytes, ns).
    """
    fixed_ns, ns_per_byte = fit_line(device_ns)
    return CopyCosts(
        set_node_ns=max(_LEAST_NS, statistics.median(set_node_ns)),
        submit_ns=statistics.median(submit_ns),
        device_ns=fixed_ns,
        device_ns_per_byte=ns_per_byte,
    )


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The time of a copy as a line: the time of none, and of each byte, in ns.

    The line is the one with the least squares of relative errors, so that small copies count as
    much as large ones. Neither of its two numbers is negative.

    Args:
        samples: of one copy each, as (bytes, ns), of at least two sizes.
    """
    sums = [0.0] * 5
    for size_bytes, time_ns in samples:
        weight = 1 / max(time_ns, _LEAST_NS) ** 2
        terms = (1, size_bytes, size_bytes**2, time_ns, size_bytes * time_ns)
        sums = [total + weight * term for total, term in zip(sums, terms, strict=True)]
    n, x, xx, y, xy = sums
    ns_per_byte = max(0.0, (n * xy - x * y) / (n * xx - x * x))
    fixed_ns = (y - ns_per_byte * x) / n
    if fixed_ns < 0:
        fixed_ns, ns_per_byte = 0.0, xy / xx
    return fixed_ns, ns_per_byte
