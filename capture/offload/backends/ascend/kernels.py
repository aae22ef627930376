"""The result of a capturer: a Program's launches as kernels, and their address words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from offload.errors import CaptureError
from offload.program import Launch, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A word of eight bytes in a kernel's arguments that is the address of a Value.

    Attributes:
        offset_bytes: its offset in the argument block; a multiple of 8.
        value: the Value of the Program.
        value_offset_bytes: the offset in the Value that it points to.
    """

    offset_bytes: int
    value: int
    value_offset_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class OwnAddress:
    """A word of eight bytes in a kernel's arguments that is an address in the same block.

    Attributes:
        offset_bytes: its offset in the argument block; a multiple of 8.
        target_bytes: the byte of the block that it points to.
    """

    offset_bytes: int
    target_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on the device.

    Attributes:
        function: the runtime's handle of it.
        n_blocks: the number of blocks; 0, only from `SizedKernels`: it is not launched, as there is
            nothing to compute.
        arguments: its argument block; the content of address words is ignored.
        addresses: its words that are addresses of Values.
        launch: the launch of the Program to which it belongs.
        own_addresses: its words that are addresses in the block itself.
        most_bytes: the maximum of its argument block at any sizes; 0: that of these sizes.
    """

    function: int
    n_blocks: int
    arguments: bytes
    addresses: tuple[Address, ...]
    launch: int
    own_addresses: tuple[OwnAddress, ...] = ()
    most_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCapture:
    """A Program's launches as kernels.

    Attributes:
        kernels: in the order of their sequential execution.
        keep: objects that must live as long as they may run.
    """

    kernels: Sequence[Kernel]
    keep: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GatherKernel:
    """The kernel that refreshes argument tables: `args[w] = base[index[w]] + offset[w]`.

    `native/ascend/argument_table.hpp` describes its arguments.

    Attributes:
        function: the runtime's handle of it.
        n_blocks: the number of blocks.
        keep: objects that must live as long as it may run.
    """

    function: int
    n_blocks: int
    keep: Any


class SizedKernels(Protocol):
    """The role of a capturer whose kernels run at other sizes than the recorded ones."""

    def at(self, program: Program, launch: Launch) -> tuple[Kernel, ...]:
        """Return the kernels of one launch at other sizes. Called on several threads.

        Args:
            program: the captured program, at the recorded sizes.
            launch: one of its launches, at other sizes.

        Returns:
            As many kernels as in the capture of the launch, in the same order. Their `function` is
            not read.

        Raises:
            CaptureError: they do not fit the launch at these sizes.
        """


class Capturer(Protocol):
    """Makes kernels of a Program's launches, whose arguments it knows."""

    @property
    def sized(self) -> SizedKernels | None:
        """None: each choice of sizes is captured separately."""

    def capture(self, program: Program, device: int) -> KernelCapture:
        """Return the kernels of every launch; execute nothing.

        Args:
            program: its launches, in order.
            device: the index of the kernels' device.

        Raises:
            CaptureError: there is no kernel for a launch; the message names it.
            ExecutionError: the runtime failed.
        """

    def gather_kernel(self, device: int) -> GatherKernel | None:
        """Return the kernel that refreshes argument tables; None: operators do it, if available."""


def refuse_random(program: Program) -> None:
    """Refuse launches that draw: a capturer does not state where its kernels read their state.

    Raises:
        CaptureError: there is such a launch.
    """
    for launch in program.launches:
        if launch.random:
            raise CaptureError(
                f"{launch.source}: {launch.name} draws random numbers, which a custom kernel on "
                "an Ascend device could only repeat: a capturer does not report where kernels "
                "read seed and offset"
            )


def refuse_own_formats(program: Program) -> None:
    """Refuse Values in a device format: custom kernels receive plain memory.

    Raises:
        CaptureError: there is such a Value; the message names it.
    """
    for value in program.values:
        if value.device_format:
            raise CaptureError(
                f"{value.name} lies in the device's format {value.device_format}, which a custom "
                "kernel would treat as plain memory: cast it with "
                "torch_npu.npu_format_cast(tensor, 2) before the capture"
            )
