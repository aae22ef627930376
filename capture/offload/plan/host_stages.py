"""Host stages as Steps: the predicted time that a device waits for the host's launches.

The stages of a launch are `native/core/host_stages.cpp`'s: infer shapes and tile, write addresses,
launch; then the device runs the kernel. Sources: the workers of Ascend's graph engine
(runtime/v2/core/executor/multi_thread_topological, MAX_RUNTIME_CORE_NUMBER).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Lane, LaneKind, Record, Run, Step, Wait

_TILE, _MEMORY, _LAUNCH, _KERNEL = range(4)
_STAGES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchCosts:
    """The costs of one launch at new sizes, in ns.

    Attributes:
        tile_ns: the host infers shapes, and computes the grid and the arguments.
        memory_ns: it writes addresses.
        launch_ns: it calls the runtime.
        kernel_ns: the device runs the kernels.
    """

    tile_ns: float
    memory_ns: float
    launch_ns: float
    kernel_ns: float


@dataclasses.dataclass(frozen=True, slots=True)
class HostStagesForecast:
    """An execution at new sizes, on an idle device.

    Attributes:
        total_ns: from the call to the end of the last kernel.
        idle_ns: the part of it in which the device runs no kernel.
    """

    total_ns: float
    idle_ns: float


def host_stage_lanes(n_launches: int, n_cores: int) -> tuple[Lane, ...]:
    """The Steps of an execution: a lane for each tiling core of the host, and last the device.

    Launch 4 * i + 0 of the Steps is the tiling of launch i, + 1 and + 2 are its other stages, and +
    3 is its kernel. An execution begins when the kernels of the previous one have ended.

    Raises:
        PlanError: there is no core.
    """
    if n_cores < 1:
        raise PlanError(f"n_cores: expected at least 1, got {n_cores}")
    # Event _STAGES * i + s is of launch i and stage s; the last is the end of the execution.
    end = _STAGES * n_launches
    lanes: list[list[Step]] = []
    for stages, first, step in _cores(n_cores):
        steps: list[Step] = [Wait(end, age=1)]
        for launch in range(first, n_launches, step):
            steps += _stage_steps(launch, stages)
        lanes.append(steps)
    device: list[Step] = []
    for launch in range(n_launches):
        device += _stage_steps(launch, (_KERNEL,))
    lanes.append([*device, Record(end)])
    return tuple(Lane(LaneKind.LAUNCHES, tuple(steps)) for steps in lanes)


def _cores(n_cores: int) -> list[tuple[tuple[int, ...], int, int]]:
    """By core its stages, its first launch, and the distance to its next launch."""
    if n_cores == 1:
        return [((_TILE, _MEMORY, _LAUNCH), 0, 1)]
    if n_cores == 2:
        return [((_TILE,), 0, 1), ((_MEMORY, _LAUNCH), 0, 1)]
    tilers = n_cores - 2
    tiling = [((_TILE,), tiler, tilers) for tiler in range(tilers)]
    return [*tiling, ((_MEMORY,), 0, 1), ((_LAUNCH,), 0, 1)]


def _stage_steps(launch: int, stages: Sequence[int]) -> list[Step]:
    """Consecutive stages of a launch, after the previous stage and before the next."""
    at = _STAGES * launch
    steps: list[Step] = [] if stages[0] == _TILE else [Wait(at + stages[0] - 1)]
    steps.append(Run(at + stages[0], at + stages[-1] + 1))
    if stages[-1] != _KERNEL:
        steps.append(Record(at + stages[-1]))
    return steps


def predict_host_stages(costs: Sequence[LaunchCosts], n_cores: int) -> HostStagesForecast:
    """Predict how long the device waits while host cores prepare launches at new sizes.

    Args:
        costs: of each launch, in order.
        n_cores: of the host.

    Raises:
        PlanError: there is no core.
    """
    if not costs:
        return HostStagesForecast(0.0, 0.0)
    taken_ns = [
        ns for one in costs for ns in (one.tile_ns, one.memory_ns, one.launch_ns, one.kernel_ns)
    ]
    total_ns = simulate_steps(host_stage_lanes(len(costs), n_cores), taken_ns, ()).period_ns
    return HostStagesForecast(total_ns, total_ns - sum(one.kernel_ns for one in costs))
