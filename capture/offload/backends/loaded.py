"""What a backend gives: a Program prepared for its device, and one that is resident there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from offload.native import _native
from offload.plan import NodeGraph
from offload.plan.topology import CopyCosts
from offload.program import Bindings, BoundProgram, Program


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchReport:
    """How a launch is executed.

    Attributes:
        mode: `thunk` or `out` (it writes where the Plan says), `call` (as recorded: in place, or
            into memory of its own), `copied` (as recorded, then copied: its out-variant failed its
            proof), `gathered` (rows of a table are read from the store into its result), `unproved`
            (not executed yet), `graph` (as nodes of a device's own graph), `opaque` (likewise, all
            nodes of the recorded callable as one launch), `kernel` (compiled code in place of
            launches), `replaced` (these launches run instead, as recorded: the compiled code failed
            its proof), `model` (as tasks of one model on the device), `dispatched` (the operator as
            recorded, delivered by the host), `scheduled` (kernels of a capturer, delivered by the
            host), `none` (nothing is computed).
        outside_bytes: bytes that it allocates outside the arena, counted at the first execution.
    """

    mode: str
    outside_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A backend's findings about a Program before it is placed.

    Attributes:
        bound: the Program; a device that needs scratch memory appends Values of role scratch, which
            the planner places.
        operator_allocated: the Values whose operator can only return its own memory.
        graph: the accesses of each node, where the device runs a graph; None where it runs launches
            in sequence.
        state: the backend's own, for `instantiate`.
        notes: notes on the preparation, in sentences for people.
        prepare_unproved: prepares it for a load without proof, where this preparation relies on the
            proof; None: this preparation serves as well.
    """

    bound: BoundProgram
    operator_allocated: frozenset[int] = frozenset()
    graph: NodeGraph | None = None
    state: Any = None
    notes: tuple[str, ...] = ()
    prepare_unproved: Callable[[], Prepared] | None = None

    @property
    def program(self) -> Program:
        """The Program."""
        return self.bound.program

    @property
    def bindings(self) -> Bindings:
        """The Program's live objects."""
        return self.bound.bindings


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A Program's weights on a device.

    Attributes:
        check: raises BindingError where a weight cannot be used in its present memory; None: all
            can.
        tensors: the tensor of each weight that lies in the executable's own memory.
        stream: transfers weights there, not loaded yet; None without streaming.
        derive_again: makes the next execution compute derived values again, whether or not torch
            counted a write; None without derived values. Any thread may call it.
    """

    check: Callable[[], None] | None = None
    tensors: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    stream: _native.WeightStream | _native.DeviceWeightStream | None = None
    derive_again: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Streams:
    """Streams of a device; an execution goes to the caller's current stream.

    Attributes:
        current: returns the driver's handle of that stream on the device of this index; None where
            torch knows it.
        drains_queue: requesting that handle waits until torch has delivered its own queue, which is
            a stage of m_l_t.
    """

    current: Callable[[int], int] | None = None
    drains_queue: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetNodes:
    """Nodes of a device's graph that are re-set when addresses change.

    Attributes:
        of_slot: by slot, the nodes that are re-set each time its address changes.
        measure_copies: measures re-setting and copying on the device. Raises ExecutionError.
    """

    of_slot: Mapping[int, Set[int]]
    measure_copies: Callable[[], CopyCosts]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedLanes:
    """Lanes of launches on a device.

    Attributes:
        counts: of executions so far.
        share_always: sets whether helpers take part in each execution from now on, or where that
            pays.
    """

    counts: Callable[[], _native.LaneCounts]
    share_always: Callable[[bool], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A Program on a device.

    Attributes:
        resident: the native object that replay drives.
        operator_allocated: the Values that operators allocate themselves.
        launch_reports: asks the resident how each launch is executed, in program order.
        device: of the tensors of an execution; None: the Program's.
        alignment_bytes: an input or a given output whose address is not a multiple of it is copied.
        moves_feature_map: whether this program's feature map may be new at every execution, on a
            backend that supports this.
        notes: notes on the execution, in sentences for people.
        weights: the weights on the device.
        streams: None: the device has no streams, and an execution has ended when its call returns.
        draw: where kernels read the state of generators: returns the seed and offset of each at
            each execution, and advances them; None where no kernel does.
        set_nodes: None where a slot's address is one word, so that a copy never pays.
        lanes: None where the Plan has no lanes of launches.
        graph_bytes: returns the memory that the device took to make its graph executable; 0 where
            it does not report it, or has not yet.
    """

    resident: _native.Resident
    operator_allocated: frozenset[int]
    launch_reports: Callable[[], tuple[LaunchReport, ...]]
    device: torch.device | None = None
    alignment_bytes: int = 1
    moves_feature_map: bool = True
    notes: Callable[[], tuple[str, ...]] = tuple
    weights: LoadedWeights = dataclasses.field(default_factory=LoadedWeights)
    streams: Streams | None = None
    draw: Callable[[], list[int]] | None = None
    set_nodes: SetNodes | None = None
    lanes: LoadedLanes | None = None
    graph_bytes: Callable[[], int] = int


@dataclasses.dataclass(frozen=True, slots=True)
class TimedLaunches:
    """The durations of launches.

    Attributes:
        times_ns: of each launch, in program order.
        how: how they were measured and what else they include, in words for people.
    """

    times_ns: tuple[float, ...]
    how: str
