"""Models of torch_npu on an Ascend device: captured, and relocated or with copied tensors."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from offload.backends.ascend.backend import AscendBackend
from offload.backends.ascend.captured_model import CapturedModel, Improve, moving_values
from offload.backends.ascend.launch_times import timed_launches
from offload.backends.ascend.refresh import stages_note
from offload.backends.ascend.relocated_model import notes_of, patched_arguments, prove_relocation
from offload.backends.ascend.stream_budget import streams_note
from offload.backends.ascend.streaming import (
    AscendWeights,
    StreamedWeights,
    stream_weights,
    streaming_notes,
)
from offload.backends.ascend.torch_capture import NONE_STREAMED, TorchCapturer, give_back_unused
from offload.backends.ascend.torch_relocation import BoundModel, Relocator
from offload.backends.base import Backend, Capabilities, LaunchTimer, Unproved, WeightStreamer
from offload.backends.captured.random_draws import drawing
from offload.backends.captured.relocation.touches import node_graph, with_scratch
from offload.backends.dispatched import DispatchBackend
from offload.backends.loaded import (
    LaunchReport,
    Loaded,
    LoadedWeights,
    Prepared,
    Streams,
    TimedLaunches,
)
from offload.backends.refusals import check_formats
from offload.errors import BackendUnavailable, CaptureError
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.streaming import Streaming
from offload.plan.topology import Machine
from offload.program import BoundProgram, Launch, Program, Role


class TorchAscendBackend(AscendBackend):
    """One Ascend device that torch_npu uses.

    A Program's launches are captured through torch_npu into one model. Where the runtime reports
    the kernels' arguments, inputs, outputs and the feature map move by patching these arguments;
    elsewhere the kernels keep the addresses of the capture: the feature map is torch's, and inputs
    and outputs are copied. Weights stay in place; if they lie in files, the launches are captured
    once a streaming plan has placed them.
    """

    capabilities = Capabilities(
        queues_work=True,
        rebinds_weights=False,
        schedules_launches=False,
    )

    def __init__(
        self,
        *,
        torch_capturer: TorchCapturer | None = None,
        copies: Literal["captured", "enqueued"] | None = None,
        relocation: bool | None = None,
        why_copied: str = "not requested",
        argument_table: bool = True,
        why_no_table: str = "not requested",
    ) -> None:
        """Capture with torch_npu.

        Args:
            torch_capturer: the capturer; None: one for each Program.
            copies: what copies inputs and outputs: tasks of the model, which read their addresses
                from a table, or the host around it. None: tasks, where the runtime supports them.
            relocation: whether addresses in the kernels' own arguments are patched. None: where
                possible and proved at load; `Executable.explain` says why not. True: loading fails
                where this is impossible. False: inputs and outputs are copied.
            why_copied: the reason for relocation=False.
            argument_table: whether kernels with patched arguments read them from one table, by an
                update of their tasks at load, where the runtime allows it. False: they keep the
                runtime's blocks, each copied separately.
            why_no_table: the reason for argument_table=False.
        """
        super().__init__()
        self._why_no_table = "" if argument_table else why_no_table
        self._why_copied = why_copied
        self._relocation = relocation
        self._torch_capturer = torch_capturer
        self._copies = copies

    @property
    def weights(self) -> WeightStreamer:
        """Copies weights from the host, inside the model, captured once they have places."""
        return TorchAscendWeights(self)

    @property
    def timing(self) -> LaunchTimer:
        """Times the launches one by one."""
        return WarmUpTimer(self.device_of, self._torch_capturer)

    @property
    def dispatch(self) -> Backend:
        """Launches torch_npu's operators one by one, captured or not."""
        return DispatchBackend(self.name, self._torch_machine)

    def _torch_machine(self, index: int | None) -> Machine:
        if missing := self._missing_capturer():
            raise BackendUnavailable("; ".join(missing))
        return self.device_machine(index)

    def _missing_functions(self, has: dict[str, bool]) -> list[str]:
        missing = []
        if not has["capture"]:
            missing.append(
                "the runtime captures no models (aclmdlRICaptureBegin): install CANN 8.1 or newer"
            )
        if self._copies == "captured" and not has["memcpy_offset"]:
            missing.append(
                "the runtime has no copies whose addresses move (aclrtMemcpyAsyncWithOffset): "
                "install CANN 8.5 or newer, or let the host copy (copies='enqueued')"
            )
        return missing

    def _missing_capturer(self) -> list[str]:
        npu: Any = getattr(torch, "npu", None)
        if npu is None:
            return ["torch has no device npu: import torch_npu, of the same version as torch"]
        if not npu.is_available():
            return ["torch_npu finds no device that it can use"]
        return []

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Capture the Program's launches, unless weights in files have no addresses yet.

        Raises:
            BackendUnavailable: as `machine`.
            BindingError: a weight was cast to another format since it was recorded.
            CaptureError: a launch cannot be captured, or draws random numbers that would be the
                same at each execution; written inputs cannot be copied; or kernels cannot be
                relocated although this was required.
            ExecutionError: the runtime failed.
        """
        program = bound.program
        device = self.device_of(program)
        self.machine(device)
        self.refuse_launches(program)
        check_formats(bound)
        own = frozenset(value.index for value in program.of_role(Role.ACTIVATION))
        if not bound.bindings.stored:
            return self.captured(bound, own, NONE_STREAMED)
        moving_values(program)  # refuses inputs that cannot be copied
        return Prepared(bound, own)

    def captured(
        self, bound: BoundProgram, own: frozenset[int], streamed: StreamedWeights
    ) -> Prepared:
        """Capture the launches, and relocate them where requested and possible.

        Args:
            bound: the Program.
            own: the Values that operators allocate themselves.
            streamed: where its streamed weights lie, and their steps.

        Raises:
            CaptureError, ExecutionError: as `prepare`.
        """
        if self._relocation is False:
            model = self._capture(bound, streamed)
            return Prepared(
                bound,
                own,
                state=BoundModel(model, why_copied=self._why_copied, streamed=streamed),
            )
        device, is_required = self.device_of(bound.program), bool(self._relocation)
        relocator = Relocator(
            bound,
            device,
            streamed,
            is_required=is_required,
            why_no_table=self._why_no_table,
        )
        self._capture(bound, streamed, relocator.improve)
        assert relocator.bound is not None  # set by `improve`
        words = relocator.bound.words
        if words is None:
            return Prepared(bound, own, state=relocator.bound)
        whole = with_scratch(bound.program, words.discovery.scratch_bytes)
        graph = node_graph(whole, words.capture, words.discovery.words)
        bound = dataclasses.replace(bound, program=whole)
        return Prepared(bound, own, graph, state=relocator.bound)

    def _capture(
        self, bound: BoundProgram, streamed: StreamedWeights, improve: Improve | None = None
    ) -> CapturedModel:
        program = bound.program
        capturer = self._torch_capturer or TorchCapturer()
        device = self.device_of(program)
        return capturer.capture(bound, device, self._copies, improve=improve, streamed=streamed)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Load the captured model, its moving tensors bound to the Plan's slots.

        Raises:
            PlanError: the Plan does not fit the Program.
            ExecutionError: the runtime failed.
        """
        program, bound = prepared.program, prepared.state
        check_plan(program, plan)
        assert isinstance(bound, BoundModel)  # prepared for streaming, where weights are in files
        streamed = bound.streamed
        resident = self._resident(bound, program, plan)
        bound.residents.append(weakref.ref(resident))
        states = bound.model.random_states
        device = self.device_of(program)
        held = streams_note(device, resident, streams_weights=streamed.stream is not None)
        more = streaming_notes(streamed.stream, plan.streaming)
        reports = tuple(
            LaunchReport("model", _outside_bytes(program, plan, launch))
            for launch in program.launches
        )
        return Loaded(
            resident,
            frozenset(),
            lambda: reports,
            device=self.tensor_device(device),
            alignment_bytes=self.tensor_alignment_bytes,
            moves_feature_map=bound.words is not None and not bound.words.why_fixed,
            notes=functools.partial(_notes, bound, program, resident, held, more),
            weights=LoadedWeights(tensors=streamed.tensors, stream=streamed.stream),
            streams=Streams(self.current_stream, drains_queue=True),
            draw=drawing(*states) if states else None,
        )

    def _resident(
        self,
        bound: BoundModel,
        program: Program,
        plan: Plan,
    ) -> _native.AscendCapturedResident:
        model = bound.model
        assert model.copies is not None  # closed by no other owner
        patched = patched_arguments(bound, plan)
        return _native.AscendCapturedResident(
            device=self.device_of(program),
            model=model.handle,
            copies=model.copies,
            slots=[plan.slot_of(one.value) for one in model.moving],
            n_launches=len(program.launches),
            random_cells=model.random_cells,
            release=model.close,
            blocks=patched.blocks,
            words=patched.words,
            places=patched.places,
            feature_map_slot=plan.feature_map.index,
            home=patched.home,
            table=model.table,
            steps=model.steps,
            for_next_pass=bound.streamed.for_next_pass,
        )

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Execute a relocated model in place, and moved; see `relocation.proof`.

        Raises:
            Unproved: results or written state differ, or old memory was written; a backend without
                an argument table may succeed, and a backend without relocation would.
            CaptureError: the same, where relocation is required and there is no argument table.
            OutOfMemory: the device has no memory for the proof.
            ExecutionError: the device failed.
        """
        bound = prepared.state
        assert isinstance(bound, BoundModel)  # it is being loaded
        if bound.words is None:
            return
        device = self.device_of(prepared.program)
        stream = self.current_stream(device)
        try:
            prove_relocation(prepared, plan, bound, device, stream)
        except CaptureError as error:
            if bound.model.table is not None:
                why = f"the proof at load failed with an argument table: {error}"
                raise Unproved(why, self._without_table(why)) from error
            if self._relocation:
                raise CaptureError(
                    f"{error}; TorchAscendBackend(relocation=False) copies inputs and outputs"
                ) from error
            why = f"the proof at load failed: {error}"
            raise Unproved(why, self._copying(why)) from error

    def _without_table(self, why: str) -> TorchAscendBackend:
        return TorchAscendBackend(
            torch_capturer=self._torch_capturer,
            copies=self._copies,
            relocation=self._relocation,
            why_copied=self._why_copied,
            argument_table=False,
            why_no_table=why,
        )

    def _copying(self, why: str) -> TorchAscendBackend:
        return TorchAscendBackend(
            torch_capturer=self._torch_capturer,
            copies=self._copies,
            relocation=False,
            why_copied=why,
        )


class TorchAscendWeights(AscendWeights):
    """Captures launches once weights have their places, as kernels keep their addresses."""

    def __init__(self, backend: TorchAscendBackend) -> None:
        """Serve programs that the backend captures."""
        super().__init__(backend.device_of, backend.alignment_bytes)
        self._backend = backend

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Allocate the weights' memory, and capture the launches with the weights in it.

        Raises:
            PlanError: the host has no room for the store.
            FileError: a file with weights is shorter than it was, or cannot be read.
            OutOfMemory: the device has no room for the weights.
            BackendUnavailable, CaptureError, ExecutionError: as `TorchAscendBackend.prepare`.
        """
        program = prepared.program
        device = self._backend.device_of(program)
        give_back_unused()  # torch would allocate weights from its cache of a larger budget's
        streamed = stream_weights(
            prepared.bound,
            streaming,
            device,
            touches=[(*launch.reads, *launch.writes) for launch in program.launches],
            launches=range(len(program.launches)),
            memory=functools.partial(self._backend.weight_memory, device),
        )
        return self._backend.captured(prepared.bound, prepared.operator_allocated, streamed)


