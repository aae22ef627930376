"""Passes: pure functions from data to data; they need no device."""

from offload.passes.check_streaming import check_streaming
from offload.passes.copied_slots import MovingSlot, SlotChoice, choose_copied_slots
from offload.passes.dead_launches import remove_dead_launches
from offload.passes.graph_lifetimes import graph_lifetimes
from offload.passes.lifetimes import value_lifetimes
from offload.passes.memory import Interval, Placement, check_placement, place_intervals, round_up
from offload.passes.place_values import place_values
from offload.passes.row_reads import RowReads, row_reads
from offload.passes.simulate_streaming import StreamingPass, simulate_streaming
from offload.passes.stream_weights import roofline_ns, stream_weights
from offload.passes.weight_demand import weight_demand

__all__ = [
    "Interval",
    "MovingSlot",
    "Placement",
    "RowReads",
    "SlotChoice",
    "StreamingPass",
    "check_placement",
    "check_streaming",
    "choose_copied_slots",
    "graph_lifetimes",
    "place_intervals",
    "place_values",
    "remove_dead_launches",
    "roofline_ns",
    "round_up",
    "row_reads",
    "simulate_streaming",
    "stream_weights",
    "value_lifetimes",
    "weight_demand",
]
