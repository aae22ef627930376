"""The seam between backends and the rest of offload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from offload.errors import CaptureError
from offload.interpreter.settled_family import SettledFamily
from offload.native import _native
from offload.plan import NodeGraph, Plan
from offload.plan.steps import Lane
from offload.plan.streaming import Streaming
from offload.plan.topology import CopyCosts, Link, Machine, MemoryLayout
from offload.program import Bindings, BoundProgram, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do; the conformance suite reads it.

    Attributes:
        computes: results are computed (the null backend computes none).
        moves_feature_map: the feature map's address may be new at every execution, unless a Loaded
            says otherwise.
        queues_work: a call returns once its work is queued, so a failing launch surfaces at a
            ticket's wait, and the device is unusable afterwards.
        rebinds_weights: weights may move to other storages after the load.
        schedules_launches: the host can deliver a program launch by launch, for comparison.
        runs_kernels: launches may be compiled code over addresses (`Kernel`).
        runs_lanes: launches may run on several lanes of one thread each (`Plan.launch_lanes`).
        runs_collectives: launches may exchange tensors with other ranks.
        shares_arena: feature maps of all executables on a device share memory.
    """

    computes: bool = True
    moves_feature_map: bool = True
    queues_work: bool = False
    rebinds_weights: bool = True
    schedules_launches: bool = True
    runs_kernels: bool = False
    runs_lanes: bool = False
    runs_collectives: bool = False
    shares_arena: bool = False


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


class OpaqueLauncher(Protocol):
    """The role of a device that runs a callable itself as one launch.

    This includes work below torch's dispatcher, so its launches can be compared with a Program.
    """

    def unseen_work(self, seen: BoundProgram, opaque: BoundProgram) -> tuple[str, ...]:
        """Find a callable's work on the device beyond its recorded launches.

        Inputs, weights and generators stay unchanged.

        Args:
            seen: every launch that was observed, dead ones and constants included.
            opaque: the same call as one opaque launch.

        Returns:
            The name of each launch of the callable beyond the Program.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
            CaptureError: either cannot be captured, so that they cannot be compared.
            ExecutionError: the device failed.
        """


class LaneRunner(Protocol):
    """The role of a device that runs launches of one Program concurrently, in its graph.

    Attributes:
        most_lanes: the number of lanes worth trying.
        synchronisation_ns: the duration of a wait for another lane, for planners.
    """

    most_lanes: int
    synchronisation_ns: float

    def refusal(self, prepared: Prepared) -> str:
        """Return why this Program cannot run on lanes; empty if it can."""

    def conflicts(self, prepared: Prepared) -> tuple[tuple[int, int], ...]:
        """Return pairs of a launch and a later one that keep their order on this device."""

    def in_lanes(self, prepared: Prepared, lanes: Sequence[Lane]) -> Prepared:
        """Return what the planner must know of the Program on these lanes. Runs nothing.

        Args:
            prepared: of the Program, on one lane; it is not changed.
            lanes: of its launches, which `conflicts` allow.

        Raises:
            PlanError: the lanes do not fit the Program.
            ExecutionError: the device failed.
        """

    def time_executions(self, placed: Sequence[tuple[Prepared, Plan]]) -> list[float]:
        """Measure executions of each on the device in turns, in ns. Changes no state.

        Args:
            placed: one Program, prepared and placed in several ways.

        Raises:
            CaptureError: a launch refuses made-up inputs.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """


class LaunchTimer(Protocol):
    """The role of a device that queues work: it measures the durations of single launches."""

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Measure each launch on made-up inputs and weights. Changes no state.

        Args:
            prepared: of the Program.
            plan: where its activations lie; weights are not streamed.

        Raises:
            BackendUnavailable: the device reports no times.
            CaptureError: a launch refuses such inputs.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """


class OfflineLoader(Protocol):
    """The role of a device that loads offline models: files made by its vendor's compiler."""

    def open(self, path: Path, index: int | None) -> tuple[Prepared, Backend]:
        """Load an offline model, and describe it as a Program of one launch.

        Args:
            path: of the file.
            index: of the device; None: torch's current one.

        Returns:
            The prepared Program, and the backend that instantiates only this Program.

        Raises:
            BackendUnavailable: the device, its runtime or a function of it is missing.
            CaptureError: a shape or dtype of the model is unknown, or does not exist in torch.
            ExecutionError: the file cannot be loaded, or the device has no memory for it.
        """


