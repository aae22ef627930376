"""The seam: what a backend is to the rest of offload."""

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
        moves_feature_map: the feature map's address may be new at every execution; of some
            programs, where a Loaded says otherwise.
        queues_work: a call returns once its work is queued, so a failing launch surfaces at a
            ticket's wait; and the device does not work again after one.
        rebinds_weights: weights may be used in other storages than those they were loaded with.
        schedules_launches: the host can deliver a program launch by launch, for comparison.
        runs_kernels: launches may be compiled code over addresses (`Kernel`).
        runs_lanes: launches may run on several lanes of one thread each (`Plan.launch_lanes`).
        runs_collectives: launches may exchange tensors with other ranks.
        shares_arena: feature maps of all executables on a device lie in the same memory.
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
    """How a launch is carried out.

    Attributes:
        mode: `thunk` or `out` (it writes where the Plan says), `call` (as recorded: in place, or
            into memory of its own), `copied` (as recorded, then copied: its out-variant failed its
            proof), `gathered` (rows of a table are read from the store into its result),
            `unproved` (not executed yet), `graph` (as nodes of a device's own graph), `opaque`
            (likewise, all nodes of the recorded callable as one launch), `kernel` (compiled code in
            the place of launches), `replaced` (these launches run instead, as recorded: the
            compiled code failed its proof), `model` (as tasks of one model on the device),
            `dispatched` (the operator as recorded, delivered by the host), `scheduled` (kernels of
            a capturer's, delivered by the host), `none` (nothing is computed).
        outside_bytes: bytes that it allocates outside the arena, counted at the first execution.
    """

    mode: str
    outside_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What a backend finds out about a Program before it is placed.

    Attributes:
        bound: the Program; a device that needs scratch memory has appended Values of role
            scratch for the planner to place.
        operator_allocated: the Values whose operator can only return memory of its own.
        graph: who touches what, where the device runs a graph; None where it runs the launches
            one after the other.
        state: the backend's own, for `instantiate`.
        notes: what a user should know of how it was prepared, in sentences for people.
        prepare_unproved: prepares it for a load that proves nothing, where this relies on the
            proof; None: this serves as well.
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
        """What the Program stands for."""
        return self.bound.bindings


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What becomes of a Program's weights on a device.

    Attributes:
        check: raises BindingError where one cannot be used where it lies now; None: each can.
        tensors: for each that lies in a memory of the executable's own the tensor there.
        stream: what brings weights there, not loaded yet; None: nothing does.
        derive_again: what is derived from weights is made again by the next execution, whether or
            not torch counted a write; None where nothing is. Any thread may call it.
    """

    check: Callable[[], None] | None = None
    tensors: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    stream: _native.WeightStream | _native.DeviceWeightStream | None = None
    derive_again: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Streams:
    """Streams of a device, to the caller's current one of which an execution goes.

    Attributes:
        current: the driver's handle of that on the device of this index; None where torch knows it.
        drains_queue: asking for that handle waits until torch has delivered what it queues, which
            is a stage of m_l_t.
    """

    current: Callable[[int], int] | None = None
    drains_queue: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetNodes:
    """Nodes of a device's graph that are re-set where addresses are others.

    Attributes:
        of_slot: by slot those that are re-set each time its address is another.
        measure_copies: what re-setting and copying cost on the device. Raises ExecutionError.
    """

    of_slot: Mapping[int, Set[int]]
    measure_copies: Callable[[], CopyCosts]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedLanes:
    """Lanes of launches on a device.

    Attributes:
        counts: of executions so far.
        share_always: whether helpers take part in each execution from now on, or where that pays.
    """

    counts: Callable[[], _native.LaneCounts]
    share_always: Callable[[bool], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A Program on a device.

    Attributes:
        resident: the native object that replay drives.
        operator_allocated: the Values that operators allocate themselves.
        launch_reports: asks the resident how each launch is carried out, in program order.
        device: of the tensors that an execution takes and gives; None: the Program's.
        alignment_bytes: an input or a given output whose address is no multiple of it is copied.
        moves_feature_map: whether this program's feature map may be new at every execution, on a
            backend that can do that at all.
        notes: what else a user should know of how it is executed, in sentences for people.
        weights: what becomes of them.
        streams: None: the device has none, and an execution is over when its call returns.
        draw: where kernels read the state of generators: asked at each execution for the seed and
            the offset of each, it moves them on; None where none does.
        set_nodes: None where a slot's address is one word, so that a copy never pays.
        lanes: None where the Plan has no lanes of launches.
        graph_bytes: asks what the device took to make its graph executable; 0 where it does not
            tell, or has not been asked yet.
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
    """What launches take.

    Attributes:
        times_ns: of each launch, in program order.
        how: they were measured and what they include besides, in words for people.
    """

    times_ns: tuple[float, ...]
    how: str


class OpaqueLauncher(Protocol):
    """The role of a device that runs a callable itself as one launch.

    Whatever that does below torch's dispatcher; so what it launches can be compared with a Program.
    """

    def unseen_work(self, seen: BoundProgram, opaque: BoundProgram) -> tuple[str, ...]:
        """Tell what a callable does on the device besides the launches that were recorded of it.

        Leaves inputs, weights and generators as they are.

        Args:
            seen: every launch that was observed, dead ones and constants included.
            opaque: the same call as one opaque launch.

        Returns:
            The names of what the callable launches beyond the Program, one for each launch.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
            CaptureError: one of the two cannot be captured, so that they cannot be compared.
            ExecutionError: the device failed.
        """


class LaneRunner(Protocol):
    """The role of a device that runs launches of one Program at once, by the graph it executes.

    Attributes:
        most_lanes: that are worth a try.
        synchronisation_ns: what a wait for another lane takes, for who plans lanes.
    """

    most_lanes: int
    synchronisation_ns: float

    def refusal(self, prepared: Prepared) -> str:
        """Why this Program cannot run on lanes; empty if it can."""

    def conflicts(self, prepared: Prepared) -> tuple[tuple[int, int], ...]:
        """Pairs of a launch and a later one that keep their order on this device."""

    def in_lanes(self, prepared: Prepared, lanes: Sequence[Lane]) -> Prepared:
        """What the planner must know of the Program on these lanes. Runs nothing.

        Args:
            prepared: of the Program, on one lane; it stays as it is.
            lanes: of its launches, which `conflicts` allow.

        Raises:
            PlanError: the lanes do not fit the Program.
            ExecutionError: the device failed.
        """

    def time_executions(self, placed: Sequence[tuple[Prepared, Plan]]) -> list[float]:
        """What an execution takes on the device, in ns, of each in turns. Changes no state.

        Args:
            placed: one Program, prepared and placed in several ways.

        Raises:
            CaptureError: a launch refuses made-up inputs.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """


class LaunchTimer(Protocol):
    """The role of a device that queues work: it measures what single launches take on it."""

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """What each launch takes on made-up inputs and weights. Changes no state.

        Args:
            prepared: of the Program.
            plan: where its activations lie; weights are not streamed.

        Raises:
            BackendUnavailable: the device tells no times.
            CaptureError: a launch refuses such inputs.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """


class OfflineLoader(Protocol):
    """The role of a device that loads offline models: files that its vendor's compiler has made."""

    def open(self, path: Path, index: int | None) -> tuple[Prepared, Backend]:
        """Load an offline model, and describe it as a Program of one launch.

        Args:
            path: of the file.
            index: which device; None: torch's current one.

        Returns:
            The prepared Program, and the backend that instantiates just this one.

        Raises:
            BackendUnavailable: the device, its runtime or a function of it is missing.
            CaptureError: a shape or dtype of the model is unknown, or torch does not have it.
            ExecutionError: the file cannot be loaded, or the device has no memory for it.
        """


