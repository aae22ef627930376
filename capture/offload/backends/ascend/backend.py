"""The Ascend backend: kernels in one model on the device, which read their arguments from a table.

At each execution the table's words are refreshed on the execution's stream: by the host, which
writes changed words and copies the range that they span; or by the device, which gathers all words
from a table of the slots' addresses, by a kernel of the capturer or else by operators of the
operator libraries.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from offload.backends.ascend.kernel_table import make_resident
from offload.backends.ascend.kernels import (
    Capturer,
    KernelCapture,
    refuse_own_formats,
    refuse_random,
)
from offload.backends.ascend.launch_times import TwinTimer
from offload.backends.ascend.offline import AscendOfflineLoader
from offload.backends.ascend.refresh import Refresh, choose_gather, notes_of_refresh
from offload.backends.ascend.relocated_model import ProofMemory
from offload.backends.ascend.scheduled import ScheduledAscendBackend
from offload.backends.ascend.stream_budget import streams_note
from offload.backends.ascend.streaming import (
    AscendWeights,
    StreamedWeights,
    WeightMemory,
    stream_weights,
    streaming_notes,
)
from offload.backends.base import Backend, Capabilities, LaunchTimer, OfflineLoader, WeightStreamer
from offload.backends.loaded import LaunchReport, Loaded, LoadedWeights, Prepared, Streams
from offload.backends.refusals import check_weights, refuse_launch, refuse_unaligned
from offload.errors import BackendUnavailable
from offload.interpreter.device_failures import failure_of_torch
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.topology import CostTable, Machine
from offload.program import BoundProgram, Program

ALIGNMENT_BYTES = 512
"""Of every Value in the feature map: preferred by cube and vector units, and torch_npu's unit."""

TENSOR_ALIGNMENT_BYTES = 32
"""Of inputs, given outputs and weights, as operators require; less aligned tensors are copied."""

_COSTS = CostTable(memory_bytes_per_ns=1600.0)


