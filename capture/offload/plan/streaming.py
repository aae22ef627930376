"""Weight streaming as data: what stays in a device's weight memory, and what is copied when.

A pass is one execution of the Program. Weights lie in one linear range of device memory: one part
is resident, and the rest, the ring, is repeatedly written by transfers. The position of each piece
is the same in every pass.
"""

from __future__ import annotations

import dataclasses

from offload.plan.steps import Lane, Transfer, counted
from offload.plan.topology import AS_ASKED, Link, MemoryUnit


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight, and the launches that read it.

    Attributes:
        value: the Program's Value, of role weight.
        size_bytes: of its storage.
        launches: the launches that read it, ascending; at least one unless it stays.
        name: for messages.
        stays: it must be resident: a launch writes it, no launch reads it, the result shows it, or
            it is in memory beside weights in files.
        row_bytes: the size of a row, for a table of which each launch reads rows by index; 0:
            launches read all of it.
        n_rows: for a table, the rows that each of `launches` reads, repeated rows counted again.
    """

    value: int
    size_bytes: int
    launches: tuple[int, ...]
    name: str
    stays: bool = False
    row_bytes: int = 0
    n_rows: tuple[int, ...] = ()

    @property
    def rows_bytes(self) -> int:
        """The bytes of the rows that the launches of a pass read."""
        return self.row_bytes * sum(self.n_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightDemand:
    """The weights that a pass needs, in order, and the time that hides their transfers.

    Attributes:
        launch_ns: the duration of each launch with all weights resident, in program order.
        weights: all weights; each may be streamed or stay, unless it must stay.
    """

    launch_ns: tuple[float, ...]
    weights: tuple[WeightUse, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes of one weight, and their place.

    Attributes:
        value: the weight.
        offset_bytes: their begin in the weight.
        size_bytes: their number.
        memory_offset_bytes: their place in the weight memory. A weight in one piece lies there as
            it is; the pieces of a weight in several pieces lie at multiples of the granule, and are
            mapped side by side.
        streamed: copied by steps; otherwise it is resident.
    """

    value: int
    offset_bytes: int
    size_bytes: int
    memory_offset_bytes: int
    streamed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Rows of a table that a launch reads from the store, straight into its result.

    A table whose rows are gathered has no pieces: no part of it is in the memory of weights.

    Attributes:
        value: the weight that is the table.
        launch: the launch that reads them.
        n_rows: the number of its indices.
        row_bytes: the size of each row.
    """

    value: int
    launch: int
    n_rows: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """The bytes of all the rows."""
        return self.n_rows * self.row_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StreamingFloor:
    """The least budget, and what sets it.

    Attributes:
        required_bytes: no smaller budget has a plan; as allocated by the device.
        ring_bytes, resident_bytes: the used part of it; weights that must stay or are too small to
            be streamed are resident.
        value: the weight that sets the ring: the largest that is read when it is fullest; -1
            without weights.
        name: its name.
        period_ns: the predicted time of a pass at this budget.
    """

    required_bytes: int
    ring_bytes: int
    resident_bytes: int
    value: int
    name: str
    period_ns: float


@dataclasses.dataclass(frozen=True, slots=True)
class Streaming:
    """Where weights lie under a budget, and the steps of a pass.

    Attributes:
        budget_bytes: all device memory that weights may use, including the ring.
        memory_bytes: the bytes that they use; the device takes `taken_bytes` for them.
        granule_bytes: the unit in which memory can be mapped.
        pieces: of all weights whose rows are not gathered; pieces of one weight are adjacent, in
            ascending offset.
        lanes: the launches of a pass, and beside them the copies of streamed pieces, if any.
        period_ns: the simulated time of a pass after the first.
        compute_ns: that of a pass with all weights resident.
        roofline_ns: max(compute, (weights - budget) / bandwidth), counting only the rows of tables
            that may be gathered: no plan is quicker.
        floor: the least budget.
        link: the cost of a copy into the kind of memory that the plan uses.
        estimated: why the times of launches are estimates; empty if they were measured, or need no
            measurement.
        timing: how they were measured; may be empty.
        launch_ns: the times of launches with which it was planned.
        gathers: rows that launches read from the store when needed; those of one table adjacent, by
            launch.
        shares_store: whether streamed weights may share the host memory of other executables on the
            device; for devices with their own store there.
        unit: the unit in which the device gives memory.
    """

    budget_bytes: int
    memory_bytes: int
    granule_bytes: int
    pieces: tuple[Piece, ...]
    lanes: tuple[Lane, ...]
    period_ns: float
    compute_ns: float
    roofline_ns: float
    floor: StreamingFloor
    link: Link
    estimated: str = ""
    timing: str = ""
    launch_ns: tuple[float, ...] = ()
    gathers: tuple[Gather, ...] = ()
    shares_store: bool = True
    unit: MemoryUnit = AS_ASKED

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The copies of a pass with their order as counts, in the order of need."""
        return counted(self.lanes)

    @property
    def taken_bytes(self) -> int:
        """The device memory that is taken for the weights: at most the budget."""
        return self.unit.taken_bytes(self.memory_bytes)

    @property
    def is_resident(self) -> bool:
        """Whether all weights stay, so that a pass reads nothing from the store."""
        return len(self.lanes) == 1 and not self.gathers

    @property
    def resident_bytes(self) -> int:
        """The bytes of weights that stay in device memory."""
        return sum(piece.size_bytes for piece in self.pieces if not piece.streamed)

    @property
    def ring_bytes(self) -> int:
        """The bytes of device memory that copies write."""
        written = [piece for piece in self.pieces if piece.streamed]
        begin = min((one.memory_offset_bytes for one in written), default=0)
        return max((one.memory_offset_bytes + one.size_bytes for one in written), default=0) - begin

    @property
    def transfer_bytes(self) -> int:
        """The bytes that the transfers of each pass copy."""
        return sum(self.pieces[one.piece].size_bytes for lane in self.lanes for one in lane.copies)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the rows that launches of each pass gather."""
        return sum(one.size_bytes for one in self.gathers)

    @property
    def streamed_bytes(self) -> int:
        """The bytes that each pass reads from the store: by transfers and as rows."""
        return self.transfer_bytes + self.gathered_bytes
