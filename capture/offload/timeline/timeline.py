"""The Timeline that a user gets from `run.timeline()`."""

from __future__ import annotations

from offload.timeline.spans import ExecutionTimeline


class Timeline:
    """Executions recorded between the beginning and the end of a with-block.

    Owner: the caller. Filled when the block ends; data without a device from then on.

    Attributes:
        device: the backend's name.
        machine_name: the processor's own name.
        versions: of what ran, by name, such as `torch`.
        executions: in order.
        clock_reads: how often recording read the clock; executions outside a block read it never.
        clock_read_ns: the cost of one read, measured when the block ended.
    """

    def __init__(self, device: str, machine_name: str, versions: dict[str, str]) -> None:
        self.device = device
        self.machine_name = machine_name
        self.versions = versions
        self.executions: tuple[ExecutionTimeline, ...] = ()
        self.clock_reads = 0
        self.clock_read_ns = 0.0

    @property
    def recording_cost_ns(self) -> int:
        """What recording has added to all executions together."""
        return round(self.clock_reads * self.clock_read_ns)
