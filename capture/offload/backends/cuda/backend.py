"""The CUDA backend: one graph, discovered in several layouts, placed by the Plan, patched."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping

import torch

from offload.backends.base import (
    Backend,
    Capabilities,
    LaneRunner,
    LaunchTimer,
    OpaqueLauncher,
    Unproved,
    WeightStreamer,
)
from offload.backends.captured.capture_thread import refuse_capturing
from offload.backends.captured.random_draws import drawing
from offload.backends.captured.relocation.captures import RANDOM_OWNER, launch_names
from offload.backends.captured.relocation.fixed_values import FIXED_OWNER
from offload.backends.captured.relocation.fixed_weights import WEIGHT_OWNER
from offload.backends.captured.relocation.known_kernels import KnownKernels
from offload.backends.captured.relocation.words import Discovery
from offload.backends.captured.streamed_copies import StreamedGraph, streamed_graph
from offload.backends.cuda.capture import Capturer, current_device, device_of
from offload.backends.cuda.copy_costs import fit_copy_costs
from offload.backends.cuda.driver import driver_bindings
from offload.backends.cuda.lanes import CudaLanes
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.opaque import CudaOpaqueLauncher
from offload.backends.cuda.prepared_graph import prepare_captured
from offload.backends.cuda.resident_graph import (
    TemplateGraph,
    make_resident,
    set_nodes,
)
from offload.backends.cuda.streaming import CudaWeights, make_stream
from offload.backends.cuda.torch_capture import TorchCapturer
from offload.backends.cuda.twins import TwinTimer, prove_twins
from offload.backends.dispatched import DispatchBackend
from offload.backends.loaded import LaunchReport, Loaded, LoadedWeights, Prepared, SetNodes, Streams
from offload.backends.refusals import check_weights, refuse_launch, refuse_unaligned
from offload.errors import BackendUnavailable, CaptureError
from offload.interpreter.device_failures import torch_failures
from offload.native import _native
from offload.plan import Plan, check_plan
from offload.plan.check_node_order import check_node_order
from offload.plan.topology import CopyCosts, CostTable, Machine
from offload.program import BoundProgram

ALIGNMENT_BYTES = 256
"""Alignment of every Value: cuBLASLt takes it into account when it chooses a kernel. A kernel
chosen for less aligned memory runs on more aligned memory, but not the other way round.
"""

_LEAST_DRIVER = 12040  # cuFuncGetParamInfo

_COSTS = CostTable(memory_bytes_per_ns=2000.0)
_copy_costs: dict[int, CopyCosts] = {}
_known: dict[int, KnownKernels] = {}

_arenas: weakref.WeakValueDictionary[int, _native.CudaArena] = weakref.WeakValueDictionary()
_making_arena = threading.Lock()


class CudaBackend:
    """One NVIDIA GPU, or anything else behind the driver's API."""

    name = "cuda"
    capabilities = Capabilities(queues_work=True, shares_arena=True)
    alignment_bytes = ALIGNMENT_BYTES
    current_stream: Callable[[int], int] | None = None  # torch's, whose handle is the driver's
    offline = sizes = None

    _uses_known = True

    def __init__(self, capturer: Capturer | None = None) -> None:
        """Capture with torch, unless another capturer is given."""
        self._capturer = capturer
        if capturer is None or isinstance(capturer, TorchCapturer):  # which launches kernels
            self.capabilities = dataclasses.replace(self.capabilities, runs_kernels=True)

    @property
    def opaque(self) -> OpaqueLauncher:
        """Captures the work of a callable."""
        return CudaOpaqueLauncher(self._capturer, self._require)

    @property
    def weights(self) -> WeightStreamer:
        """Copies weights from the host, within the graph."""
        return CudaWeights(self.alignment_bytes)

    @property
    def timing(self) -> LaunchTimer:
        """Times a twin of the graph."""
        return TwinTimer(self.proof_memory)

    @property
    def lanes(self) -> LaneRunner:
        """Runs launches as branches of the graph."""
        return CudaLanes(self.proof_memory)

    @property
    def dispatch(self) -> Backend | None:
        """Launches torch's operators one by one; None with another capturer."""
        return DispatchBackend("cuda", _torch_machine) if self._capturer is None else None

    def machine(self, index: int | None = None) -> Machine:
        """The Machine of a GPU; by default torch's current one.

        Raises:
            BackendUnavailable: the driver, its bindings, this GPU, or a torch built with CUDA is
                missing; the message names all that are.
        """
        index = current_device() if index is None else index
        missing = self._missing(index)
        if missing:
            raise BackendUnavailable("; ".join(missing))
        name, memory_bytes = _native.cuda_devices()[index]
        return Machine("cuda", name, memory_bytes, self.alignment_bytes, _COSTS)

    def _missing(self, index: int) -> list[str]:
        missing = []
        try:
            if _native.cuda_driver_version() < _LEAST_DRIVER:
                missing.append(
                    f"the driver is for CUDA {_native.cuda_driver_version() / 1000:g}, and 12.4 "
                    "is the first version that reports the arguments of a kernel"
                )
            n_devices = _native.cuda_device_count()
            if not n_devices:
                missing.append("the driver finds no GPU")
            elif index >= n_devices:
                missing.append(f"there is no GPU {index}: the driver finds {n_devices}")
        except BackendUnavailable as error:
            missing.append(str(error))
        try:
            driver_bindings()
        except BackendUnavailable as error:
            missing.append(str(error))
        if self._capturer is None and torch.version.cuda is None:
            missing.append(f"torch {torch.__version__} is built without CUDA")
        elif self._capturer is None and not torch.cuda.is_available():
            missing.append("torch finds no GPU that it can use")
        return missing

    def _require(self, device: int) -> None:
        """Require a GPU, and a caller that is not capturing: a pool of discovery takes memory."""
        self.machine(device)
        if self._capturer is None:
            refuse_capturing("cuda")

    def records(self) -> str:
        """Records Programs on CUDA tensors."""
        return "cuda"

    @torch_failures("capturing the program")
    def prepare(self, bound: BoundProgram) -> Prepared:
        """Capture the Program's launches in three layouts, and find its words.

        Raises:
            BackendUnavailable: as `machine`.
            CaptureError: a launch cannot be captured, or can be neither relocated nor made to work
                on copies, or is captured differently each time; the message names the kernel.
            OutOfMemory: the device has no memory for copies.
            Disproved: compiled kernels differ from the launches that they replace.
            ExecutionError: the driver failed.
        """
        program = bound.program
        self._require(device_of(program))
        for launch in program.launches:
            refuse_launch(launch, "cuda")
        for overlap in program.overlaps:
            refuse_unaligned(program, overlap, self.alignment_bytes)
        known = _known_kernels(device_of(program)) if self._uses_known else None
        prepared = prepare_captured(bound, self._capturer or TorchCapturer(), known)
        if not prepared.state.is_known:
            return prepared
        again = functools.partial(self._without_known().prepare, bound)
        return dataclasses.replace(prepared, prepare_unproved=again)

    def _without_known(self) -> CudaBackend:
        """The same backend, which finds all words by comparing captures."""
        other = copy.copy(self)
        other._uses_known = False
        return other

    @torch_failures("making the program resident")
    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Instantiate the graph with one relocated word for each address found.

        Raises:
            PlanError: the Plan does not fit the Program.
            BindingError: a weight's memory is not aligned.
            BackendUnavailable: streamed weights have no store on the host.
            CaptureError: the copies of weights cannot be ordered with the graph's nodes.
            FileError: a file with weights is shorter than before, or cannot be read.
            ExecutionError: the driver failed; if memory ran out, the message gives bytes.
        """
        check_plan(prepared.program, plan)
        captured: TemplateGraph = prepared.state
        if captured.one_lane is not None:
            assert prepared.graph is not None
            check_node_order(prepared.program, plan, prepared.graph)
        named = {word.value for word in captured.discovery.words}
        check = functools.partial(check_weights, prepared.bound, named, self.alignment_bytes)
        check()
        arena = _arena(captured.device)
        stream, weights, streamed = self._streamed(prepared, plan, captured.device)
        resident = make_resident(
            captured,
            prepared.program,
            plan,
            arena,
            plan.feature_map_bytes,
            stream=stream,
            streamed=streamed,
            keep=_kept(prepared, captured, arena),
        )
        random = captured.capture.random
        mode = "graph" if prepared.program.opaque is None else "opaque"
        reports = tuple(LaunchReport(mode, 0) for _ in prepared.program.launches)
        return Loaded(
            resident,
            frozenset(),
            lambda: reports,
            device=self.tensor_device(captured.device),
            alignment_bytes=self.alignment_bytes,
            notes=functools.partial(
                _notes, tuple(captured.fixed.notes(prepared.program)), captured.proved
            ),
            weights=LoadedWeights(check, weights, stream),
            streams=Streams(self.current_stream),
            draw=drawing(random) if random is not None and captured.random_cells else None,
            set_nodes=SetNodes(
                set_nodes(captured, plan),
                functools.partial(self.copy_costs, captured.device, resident),
            ),
            graph_bytes=lambda: resident.graph_bytes,
        )

    def _streamed(
        self, prepared: Prepared, plan: Plan, device: int
    ) -> tuple[_native.CudaWeightStream | None, Mapping[int, torch.Tensor], StreamedGraph]:
        """Return the stream of weights, their tensors, and the copies among the graph's nodes."""
        if plan.streaming is None:
            return None, {}, StreamedGraph((), ())
        assert prepared.graph is not None
        streamed = streamed_graph(prepared.program, prepared.graph, plan.streaming)
        on = self.tensor_device(device)
        stream, weights = make_stream(prepared.bound, plan.streaming, device, on)
        return stream, weights, streamed

    def copy_costs(self, index: int, resident: _native.CudaResident) -> CopyCosts:
        """The costs of re-setting a node and of copying on a device, measured once per process.

        Raises:
            ExecutionError: the driver failed, or has no memory to measure with.
        """
        if index not in _copy_costs:
            _copy_costs[index] = fit_copy_costs(*resident.sample_copy_costs())
        return _copy_costs[index]

    def tensor_device(self, index: int) -> torch.device:
        """The torch device of the tensors that executions take."""
        return torch.device("cuda", index)

    def proof_memory(self, index: int) -> DeviceMemory:
        """The source of the proof's memory."""
        return DeviceMemory(index, self.tensor_device(index))

    @torch_failures("proving that the program can be relocated; load(verify=False) leaves it out")
    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Execute twins of the graph in three placements, with other data in old memory.

        Raises:
            CaptureError: results or written state differ, old memory was written, or a kernel reads
                presumed padding.
            Unproved: the same, for a graph whose kernels were taken to be known.
            ExecutionError: the device failed, or has no memory for the proof.
        """
        captured: TemplateGraph = prepared.state
        names = launch_names(prepared.program)
        memory = self.proof_memory(captured.device)
        try:
            prove_twins(captured, prepared.bound, plan, names, memory)
        except CaptureError as error:
            if not captured.is_known:
                raise
            raise Unproved(str(error), self._without_known()) from error
        told = captured.one_lane or captured
        if not (captured.is_known or captured.fixed.fixed):
            sizes_bytes = [value.size_bytes for value in prepared.program.values]
            _known_kernels(captured.device).learn(told.capture, told.discovery, sizes_bytes)


def _torch_machine(index: int | None) -> Machine:
    """A GPU according to torch, without the driver or its bindings.

    Raises:
        BackendUnavailable: torch is built without CUDA, or finds no such GPU.
    """
    if torch.version.cuda is None:
        raise BackendUnavailable(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise BackendUnavailable("torch finds no GPU that it can use")
    at = torch.cuda.current_device() if index is None else index
    if at >= torch.cuda.device_count():
        raise BackendUnavailable(f"there is no GPU {at}: torch finds {torch.cuda.device_count()}")
    found = torch.cuda.get_device_properties(at)
    return Machine("cuda", found.name, found.total_memory, ALIGNMENT_BYTES, _COSTS)


def _notes(fixed: tuple[str, ...], proved: list[str]) -> tuple[str, ...]:
    """What stays in place, and what the proof allowed; keeps nothing of the capture alive."""
    return (*fixed, *proved)


def _kept(prepared: Prepared, captured: TemplateGraph, arena: object) -> tuple[object, ...]:
    """What must stay as long as the device executes a resident.

    The resident has a separate graph: of the capture only the memory that its constant words point
    to must stay. `_arenas` finds the arena as long.
    """
    return (
        arena,
        captured.fixed.mapping,
        captured.capture.keep if _points_outside(captured.discovery) else None,
        prepared.bindings.weights if prepared.program.opaque is not None else None,
    )


def _points_outside(discovery: Discovery) -> bool:
    """Whether constant words point to memory that the capture keeps."""
    kept_by_others = (RANDOM_OWNER, WEIGHT_OWNER, FIXED_OWNER)
    return any(not one.owner.startswith(kept_by_others) for one in discovery.constants)


def _known_kernels(device: int) -> KnownKernels:
    """Known kernels of a device, from proved graphs; empty in a fork's child."""
    return _known.setdefault(device, KnownKernels())


os.register_at_fork(after_in_child=_known.clear)


def _arena(device: int) -> _native.CudaArena:
    """The arena that all executables on a device share."""
    with _making_arena:
        arena = _arenas.get(device)
        if arena is None:
            arena = _arenas[device] = _native.CudaArena(device)
        return arena
