"""The compiled part of offload. Contracts are in native/**/*.hpp."""

import enum
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

torch_version: str

# ---- calls --------------------------------------------------------------------------------------

PLAIN_DEVICE_FORMATS: tuple[int, ...]

class TensorLayout:
    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        conjugate: bool,
        negative: bool,
    ) -> None: ...

class InputSpec:
    def __init__(
        self,
        *,
        name: str,
        slot: int,
        written: bool,
        may_be_written: bool = False,
        returned_as_view: bool = False,
        alignment_bytes: int = 1,
        copied: bool = False,
        on_host: bool = False,
    ) -> None: ...

class OutputSpec:
    def __init__(
        self,
        *,
        name: str,
        slot: int,
        operator_allocated: bool,
        alignment_bytes: int = 1,
        copied: bool = False,
    ) -> None: ...

class ResultSource:
    INPUT: ResultSource
    WEIGHT: ResultSource
    OUTPUT: ResultSource

class ResultSpec:
    def __init__(
        self,
        *,
        source: ResultSource,
        index: int,
        is_argument: bool,
    ) -> None: ...

class ResultShape:
    def __init__(self, *, offset_bytes: int, layout: TensorLayout, covers_output: bool) -> None: ...

class CallShapes:
    def __init__(
        self,
        *,
        inputs: Sequence[TensorLayout],
        outputs_bytes: Sequence[int],
        results: Sequence[ResultShape],
        feature_map_bytes: int,
    ) -> None: ...

class VaryingView:
    def __init__(
        self, *, layout: TensorLayout, offset_bytes: int, varying: Sequence[tuple[int, int]]
    ) -> None: ...

class SizeConstants:
    def __init__(
        self,
        *,
        resident: Resident,
        values: Sequence[tuple[str, int]],
        results: Sequence[tuple[int, int]],
        given: list[tuple[int, torch.Tensor]],
        on_host: SizeConstants | None = None,
        device: str = "cpu",
    ) -> None: ...

class InstanceCounts:
    n_hits: int
    n_misses: int
    n_evicted: int
    n_kept: int
    kept_bytes: int
    n_places: int

class Instances:
    def __init__(
        self,
        *,
        dims: Sequence[tuple[int, int, Sequence[int]]],
        numbers: Sequence[Sequence[tuple[str, int | float]]],
        reals: Sequence[bool],
        conditions: Sequence[Sequence[tuple[str, int | float]]],
        compared: Sequence[Sequence[int]],
        values: Sequence[tuple[str, int]],
        inputs: Sequence[VaryingView],
        outputs: Sequence[int],
        results: Sequence[tuple[VaryingView, int | None]],
        constants: SizeConstants | None,
        resident: Resident,
        budget_bytes: int,
        refuse: Callable[[list[int]], None],
        place: Callable[
            [list[int], list[int], list[int]], tuple[Sequence[int], Sequence[int], int, bool]
        ],
    ) -> None: ...
    def feature_map_bytes(self, sizes: Sequence[int]) -> int: ...
    def clear(self) -> None: ...
    @property
    def counts(self) -> InstanceCounts: ...

class SizesAccount:
    """Executions at some sizes: (their number, their total ns, the least ns of one)."""

    @property
    def resident(self) -> tuple[int, int, int]: ...
    @property
    def promoted(self) -> tuple[int, int, int]: ...
    @property
    def used(self) -> int: ...
    @property
    def due_ns(self) -> int: ...
    @property
    def is_promoted(self) -> bool: ...