class SizeChanger(Protocol):
    """The role of a device whose residents take other sizes between two executions."""

    @property
    def one_host_core(self) -> str:
        """Why the host's stages of a launch stay on one core; empty: they can be on several."""

    def on_host_cores(self, n_cores: int) -> SizeChanger:
        """The same, with stages on so many cores of the host; 1 where they stay on one."""

    def instantiate(self, settled: SettledFamily, prepared: Prepared, plan: Plan) -> Loaded:
        """Make what a Family does resident, at the recorded sizes. Runs nothing.

        Args:
            settled: the Family.
            prepared: of its Program.
            plan: of the recorded sizes. Others have the same slots, but other places in the
                feature map.

        Returns:
            A Loaded whose resident has the native role SizeChanges.

        Raises:
            PlanError, CaptureError, OutOfMemory: as `Backend.instantiate`.
        """

    def constants(self, settled: SettledFamily) -> _native.SizeConstants | None:
        """Make resident what computes the constants of sizes; None where there are none.

        Raises:
            CaptureError, OutOfMemory: as `Backend.instantiate`.
        """


class WeightStreamer(Protocol):
    """The role of a device that brings weights from a store as launches run: `Plan.streaming`."""

    @property
    def gathers_rows(self) -> bool:
        """Whether a launch of an embedding can read rows of its table from the store.

        For others no plan has `Streaming.gathers`.
        """

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """What it takes to read the program's weights, measured on some of them.

        Args:
            bound: has them.
            mapped: into memory in which pieces of a weight are mapped side by side. Asked for only
                where there is a granule.

        Raises:
            BackendUnavailable: the program's weights have no store that this device can read.
            FileError: a file is gone, or shorter than it was.
            OutOfMemory: there is no memory for the sample.
        """

    def memory_layout(self, program: Program) -> MemoryLayout:
        """How the memory of weights is divided on the Program's device.

        Raises:
            BackendUnavailable: the device is missing.
            ExecutionError: it does not say.
        """

    def free_bytes(self, program: Program) -> int:
        """Memory that weights could take now, of the device that the Program was recorded on."""

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Find out what the planner must know once weights have their places. Runs nothing.

        Called for each budget that is tried, before the Values are placed.

        Args:
            prepared: of the Program.
            streaming: where its weights lie.

        Returns:
            `prepared` itself where nothing depends on those places. Else another one, of which
            Values may be appended, and which owns the weights' memory until it is instantiated.

        Raises:
            PlanError: the host has no room for the store of streamed weights.
            CaptureError: the device cannot run a launch of the Program.
            FileError: a file is gone, or shorter than it was.
            OutOfMemory: the device has no room for it.
            BackendUnavailable, ExecutionError: the device is missing, or failed.
        """


@runtime_checkable
class Backend(Protocol):
    """One kind of device. A backend holds no state of its own.

    What only some devices have is a role object of its own, or None.
    """

    name: str
    capabilities: Capabilities

    @property
    def opaque(self) -> OpaqueLauncher | None:
        """None: opaque Programs are refused."""

    @property
    def weights(self) -> WeightStreamer | None:
        """None: weights are used where they are, and a budget is refused."""

    @property
    def timing(self) -> LaunchTimer | None:
        """None: plans of streamed weights are made with estimates, where it queues work.

        Where it does not, executions themselves are timed.
        """

    @property
    def lanes(self) -> LaneRunner | None:
        """None: launches of a Program run one after the other."""

    @property
    def sizes(self) -> SizeChanger | None:
        """None: a Program whose sizes vary is executed by `dispatch`, or loaded for each choice."""

    @property
    def dispatch(self) -> Backend | None:
        """A backend of the same device whose host delivers launch by launch, at any sizes.

        Launches are torch's operators, or a capturer's kernels.

        None: there is none. A device without `sizes` executes Programs whose sizes vary by it, and
        one that executes a Program as a whole all that are scheduled by the host.
        """

    @property
    def offline(self) -> OfflineLoader | None:
        """None: it loads no offline models."""

    def machine(self, index: int | None = None) -> Machine:
        """Describe the device.

        Args:
            index: which one, where there are several; None: torch's current one.

        Raises:
            BackendUnavailable: the device, its driver or a library is missing.
        """

    def records(self) -> str:
        """The device type on which Programs for it are recorded."""

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Find out what the planner must know. Leaves weights and generators as they are.

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
        """Prove before the first execution that what is loaded does what was recorded.

        Left out with `load(verify=False)`. A backend that proves each launch when it is first
        executed, or computes nothing, does nothing here.

        Raises:
            Unproved: it does not, and the same device can do it in another way.
            CaptureError: it does not; the message says in what.
        """


class Unproved(CaptureError):
    """What is loaded has failed its proof, and another backend of the device needs none.

    Attributes:
        instead: loads the same Program in the other way, and says why.
    """

    def __init__(self, message: str, instead: Backend) -> None:
        super().__init__(message)
        self.instead = instead
