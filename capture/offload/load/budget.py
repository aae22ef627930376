"""Loads a Program whose weights lie in a store, trying budgets."""

from __future__ import annotations

import dataclasses
import functools

from offload.backends import Backend, LaunchTimer, Prepared, WeightStreamer, managed_weights
from offload.compile import Fusion
from offload.console.progress import stage
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    OutOfMemory,
    PlanError,
)
from offload.files import check_stored_tensors
from offload.interpreter.own_generators import DrawingAlone, drawing_alone
from offload.load.device_memory import beside_weights_bytes
from offload.load.options import AUTO
from offload.load.place import place
from offload.load.trial import estimated_ns, execute_made_up, quickest_ns
from offload.plan import Plan, round_up, stream_weights, weight_demand
from offload.plan.streaming import Streaming, WeightDemand
from offload.plan.topology import Link
from offload.run import Executable
from offload.timeline import Scheduling

# The used share of free memory: other processes allocate meanwhile.
_FREE_SHARE = 0.9
_LESS = 0.8

_N_WARM_UP = 2

# Expected time of the warm-up per byte of weights: only for the display of progress.
_TIMED_NS_PER_BYTE = 2.0

_NOT_PROVED = "load(verify=False) executes nothing on made-up inputs"
_NOT_TIMED = "the device executes a graph, in which launches are not timed one by one"


