"""Placement of a prepared Program, by its backend's data on lifetimes and the device."""

from __future__ import annotations

import dataclasses

from offload.backends import Backend, Prepared
from offload.plan import Plan, graph_lifetimes, place_values, value_lifetimes
from offload.plan.collective_lanes import collective_lanes
from offload.plan.steps import Lane


def place(
    prepared: Prepared, backend: Backend, launch_lanes: tuple[Lane, ...] | None = None
) -> Plan:
    """Place a prepared Program's Values in the feature map of this backend's device.

    `launch_lanes`: the lanes of launches; None: one after another, or as in the device's graph.
    """
    graph, program = prepared.graph, prepared.program
    lifetimes = None if graph is None else graph_lifetimes(program, graph)
    if launch_lanes is not None and len(launch_lanes) > 1:
        lifetimes = value_lifetimes(program, launch_lanes)
    machine = backend.machine(program.device_index)
    plan = place_values(program, machine, prepared.operator_allocated, lifetimes)
    beside = collective_lanes(program) if program.groups else None
    return dataclasses.replace(plan, launch_lanes=launch_lanes, collective_lanes=beside)
