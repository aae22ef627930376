"""Models of torch_npu on an Ascend device: captured once, their inputs and outputs copied."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from offload import _native
from offload.backends.ascend.backend import AscendBackend, stages_note
from offload.backends.ascend.torch_capture import CapturedModel, TorchCapturer
from offload.backends.base import Capabilities, LaunchReport, Loaded, Prepared
from offload.backends.random_draws import drawing
from offload.errors import PlanError
from offload.plan import Plan, check_plan
from offload.program import Launch, Program, Role


class TorchAscendBackend(AscendBackend):
    """One Ascend device that torch_npu uses.

    A Program's launches are captured through torch_npu into one model. Its kernels keep the
    addresses of the capture: the feature map is torch's, weights stay where they are, and inputs
    and outputs are copied.
    """

    capabilities = Capabilities(
        moves_feature_map=False,
        queues_work=True,
        rebinds_weights=False,
        schedules_launches=False,
    )

    def __init__(
        self,
        *,
        torch_capturer: TorchCapturer | None = None,
        copies: Literal["captured", "enqueued"] | None = None,
    ) -> None:
        """A backend that captures with torch_npu.

        Args:
            torch_capturer: what captures; None: one for each Program.
            copies: who copies inputs and outputs: tasks of the model, which read their addresses
                from a table, or the host around it. None: the first, where the runtime has it.
        """
        super().__init__()
        self._torch_capturer = torch_capturer
        self._copies = copies

    def _missing_functions(self, has: dict[str, bool]) -> list[str]:
        missing = []
        if not has["capture"]:
            missing.append(
                "the runtime captures no models (aclmdlRICaptureBegin): install CANN 8.1 or newer"
            )
        if self._copies == "captured" and not has["memcpy_desc"]:
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
        """Capture the Program's launches.

        Raises:
            BackendUnavailable: as `machine`.
            CaptureError: a launch cannot be captured, or draws random numbers that would be the
                same at each execution; inputs that are written cannot be copied.
            ExecutionError: the runtime failed.
        """
        device = self.device_of(program)
        self.machine(device)
        self.refuse_launches(program)
        capturer = self._torch_capturer or TorchCapturer()
        model = capturer.capture(program, device, self._copies)
        own = frozenset(value.index for value in program.of_role(Role.ACTIVATION))
        return Prepared(program, operator_allocated=own, state=model)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """What was captured, its moving tensors bound to the Plan's slots.

        Raises:
            PlanError: the Plan does not fit the Program, or places activations.
            BackendUnavailable, ExecutionError: the runtime failed.
        """
        program = prepared.program
        check_plan(program, plan)
        if plan.feature_map_bytes:
            raise PlanError("the activations of a captured model stay where torch has put them")
        model: CapturedModel = prepared.state
        assert model.copies is not None  # nobody else closes it
        device = self.device_of(program)
        resident = _native.AscendCapturedResident(
            device=device,
            model=model.handle,
            copies=model.copies,
            slots=[_slot(plan, one.value) for one in model.moving],
            n_launches=len(program.launches),
            random_cells=model.random_cells,
            release=model.close,
        )
        reports = tuple(
            LaunchReport("model", _activation_bytes(program, launch)) for launch in program.launches
        )
        return Loaded(
            resident,
            frozenset(),
            lambda: reports,
            device=self.tensor_device(device),
            alignment_bytes=self.tensor_alignment_bytes,
            current_stream=self.current_stream,
            drains_queue=True,
            draw=drawing(*model.random_states) if model.random_states else None,
            notes=functools.partial(_notes, resident, model.copies.form, model.pool_bytes),
        )


def _slot(plan: Plan, value: int) -> int:
    place = plan.places[value]
    assert place is not None  # inputs and outputs have slots of their own
    return place.slot


def _activation_bytes(program: Program, launch: Launch) -> int:
    made = [program.values[view.value] for view in launch.made()]
    return sum(value.size_bytes for value in made if value.role is Role.ACTIVATION)


def _notes(resident: _native.AscendCapturedResident, form: str, pool_bytes: int) -> tuple[str, ...]:
    """Where the memory lies, and who copies inputs and outputs; what that took so far."""
    counts = resident.copy_counts
    if form == "captured":
        who = (
            "tasks of the model copy them, which read addresses from a table "
            f"({counts['refreshes']} refreshes of {counts['bytes_refreshed']} bytes so far)"
        )
    else:
        who = f"the host copies them around the model ({counts['enqueued']} copies so far)"
    return (
        "one model, captured by torch_npu: activations, and copies of inputs and outputs, lie in "
        f"{pool_bytes} bytes of its pool, for good",
        f"inputs and outputs: {who}; kernels' own arguments are not relocated",
        stages_note(drains=True),
    )
