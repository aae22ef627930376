"""The backend of host scheduling: launches of torch's operators, called one by one from C++."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.backends.base import Backend, Capabilities
from offload.backends.dispatched.builder import DispatchedBuilder
from offload.backends.dispatched.sizes import DispatchedSizes
from offload.backends.loaded import Loaded, Prepared
from offload.backends.refusals import check_formats
from offload.errors import CaptureError
from offload.plan import Plan, check_plan
from offload.plan.topology import Machine
from offload.program import BoundProgram, Kernel, Program, Role, TritonKernel


class DispatchBackend:
    """Executes a Program as eager mode does, from C++: each launch is an operator of torch.

    Operators allocate their results from torch's allocator; nothing is placed, captured or proved.
    On a device with streams launches go to the caller's current stream. Only the device's type and
    torch's own guards are used, so the CPU can stand for any device.
    """

    opaque = weights = timing = offline = lanes = None

    def __init__(
        self, name: str, machine: Callable[[int | None], Machine], device_type: str = ""
    ) -> None:
        """Serve tensors of a device type.

        Args:
            name: of the backend.
            machine: describes a device; None: torch's current one. Raises BackendUnavailable.
            device_type: torch's device type; by default the name.
        """
        self.name = name
        self._type = device_type or name
        self.capabilities = Capabilities(queues_work=self._type != "cpu")
        self.sizes = DispatchedSizes(self.device_of)
        self._machine = machine

    @property
    def dispatch(self) -> Backend:
        """The backend itself."""
        return self

    def machine(self, index: int | None = None) -> Machine:
        """Describe the device.

        Raises:
            BackendUnavailable: the device, its driver or its torch is missing.
        """
        return self._machine(index)

    def records(self) -> str:
        """Programs are recorded on this type of device."""
        return self._type

    def device_of(self, program: Program) -> torch.device:
        """Return the device of a Program's recording, or the one to which its file was read."""
        if self._type == "cpu":
            return torch.device("cpu")
        index = program.device_index
        if index is None:
            index = torch.get_device_module(self._type).current_device()
        return torch.device(self._type, index)

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Let operators allocate the results of all launches.

        Raises:
            BackendUnavailable: as `machine`.
            BindingError: a weight was cast to another format since it was recorded.
            CaptureError: the Program has compiled code in place of launches.
        """
        program = bound.program
        self.machine(program.device_index)
        check_formats(bound)
        for launch in program.launches:
            if isinstance(launch.callee, Kernel):
                raise CaptureError(
                    f"{launch.source}: {launch.name} is compiled code, and launches are delivered "
                    "as recorded: load without fuse="
                )
            if isinstance(launch.callee, TritonKernel):
                raise CaptureError(
                    f"{launch.source}: {launch.name} is a Triton kernel, and launches are "
                    "delivered by operators: load without scheduling='host'"
                )
        roles = (Role.ACTIVATION, Role.OUTPUT)
        return Prepared(
            bound, frozenset(value.index for value in program.values if value.role in roles)
        )

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Describe the launches to the native side.

        Raises:
            PlanError: the Plan does not fit the Program.
            CaptureError: an operator does not exist in this torch, or takes other arguments.
        """
        check_plan(prepared.program, plan)
        device = self.device_of(prepared.program)
        builder = DispatchedBuilder(prepared.bound, plan, prepared.operator_allocated, (), device)
        return builder.loaded()

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: launches are as recorded."""