class Promotions:
    least_due_ns: int
    armed: bool
    def __init__(
        self,
        *,
        most: int,
        review_after: int,
        on_due: Callable[[tuple[int, ...], tuple[Any, ...], dict[str, Any]], None],
    ) -> None: ...
    def find(
        self, sizes: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object | None: ...
    def charge(self, sizes: Sequence[int], execution_ns: int, by_promoted: bool) -> None: ...
    def set(self, sizes: Sequence[int], executable: object | None) -> None: ...
    def set_due(self, sizes: Sequence[int], due_ns: int) -> None: ...
    def account(self, sizes: Sequence[int]) -> SizesAccount | None: ...
    def clear(self) -> None: ...

def check_memory(name: str, tensor: torch.Tensor) -> None: ...

class HeldStorages:
    def __init__(self, tensors: list[torch.Tensor]) -> None: ...

def check_weight(weight: WeightSpec) -> None: ...

class WeightSpec:
    def __init__(
        self,
        *,
        name: str,
        slot: int,
        size_bytes: int,
        written: bool,
        holders: list[torch.Tensor],
        layouts: Sequence[TensorLayout],
        offsets: Sequence[int],
        packed: bool = False,
        moved: torch.Tensor | None = None,
    ) -> None: ...

class HostConstantSpec:
    def __init__(
        self,
        *,
        name: str,
        content: bytes,
        layout: TensorLayout,
        input: int | None = None,
        holder: torch.Tensor | None = None,
    ) -> None: ...

class OverlapSpec:
    def __init__(self, *, first: int, second: int, distance_bytes: int) -> None: ...

class CallSpec:
    def __init__(
        self,
        *,
        device: str,
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        results: Sequence[ResultSpec],
        weights: Sequence[WeightSpec],
        overlaps: Sequence[OverlapSpec],
        feature_map_slot: int,
        alignment_bytes: int,
        shapes: CallShapes,
        host_constants: Sequence[HostConstantSpec] = ...,
        rebinding_refusal: str = ...,
    ) -> None: ...

# ---- weight streaming ---------------------------------------------------------------------------

class FileRange:
    def __init__(self, path: str, offset_bytes: int) -> None: ...

class StreamedWeight:
    def __init__(
        self,
        *,
        name: str,
        size_bytes: int,
        pieces: Sequence[tuple[int, int, int, bool]],
        source: FileRange | torch.Tensor | list[torch.Tensor],
        gathered: bool = False,
    ) -> None: ...

class WeightStream:
    def __init__(
        self,
        *,
        memory_bytes: int,
        granule_bytes: int,
        weights: Sequence[StreamedWeight],
        transfers: Sequence[tuple[int, int, int, int, int, int]],
        n_launches: int,
        poison: bool = False,
    ) -> None: ...
    def load(self, progress: Callable[[int], object] | None = None) -> None: ...
    def tensor(self, index: int) -> torch.Tensor: ...  # of a gathered weight without address
    def refresh(self, weights: Sequence[int] | None = None) -> None: ...
    def replace(
        self, sources: Mapping[int, FileRange | torch.Tensor | list[torch.Tensor]]
    ) -> None: ...
    def close(self) -> None: ...
    def give_back(self) -> None: ...
    @property
    def read_modes(self) -> list[str]: ...
    @property
    def load_bytes(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def n_transfers(self) -> int: ...
    @property
    def store_bytes(self) -> int | None: ...
    @property
    def shared_store_bytes(self) -> int | None: ...
    @property
    def wait_ns(self) -> int | None: ...
    @property
    def discarded_bytes(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def generation(self) -> int: ...

class DeviceWeightStream:
    def load(self, progress: Callable[[int], object] | None = None) -> None: ...
    def refresh(self, weights: Sequence[int] | None = None) -> None: ...
    def replace(
        self, sources: Mapping[int, FileRange | torch.Tensor | list[torch.Tensor]]
    ) -> None: ...
    def close(self) -> None: ...
    def give_back(self) -> None: ...
    def forget_transfers(self) -> None: ...
    @property
    def store_bytes(self) -> int | None: ...
    @property
    def shared_store_bytes(self) -> int | None: ...
    @property
    def wait_ns(self) -> int | None: ...
    @property
    def discarded_bytes(self) -> int: ...
    @property
    def read_modes(self) -> list[str]: ...
    @property
    def load_bytes(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def n_transfers(self) -> int: ...
    @property
    def generation(self) -> int: ...

class CudaWeightStream(DeviceWeightStream):
    def __init__(
        self,
        *,
        device: int,
        memory_bytes: int,
        granule_bytes: int,
        weights: Sequence[StreamedWeight],
        transfers: Sequence[tuple[int, int, int, int, int, int]],
        n_launches: int,
        shares_store: bool = True,
    ) -> None: ...
    def tensor(self, index: int, device: str) -> torch.Tensor: ...

class AscendWeightStream(DeviceWeightStream):
    def __init__(
        self,
        *,
        device: int,
        memory_bytes: int,
        granule_bytes: int,
        weights: Sequence[StreamedWeight],
        transfers: Sequence[tuple[int, int, int, int, int, int]],
        n_launches: int,
        memory: int,
        release: Callable[[], object],
        shares_store: bool = True,
    ) -> None: ...
    @property
    def outputs_are_early(self) -> bool: ...

class AscendStepKind(enum.Enum):
    NODE = ...
    COPY = ...
    RECORD = ...
    WAIT = ...
    READY = ...

class AscendStepStream(enum.Enum):
    LAUNCHES = ...
    COPIES = ...

class AscendStreamedSteps:
    def __init__(
        self,
        weights: AscendWeightStream,
        steps: Sequence[tuple[AscendStepKind, AscendStepStream, int]],
    ) -> None: ...
    def before(self, node: int, stream: int) -> None: ...
    def end(self, stream: int) -> None: ...

class AscendLaunchTime:
    @property
    def time_ns(self) -> float: ...
    @property
    def host_was_ahead(self) -> bool: ...

class AscendLaunchTimer:
    def __init__(self, device: int) -> None: ...
    def before(self, stream: int) -> None: ...
    def after(self, stream: int) -> None: ...
    def take(self) -> list[AscendLaunchTime]: ...

def ascend_held_bytes(device: int, ranges: Sequence[tuple[str, int, int]]) -> int: ...
def ascend_link_samples(device: int) -> list[tuple[int, float]]: ...
def paint_stack(size_bytes: int, byte: int) -> None: ...
def cuda_tensor_at(address: int, size_bytes: int, device: str) -> torch.Tensor: ...
def cuda_granularity_bytes(device: int) -> int: ...
def cuda_held_bytes(device: int, ranges: Sequence[tuple[str, int, int]]) -> int: ...
def keep_cuda_guard() -> bool: ...
def n_guarded_cuda_devices() -> int: ...
def cuda_link_samples(device: int) -> list[tuple[int, float]]: ...

# ---- residents ----------------------------------------------------------------------------------

class Resident: ...

class TensorIndex:
    def __init__(self, index: int) -> None: ...
    @property
    def index(self) -> int: ...

class Collective: ...

def add_start(
    resident: CpuResident,
    *,
    operator_name: str,
    arguments: tuple[Any, ...],
    outputs: Sequence[int],
    releases: Sequence[int],
    source: str,
) -> Collective: ...
def add_wait(
    resident: CpuResident, *, collective: Collective, releases: Sequence[int], source: str
) -> None: ...
def reduce_op_name(boxed: torch.ScriptObject) -> str: ...

class CpuMemory(enum.Enum):
    PATCHED = ...
    OPERATOR = ...
    KEPT = ...
    OF_SIZES = ...

class CpuSlot:
    def __init__(self, size_bytes: int, memory: CpuMemory) -> None: ...

class CpuTensor:
    def __init__(self, slot: int, offset_bytes: int, layout: TensorLayout) -> None: ...

class CpuMade:
    def __init__(
        self, position: int, slot: int, offset_bytes: int, layout: TensorLayout
    ) -> None: ...

def set_sizes(
    resident: CpuResident | DispatchedResident,
    *,
    views: Sequence[tuple[int, int, Sequence[int], Sequence[tuple[int, int]]]],
    made: Sequence[tuple[int, int, Sequence[tuple[int, int]]]],
    scalars: Sequence[tuple[int, int, int | None, int]],
    slots: Sequence[tuple[int, int]],
    constants: Sequence[tuple[int, int]],
    feature_map: int | None,
) -> None: ...

class CpuResident(Resident):
    def __init__(
        self,
        slots: Sequence[CpuSlot],
        tensors: Sequence[CpuTensor],
        stream: WeightStream | None = None,
    ) -> None: ...
    def add(
        self,
        *,
        operator_name: str,
        overload: str,
        arguments: tuple[Any, ...],
        out_overload: str | None,
        outputs: Sequence[int],
        made: Sequence[CpuMade],
        releases: Sequence[int],
        guard: bool | int | float | complex | None,
        guards_shape: bool,
        source: str,
        table: tuple[int, int, int, int] | None = None,
    ) -> None: ...
    def require_gradients(self, tensors: Sequence[int]) -> None: ...
    def add_kernel(
        self,
        *,
        function: int,
        words: Sequence[tuple[int, int]],
        prove: Callable[[list[int]], bool],
        make_replaced: Callable[[], CpuReplaced],
        name: str,
        source: str,
        releases: Sequence[int],
        sources: Sequence[Sequence[torch.Tensor] | int] = (),  # int: the weight's in the stream
    ) -> None: ...
    def set_packed_weights(self, weights: Sequence[tuple[int, Sequence[int]]]) -> None: ...
    def derive_again(self) -> None: ...
    @property
    def launch_modes(self) -> list[tuple[str, int]]: ...

class LaneStep:
    RUN: LaneStep
    RECORD: LaneStep
    WAIT: LaneStep

class LaneCounts:
    n_shared: int
    n_alone: int
    n_helped: int

def set_lanes(
    resident: CpuResident,
    lanes: Sequence[Sequence[tuple[LaneStep, int, int]]],
    endings: Sequence[tuple[int, int, int, Sequence[int]]],
) -> None: ...
def lane_counts(resident: CpuResident) -> LaneCounts: ...
def share_always(resident: CpuResident, always: bool) -> None: ...
def set_share(resident: CpuResident, n_threads: int, duty: float) -> None: ...
def n_helpers() -> int: ...
def sets_operator_threads() -> bool: ...
def ask_captures_by(device_type: str, ask: Callable[[], bool]) -> None: ...

class DispatchedResident(Resident):
    def __init__(
        self,
        slots: Sequence[CpuSlot],
        tensors: Sequence[CpuTensor],
        device: str,
        held: Sequence[tuple[int, torch.Tensor]],
    ) -> None: ...
    def add(
        self,
        *,
        operator_name: str,
        overload: str,
        arguments: tuple[Any, ...],
        made: Sequence[CpuMade],
        releases: Sequence[int],
        guard: bool | int | float | complex | None,
        guards_shape: bool,
        source: str,
    ) -> None: ...
    def require_gradients(self, tensors: Sequence[int]) -> None: ...

class CpuReplaced:
    def __init__(
        self,
        resident: CpuResident,
        inputs: Sequence[int],
        results: Sequence[tuple[int, int]],
    ) -> None: ...

class NullResident(Resident):
    def __init__(
        self,
        relocations: Sequence[tuple[int, int, int]],
        word_ns: int,
        submit_ns: int,
        launch_ns: Sequence[int],
    ) -> None: ...
    @property
    def words(self) -> list[int]: ...
    @property
    def clock_ns(self) -> int: ...

def has_thunk(operator_name: str) -> bool: ...
def call_kernel(function: int, words: Sequence[int]) -> None: ...

class AllocationObserver:
    def __init__(self) -> None: ...
    def __enter__(self) -> AllocationObserver: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def contains(self, address: int) -> bool: ...
    @property
    def n_bytes(self) -> int: ...

# ---- CUDA -------------------------------------------------------------------------------------

def cuda_driver_version() -> int: ...
def cuda_device_count() -> int: ...
def cuda_is_fault(code: int) -> bool: ...
def cuda_devices() -> list[tuple[str, int]]: ...

class DiscoveryPool:
    def __init__(self, device: int, seed: int, large_chunk_bytes: int = 0) -> None: ...
    def allocate(self, size_bytes: int) -> int: ...
    def fix(self, number: int, address: int) -> None: ...
    def free(self, address: int) -> None: ...
    def events(self, begin: int = 0) -> list[tuple[str, int, int]]: ...
    @property
    def n_events(self) -> int: ...
    def shown(self) -> list[tuple[int, int]]: ...
    def rewind(self) -> None: ...
    @property
    def error(self) -> str | None: ...
    @staticmethod
    def set_current(pool: DiscoveryPool | None) -> None: ...

class CudaArena:
    def __init__(self, device: int) -> None: ...
    def map(self, size_bytes: int) -> ArenaMapping: ...
    @property
    def size_bytes(self) -> int: ...

class ArenaMapping:
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class CudaResident(Resident):
    def __init__(
        self,
        *,
        device: int,
        graph: int,
        arena: CudaArena,
        arena_bytes: int,
        node_handles: Sequence[int],
        words: Sequence[tuple[int, int, int]],
        relocations: Sequence[tuple[int, int, int]],
        launches: Sequence[int],
        n_launches: int,
        host_tables: Mapping[int, bytes] = ...,
        random_cells: Sequence[
            tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]]]
        ] = ...,
        weights: CudaWeightStream | None = ...,
        copies: Sequence[tuple[int, Sequence[int], Sequence[int], bool]] = ...,
        ready_after: Sequence[int] = ...,
        half_words: Sequence[int] = ...,
        launch_names: Sequence[str] = ...,
        keep: Any = ...,
    ) -> None: ...
    def load(self) -> None: ...
    def patch(self, words: Sequence[tuple[int, int]]) -> None: ...
    def set_stream(self, stream: int) -> None: ...
    def set_random(self, seeds_and_offsets: Sequence[int]) -> None: ...
    def execute(self) -> None: ...
    def issue(self, launch: int) -> None: ...
    def finish(self) -> None: ...
    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None: ...
    def sample_copy_costs(self) -> tuple[list[float], list[float], list[tuple[int, float]]]: ...
    def time_launches(self) -> list[float]: ...
    def close(self) -> None: ...
    @property
    def arena_address(self) -> int: ...
    @property
    def n_launches(self) -> int: ...
    @property
    def n_set_params(self) -> int: ...
    @property
    def n_instantiations(self) -> int: ...
    @property
    def graph_bytes(self) -> int: ...
    @property
    def n_graph_launches(self) -> int: ...

# ---- Ascend -----------------------------------------------------------------------------------

def ascend_device_count() -> int: ...
def ascend_device(index: int) -> tuple[str, int, int]: ...
def ascend_capabilities() -> dict[str, bool]: ...
def ascend_missing_operators() -> str: ...
def ascend_initialize() -> None: ...
def ascend_release() -> None: ...
def ascend_streams() -> int: ...
def ascend_stream_budget(soc_name: str) -> int | None: ...

ASCEND_GATHER_ARGUMENTS_BYTES: int
ASCEND_LAUNCH_BYTES: int

class AscendBinary:
    def __init__(self, device: int, image: bytes) -> None: ...
    def function(self, name: str) -> int: ...

class AscendScheduledResident(Resident):
    def __init__(
        self,
        *,
        device: int,
        launches: Sequence[tuple[str, Sequence[int], Sequence[int]]],
        values: Sequence[tuple[str, int, int]],
        views: Sequence[tuple[int, int, Sequence[int], Sequence[tuple[int, int]]]],
        dims: Sequence[str],
        tile: Callable[[int, Sequence[int]], Sequence[SizedKernel]],
        tiles_first: bool,
        n_cores: int,
        copies_on_device: bool,
        keep: Any,
    ) -> None: ...
    def watch(self, function: Callable[[str, int, bool], object] | None) -> None: ...
    @property
    def n_staged(self) -> int: ...
    def finish(self) -> None: ...

SizedKernel = tuple[int, bytes, Sequence[tuple[int, int, int]], Sequence[tuple[int, int]]]

class AscendResident(Resident):
    def __init__(
        self,
        *,
        device: int,
        arena_bytes: int,
        kernels: Sequence[tuple[int, int, int, bytes]],
        words: Sequence[tuple[int, int]],
        relocations: Sequence[tuple[int, int, int]],
        triggers: Sequence[Trigger],
        n_launches: int,
        form: str | None = ...,
        copies_on_device: bool = ...,
        gather: tuple[int, int] | Literal["operators"] | None = ...,
        steps: AscendStreamedSteps | None = ...,
        for_next_pass: Sequence[int] = ...,
        own_addresses: Sequence[tuple[int, int, int]] = ...,
        keep: Any = ...,
    ) -> None: ...
    def patch(self, words: Sequence[tuple[int, int]]) -> None: ...
    def set_stream(self, stream: int) -> None: ...
    def copy(self, to: int, from_: int, size_bytes: int) -> bool: ...
    def execute(self) -> None: ...
    def issue(self, launch: int) -> None: ...
    def time_launches(self, timer: AscendLaunchTimer) -> list[AscendLaunchTime]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    @property
    def arena_address(self) -> int: ...
    @property
    def n_launches(self) -> int: ...
    @property
    def form(self) -> str: ...
    @property
    def model_streams(self) -> tuple[int, bool]: ...
    @property
    def refresh_counts(self) -> dict[str, int]: ...

def ascend_capturing_model(stream: int) -> int: ...
def ascend_abandon_capture(stream: int) -> None: ...
def ascend_count_tasks(device: int, model: int) -> list[int]: ...
def ascend_captured_tasks(
    device: int, model: int
) -> list[tuple[int, int, int, int, int, bytes]]: ...
def ascend_read_memory(device: int, address: int, size_bytes: int) -> bytes: ...
def ascend_write_memory(device: int, address: int, content: bytes) -> None: ...
def ascend_copy_memory(device: int, to: int, from_: int, size_bytes: int) -> None: ...

class AscendMovingCopies:
    def __init__(
        self, *, device: int, tensors: Sequence[tuple[int, bool, bool]], form: str | None = ...
    ) -> None: ...
    @property
    def form(self) -> str: ...
    def set_place(self, tensor: int, place: int) -> None: ...
    def capture_in(self, stream: int) -> None: ...
    def capture_out(self, stream: int) -> None: ...

class AscendCapturedTable:
    def __init__(
        self,
        *,
        device: int,
        model: int,
        kernels: Sequence[tuple[int, int, bytes]],
        words: Sequence[tuple[int, int, bool]],
        own: Sequence[tuple[int, int, int]] = ...,
    ) -> None: ...
    def install(self, device: int) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def addresses(self) -> list[int]: ...
    @property
    def n_set(self) -> int: ...
    @property
    def n_updates(self) -> int: ...

class AscendCapturedResident(Resident):
    def __init__(
        self,
        *,
        device: int,
        model: int,
        copies: AscendMovingCopies,
        slots: Sequence[int],
        n_launches: int,
        random_cells: Sequence[tuple[int, int]] = (),
        release: Callable[[], None],
        blocks: Sequence[tuple[int, bytes]] = ...,
        words: Sequence[tuple[int, int]] = ...,
        places: Sequence[tuple[int, int]] = ...,
        feature_map_slot: int = ...,
        home: int = ...,
        table: AscendCapturedTable | None = ...,
        steps: AscendStreamedSteps | None = ...,
        for_next_pass: Sequence[int] = ...,
    ) -> None: ...
    def patch(self, words: Sequence[tuple[int, int]]) -> None: ...
    def set_stream(self, stream: int) -> None: ...
    def set_random(self, seeds_and_offsets: Sequence[int]) -> None: ...
    def execute(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    @property
    def model_streams(self) -> tuple[int, bool]: ...
    @property
    def refresh_counts(self) -> dict[str, int]: ...
    @property
    def copy_counts(self) -> dict[str, int]: ...

class AscendOfflineModel(Resident):
    def __init__(self, *, device: int, path: str, copies_on_device: bool = ...) -> None: ...
    @property
    def inputs(self) -> list[tuple[str, int, tuple[int, ...], int, int]]: ...
    @property
    def outputs(self) -> list[tuple[str, int, tuple[int, ...], int, int]]: ...
    @property
    def work_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def n_updates(self) -> int: ...
    def patch(self, words: Sequence[tuple[int, int]]) -> None: ...
    def set_stream(self, stream: int) -> None: ...
    def execute(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

# ---- replay -------------------------------------------------------------------------------------

class Trigger:
    IO: Trigger
    FEATURE_MAP: Trigger
    WEIGHT: Trigger
    INTERNAL: Trigger

class Drain:
    begin_ns: int
    end_ns: int

class Proof:
    n_launches: int
    n_failed: int
    ns: int

class LastExecution:
    sizes: list[int]
    sizes_were_ready: bool | None
    prepare_sizes_ns: int
    resize_ns: int
    call_ns: int
    checked_ns: int
    begin_ns: int
    bound_ns: int
    decided_ns: int
    patched_ns: int
    submitted_ns: int
    substage_ends_ns: list[int]
    end_ns: int
    convert_ns: int
    drain: Drain
    drain_of_copies: Drain
    drain_ns: int
    policy_ns: int
    patch_ns: int
    submit_ns: int
    device_ns: int
    policy: str
    slots_changed: int
    words_patched: int
    bytes_copied: int
    outputs_allocated: int
    bytes_streamed: int
    stream_timed_bytes: int | None
    stream_busy_ns: int | None
    stream_wait_ns: int | None
    pass_ns: int | None
    stream_waits: list[tuple[int, int]] | None
    n_executions: int
    launches_proved: int
    proof_ns: int

class Transfer:
    begin_ns: int
    end_ns: int
    size_bytes: int
    inbound: bool

class TransferTime:
    weight: str
    begin_ns: int
    end_ns: int
    size_bytes: int

class WeightWait:
    launch: int
    begin_ns: int
    end_ns: int

class LaunchTimes:
    begin_ns: list[int]
    end_ns: list[int]

class ExecutionTrace:
    execution: LastExecution
    launches: LaunchTimes
    issues: LaunchTimes
    transfers: list[Transfer]
    weight_transfers: list[TransferTime]
    weight_waits: list[WeightWait]

def clock_read_ns(n_reads: int) -> float: ...

class Ticket:
    def __init__(self) -> None: ...
    def done(self) -> bool: ...
    def running(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def cancel(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def result(self, timeout: float | None = None) -> Any: ...
    def _begin(self) -> bool: ...
    def _outcome(self, timeout: float | None = None) -> Exception | None: ...
    def _wait_soon(self) -> bool: ...
    @property
    def _is_told(self) -> bool: ...
    def _tell(self) -> None: ...
    def _issued_to(self) -> tuple[int, int, int] | None: ...
    def _set_result(self, result: object) -> None: ...
    def _set_error(self, error: BaseException) -> None: ...
    def _fail_as(self, other: Ticket) -> bool: ...
    def _call_when_done(self, function: Callable[[], object]) -> None: ...

class Surroundings: ...

class CallableReplay:
    def __call__(
        self,
        *args: Any,
        out: Any = None,
        feature_map: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any: ...
    def _bind(self, replay: Replay, before_execution: Callable[[], object] | None) -> None: ...
    def _surroundings(self) -> Surroundings: ...
    def _submit(
        self,
        ticket: Ticket,
        surroundings: Surroundings | None,
        after: tuple[Ticket, ...],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> bool: ...

class Replay:
    def __init__(
        self,
        *,
        spec: CallSpec,
        triggers: Sequence[Trigger],
        resident: Resident,
        host_scheduled: bool,
        positional: Sequence[tuple[Any, ...]] | None,
        keyword: Mapping[str, tuple[Any, ...]] | None,
        match: Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor]],
        result_form: str,
        build_result: Callable[..., Any],
        match_buffers: Callable[[Any], list[torch.Tensor | None]],
        check_feature_map: Callable[[Any], None],
        current_stream: Callable[[int], int] | None = None,
        draw: Callable[[], list[int]] | None = None,
        drains_queue: bool = False,
        caller: tuple[int, Callable[[], object] | None, bool] | None = None,
        warn_of_gradients: Callable[[], object] | None = None,
        sizes: (
            tuple[Instances, list[tuple[int, int, int]], Callable[..., Any], Promotions | None]
            | None
        ) = None,
    ) -> None: ...
    def join(self, other: Replay) -> None: ...
    def surroundings(self) -> Surroundings: ...
    def checked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Surroundings
    ) -> list[torch.Tensor]: ...
    @property
    def arena(self) -> tuple[int, int]: ...
    def set_deferred(self, n_deferred: int, wait: Callable[[], None] | None) -> None: ...
    def wait_for_submitted(self) -> None: ...
    def rebind_weights(self) -> None: ...
    def check_layouts(self) -> None: ...
    def close(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def is_inside_launch(self) -> bool: ...
    @property
    def proof(self) -> Proof | None: ...
    @property
    def last_execution(self) -> LastExecution: ...
    @property
    def substages(self) -> list[str]: ...
    @property
    def last_traced(self) -> LastExecution: ...
    def start_trace(self) -> None: ...
    def stop_trace(self) -> list[ExecutionTrace]: ...
    @property
    def trace_clock_reads(self) -> int: ...

class DevicePaces:
    def __init__(self, paces: Sequence[float]) -> None: ...
    @property
    def values(self) -> list[float]: ...
    def observe(self, device: int, expected_ns: float, took_ns: float) -> None: ...
    def observe_at_once(self, device: int, expected_ns: float, took_ns: float) -> None: ...
    def forget(self, observed: Sequence[bool]) -> None: ...
    def begin_execution(self) -> None: ...
    def end_execution(self) -> None: ...
    @property
    def n_under_way(self) -> int: ...
    def notice_fork(self) -> None: ...

class DispatchedExecution: ...

class CopyLink:
    def __init__(self) -> None: ...
    def submit(self, copy: Callable[[], object]) -> None: ...
    def close(self) -> None: ...

class SegmentDispatcher:
    def __init__(
        self,
        *,
        graph: dict[str, Any],
        is_throughput: bool,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        names: Sequence[int],
        values: list[tuple[TensorLayout, int, bool, int]],
        groups: Sequence[Sequence[int]],
        shared: Sequence[Sequence[int]],
        sites: list[tuple[Any, ...] | None],
        memories: list[tuple[str, tuple[int, int, int] | None, bool]],
        given: Sequence[int],
        paces: DevicePaces,
        copy: Callable[..., None],
        links: Sequence[CopyLink],
    ) -> None: ...
    def prepare(
        self,
        inputs: list[torch.Tensor],
        asked: Sequence[Surroundings],
        refreshed: Sequence[Sequence[Ticket]],
        pins: HeldStorages,
        done: Ticket,
    ) -> DispatchedExecution: ...
    def returned(self, execution: DispatchedExecution) -> dict[int, torch.Tensor]: ...
    def add(
        self, execution: DispatchedExecution, devices: Sequence[int], context: object
    ) -> None: ...
    def measure(self) -> None: ...
    @property
    def measured(self) -> tuple[int, int, int, int]: ...
    def abandon(self) -> None: ...
    @property
    def is_inside_launch(self) -> bool: ...
    @property
    def n_under_way(self) -> int: ...
    @property
    def n_moved(self) -> int: ...

def hold_for_fork() -> None: ...
def release_after_fork() -> None: ...
def begin_in_child() -> None: ...
def close_all_lanes() -> None: ...
def set_recording(recording: bool) -> None: ...
def caller_state(device: str) -> int: ...
def n_accumulation_hooks(tensor: torch.Tensor) -> int: ...
def active_transform() -> str: ...