class StreamedLoad:
    """One load of a Program whose weights lie in a store, trying budgets.

    Owner: one call of `load_program`.
    """

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        backend: Backend,
        streamer: WeightStreamer,
        how: Scheduling,
        *,
        verify: bool,
        share_store: bool = True,
        fusion: Fusion | None = None,
    ) -> None:
        self._share_store = share_store
        self._fusion = fusion
        self._prepared = prepared
        self._plan = plan
        self._backend = backend
        self._streamer = streamer
        self._how = how
        self._verify = verify
        self._link = streamer.link(prepared.bound)
        self._memory = streamer.memory_layout(prepared.program)
        costs = backend.machine(prepared.program.device_index).costs
        self._launch_ns = estimated_ns(prepared.program, costs.memory_bytes_per_ns)
        self._estimated = ""
        self._timing = ""
        if backend.capabilities.queues_work:
            # An execution does not report when a launch began; and a device does not survive
            # kernels that fault on made-up inputs, the reason to omit proofs.
            if backend.timing is None:
                self._estimated = _NOT_TIMED
            elif not verify:
                self._estimated = _NOT_PROVED
        self._is_timed = bool(self._estimated)

    @functools.cached_property
    def _mapped_link(self) -> Link | None:
        """The link to mapped memory; None: weights lie in one piece."""
        if self._memory.granule_bytes is None:
            return None
        return self._streamer.link(self._prepared.bound, mapped=True)

    @property
    def all_bytes(self) -> int:
        """The least budget under which nothing is streamed."""
        unit = self._memory.alignment_bytes
        sizes_bytes = (round_up(one.size_bytes, unit) for one in self._demand().weights)
        return self._memory.unit.taken_bytes(sum(sizes_bytes))

    def within(self, budget_bytes: int) -> Executable:
        """Load under a budget. If weights are streamed, launches are timed first where possible.

        Raises:
            PlanError: the budget is below the floor.
        """
        return self._loaded(self._timed_plan(budget_bytes), verify=self._verify)

    def _timed_plan(self, budget_bytes: int) -> Streaming:
        """As `plan`, by measured times where possible."""
        streaming = self.plan(budget_bytes)
        if streaming.is_resident or self._is_timed:
            return streaming
        self._time_launches(streaming)
        return self.plan(budget_bytes)

    def _time_launches(self, streaming: Streaming) -> None:
        """Time launches by the device, or by an executable whose memory is freed on return."""
        if (timer := self._backend.timing) is not None:
            self._take_times_of(timer)
        elif self._alone.refusal:
            self._estimated = f"launches were not timed: {self._alone.refusal}"
        else:
            with self._loaded(streaming, verify=False, alone=True) as run:
                self._take_times(run)
        self._is_timed = True

    def _take_times_of(self, timer: LaunchTimer) -> None:
        """Time launches by the device; where it cannot, keep estimates and note why.

        Raises:
            ExecutionError: the device failed.
        """
        try:
            timed = timer.time_launches(self._prepared, self._plan)
        except OutOfMemory as error:
            self._estimated = f"there is no memory to time launches with: {error}"
        except (BackendUnavailable, CaptureError) as error:
            self._estimated = f"launches could not be timed: {error}"
        else:
            self._launch_ns, self._timing = timed.times_ns, timed.how

    def within_free_memory(self) -> Executable:
        """Load under the largest budget that free memory has room for; with less if that fails.

        Raises:
            PlanError: memory has no room for the floor beside the feature map.
            OutOfMemory: not even the floor could be allocated.
        """
        free_bytes = self._streamer.free_bytes(self._prepared.program)
        beside_bytes, what = self._beside_weights()
        room_bytes = max(0, int(free_bytes * _FREE_SHARE) - beside_bytes)
        budget_bytes = min(self.all_bytes, room_bytes)
        floor_bytes = self.plan(self.all_bytes).floor.required_bytes
        if budget_bytes < floor_bytes:
            try:
                self.plan(budget_bytes)
            except PlanError as error:
                raise PlanError(
                    f"{error}; {AUTO!r} takes {_FREE_SHARE:.0%} of the {free_bytes} bytes that are "
                    f"free, less {beside_bytes} of {what}: free some memory, or give the budget"
                ) from None
        while True:
            try:
                return self._tried_out(budget_bytes)
            except OutOfMemory:
                if budget_bytes <= floor_bytes:
                    raise
                budget_bytes = max(floor_bytes, int(budget_bytes * _LESS))

    def _beside_weights(self) -> tuple[int, str]:
        """The bytes that weights leave to others, and to which: all that a user's limit counts."""
        program, plan = self._prepared.program, self._plan
        machine = self._backend.machine(program.device_index)
        if not machine.is_limited:
            return plan.feature_map_bytes, "the feature map"
        taken = beside_weights_bytes(program, plan, machine)
        return taken, "activations, inputs and results"

    def _tried_out(self, budget_bytes: int) -> Executable:
        """Return an executable whose executions find memory, as streaming or proofs have shown.

        Otherwise another executable has executed on made-up inputs, and is not returned.

        Raises:
            OutOfMemory: executions find no memory.
        """
        streaming = self._timed_plan(budget_bytes)
        is_shown = not streaming.is_resident or self._backend.capabilities.queues_work
        if is_shown or self._alone.refusal:
            return self._loaded(streaming, verify=self._verify)
        with self._loaded(streaming, verify=self._verify, alone=True) as run:
            try:
                execute_made_up(run, 1)
            except OutOfMemory:
                raise
            except (BindingError, ExecutionError):
                pass  # the model refuses made-up inputs: result unknown
        return self.within(budget_bytes)

    def _take_times(self, run: Executable) -> None:
        """Time launches; if the model does not accept made-up inputs, keep estimates.

        Raises:
            OutOfMemory: executions find no memory under this budget.
        """
        try:
            expected_s = self.all_bytes * _TIMED_NS_PER_BYTE / 1e9
            with stage("timing launches", _N_WARM_UP, expected_s=expected_s):
                self._launch_ns = quickest_ns(run, _N_WARM_UP)
        except OutOfMemory:
            raise
        except (BindingError, ExecutionError) as error:
            self._estimated = f"launches could not be timed on made-up inputs: {error}"

    def _demand(self) -> WeightDemand:
        """The demand of a pass; weights that are used in place stay."""
        program = self._prepared.program
        stored = self._prepared.bindings.stored.keys()
        demand = weight_demand(program, self._launch_ns, stored)
        managed = managed_weights(self._prepared.bound)
        gathers = self._streamer.gathers_rows
        weights = tuple(
            dataclasses.replace(
                one,
                stays=one.stays or one.value not in managed,
                row_bytes=one.row_bytes if gathers else 0,
                n_rows=one.n_rows if gathers else (),
            )
            for one in demand.weights
        )
        return dataclasses.replace(demand, weights=weights)

    def plan(self, budget_bytes: int) -> Streaming:
        """The plan for a budget, by the known times.

        Raises:
            PlanError: the budget is below the floor.
        """
        streaming = stream_weights(
            self._demand(),
            self._memory,
            self._link,
            budget_bytes,
            mapped_link=self._mapped_link if budget_bytes < self.all_bytes else None,
        )
        return dataclasses.replace(
            streaming,
            estimated=self._estimated,
            timing=self._timing,
            launch_ns=self._launch_ns,
            shares_store=self._share_store,
        )

    @functools.cached_property
    def _alone(self) -> DrawingAlone:
        return drawing_alone(self._prepared.bound)

    def _loaded(self, streaming: Streaming, *, verify: bool, alone: bool = False) -> Executable:
        """Load by a plan; `alone` for trial executions, which must move no generator."""
        prepared, plan = self._prepared, self._plan
        if alone:
            prepared = dataclasses.replace(prepared, bound=self._alone.bound)
        stored = prepared.bindings.stored.values()
        check_stored_tensors(stored)
        placed = self._streamer.prepare_streamed(prepared, streaming)
        if placed is not prepared:
            plan = place(placed, self._backend)
        return Executable(
            placed,
            dataclasses.replace(plan, streaming=streaming),
            self._backend,
            self._how,
            verify=verify,
            fusion=self._fusion,
            check_stored=lambda: check_stored_tensors(stored),
        )
