"""The seam between backends and the rest of offload."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from offload.backends.loaded import (
    Loaded,
    Prepared,
    TimedLaunches,
)
from offload.errors import CaptureError
from offload.interpreter.settled_family import SettledFamily
from offload.native import _native
from offload.plan import Plan
from offload.plan.steps import Lane
from offload.plan.streaming import Streaming
from offload.plan.topology import Link, Machine, MemoryLayout
from offload.program import BoundProgram, Program


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


class Disproved(CaptureError):
    """Compiled kernels give other results than the launches that they replace.

    Attributes:
        failures: by `Kernel.index`, how results differ.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        first = next(iter(failures.values()))
        super().__init__(f"{len(failures)} compiled launches failed their proof: {first}")
        self.failures = failures


class Unproved(CaptureError):
    """The loaded object failed its proof, and another backend of the device needs no proof.

    Attributes:
        instead: loads the same Program in the other way, and says why.
    """

    def __init__(self, message: str, instead: Backend) -> None:
        super().__init__(message)
        self.instead = instead
