"""Models of torch_npu on an Ascend device: captured, and relocated or their tensors copied."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from offload import _native
from offload.backends.ascend.backend import AscendBackend
from offload.backends.ascend.captured_model import CapturedModel, Improve, moving_values
from offload.backends.ascend.refresh import stages_note
from offload.backends.ascend.relocated_model import (
    notes_of,
    patched_arguments,
    prove_relocation,
)
from offload.backends.ascend.stream_budget import streams_note
from offload.backends.ascend.streaming import StreamedWeights, stream_weights, streaming_notes
from offload.backends.ascend.torch_capture import NONE_STREAMED, TorchCapturer
from offload.backends.ascend.torch_relocation import BoundModel, Relocator
from offload.backends.base import Capabilities, LaunchReport, Loaded, Prepared
from offload.backends.random_draws import drawing
from offload.backends.relocation.touches import node_graph, with_scratch
from offload.errors import CaptureError
from offload.plan import Plan, check_plan
from offload.program import Launch, Program, Role
from offload.streaming import Streaming

_DRAWS = "random numbers are drawn, whose cells each capture has elsewhere"
_STREAMED = "weights are streamed, whose addresses the capture must have from the plan"


class TorchAscendBackend(AscendBackend):
    """One Ascend device that torch_npu uses.

    A Program's launches are captured through torch_npu into one model. Where the runtime tells what
    its kernels were given, inputs, outputs and the feature map move by patching those arguments;
    elsewhere the kernels keep the addresses of the capture: the feature map is torch's, and inputs
    and outputs are copied. Weights stay where they are; those in files are captured where a
    streaming plan places them, and then inputs and outputs are copied too.
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
    ) -> None:
        """A backend that captures with torch_npu.

        Args:
            torch_capturer: what captures; None: one for each Program.
            copies: who copies inputs and outputs: tasks of the model, which read their addresses
                from a table, or the host around it. None: the first, where the runtime has it.
            relocation: whether addresses in the kernels' own arguments are patched. None: where
                that is possible; `Executable.explain` says why it is not. True: loading fails where
                it is not. False: inputs and outputs are copied.
        """
        super().__init__()
        self._relocation = relocation
        self._torch_capturer = torch_capturer
        self._copies = copies

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

    def prepare(self, program: Program) -> Prepared:
        """Capture the Program's launches, unless weights in files have no addresses yet.

        Raises:
            BackendUnavailable: as `machine`.
            CaptureError: a launch cannot be captured, or draws random numbers that would be the
                same at each execution; inputs that are written cannot be copied; or kernels cannot
                be relocated, and that was required.
            ExecutionError: the runtime failed.
        """
        device = self.device_of(program)
        self.machine(device)
        self.refuse_launches(program)
        own = frozenset(value.index for value in program.of_role(Role.ACTIVATION))
        if program.stored:
            if self._relocation:
                raise CaptureError(f"relocation=True: {_STREAMED}; leave relocation out")
            moving_values(program)  # which refuses inputs that cannot be copied
            return Prepared(program, own)
        if self._relocation is False:
            model = self._capture(program)
            return Prepared(program, own, state=BoundModel(model, why_copied="not asked for"))
        relocator = Relocator(program, device, is_required=bool(self._relocation))
        model = self._capture(program, improve=relocator.improve)
        bound = relocator.bound or BoundModel(model, why_copied=_DRAWS)
        if self._relocation and bound.words is None:
            model.close()
            raise CaptureError(f"relocation=True: {bound.why_copied}; leave relocation out")
        if bound.words is None:
            return Prepared(program, own, state=bound)
        words = bound.words
        whole = with_scratch(program, words.discovery.scratch_bytes)
        graph = node_graph(whole, words.capture, words.discovery.words)
        return Prepared(whole, own, graph, state=bound)

    def _capture(
        self,
        program: Program,
        improve: Improve | None = None,
        streamed: StreamedWeights = NONE_STREAMED,
    ) -> CapturedModel:
        capturer = self._torch_capturer or TorchCapturer()
        device = self.device_of(program)
        return capturer.capture(program, device, self._copies, improve=improve, streamed=streamed)

    def _streamed_launches(self, program: Program, streaming: Streaming | None) -> StreamedWeights:
        """Weights in files have the addresses that the plan gives them, and are captured there."""
        device = self.device_of(program)
        return stream_weights(
            program,
            streaming,
            device,
            touches=[(*launch.reads, *launch.writes) for launch in program.launches],
            launches=range(len(program.launches)),
            memory=functools.partial(self.weight_memory, device),
        )

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """What was captured, its moving tensors bound to the Plan's slots.

        Weights in files are captured here, where the plan has given them addresses.

        Raises:
            PlanError: the Plan does not fit the Program.
            CaptureError: a launch cannot be captured.
            FileError: a file with weights is shorter than it was, or cannot be read.
            BackendUnavailable, ExecutionError: the runtime failed.
        """
        program = prepared.program
        check_plan(program, plan)
        streamed = self._streamed_launches(program, plan.streaming)
        bound: BoundModel = prepared.state or BoundModel(
            self._capture(program, streamed=streamed),
            why_copied=_STREAMED,
        )
        resident = self._resident(bound, program, plan, streamed)
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
            current_stream=self.current_stream,
            moves_feature_map=bound.words is not None and not bound.words.why_fixed,
            drains_queue=True,
            draw=drawing(*states) if states else None,
            weights=streamed.tensors,
            stream=streamed.stream,
            notes=functools.partial(_notes, bound, program, resident, held, more),
        )

    def _resident(
        self,
        bound: BoundModel,
        program: Program,
        plan: Plan,
        streamed: StreamedWeights,
    ) -> _native.AscendCapturedResident:
        model = bound.model
        assert model.copies is not None  # nobody else closes it
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
            steps=streamed.steps,
            for_next_pass=streamed.for_next_pass,
        )

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Execute a relocated model where it was captured, and moved; see `relocation.proof`.

        Raises:
            CaptureError: results or written state differ, or old memory was written.
            OutOfMemory: the device has no memory for the proof.
            ExecutionError: the device failed.
        """
        bound: BoundModel | None = prepared.state
        if bound is None or bound.words is None:
            return
        device = self.device_of(prepared.program)
        stream = self.current_stream(device)
        prove_relocation(prepared.program, plan, bound, device, stream)


def _outside_bytes(program: Program, plan: Plan, launch: Launch) -> int:
    """What a launch takes of torch's pool, where that is no feature map of the Plan's."""
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
    return (
        *notes_of(bound, program, resident),
        stages_note(drains=True),
        held(),
        *more,
    )
