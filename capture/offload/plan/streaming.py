"""Weight streaming as data: what stays in a device's weight memory, what is copied there, when.

A pass is one execution of the Program. Weights lie in one linear range of device memory, of which
a part is resident and the rest, the ring, is written again and again by transfers. The position of
each piece is the same in every pass.
"""

from __future__ import annotations

import dataclasses

from offload.plan.steps import Lane, Transfer, counted
from offload.plan.topology import AS_ASKED, Link, MemoryUnit


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight, and the launches that read it.

    Attributes:
        value: of the Program, of role weight.
        size_bytes: of its storage.
        launches: that read it, ascending; at least one unless it stays.
        name: for messages.
        stays: it must be resident: a launch writes it, none reads it, the result shows it, or it is
            in memory beside weights in files.
        row_bytes: of a table of which each launch reads some rows, named by indices; 0: launches
            read all of it.
        n_rows: of a table, how many rows each of `launches` reads, the same ones counted again.
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
        """Of the rows that the launches of a pass read."""
        return self.row_bytes * sum(self.n_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightDemand:
    """What a pass needs of weights, in which order, and the time that hides their transfers.

    Attributes:
        launch_ns: what each launch takes with all weights resident, in program order.
        weights: all of them; each may be streamed or stay, unless it is said to stay.
    """

    launch_ns: tuple[float, ...]
    weights: tuple[WeightUse, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one weight that lie together, and where.

    Attributes:
        value: the weight.
        offset_bytes: where in the weight they begin.
        size_bytes: how many they are.
        memory_offset_bytes: where in the weight memory they lie. A weight in one piece lies there
            as it is; the pieces of a weight in several lie at multiples of the granule, and are
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

    A table whose rows are gathered has no pieces: nothing of it is in the memory of weights.

    Attributes:
        value: the weight that is the table.
        launch: reads them.
        n_rows: as many as it has indices.
        row_bytes: of each.
    """

    value: int
    launch: int
    n_rows: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Of all the rows."""
        return self.n_rows * self.row_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StreamingFloor:
    """The least budget, and what sets it.

    Attributes:
        required_bytes: no smaller budget has a plan; in what the device gives.
        ring_bytes, resident_bytes: of which are used; resident are weights that must stay, and
            those too small to be streamed.
        value: the weight that sets the ring: the largest that is read when it is fullest; -1
            without weights.
        name: of it.
        period_ns: the time of a pass that is predicted at this budget.
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
        budget_bytes: every byte of device memory that weights may use, the ring included.
        memory_bytes: those that they use; what the device takes for that is `taken_bytes`.
        granule_bytes: the unit in which memory can be mapped.
        pieces: of all weights whose rows are not gathered; those of one weight stand side by side
            in ascending offset.
        lanes: the launches of a pass, and beside them the copies of streamed pieces, where there
            are any.
        period_ns: the time of a pass, as simulated, once the first one is over.
        compute_ns: that of a pass with all weights resident.
        roofline_ns: max(compute, (weights - budget) / bandwidth), of tables that may be gathered
            only the rows: no plan is quicker.
        floor: the least budget.
        link: what a copy takes, into the kind of memory that the plan uses.
        estimated: why the times of launches are estimates; empty if they were measured, or need
            not be.
        timing: how they were measured; empty where there is nothing to say of it.
        launch_ns: by launch the times that it was planned with.
        gathers: rows that launches read from the store as they need them; those of one table side
            by side, by launch.
        shares_store: whether what is streamed may be where other executables on the device have it
            in the host's memory; on devices that have a store of their own there.
        unit: in which the device gives memory.
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
        """The copies of a pass as counters tell their order, those that it needs first in front."""
        return counted(self.lanes)

    @property
    def taken_bytes(self) -> int:
        """Of device memory, what is taken for the weights: no more than the budget."""
        return self.unit.taken_bytes(self.memory_bytes)

    @property
    def is_resident(self) -> bool:
        """Whether all weights stay, so that a pass reads nothing from the store."""
        return len(self.lanes) == 1 and not self.gathers

    @property
    def resident_bytes(self) -> int:
        """Of weights that stay in device memory."""
        return sum(piece.size_bytes for piece in self.pieces if not piece.streamed)

    @property
    def ring_bytes(self) -> int:
        """Device memory that copies write."""
        written = [piece for piece in self.pieces if piece.streamed]
        begin = min((one.memory_offset_bytes for one in written), default=0)
        return max((one.memory_offset_bytes + one.size_bytes for one in written), default=0) - begin

    @property
    def transfer_bytes(self) -> int:
        """That the transfers of each pass copy."""
        return sum(self.pieces[one.piece].size_bytes for lane in self.lanes for one in lane.copies)

    @property
    def gathered_bytes(self) -> int:
        """Of the rows that launches of each pass gather."""
        return sum(one.size_bytes for one in self.gathers)

    @property
    def streamed_bytes(self) -> int:
        """That each pass reads from the store: by transfers and as rows."""
        return self.transfer_bytes + self.gathered_bytes
