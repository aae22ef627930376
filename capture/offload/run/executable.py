"""Executables: a Program resident on a device, executed at new addresses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import torch

from offload.backends import Backend, LaunchReport, Loaded, LoadedLanes, Prepared
from offload.costs import CostModel, HeaderShape
from offload.errors import BindingError, CopyError, TimelineError
from offload.interpreter.outside_graphs import outside_graphs
from offload.native import _native
from offload.plan import Plan, SlotChoice, choose_copied_slots
from offload.plan.steps import lanes_of_launches
from offload.plan.topology import Machine
from offload.program import Role
from offload.run.buffers import check_feature_map
from offload.run.call_signature import CallSignature
from offload.run.deferred import Deferred
from offload.run.execution_submitting import ExecutionSubmitting
from offload.run.explanation import explain
from offload.run.lane_choice import LaneChoice
from offload.run.native_replay import SizedCalls, moving_slots, native_replay
from offload.run.optimizer_steps import watched_steps
from offload.run.overlap_choice import OverlapChoice
from offload.run.predicted_timeline import predict
from offload.run.process_ends import register_waits
from offload.run.rebinding import rebinding_refusal
from offload.run.recorded_timeline import fill_timeline
from offload.run.reports import LastExecution, MemoryReport, Proof
from offload.run.weight_streaming import WeightStreaming, read_weights
from offload.timeline import Scheduling, Timeline

if TYPE_CHECKING:
    from offload.compile import Fusion

register_waits()

# Over this many reads the clock's cost is accurate to a tenth of a nanosecond.
_CLOCK_READS = 10_000


class Executable(ExecutionSubmitting):
    """A Program resident on a device: loaded, executed, closed.

    Owner of the arena. Calls from several threads are safe and run one at a time; tickets run in
    the order of submission. Made by `Captured.load`.

    Calling it, as `run(x)` or `run(x, out=y)`, executes the program and returns what the model
    returns. A call takes the model's arguments, and:
        out: buffers for the results, nested like them; None entries are allocated.
        feature_map: uint8 memory of at least `feature_map_bytes` for the activations.
    It raises:
        BindingError: an argument does not fit, or a host constant has another value; nothing
            has run. Or a guard found another value than the recorded one; no input, weight or
            generator has changed.
        ExecutionError: a launch failed, or the executable is closed.
        CaptureError: an operator's result has another layout than recorded, as from a custom
            operator whose fake implementation differs (`capture(weights=)`).

    Attributes:
        program, plan: the resident program, and where its Values lie.
        bound: the program with its live objects.
        scheduling: as one task, or launch by launch.
        fusion: the outcome of `load(fuse=True)`; None where nothing was fused.
        lane_choice: the outcome of `load(lanes=...)`; None where one lane was requested.
        overlap: the same for a Program with collectives; None where one lane was requested.
        copy_choices: for each input and output that may be copied instead of re-setting the nodes
            that hold its address: the choice and its costs; empty where no slot has several nodes.
    """

    __signature__ = CallSignature()

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        backend: Backend,
        scheduling: Scheduling = Scheduling.OFFLOAD,
        *,
        verify: bool = True,
        fusion: Fusion | None = None,
        lane_choice: LaneChoice | None = None,
        check_stored: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a Program resident; `check_stored` refuses files whose layout has changed."""
        # The garbage collector sees only one native reference: the callable run before executions,
        # which refers to the model, and the model may refer to this executable.
        before_execution = prepared.bindings.before_execution
        if before_execution is not None:
            prepared = dataclasses.replace(prepared, bound=prepared.bound.unguarded())
        self.fusion = fusion
        self.lane_choice = lane_choice
        self.overlap: OverlapChoice | None = None
        self._check_stored = check_stored
        self.bound = prepared.bound
        self.program = prepared.program
        self.plan = plan
        self.scheduling = scheduling
        self._backend = backend
        self._keep_timeline: Callable[[Executable, Timeline], None] | None = None
        self._prepared_notes = prepared.notes
        self._loaded = self._instantiate(prepared, plan)
        self._steps = watched_steps(prepared.bound, self._loaded)
        if (stream := self._loaded.weights.stream) is not None:
            read_weights(stream)
        if verify:
            backend.prove(prepared, plan)
        self.copy_choices = self._choose_copies()
        self._native = native_replay(
            prepared.bound,
            plan,
            self._loaded,
            host_scheduled=scheduling is Scheduling.HOST,
            copied={choice.slot for choice in self.copy_choices if choice.is_copied},
            check_feature_map=functools.partial(
                check_feature_map,
                moves=backend.capabilities.moves_feature_map and self._loaded.moves_feature_map,
            ),
            rebinding_refusal=self.rebinding_refusal,
            sizes=self._sized_calls(),
        )
        self._deferred = Deferred(self._native, keeps_order=self.program.leaves_something)
        self._bind(self._native, before_execution)

    def _instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        return self._backend.instantiate(prepared, plan)

    def _sized_calls(self) -> SizedCalls | None:
        """Return what is known of calls whose sizes vary; None where sizes are fixed."""
        return None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its device's memory, and cannot be copied or pickled: load the "
            "captured program once more; for another process, save it (captured.save) and open it "
            "there"
        )

    def _choose_copies(self) -> tuple[SlotChoice, ...]:
        """Choose inputs and outputs to copy; empty where no graph has nodes to re-set."""
        nodes = self._loaded.set_nodes
        if nodes is None or self.scheduling is Scheduling.HOST:
            return ()
        slots = moving_slots(self.program, self.plan, self._loaded)
        return choose_copied_slots(slots, nodes.measure_copies)

    @outside_graphs
    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, after `param.data = ...`.

        Values derived from them (packed weights) are computed again by the next execution: call it
        also after writes that torch does not count, through `param.data` or NumPy.

        Raises:
            BindingError: a new storage has another layout than the recorded one, or is less aligned
                than the device needs; or a packed weight now lies in shared memory, which other
                processes write unseen; or the program is opaque, or the device captures models
                whole, so that kernels keep the addresses of weights.
        """
        self.check_rebinding()
        weights = self._loaded.weights
        self._native.rebind_weights()
        if weights.derive_again is not None:
            weights.derive_again()

    def check_rebinding(self) -> None:
        """Refuse what `rebind_weights` would refuse because of this device; change nothing.

        Raises:
            BindingError: as `rebind_weights`, but for layouts.
        """
        if self.rebinding_refusal:
            raise BindingError(self.rebinding_refusal)
        if self._loaded.weights.check is not None:
            self._loaded.weights.check()

    @property
    def rebinding_refusal(self) -> str:
        """Why this device refuses `rebind_weights`, and what to do; empty: it does not."""
        return rebinding_refusal(self._backend, self.program)

    @outside_graphs
    def close(self) -> None:
        """Wait for executions in flight and free the memory; idempotent.

        Called in one of its own launches it does not wait, and the memory is freed when it is
        closed again or dropped. Submissions that depend on tasks are in flight; a task that closes
        does not wait for them, and they fail. The memory of weights that results alias stays until
        these results and the executable are dropped.
        """
        if not self._native.is_inside_launch:
            self._deferred.wait()
        is_done = self._native.close()
        weights = self._loaded.weights
        if not is_done or weights.stream is None:
            return
        # The resident closes it once nothing on the device reads it; until then nothing is freed.
        if all(one.view.value not in weights.tensors for one in self.program.results):
            weights.stream.give_back()

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def streaming(self) -> WeightStreaming | None:
        """The weights that lie in the executable's own memory; None where they are used in place.

        So None without a budget, unless weights lie in files.
        """
        stream = self._loaded.weights.stream
        if self.plan.streaming is None or stream is None:
            return None
        native = self._native  # not the executable, which would form a cycle
        return WeightStreaming(
            self.bound,
            self.plan.streaming,
            stream,
            self._check_stored,
            lambda: (
                LastExecution.of(native.last_execution, native.substages),
                LastExecution.of(native.last_traced, native.substages),
            ),
            wait_for_submitted=native.wait_for_submitted,
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._native.closed

    @property
    def device(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def machine(self) -> Machine:
        """The device that it is resident on, as planners see it."""
        return self._backend.machine(self.program.device_index)

    @property
    def queues_work(self) -> bool:
        """Whether the device continues after a call has returned (`Capabilities.queues_work`)."""
        return self._backend.capabilities.queues_work

    @property
    def feature_map_bytes(self) -> int:
        """The bytes that a `feature_map=` tensor must have."""
        return self.plan.feature_map_bytes

    @property
    def last_execution(self) -> LastExecution:
        """The latest finished execution; all zero before the first."""
        return LastExecution.of(self._native.last_execution, self._native.substages)

    @property
    def proof(self) -> Proof | None:
        """The proofs of the first successful execution; None before it.

        The cpu backend proves launches there. Other backends prove at load, if at all: then it
        counts no launches.
        """
        native = self._native.proof
        return None if native is None else Proof(native.n_launches, native.n_failed, native.ns)

    @contextlib.contextmanager
    @outside_graphs
    def timeline(
        self, costs: CostModel | None = None, *, executions: int | None = None
    ) -> Iterator[Timeline]:
        """Record the executions that end inside a with-block.

        Where a CUDA or Ascend device streams weights, these executions are timed by additional
        events, and a call returns when its outputs are ready: see `LastExecution`.

        Args:
            costs: of this machine (`offload.calibrate`); they add predicted spans. Durations of
                launches never measured before come from this timeline, or where weights are
                streamed on a device that queues work, from the plan of streaming.
            executions: how many the block must hold, at least 1. Tables and pictures name their
                median by total time, and pictures draw it. Any number if not given.

        Yields:
            A Timeline, filled when the block ends.

        Raises:
            ExecutionError: another timeline of this executable is being recorded; from a call in
                the block: the device has no memory for timing.
            TimelineError: `executions` is less than 1, or the block ended with more or fewer.
        """
        if executions is not None and executions < 1:
            raise TimelineError(f"expected executions of at least 1, got {executions}")
        machine = self.machine
        timeline = Timeline(machine.device, machine.name, {"torch": torch.__version__})
        reads = self._native.trace_clock_reads
        self._native.start_trace()
        try:
            yield timeline
        finally:
            fill_timeline(
                timeline,
                self._native.stop_trace(),
                self.program,
                device_lane=self.device,
                scheduling=self.scheduling,
                substages=self._native.substages,
                launch_lanes=lanes_of_launches(self.plan.launch_lanes or ()),
            )
            if costs is not None:
                predict(self, timeline, costs)
            timeline.clock_reads = self._native.trace_clock_reads - reads
            timeline.clock_read_ns = _native.clock_read_ns(_CLOCK_READS)
        if self._keep_timeline is not None:
            self._keep_timeline(self, timeline)
        if executions not in (None, len(timeline.executions)):
            raise TimelineError(
                f"expected {executions:,} executions inside the with-block of timeline(), got "
                f"{len(timeline.executions):,}: warm up before the block, and call the executable "
                f"{executions:,} times inside it"
            )

    def keep_timelines(self, keep: Callable[[Executable, Timeline], None]) -> None:
        """Call `keep` with this executable and each timeline whose block ends without an error."""
        self._keep_timeline = keep

    def header_shape(
        self, outputs_allocated: int, slots_changed: int, words_patched: int
    ) -> HeaderShape:
        """Return what the header of an execution with these counts has to do."""
        n_outputs = sum(
            value.index not in self._loaded.operator_allocated
            for value in self.program.of_role(Role.OUTPUT)
        )
        return HeaderShape(
            n_inputs=len(self.program.inputs),
            outputs_allocated=outputs_allocated,
            outputs_given=max(0, n_outputs - outputs_allocated),
            n_weights=len(self.bound.bindings.weights),
            slots_changed=slots_changed,
            words_patched=words_patched,
            operators=self._operators,
        )

    @functools.cached_property
    def _operators(self) -> frozenset[str]:
        return frozenset(launch.name for launch in self.program.launches)

    def n_set_nodes(self, slot: int) -> int | None:
        """Return how many nodes are re-set when a slot's address changes; None without nodes."""
        nodes = self._loaded.set_nodes
        return None if nodes is None or not nodes.of_slot else len(nodes.of_slot.get(slot, ()))

    def launch_reports(self) -> tuple[LaunchReport, ...]:
        """Describe how each launch is executed, in program order."""
        return self._loaded.launch_reports()

    @property
    def lanes(self) -> LoadedLanes | None:
        """The activity of its lanes of launches; None where launches run with torch's settings."""
        return self._loaded.lanes

    def notes(self) -> tuple[str, ...]:
        """Further sentences of the device about how the program is executed."""
        return (*self._prepared_notes, *self._loaded.notes())

    @outside_graphs
    def explain(self) -> str:
        """Describe launches without an out-variant, copies, and avoided reads.

        Before the first execution it states how many launches that execution will prove; which of
        them failed, the duration of the proof, and the bytes outside the arena are known after it.
        """
        return explain(self)

    def memory_report(self) -> MemoryReport:
        """Return the executable's memory by kind."""
        outside = sum(report.outside_bytes for report in self.launch_reports())
        copied = [choice.slot for choice in self.copy_choices if choice.is_copied]
        return MemoryReport.of(
            self.plan,
            copied,
            outside_bytes=outside if self.last_execution.n_executions else None,
            discarded_bytes=0 if self.streaming is None else self.streaming.discarded_bytes,
            graph_bytes=self._loaded.graph_bytes(),
        )
