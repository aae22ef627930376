"""Custom kernels at varying sizes: the host launches them one by one (host scheduling)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offload.backends.ascend.kernels import Kernel, KernelCapture, SizedKernels
from offload.backends.base import Backend, Capabilities
from offload.backends.dispatched.sizes import constants_of_host
from offload.backends.loaded import LaunchReport, Loaded, LoadedWeights, Prepared, Streams
from offload.backends.refusals import check_weights
from offload.errors import BackendUnavailable, CaptureError, ExecutionError, OffloadError
from offload.interpreter.outside_graphs import outside_graphs
from offload.interpreter.settled_family import SettledFamily
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.topology import Machine
from offload.program import ITEM_BYTES, BoundProgram, Launch, Program, TensorView
from offload.program.family import Family
from offload.program.numbers import map_launch
from offload.program.varying_numbers import expression_of, varying_of

if TYPE_CHECKING:
    from offload.backends.ascend.backend import AscendBackend

_NUMBERS_KEPT = 16
"""The number of choices of sizes whose numbers are kept while launches are tiled."""


class ScheduledAscendBackend:
    """An Ascend device whose host launches a capturer's kernels one by one.

    For Programs whose sizes vary: one resident executes all sizes. Other Programs are loaded by the
    underlying backend.
    """

    opaque = weights = timing = offline = lanes = None

    def __init__(self, whole: AscendBackend, sized: SizedKernels) -> None:
        """Take the backend `whole` of the same device, whose capturer has the role `sized`."""
        self.name = whole.name
        self.capabilities = Capabilities(queues_work=True)
        self.sizes = ScheduledSizes(whole, sized)
        self._whole = whole

    @property
    def dispatch(self) -> Backend:
        """Itself."""
        return self

    def machine(self, index: int | None = None) -> Machine:
        """Describe the device.

        Raises:
            BackendUnavailable: the runtime's library, a function of it or this device is missing.
        """
        found = self._whole.machine(index)
        if not _native.ascend_capabilities()["host_args"]:
            raise BackendUnavailable(
                "the runtime accepts no kernel arguments from the host "
                "(aclrtLaunchKernelWithHostArgs): install CANN 8.5 or later, or load each choice "
                "of sizes by itself: scheduling='offload'"
            )
        return found

    def records(self) -> str:
        """Records as the underlying backend."""
        return self._whole.records()

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Make kernels of the Program's launches at the recorded sizes.

        Raises:
            BackendUnavailable: as `machine`.
            CaptureError: as `AscendBackend.prepare`.
            ExecutionError: the runtime failed.
        """
        self.machine(self._whole.device_of(bound.program))
        return self._whole.prepare(bound)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Load a Program of one size, as the underlying backend."""
        return self._whole.instantiate(prepared, plan)

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: the capturer states which words are addresses."""


class ScheduledSizes:
    """Loads Programs whose sizes vary; see `SizeChanger`."""

    one_host_core = ""  # tiling runs on the host

    def __init__(self, whole: AscendBackend, sized: SizedKernels, n_host_cores: int = 1) -> None:
        """Take the kernels of a capturer; `n_host_cores` execute the stages of a launch."""
        self._whole = whole
        self._sized = sized
        self._n_host_cores = n_host_cores

    def on_host_cores(self, n_cores: int) -> ScheduledSizes:
        """Return the same, with the stages of launches on this many cores of the host."""
        return ScheduledSizes(self._whole, self._sized, n_cores)

    def instantiate(self, settled: SettledFamily, prepared: Prepared, plan: Plan) -> Loaded:
        """As `SizeChanger.instantiate`.

        Raises:
            PlanError: the Plan does not fit the Program.
            BindingError: a weight's memory is not aligned, or has a device format.
            CaptureError: a kernel takes the address of a Value without a place.
            BackendUnavailable: the runtime takes no kernel arguments from the host.
            ExecutionError: the runtime failed.
        """
        program, captured = prepared.program, prepared.state
        check_plan(program, plan)
        whole, device = self._whole, self._whole.device_of(program)
        named = {address.value for one in captured.kernels for address in one.addresses}
        check = functools.partial(
            check_weights, prepared.bound, named, whole.tensor_alignment_bytes
        )
        check()
        resident = _native.AscendScheduledResident(
            device=device,
            launches=_launches(program, captured),
            values=_places(settled, plan, named),
            views=_views(program, plan),
            dims=settled.family.names,
            tile=_Tiling(settled, self._sized),
            tiles_first=settled.program.leaves_something,
            n_cores=self._n_host_cores,
            copies_on_device=whole.copies_on_device,
            keep=captured.keep,
        )
        reports = tuple(LaunchReport("scheduled", 0) for _ in program.launches)
        return Loaded(
            resident,
            frozenset(),
            lambda: reports,
            device=whole.tensor_device(device),
            alignment_bytes=whole.tensor_alignment_bytes,
            notes=functools.partial(_notes, resident, self._n_host_cores),
            weights=LoadedWeights(check),
            streams=Streams(whole.current_stream),
        )

    def constants(self, settled: SettledFamily) -> _native.SizeConstants | None:
        """Make size constants resident, by torch on the host; None without size constants."""
        if settled.constants is None:
            return None
        device = self._whole.tensor_device(self._whole.device_of(settled.program))
        return constants_of_host(settled.constants, settled.bound.bindings, device)


