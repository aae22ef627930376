"""Machines: all that a planner may know about the hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Durations for predictions and for the null backend's virtual clock, in ns.

    Attributes:
        launch_ns: device time of a launch whose operator is not in `operator_ns`.
        issue_ns: host time to deliver one launch.
        slot_ns, word_ns: header time per slot that changed and per word that is patched.
        submit_ns: host time to submit the whole program.
        operator_ns: device time by operator.
    """

    launch_ns: int = 5_000
    issue_ns: int = 3_000
    slot_ns: int = 10
    word_ns: int = 5
    submit_ns: int = 2_000
    operator_ns: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class CopyCosts:
    """What a moved address costs on a device, and what a copy costs instead, in ns.

    Attributes:
        set_node_ns: host time to re-set one node of an instantiated graph.
        submit_ns: host time to enqueue one copy on the device.
        device_ns, device_ns_per_byte: device time of one copy.
    """

    set_node_ns: float
    submit_ns: float
    device_ns: float
    device_ns_per_byte: float

    def copy_ns(self, size_bytes: int) -> float:
        """One copy from the host's call to its end on an idle device."""
        return self.submit_ns + self.device_ns + self.device_ns_per_byte * size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as a planner sees it.

    Attributes:
        device: device type, such as `cpu`.
        name: the processor's own name, for reports.
        memory_bytes: memory of the device; 0 where unknown.
        alignment_bytes: every Value starts at a multiple of this; a power of two.
        costs: durations.
    """

    device: str
    name: str
    memory_bytes: int
    alignment_bytes: int
    costs: CostTable
