"""Plans: where the Values of a Program lie, and when data move. No torch, no device.

The data are in `plan`, `streaming` and `topology`; the rest are pure functions from data to data.
"""

from offload.plan.check_plan import check_order, check_plan
from offload.plan.check_streaming import check_streaming
from offload.plan.copied_slots import MovingSlot, SlotChoice, choose_copied_slots
from offload.plan.graph_lifetimes import graph_lifetimes
from offload.plan.lifetimes import value_lifetimes
from offload.plan.memory import Interval, Placement, check_placement, place_intervals, round_up
from offload.plan.place_values import place_values
from offload.plan.plan import Lifetime, NodeGraph, Place, Plan, Slot, SlotKind
from offload.plan.row_reads import RowReads, row_reads
from offload.plan.simulate_steps import SimulatedExecution
from offload.plan.simulate_streaming import simulate_streaming
from offload.plan.stream_weights import roofline_ns, stream_weights
from offload.plan.weight_demand import weight_demand

__all__ = [
    "Interval",
    "Lifetime",
    "MovingSlot",
    "NodeGraph",
    "Place",
    "Placement",
    "Plan",
    "RowReads",
    "SimulatedExecution",
    "Slot",
    "SlotChoice",
    "SlotKind",
    "check_order",
    "check_placement",
    "check_plan",
    "check_streaming",
    "choose_copied_slots",
    "graph_lifetimes",
    "place_intervals",
    "place_values",
    "roofline_ns",
    "round_up",
    "row_reads",
    "simulate_streaming",
    "stream_weights",
    "value_lifetimes",
    "weight_demand",
]
