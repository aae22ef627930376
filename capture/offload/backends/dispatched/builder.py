"""Build residents with dispatched launches: described as the CPU's, without places."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any

import torch

from offload.backends.cpu.builder import add_described
from offload.backends.cpu.resizing import SizedBuilder
from offload.backends.loaded import LaunchReport, Loaded, LoadedWeights, Streams
from offload.backends.refusals import check_formats
from offload.errors import BindingError
from offload.interpreter.torch_names import find_dtype
from offload.native import _native
from offload.plan import Plan, Slot
from offload.program import Argument, BoundProgram, Launch, Program, TensorView


class DispatchedBuilder(SizedBuilder):
    """Translates a Program, whose numbers may vary, into a DispatchedResident."""

    def __init__(
        self,
        bound: BoundProgram,
        plan: Plan,
        operator_allocated: Set[int],
        constants: Sequence[int],
        device: torch.device,
    ) -> None:
        """Begin without launches.

        Args:
            bound: the Program.
            plan: gives each Value a separate slot.
            operator_allocated: the Values that launches make, or that begin without content.
            constants: the Values that depend only on sizes.
            device: the executing device.
        """
        super().__init__(bound, plan, operator_allocated, constants)
        self._device = device
        self._held = [
            (plan.slot_of(index), holders[0])
            for index, holders in bound.bindings.weights.items()
            if bound.program.values[index].device_format
        ]

    def loaded(self) -> Loaded:
        """Return the launches, on torch's current stream of the device."""
        program = self._program
        reports = tuple(
            LaunchReport("dispatched", _made_bytes(program, launch)) for launch in program.launches
        )
        return Loaded(
            self.dispatched(),
            self._operator_allocated,
            lambda: reports,
            device=self._device,
            weights=LoadedWeights(check=functools.partial(_check_weights, self._bound)),
            streams=None if self._device.type == "cpu" else Streams(),
        )

    def dispatched(self) -> _native.DispatchedResident:
        """Return only the launches.

        Raises:
            CaptureError: an operator does not exist in this torch, or takes other arguments.
        """
        if self._device.type != "cpu":
            _tell_captures(self._device.type)
        launches = self._program.launches
        descriptions = [self._describe(launch) for launch in launches]
        resident = _native.DispatchedResident(
            self._slots(), self._tensors, str(self._device), self._held
        )
        for launch, description in zip(launches, descriptions, strict=True):
            add_described(resident.add, launch, description)
        self._require_gradients(resident)
        _native.set_sizes(resident, **self._varying())
        return resident

    def _memory(self, slot: Slot, operator_slots: Set[int]) -> _native.CpuMemory:
        if any(slot.index == index for index, _ in self._held):
            return _native.CpuMemory.KEPT
        return super()._memory(slot, operator_slots)

    def _describe(self, launch: Launch) -> dict[str, Any]:
        described = super()._describe(launch)
        return {
            name: what
            for name, what in described.items()
            if name not in ("out_overload", "outputs", "table")
        }

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, TensorView):
            content = self._program.values[argument.value].host_content
            if content is not None:
                return _host_tensor(content, argument)
        return super()._argument(argument)


@functools.cache
def _tell_captures(device_type: str) -> None:
    """Have native code know of captures where torch's own guard of the type does not.

    torch_npu 2.13.0 does not override `DeviceGuardImplInterface::isStreamCapturing`.
    """
    module: Any = torch.get_device_module(device_type)
    _native.ask_captures_by(device_type, module.is_current_stream_capturing)


def _host_tensor(content: bytes, view: TensorView) -> torch.Tensor:
    """Return a host constant, with the same content at each execution."""
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()
    tensor = torch.empty(0, dtype=find_dtype(view.dtype))
    offset = view.offset_bytes // tensor.element_size()
    return tensor.set_(whole.untyped_storage(), offset, view.shape, view.strides)


def _made_bytes(program: Program, launch: Launch) -> int:
    return sum(program.values[view.value].size_bytes for view in launch.made())


def _check_weights(bound: BoundProgram) -> None:
    """Refuse weights that cannot be used in their present memory.

    Raises:
        BindingError: a weight was cast to another format since it was recorded, or has a device
            format and has moved.
    """
    check_formats(bound)
    for index in bound.bindings.weights:
        if bound.program.values[index].device_format:
            raise BindingError(
                f"{bound.program.values[index].name}: it lies in a device format, which is known "
                "only for the storage that it was loaded with: capture and load again to use "
                "others"
            )