class _Tiling:
    """Gives the native side the kernels of launches at new sizes.

    Thread: any; several launches are tiled concurrently.
    """

    def __init__(self, settled: SettledFamily, sized: SizedKernels) -> None:
        self._program = settled.program
        self._family = settled.family
        self._sized = sized
        self._numbers = functools.lru_cache(_NUMBERS_KEPT)(settled.family.numbers_at)

    @outside_graphs
    def __call__(self, index: int, sizes: Sequence[int]) -> list[_native.SizedKernel]:
        """Return the kernels of a launch.

        Raises:
            CaptureError: they do not fit the launch at these sizes.
            ExecutionError: a function of a grid, a number or tiling data raised an exception.
        """
        numbers = self._numbers(tuple(sizes))

        def at_sizes(number: int | float) -> int | float:
            expression = expression_of(number)
            return number if expression is None else numbers[expression]

        launch = map_launch(self._program.launches[index], at_sizes)
        try:
            return [_native_kernel(one) for one in self._sized.at(self._program, launch)]
        except OffloadError as error:
            raise type(error)(f"at {_at_text(self._family, sizes)}: {error}") from error
        except Exception as error:
            raise ExecutionError(
                f"{launch.place}: at {_at_text(self._family, sizes)} a function of the kernels of "
                f"{launch.name} raised {type(error).__qualname__}: {error}"
            ) from error


def _at_text(family: Family, sizes: Sequence[int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in zip(family.names, sizes, strict=True))


def _native_kernel(kernel: Kernel) -> _native.SizedKernel:
    return (
        kernel.n_blocks,
        kernel.arguments,
        [(one.offset_bytes, one.value, one.value_offset_bytes) for one in kernel.addresses],
        [(one.offset_bytes, one.target_bytes) for one in kernel.own_addresses],
    )


def _launches(program: Program, captured: KernelCapture) -> list[tuple[str, list[int], list[int]]]:
    """Return each launch's name, its kernels' functions, and its maximal argument bytes."""
    found: list[tuple[str, list[int], list[int]]] = [
        (f"{launch.place}: {launch.name}", [], []) for launch in program.launches
    ]
    for kernel in captured.kernels:
        _, functions, blocks_bytes = found[kernel.launch]
        functions.append(kernel.function)
        blocks_bytes.append(max(kernel.most_bytes, len(kernel.arguments)))
    return found


def _places(settled: SettledFamily, plan: Plan, named: set[int]) -> list[tuple[str, int, int]]:
    """Return where each Value lies, in the native side's terms.

    Raises:
        CaptureError: a kernel takes the address of a Value without a place.
    """
    constants = {value: number for number, value in enumerate(settled.constant_values)}
    found = []
    for value, place in zip(settled.program.values, plan.places, strict=True):
        if value.index in constants:
            found.append(("constant", constants[value.index], 0))
        elif place is None:
            if value.index in named:
                raise CaptureError(
                    f"a kernel takes the address of {value.name}, which has no place: the capturer "
                    "has to name Values that the launch reads or writes"
                )
            found.append(("nowhere", 0, 0))
        elif place.slot == plan.feature_map.index:
            found.append(("feature map", place.slot, 0))
        else:
            found.append(("slot", place.slot, place.offset_bytes))
    return found


def _views(program: Program, plan: Plan) -> list[tuple[int, int, list[int], list[tuple[int, int]]]]:
    """Return every view that launches take or make, and which of its numbers vary."""
    found = {}
    for view in (view for launch in program.launches for view in _used(launch)):
        if plan.places[view.value] is not None:
            found[view, tuple(varying_of(view))] = view
    return [
        (
            view.value,
            ITEM_BYTES[view.dtype],
            [*view.shape, *view.strides, view.offset_bytes],
            varying_of(view),
        )
        for view in found.values()
    ]


def _used(launch: Launch) -> Iterator[TensorView]:
    yield from launch.views()
    yield from launch.made()


def _notes(resident: _native.AscendScheduledResident, n_host_cores: int) -> tuple[str, ...]:
    stages = {
        1: "one after the other, on the calling thread",
        2: "on 2 cores of the host: infer shapes and tile | write addresses and launch",
    }.get(
        n_host_cores,
        f"on {n_host_cores} cores of the host: infer shapes and tile (on {n_host_cores - 2}) | "
        "write addresses | launch",
    )
    return (
        f"at new sizes launches are prepared {stages} ({resident.n_staged:,} executions so far); "
        "at sizes that are kept the calling thread writes addresses and launches",
    )