class SizeChanger(Protocol):
    """The role of a device whose residents can change sizes between two executions."""

    @property
    def one_host_core(self) -> str:
        """Why the host's stages of a launch stay on one core; empty where they can use several."""

    def on_host_cores(self, n_cores: int) -> SizeChanger:
        """Return the same, with stages on this many cores of the host; 1 where they stay on one."""

    def instantiate(self, settled: SettledFamily, prepared: Prepared, plan: Plan) -> Loaded:
        """Make a Family resident, at the recorded sizes. Runs nothing.

        Args:
            settled: the Family.
            prepared: of its Program.
            plan: at the recorded sizes. Other sizes have the same slots, but other places in the
                feature map.

        Returns:
            A Loaded whose resident has the native role SizeChanges.

        Raises:
            PlanError, CaptureError, OutOfMemory: as `Backend.instantiate`.
        """

    def constants(self, settled: SettledFamily) -> _native.SizeConstants | None:
        """Make resident what computes size constants; None without size constants.

        Raises:
            CaptureError, OutOfMemory: as `Backend.instantiate`.
        """


class WeightStreamer(Protocol):
    """The role of a device that streams weights from a store as launches run: `Plan.streaming`."""

    @property
    def gathers_rows(self) -> bool:
        """Whether a launch of an embedding can read rows of its table from the store.

        Plans for other devices have no `Streaming.gathers`.
        """

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """Measure reads of the program's weights, on some of them.

        Args:
            bound: the program.
            mapped: into memory in which pieces of a weight are mapped contiguously. Requested only
                where there is a granule.

        Raises:
            BackendUnavailable: the program's weights have no store that this device can read.
            FileError: a file is missing, or shorter than it was.
            OutOfMemory: there is no memory for the sample.
        """

    def memory_layout(self, program: Program) -> MemoryLayout:
        """Return the division of weights' memory on the Program's device.

        Raises:
            BackendUnavailable: the device is missing.
            ExecutionError: the device does not report it.
        """

    def free_bytes(self, program: Program) -> int:
        """Return the free memory for weights, on the device of the Program's recording."""

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Find out what the planner must know once weights have their places. Runs nothing.

        Called for each budget that is tried, before the Values are placed.

        Args:
            prepared: of the Program.
            streaming: where its weights lie.

        Returns:
            `prepared` itself where nothing depends on those places. Otherwise another, which may
            have appended Values, and owns the weights' memory until it is instantiated.

        Raises:
            PlanError: the host has no room for the store of streamed weights.
            CaptureError: the device cannot run a launch of the Program.
            FileError: a file is missing, or shorter than it was.
            OutOfMemory: the device has no room for the weights.
            BackendUnavailable, ExecutionError: the device is missing, or failed.
        """


@runtime_checkable
class Backend(Protocol):
    """One kind of device. A backend is stateless.

    Features of only some devices are role objects, or None.
    """

    name: str
    capabilities: Capabilities

    @property
    def opaque(self) -> OpaqueLauncher | None:
        """None: opaque Programs are refused."""

    @property
    def weights(self) -> WeightStreamer | None:
        """None: weights are used in place, and a budget is refused."""

    @property
    def timing(self) -> LaunchTimer | None:
        """None: plans of streamed weights use estimates, where the device queues work.

        Otherwise executions themselves are timed.
        """

    @property
    def lanes(self) -> LaneRunner | None:
        """None: launches of a Program run in sequence."""

    @property
    def sizes(self) -> SizeChanger | None:
        """None: a Program whose sizes vary is executed by `dispatch`, or loaded for each choice."""

    @property
    def dispatch(self) -> Backend | None:
        """A backend of the same device, whose host delivers launch by launch at any sizes.

        Launches are torch's operators, or a capturer's kernels.

        None if absent. A device without `sizes` uses it for Programs whose sizes vary, and a device
        that executes whole Programs uses it for all host scheduling.
        """

    @property
    def offline(self) -> OfflineLoader | None:
        """None: the device loads no offline models."""

    def machine(self, index: int | None = None) -> Machine:
        """Describe the device.

        Args:
            index: of the device, where there are several; None: torch's current device.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
        """

    def records(self) -> str:
        """The device type on which Programs for it are recorded."""

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Find out what the planner must know. Weights and generators stay unchanged.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
            CaptureError: the device cannot run a launch of the Program.
        """

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Make the prepared Program resident, placed as the Plan says. Runs nothing.

        Raises:
            PlanError: the Plan does not fit the Program, or the host has no room for the store of
                streamed weights.
            CaptureError: an operator does not exist on this device.
            OutOfMemory: the device has no room for it.
        """

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Prove before the first execution that the loaded object does what was recorded.

        Skipped with `load(verify=False)`. A no-op for a backend that proves each launch when it is
        first executed, or computes nothing.

        Raises:
            Unproved: the proof failed, and the same device has another way.
            CaptureError: the proof failed; the message says where.
        """


class Unproved(CaptureError):
    """The loaded object failed its proof, and another backend of the device needs no proof.

    Attributes:
        instead: loads the same Program in the other way, and says why.
    """

    def __init__(self, message: str, instead: Backend) -> None:
        super().__init__(message)
        self.instead = instead
