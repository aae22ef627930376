"""The costs of re-setting a node and of copying on a device, fitted to measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from offload.backends.captured.fitted_lines import fit_line
from offload.plan.topology import CopyCosts

_LEAST_NS = 1.0  # for a call; a clock too coarse to measure it must not make it free


def fit_copy_costs(
    set_node_ns: Sequence[float],
    submit_ns: Sequence[float],
    device_ns: Sequence[tuple[int, float]],
) -> CopyCosts:
    """Return medians of the host's times, and a line through the device's.

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
