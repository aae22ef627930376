"""All that planners may know of hardware: machines, their memory, what copies into it take, costs.

Measured ones (`Link`, `CopyCosts`) are asked for where a plan needs them.
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
        memory_bytes_per_ns: at which launches that nobody has timed are taken to read and write: an
            assumption of the order of the device's memory, never a measurement.
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
class Link:
    """What a copy from the host store to a device's memory takes: overhead + bytes / bandwidth.

    Attributes:
        bytes_per_second: the bandwidth.
        overhead_ns: of a copy.
        row_overhead_ns: the same, of a row that a launch gathers; None: as of any copy.
    """

    bytes_per_second: float
    overhead_ns: float
    row_overhead_ns: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUnit:
    """How a device gives memory: as much as is asked for and a little more, in whole units.

    Attributes:
        unit_bytes: what it gives is a multiple of it.
        extra_bytes: what it takes beside what is asked for, before it rounds up.
    """

    unit_bytes: int = 1
    extra_bytes: int = 0

    def taken_bytes(self, size_bytes: int) -> int:
        """What is taken of the device where so many bytes are asked for; none for none."""
        if not size_bytes:
            return 0
        return -(-(size_bytes + self.extra_bytes) // self.unit_bytes) * self.unit_bytes

    def usable_bytes(self, budget_bytes: int) -> int:
        """The most that can be asked for so that no more is taken than this."""
        return max(0, budget_bytes // self.unit_bytes * self.unit_bytes - self.extra_bytes)


AS_ASKED = MemoryUnit()
"""A device that gives what it is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How the memory of weights is divided on a device that brings them there.

    Attributes:
        alignment_bytes: of a weight that lies in one piece; divides the granule.
        granule_bytes: the unit in which pieces of a weight can be mapped side by side, so that a
            part may stay; None: a weight lies in one piece.
        unit: in which the device gives memory: all that it gives counts in a budget.
    """

    alignment_bytes: int
    granule_bytes: int | None = None
    unit: MemoryUnit = AS_ASKED

    @property
    def piece_bytes(self) -> int:
        """At multiples of which pieces begin."""
        return self.alignment_bytes if self.granule_bytes is None else self.granule_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as a planner sees it.

    Attributes:
        device: device type, such as `cpu`.
        name: the processor's own name, for reports.
        memory_bytes: memory of the device; 0 where unknown.
        alignment_bytes: every Value starts at a multiple of this; a power of two.
        costs: durations.
        settings: what else durations depend on, such as a number of threads; empty: nothing.
    """

    device: str
    name: str
    memory_bytes: int
    alignment_bytes: int
    costs: CostTable
    settings: str = ""
