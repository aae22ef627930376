"""Placement of a prepared Program, by what its backend says of lifetimes and of the device."""

from __future__ import annotations

from offload.backends import Backend, Prepared
from offload.plan import Plan, graph_lifetimes, place_values


def place(prepared: Prepared, backend: Backend) -> Plan:
    """Where a prepared Program's Values lie in the feature map of this backend's device."""
    graph, program = prepared.graph, prepared.program
    lifetimes = None if graph is None else graph_lifetimes(program, graph)
    machine = backend.machine(program.device_index)
    return place_values(program, machine, prepared.operator_allocated, lifetimes)
