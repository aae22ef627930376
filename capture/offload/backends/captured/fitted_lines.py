"""The duration of a copy as a line through samples."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_NS = 1.0  # for a copy; a clock too coarse to measure it must not make it free


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The duration of a copy as a line: its fixed part, and the duration per byte, in ns.

    The line minimises the squares of relative errors, so that small copies count as much as large
    ones. Neither of its two numbers is negative.

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
