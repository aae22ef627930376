"""The CPU backend: launches in C++ on libtorch, on tensors over patched storages."""

from __future__ import annotations

import contextlib
import functools
import numbers
import platform
from typing import cast

import torch

from offload.backends.base import Capabilities
from offload.backends.cpu.builder import Builder
from offload.backends.cpu.out_variants import out_variant
from offload.backends.cpu.resizing import CpuSizes
from offload.backends.cpu.streaming import CpuWeights
from offload.backends.host_memory import total_bytes
from offload.backends.loaded import Loaded, Prepared
from offload.console.amounts import parse_bytes
from offload.errors import BackendUnavailable, BindingError, CaptureError
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.topology import CostTable, Machine
from offload.program import BoundProgram, Kernel

# The alignment of torch's CPU allocator, and the best for vector instructions.
ALIGNMENT_BYTES = 64

_SETS_THREADS = _native.sets_operator_threads()
_MOST_THREADS = 1024


@functools.cache
def _processor_name() -> str:
    """Return the kernel's name of the processor, or Python's where the kernel has none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class CpuBackend:
    """The embedded default, available on every machine with torch.

    Attributes:
        threads: how many share the work of a launch; None: torch's setting where an execution is
            requested.
        duty: the share of time in which executions compute; after each the device rests, as a
            shared or throttled device would.
        memory_bytes: the most that an executable may take of the memory, and placed segments
            together; None: in placements the machine's memory, or that of its control groups.
    """

    name = "cpu"
    capabilities = Capabilities(runs_kernels=True, runs_lanes=_SETS_THREADS, runs_collectives=True)
    opaque = None  # running a callable as one launch would equal calling it
    timing = dispatch = offline = lanes = None
    weights = CpuWeights(ALIGNMENT_BYTES)
    sizes = CpuSizes()

    def __init__(
        self,
        threads: int | None = None,
        duty: float = 1.0,
        memory_bytes: int | str | None = None,
    ) -> None:
        """Use as much of the processor as torch does and as much memory as there is, or less.

        Args:
            threads: as the attribute.
            duty: as the attribute.
            memory_bytes: a number of bytes, or text such as `1GiB`.

        Raises:
            BindingError: `memory_bytes` is not a number of bytes, or 0.
            BackendUnavailable: the number of threads or the duty is invalid, or this torch has no
                OpenMP to set threads.
        """
        if threads is not None and not (
            isinstance(threads, int)
            and not isinstance(threads, bool)
            and 1 <= threads <= _MOST_THREADS
            and _SETS_THREADS
        ):
            raise BackendUnavailable(
                f"threads: expected a number from 1 to {_MOST_THREADS}, and a torch that shares "
                f"work by OpenMP, got {threads!r}"
            )
        is_number = isinstance(duty, numbers.Real) and not isinstance(duty, bool)
        if not (is_number and 0 < duty <= 1):
            raise BackendUnavailable(f"duty: expected more than 0 and at most 1, got {duty!r}")
        self.threads, self.duty = threads, duty
        self.memory_bytes = None
        if memory_bytes is not None:
            self.memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
            if not self.memory_bytes:
                raise BindingError(f"memory_bytes: expected at least 1 byte, got {memory_bytes!r}")
            self.weights = CpuWeights(ALIGNMENT_BYTES, self.memory_bytes)

    def machine(self, index: int | None = None) -> Machine:
        """Describe this computer."""
        is_limited = self.memory_bytes is not None
        memory_bytes = total_bytes() if self.memory_bytes is None else self.memory_bytes
        n_threads = torch.get_num_threads() if self.threads is None else self.threads
        settings = f"threads={n_threads}, duty={self.duty}"
        return Machine(
            "cpu",
            _processor_name(),
            memory_bytes,
            ALIGNMENT_BYTES,
            CostTable(),
            settings,
            is_limited,
        )

    def records(self) -> str:
        """Programs are recorded on the CPU."""
        return "cpu"

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Find the results of launches without an out-variant.

        Raises:
            CaptureError: an operator does not exist in this torch, or the Program has host
                constants, which belong to launches of devices other than the host.
        """
        program = bound.program
        for value in program.values:
            if value.on_host:
                raise CaptureError(
                    f"%{value.index} ({value.name}) is a host constant of a program on "
                    f"{program.device}: on the CPU every tensor is an input, a weight or computed"
                )
        return Prepared(
            bound,
            frozenset(
                view.value
                for launch in program.launches
                if not isinstance(launch.callee, Kernel)
                and not launch.is_collective
                and out_variant(launch) is None
                for view in launch.made()
            ),
        )

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Build the storages, the tensors on them, and the launches.

        Raises:
            PlanError: the Plan does not fit the Program.
            CaptureError: an operator does not exist in this torch, or takes other arguments.
        """
        check_plan(prepared.program, plan)
        loaded = Builder(prepared.bound, plan, prepared.operator_allocated).loaded()
        if self.threads is not None or self.duty < 1:
            resident = cast(_native.CpuResident, loaded.resident)
            _native.set_share(resident, self.threads or 0, self.duty)
        return loaded

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: out-variants are proved when they are first executed.

        They are proved on the live inputs, or on made-up ones where a budget was tried.
        """