class WarmUpTimer:
    """Times launches as in a capture's warm-up; see `LaunchTimer`."""

    def __init__(
        self, device_of: Callable[[Program], int], torch_capturer: TorchCapturer | None
    ) -> None:
        """Time programs that the capturer captures; None: a capturer is made."""
        self._device_of = device_of
        self._torch_capturer = torch_capturer

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Time the launches, with zeros for weights in files.

        Raises:
            BackendUnavailable: the runtime has no timing events.
            CaptureError: a launch fails on made-up inputs, or the caller is capturing.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """
        capturer = self._torch_capturer or TorchCapturer()
        device = self._device_of(prepared.program)
        return timed_launches(capturer.time_launches(prepared.bound, device))


def _outside_bytes(program: Program, plan: Plan, launch: Launch) -> int:
    """Return a launch's bytes of torch's pool, where these are not the Plan's feature map."""
    if plan.feature_map_bytes:
        return 0
    made = [program.values[view.value] for view in launch.made()]
    return sum(value.size_bytes for value in made if value.role is Role.ACTIVATION)


def _notes(
    bound: BoundModel,
    program: Program,
    resident: _native.AscendCapturedResident,
    held: Callable[[], str],
    more: tuple[str, ...],
) -> tuple[str, ...]:
    model = bound.model
    by_host = bool(model.moving) and model.copies is not None and model.copies.form == "enqueued"
    return (
        *notes_of(bound, program, resident),
        stages_note(drains=True, copies_inputs=by_host),
        held(),
        *more,
    )
