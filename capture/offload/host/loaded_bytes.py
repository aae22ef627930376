"""The own memory of an executable of one choice of sizes."""

from __future__ import annotations

from offload.program.family import BoundFamily
from offload.run import Executable

_LAUNCH_BYTES = 8 * 1024
"""Memory of a launch, described and loaded: 170 instances of a BERT took 7.1 KiB per launch."""


def loaded_bytes(bound: BoundFamily, run: Executable) -> int:
    """Bytes of size constants, packed weights, launches, graph; no model's weights, no arena.

    Args:
        bound: the Family.
        run: its Program at some sizes, loaded.
    """
    shared = {tensors[0].untyped_storage()._cdata for tensors in bound.bindings.weights.values()}
    own = (tensors[0].untyped_storage() for tensors in run.bound.bindings.weights.values())
    constant_bytes = sum(one.nbytes() for one in own if one._cdata not in shared)
    report = run.memory_report()
    device_bytes = report.derived_bytes + report.graph_bytes
    return constant_bytes + device_bytes + _LAUNCH_BYTES * len(run.program.launches)
