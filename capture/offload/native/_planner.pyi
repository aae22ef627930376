"""Planning, and computations of sizes. Contracts are in native/include/offload."""

from array import array
from collections.abc import Sequence

# ---- placement ----------------------------------------------------------------------------------

DEFAULT_SEARCH_STEPS: int

def place_intervals(
    first: array[int],
    last: array[int],
    size_bytes: array[int],
    *,
    alignment_bytes: int,
    capacity_bytes: int | None,
    search_steps: int,
) -> tuple[list[int], int, int, str, int]: ...
def check_placement(
    first: array[int], last: array[int], size_bytes: array[int], offsets_bytes: array[int]
) -> None: ...
def lower_bound_bytes(
    first: array[int], last: array[int], size_bytes: array[int], *, alignment_bytes: int
) -> int: ...
def place_partial(
    n_chains: int,
    begins: array[int],
    ends: array[int],
    size_bytes: array[int],
    *,
    alignment_bytes: int,
    search_steps: int,
) -> tuple[list[int], int, int, str, int]: ...
def check_partial_placement(
    n_chains: int,
    begins: array[int],
    ends: array[int],
    size_bytes: array[int],
    offsets_bytes: array[int],
) -> None: ...

# ---- weight streaming ---------------------------------------------------------------------------

def simulate_streaming(
    launch_ns: Sequence[float], transfers: Sequence[tuple[float, int, int]]
) -> tuple[float, list[float], list[float], list[float], list[float]]: ...

STEP_KINDS: list[int]

def simulate_steps(
    lanes: Sequence[Sequence[tuple[int, int, int]]],
    launch_ns: Sequence[float],
    copy_ns: Sequence[float],
) -> tuple[float, list[float], list[float], list[float], list[float]]: ...
def search_streaming(
    launch_ns: Sequence[float],
    weights: Sequence[tuple[int, int, int, bool]],
    *,
    bytes_per_second: float,
    overhead_ns: float,
    budget_bytes: int,
    floor_bytes: int,
    floor_period_ns: float,
    alignment_bytes: int,
    granule_bytes: int,
    tails: bool,
) -> tuple[tuple[list[int], list[int], list[int], list[int], int, float] | None, int]: ...

# ---- tasks and lanes ----------------------------------------------------------------------------

DEFAULT_EVALUATIONS: int
DEFAULT_PLACED_TASKS: int
DEFAULT_LANE_EVALUATIONS: int
DEFAULT_PLACED_LAUNCHES: int

def place_tasks(
    costs_ns: array[int],
    memory_bytes: array[int],
    edges: array[int],
    links: Sequence[tuple[float, float]],
    limits_bytes: array[int],
    busy_watts: Sequence[float],
    idle_watts: Sequence[float],
    *,
    objective: int,
    max_slowdown: float,
    max_evaluations: int,
    seed: int,
) -> tuple[
    tuple[list[int], list[int], list[int], int, int, float],
    str,
    int,
    int,
    float,
    int,
    list[tuple[str, float]],
]: ...
def moved_costs(
    costs_ns: array[int],
    memory_bytes: array[int],
    edges: array[int],
    links: Sequence[tuple[float, float]],
    limits_bytes: array[int],
    busy_watts: Sequence[float],
    idle_watts: Sequence[float],
    *,
    objective: int,
    processors: array[int],
    order: array[int],
    groups: Sequence[Sequence[int]],
    latency_limit_ns: int,
) -> list[float]: ...
def schedule_lanes(
    launch_ns: Sequence[float],
    conflicts: array[int],
    *,
    n_lanes: int,
    synchronisation_ns: float,
    max_evaluations: int,
) -> tuple[list[int], list[tuple[int, int]], list[int], list[int], float, float, str, int]: ...

class DeviceSearch:
    def __init__(
        self,
        n_devices: int,
        costs_ns: Sequence[float],
        after: Sequence[Sequence[int]],
        *,
        hand_over_ns: float,
        memory_of: Sequence[int],
        home: int,
        links: Sequence[tuple[float, float]],
        values: Sequence[tuple[int, float, Sequence[int], bool]],
    ) -> None: ...
    def value(
        self,
        devices: Sequence[int],
        paces: Sequence[float],
        free_ns: Sequence[float],
        is_throughput: bool,
    ) -> float: ...
    def freed(
        self, devices: Sequence[int], paces: Sequence[float], free_ns: Sequence[float]
    ) -> list[float]: ...
    def begin(
        self,
        choices: Sequence[Sequence[int]],
        paces: Sequence[float],
        free_ns: Sequence[float],
        is_throughput: bool,
    ) -> None: ...
    def improve(self, max_evaluations: int) -> bool: ...
    @property
    def found(self) -> list[int]: ...
    @property
    def found_value(self) -> float: ...

# ---- sizes that vary ----------------------------------------------------------------------------

OPERATIONS: list[str]

class Expressions:
    def __init__(self, n_dims: int, codes: Sequence[Sequence[tuple[str, int | float]]]) -> None: ...
    def __len__(self) -> int: ...
    def evaluate(self, index: int, sizes: Sequence[int]) -> int | float: ...
    def bounds(
        self, index: int, least: Sequence[int], greatest: Sequence[int]
    ) -> tuple[int | float, int | float]: ...
    def greatest(
        self, index: int, least: Sequence[int], greatest: Sequence[int]
    ) -> int | float: ...
    def evaluate_all(self, sizes: Sequence[int]) -> list[int | float]: ...

class DispatchRules:
    def __init__(
        self,
        *,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        after: Sequence[Sequence[int]],
        home: int,
        returned: Sequence[int],
        n_memories: int,
        names: Sequence[int],
    ) -> None: ...

class DispatchCheck:
    def __init__(self, rules: DispatchRules) -> None: ...
    def copied(self, producer: int, origin: int, target: int, values: Sequence[int]) -> None: ...
    def arrived(self, target: int, values: Sequence[int]) -> None: ...
    def begun(self, segment: int, memory: int) -> None: ...
    def ended(self, segment: int) -> None: ...
    def finished(self) -> None: ...

class SegmentDispatch:
    def __init__(
        self,
        n_devices: int,
        costs_ns: Sequence[float],
        after: Sequence[Sequence[int]],
        *,
        hand_over_ns: float,
        memory_of: Sequence[int],
        home: int,
        links: Sequence[tuple[float, float]],
        values: Sequence[tuple[int, float, Sequence[int], bool]],
        is_throughput: bool,
    ) -> None: ...
    def add(self, devices: Sequence[int]) -> int: ...
    def segment_ended(self, execution: int, segment: int) -> None: ...
    def copy_ended(self, execution: int, to: int, values: Sequence[int]) -> None: ...
    def abandon(self, execution: int) -> None: ...
    def next(
        self, paces: Sequence[float], now_ns: float
    ) -> list[tuple[int, int, int, int, list[int]]]: ...
    def devices(self, execution: int) -> list[int]: ...
    @property
    def wake_at_ns(self) -> float: ...
    @property
    def n_moved(self) -> int: ...
