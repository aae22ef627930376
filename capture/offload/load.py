"""Loading: a Program becomes an Executable on a device, its weights streamed where asked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from offload import passes
from offload.backends import (
    Backend,
    OfflineBackend,
    Prepared,
    StreamingBackend,
    TimingBackend,
    backend_and_index,
    find_backend,
    managed_weights,
    on_device,
)
from offload.byte_sizes import parse_bytes
from offload.eager_run import bytes_of
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    OutOfMemory,
    PlanError,
)
from offload.files import check_stored_tensors
from offload.made_up_inputs import input_tensors, made_up_inputs
from offload.plan import Plan
from offload.program import Program
from offload.replay import Executable
from offload.streaming import Streaming, WeightDemand
from offload.structure import unflatten
from offload.timeline import Scheduling, SpanKind

AUTO: Literal["auto"] = "auto"
"""The budget that takes what memory is free."""

# What is left free of what was found free: others allocate meanwhile.
_FREE_SHARE = 0.9
_LESS = 0.8

# Of launches that nobody has timed, besides what they read and write.
_LAUNCH_NS = 1_000.0

_N_WARM_UP = 2

_NOT_PROVED = "load(verify=False) executes nothing on made-up inputs"
_NOT_TIMED = "the device executes a graph, in which launches are not timed one by one"


def load_program(
    program: Program,
    device: str | torch.device | None,
    *,
    scheduling: str,
    verify: bool,
    weights_budget: int | str | None,
    progress: Callable[[int, int], object] | None,
) -> Executable:
    """Make a Program resident; the arguments are those of `Captured.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, PlanError, FileError, ExecutionError: as
            `Captured.load`.
    """
    kind, index = backend_and_index(program.device if device is None else device)
    backend = find_backend(kind)
    _refuse_foreign(program, backend)
    how = _scheduling(scheduling)
    if how is Scheduling.HOST and not backend.capabilities.schedules_launches:
        raise BackendUnavailable(
            f"device {backend.name!r} executes a model as a whole: load without scheduling='host'"
        )
    budget = _budget(weights_budget)
    program = on_device(program, index)
    is_streamed = weights_budget is not None or bool(program.stored)
    store = _streaming_backend(program, backend) if is_streamed else None
    prepared = backend.prepare(program)
    plan = _place(prepared, backend)
    if store is None:
        return Executable(prepared, plan, backend, how, verify=verify)
    load = _StreamedLoad(prepared, plan, store, how, verify=verify, progress=progress)
    if budget == AUTO:
        return load.within_free_memory()
    return load.within(load.all_bytes if budget is None else budget)


def load_offline_model(path: Path, device: str | torch.device, *, scheduling: str) -> Executable:
    """Make an offline model resident; the arguments are those of `OfflineModel.load`.

    Raises:
        BackendUnavailable, CaptureError, BindingError, ExecutionError: as `OfflineModel.load`.
    """
    kind, index = backend_and_index(device)
    backend = find_backend(kind)
    how = _scheduling(scheduling)
    if not isinstance(backend, OfflineBackend):
        raise BackendUnavailable(
            f"{path}: device {backend.name!r} loads no offline models (.om): load it on npu"
        )
    prepared, its_backend = backend.open_offline(path, index)
    return Executable(prepared, _place(prepared, its_backend), its_backend, how)


def _budget(given: int | str | None) -> int | Literal["auto"] | None:
    if given is None or given == AUTO:
        return given
    return parse_bytes(given, f"weights_budget (if not {AUTO!r})")


def _refuse_foreign(program: Program, backend: Backend) -> None:
    if backend.records() != program.device:
        raise BackendUnavailable(
            f"the program was recorded on {program.device}, and device {backend.name!r} runs "
            f"programs recorded on {backend.records()}: capture the model there"
        )
    if program.opaque is not None and not backend.capabilities.runs_opaque:
        raise BackendUnavailable(
            f"the program is one opaque launch, which device {backend.name!r} does not run: "
            f"{program.opaque.reason}"
        )


def _streaming_backend(program: Program, backend: Backend) -> StreamingBackend:
    if isinstance(backend, StreamingBackend):
        return backend
    advice = "load without weights_budget="
    if program.stored:
        advice = "capture the model without weights=, its weights in the device's memory"
    raise BackendUnavailable(
        f"device {backend.name!r} cannot bring weights from a store while it computes: {advice}"
    )


def _scheduling(name: str) -> Scheduling:
    try:
        return Scheduling(name)
    except ValueError:
        expected = [one.value for one in Scheduling]
        raise BindingError(f"scheduling: expected one of {expected}, got {name!r}") from None


def _place(prepared: Prepared, backend: Backend) -> Plan:
    graph, program = prepared.graph, prepared.program
    lifetimes = None if graph is None else passes.graph_lifetimes(program, graph)
    machine = backend.machine(program.device_index)
    return passes.place_values(program, machine, prepared.operator_allocated, lifetimes)


class _StreamedLoad:
    """One load of a Program whose weights lie in a store, under budgets that are tried.

    Owner: one call of `load_program`.
    """

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        backend: StreamingBackend,
        how: Scheduling,
        *,
        verify: bool,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._prepared = prepared
        self._plan = plan
        self._backend = backend
        self._how = how
        self._verify = verify
        self._progress = progress
        self._link = backend.link(prepared.program)
        self._launch_ns = _estimated_ns(prepared.program, backend.memory_bytes_per_ns)
        self._estimated = ""
        self._timing = ""
        if backend.capabilities.queues_work:
            # An execution does not tell when a launch began; and a device does not survive kernels
            # that fault on made-up inputs, which is what proofs are left out for.
            if not isinstance(backend, TimingBackend):
                self._estimated = _NOT_TIMED
            elif not verify:
                self._estimated = _NOT_PROVED
        self._is_timed = bool(self._estimated)

    @property
    def all_bytes(self) -> int:
        """The budget under which nothing is streamed."""
        unit = self._backend.alignment_bytes
        return sum(passes.round_up(one.size_bytes, unit) for one in self._demand().weights)

    def within(self, budget_bytes: int) -> Executable:
        """Load under a budget. If some are streamed, launches are timed first where they can be.

        Raises:
            PlanError: the budget is below the floor.
        """
        streaming = self._streaming(budget_bytes)
        if not streaming.is_resident and not self._is_timed:
            self._time_launches(streaming)
            streaming = self._streaming(budget_bytes)
        return self._loaded(streaming, verify=self._verify)

    def _time_launches(self, streaming: Streaming) -> None:
        """By the device, or by an executable whose memory has gone when this returns."""
        if isinstance(self._backend, TimingBackend):
            self._take_times_of(self._backend)
        else:
            with self._loaded(streaming, verify=False) as run:
                self._take_times(run)
        self._is_timed = True

    def _take_times_of(self, backend: TimingBackend) -> None:
        """Let the device time launches; where it cannot, keep estimates and say why.

        Raises:
            ExecutionError: the device failed.
        """
        try:
            timed = backend.time_launches(self._prepared, self._plan)
        except OutOfMemory as error:
            self._estimated = f"there is no memory to time launches with: {error}"
        except (BackendUnavailable, CaptureError) as error:
            self._estimated = f"launches could not be timed: {error}"
        else:
            self._launch_ns, self._timing = timed.times_ns, timed.how

    def within_free_memory(self) -> Executable:
        """Load under the largest budget that memory has room for; with less where that fails.

        Raises:
            PlanError: memory has no room for the floor.
            OutOfMemory: not even the floor could be had.
        """
        free_bytes = self._backend.free_bytes(self._prepared.program)
        budget_bytes = min(self.all_bytes, int(free_bytes * _FREE_SHARE))
        floor_bytes = self._streaming(self.all_bytes).floor.required_bytes
        if budget_bytes < floor_bytes:
            raise PlanError(
                f"weights need at least {floor_bytes} bytes, and of the {free_bytes} bytes that "
                f"are free {_FREE_SHARE:.0%} may be taken: free some memory, or give the budget"
            )
        while True:
            try:
                return self.within(budget_bytes)
            except OutOfMemory:
                if budget_bytes <= floor_bytes:
                    raise
                budget_bytes = max(floor_bytes, int(budget_bytes * _LESS))

    def _take_times(self, run: Executable) -> None:
        """Let launches be timed; where made-up inputs are none for this model, keep estimates.

        Raises:
            OutOfMemory: executions find no memory under this budget.
        """
        try:
            self._launch_ns = _timed_ns(run)
        except OutOfMemory:
            raise
        except (BindingError, ExecutionError) as error:
            self._estimated = f"launches could not be timed on made-up inputs: {error}"

    def _demand(self) -> WeightDemand:
        """What a pass needs; weights that are used where they lie stay."""
        program = self._prepared.program
        demand = passes.weight_demand(program, self._launch_ns)
        managed = managed_weights(program)
        gathers = self._backend.capabilities.gathers_rows
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

    def _streaming(self, budget_bytes: int) -> Streaming:
        streaming = passes.stream_weights(
            self._demand(),
            self._link,
            budget_bytes,
            granule_bytes=self._backend.granule_bytes,
            alignment_bytes=self._backend.alignment_bytes,
            tails=self._backend.maps_pieces(),
        )
        return dataclasses.replace(
            streaming,
            estimated=self._estimated,
            timing=self._timing,
            launch_ns=self._launch_ns,
        )

    def _loaded(self, streaming: Streaming, *, verify: bool) -> Executable:
        plan = dataclasses.replace(self._plan, streaming=streaming)
        stored = self._prepared.program.stored.values()
        check_stored_tensors(stored)
        return Executable(
            self._prepared,
            plan,
            self._backend,
            self._how,
            verify=verify,
            check_stored=lambda: check_stored_tensors(stored),
            progress=self._progress,
        )


def _estimated_ns(program: Program, memory_bytes_per_ns: float) -> tuple[float, ...]:
    """What each launch may take, from the bytes that it reads and writes; of tables, of rows."""
    tables = passes.row_reads(program)
    sizes_bytes = [
        tables[value.index].most_bytes if value.index in tables else value.size_bytes
        for value in program.values
    ]
    return tuple(
        _LAUNCH_NS
        + sum(sizes_bytes[index] for index in {*launch.reads, *launch.writes}) / memory_bytes_per_ns
        for launch in program.launches
    )


def _timed_ns(run: Executable) -> tuple[float, ...]:
    """What each launch takes, by executions on made-up inputs, waits for weights left out.

    Weights that are written and generators are put back.

    Raises:
        BindingError: a guard refuses the inputs.
        ExecutionError: a launch does.
    """
    program = run.program
    tensors = input_tensors(program, made_up_inputs(program, 0))
    args, kwargs = unflatten(program.arguments_structure, tensors)
    with _state_kept(program), run.timeline() as timeline:
        for _ in range(_N_WARM_UP):
            run(*args, **kwargs)
    spans = [
        sorted(one.of_kind(SpanKind.LAUNCH), key=lambda span: span.launch)
        for one in timeline.executions
    ]
    durations = [[span.duration_ns for span in one] for one in spans]
    return tuple(float(min(times)) for times in zip(*durations, strict=True))


@contextlib.contextmanager
def _state_kept(program: Program) -> Iterator[None]:
    """Put back generators, and weights in memory that the Program writes."""
    written = {index for launch in program.launches for index in launch.writes}
    storages = [
        tensors[0].untyped_storage()
        for index, tensors in program.weights.items()
        if index in written
    ]
    contents = [bytes_of(storage).clone() for storage in storages]
    states = [(one, one.get_state()) for one in program.generators]
    try:
        yield
    finally:
        for storage, content in zip(storages, contents, strict=True):
            bytes_of(storage).copy_(content)
        for generator, state in states:
            generator.set_state(state)