class AscendBackend:
    """One Ascend device, or any implementation of its runtime's API."""

    name = "npu"
    capabilities = Capabilities(queues_work=True)
    opaque = sizes = lanes = None
    alignment_bytes = ALIGNMENT_BYTES
    tensor_alignment_bytes = TENSOR_ALIGNMENT_BYTES
    copies_on_device = True
    """Tensors lie in the device's memory, so the runtime copies them on their stream."""

    def __init__(
        self,
        capturer: Capturer | None = None,
        *,
        refresh: Refresh | str = Refresh.HOST,
        form: Literal["build", "capture"] | None = None,
    ) -> None:
        """Load Programs whose kernels the capturer makes.

        Args:
            capturer: makes kernels of launches.
            refresh: what writes addresses into the table.
            form: how a model is made: by an explicit build or by capturing a stream. None: by a
                build, where the runtime has it.
        """
        self._capturer = capturer
        self._refresh = Refresh(refresh)
        self._form = form

    @property
    def dispatch(self) -> Backend | None:
        """Launches the capturer's kernels one by one, at varying sizes; None if it cannot."""
        sized = None if self._capturer is None else self._capturer.sized
        return None if sized is None else ScheduledAscendBackend(self, sized)

    @property
    def weights(self) -> WeightStreamer:
        """Copies weights from the host, inside the model."""
        return AscendWeights(self.device_of, self.alignment_bytes)

    @property
    def timing(self) -> LaunchTimer:
        """Times the kernels of a twin."""
        make_twin = functools.partial(
            make_resident, form=self._form, copies_on_device=self.copies_on_device
        )
        return TwinTimer(self.device_of, make_twin, self.proof_memory)

    @property
    def offline(self) -> OfflineLoader:
        """Loads .om files."""
        return AscendOfflineLoader(self)

    def machine(self, index: int | None = None) -> Machine:
        """Describe a device; by default torch's current one.

        Raises:
            BackendUnavailable: the runtime's library, a function of it, this device, or a capturer
                is missing; the message names everything that is missing.
        """
        index = self.current_device() if index is None else index
        missing = self._missing_device(index)
        if not missing:
            missing += self._missing_functions(_native.ascend_capabilities())
        missing += self._missing_capturer()
        if missing:
            raise BackendUnavailable("; ".join(missing))
        return self.device_machine(index)

    def device_machine(self, index: int | None) -> Machine:
        """Describe a device, whatever will run on it.

        Raises:
            BackendUnavailable: the runtime's library or this device is missing.
        """
        index = self.current_device() if index is None else index
        missing = self._missing_device(index)
        if missing:
            raise BackendUnavailable("; ".join(missing))
        name, memory_bytes, _ = _native.ascend_device(index)
        return Machine("npu", name, memory_bytes, self.alignment_bytes, _COSTS)

    def _missing_device(self, index: int) -> list[str]:
        try:
            n_devices = _native.ascend_device_count()
        except BackendUnavailable as error:
            return [str(error)]
        if not n_devices:
            return ["the Ascend runtime finds no device"]
        if index >= n_devices:
            return [f"there is no device {index}: the runtime finds {n_devices}"]
        return []

    def _missing_functions(self, has: dict[str, bool]) -> list[str]:
        missing = []
        if not has["kernel_launch"]:
            missing.append("the runtime cannot launch custom kernels (aclrtLaunchKernel)")
        forms = {"build": "explicit_build", "capture": "capture"}
        wanted = [self._form] if self._form else list(forms)
        if not any(has[forms[form]] for form in wanted):
            missing.append(
                f"the runtime cannot make a model by {' or '.join(wanted)} (aclmdlRIBuildBegin, "
                "aclmdlRICaptureBegin): install a newer CANN"
            )
        return missing

    def _missing_capturer(self) -> list[str]:
        if self._capturer is not None:
            return []
        return [
            "AscendBackend needs a capturer that makes kernels of a program's launches; models "
            "of torch_npu are for TorchAscendBackend"
        ]

    def records(self) -> str:
        """Programs are recorded on NPU tensors."""
        return "npu"

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Make kernels of the Program's launches.

        Raises:
            BackendUnavailable: as `machine`.
            CaptureError: there is no kernel for a launch, the Program draws random numbers, or
                holds a Value in a device format.
            ExecutionError: the runtime failed.
        """
        program = bound.program
        device = self.device_of(program)
        self.machine(device)
        self.refuse_launches(program)
        refuse_random(program)
        refuse_own_formats(program)
        for overlap in program.overlaps:
            refuse_unaligned(program, overlap, self.tensor_alignment_bytes)
        assert self._capturer is not None  # checked by `machine`
        return Prepared(bound, state=self._capturer.capture(program, device))

    def refuse_launches(self, program: Program) -> None:
        """Refuse launches that no model on the device can execute by itself.

        Raises:
            CaptureError: a launch reads on the host or makes host memory.
        """
        for launch in program.launches:
            refuse_launch(launch, program.device)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Make the model, and place its kernels' arguments in one table.

        Raises:
            PlanError: the Plan does not fit the Program.
            BindingError: a weight's memory is not aligned, or has a device format.
            BackendUnavailable: the device must gather, and has neither a kernel nor operators for
                it; or weights must be streamed that have no store on the host.
            CaptureError: a kernel uses a streamed weight that its launch does not read.
            FileError: a file with weights is shorter than it was, or cannot be read.
            ExecutionError: the runtime failed; the message says whether memory or streams ran out.
        """
        program, captured = prepared.program, prepared.state
        check_plan(program, plan)
        device = self.device_of(program)
        named = {address.value for one in captured.kernels for address in one.addresses}
        check = functools.partial(check_weights, prepared.bound, named, self.tensor_alignment_bytes)
        check()
        assert self._capturer is not None  # checked by `machine`
        gather = choose_gather(self._refresh, self._capturer, device)
        streamed = self._streamed(captured, prepared.bound, plan, device)
        resident = make_resident(
            captured,
            program,
            plan,
            device=device,
            arena_bytes=plan.feature_map_bytes,
            form=self._form,
            gather=gather,
            copies_on_device=self.copies_on_device,
            streamed=streamed,
        )
        reports = tuple(LaunchReport("model", 0) for _ in program.launches)
        held = streams_note(device, resident, streams_weights=streamed.stream is not None)
        more = streaming_notes(streamed.stream, plan.streaming)
        return Loaded(
            resident,
            frozenset(),
            lambda: reports,
            device=self.tensor_device(device),
            alignment_bytes=self.tensor_alignment_bytes,
            notes=functools.partial(notes_of_refresh, resident, gather, held, more),
            weights=LoadedWeights(check, streamed.tensors, streamed.stream),
            streams=Streams(self.current_stream),
        )

    def _streamed(
        self, captured: KernelCapture, bound: BoundProgram, plan: Plan, device: int
    ) -> StreamedWeights:
        return stream_weights(
            bound,
            plan.streaming,
            device,
            touches=[[one.value for one in kernel.addresses] for kernel in captured.kernels],
            launches=[kernel.launch for kernel in captured.kernels],
            memory=functools.partial(self.weight_memory, device),
        )

    def weight_memory(self, index: int, size_bytes: int) -> WeightMemory:
        """Allocate torch's memory on a device, for weights.

        Raises:
            OutOfMemory: the device has no memory.
            ExecutionError: the device failed.
        """
        npu: Any = getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        try:
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device=self.tensor_device(index))
            # The memory's former owner may still use it on that stream, and copies run on another.
            npu.current_stream(index).synchronize()
        except RuntimeError as error:
            raise failure_of_torch(
                error, f"allocating {size_bytes} bytes for weights failed"
            ) from error
        return WeightMemory(tensor, functools.partial(tensor.untyped_storage().resize_, 0))

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: the capturer states which words are addresses."""

    def proof_memory(self, index: int) -> ProofMemory:
        """Return torch's memory for executions of proofs."""
        return ProofMemory(index)

    def device_of(self, program: Program) -> int:
        """Return the device of a Program's recording, or the one to which its file was read."""
        return self.current_device() if program.device_index is None else program.device_index

    def current_device(self) -> int:
        """Return torch's current device; the first where torch knows none."""
        npu: Any = getattr(torch, "npu", None)
        return int(npu.current_device()) if npu is not None and npu.is_available() else 0

    def tensor_device(self, index: int) -> torch.device:
        """Return the torch device of the tensors of executions."""
        return torch.device("npu", index)

    def current_stream(self, index: int) -> int:
        """Return the runtime's handle of the caller's current stream; drains torch's queue."""
        npu: Any = getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        return int(npu.current_stream(index).npu_stream)
