"""All that planners may know of hardware: machines, their memory, copies into it, costs.

Measured costs (`Link`, `CopyCosts`) are requested where a plan needs them.
"""

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
        memory_bytes_per_ns: the assumed rate of reads and writes by untimed launches: of the order
            of the device's memory, never a measurement.
    """

    launch_ns: int = 5_000
    issue_ns: int = 3_000
    slot_ns: int = 10
    word_ns: int = 5
    submit_ns: int = 2_000
    operator_ns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    memory_bytes_per_ns: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class CopyCosts:
    """The cost of a moved address on a device, and of a copy instead, in ns.

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
        """The time of one copy from the host's call to its end on an idle device."""
        return self.submit_ns + self.device_ns + self.device_ns_per_byte * size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """The time of a copy from the host store to a device's memory: overhead + bytes / bandwidth.

    Attributes:
        bytes_per_second: the bandwidth.
        overhead_ns: the overhead of a copy.
        row_overhead_ns: that of a row that a launch gathers; None: as for any copy.
    """

    bytes_per_second: float
    overhead_ns: float
    row_overhead_ns: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUnit:
    """The allocation unit of a device: it gives the requested bytes plus an extra, in whole units.

    Attributes:
        unit_bytes: allocations are multiples of it.
        extra_bytes: the extra beside the request, before rounding up.
    """

    unit_bytes: int = 1
    extra_bytes: int = 0

    def taken_bytes(self, size_bytes: int) -> int:
        """Bytes that the device allocates for a request of `size_bytes`; 0 for 0."""
        if not size_bytes:
            return 0
        return -(-(size_bytes + self.extra_bytes) // self.unit_bytes) * self.unit_bytes

    def usable_bytes(self, budget_bytes: int) -> int:
        """The largest request for which the device allocates at most the budget."""
        return max(0, budget_bytes // self.unit_bytes * self.unit_bytes - self.extra_bytes)


AS_ASKED = MemoryUnit()
"""A device that allocates exactly the requested bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The division of weight memory on a device that copies weights there.

    Attributes:
        alignment_bytes: of a weight in one piece; divides the granule.
        granule_bytes: the unit in which pieces of a weight can be mapped side by side, so that a
            part may stay; None: a weight lies in one piece.
        unit: the allocation unit of the device: all that it allocates counts in a budget.
    """

    alignment_bytes: int
    granule_bytes: int | None = None
    unit: MemoryUnit = AS_ASKED

    @property
    def piece_bytes(self) -> int:
        """The alignment of pieces."""
        return self.alignment_bytes if self.granule_bytes is None else self.granule_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as planners see it.

    Attributes:
        device: device type, such as `cpu`.
        name: the processor's own name, for reports.
        memory_bytes: memory of the device; 0 where unknown.
        alignment_bytes: every Value starts at a multiple of this; a power of two.
        costs: durations.
        settings: other influences on durations, such as a number of threads; may be empty.
        is_limited: whether `memory_bytes` is the user's choice: the device itself has other memory.
    """

    device: str
    name: str
    memory_bytes: int
    alignment_bytes: int
    costs: CostTable
    settings: str = ""
    is_limited: bool = False
