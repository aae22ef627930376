"""The predicted timeline of an execution, from kept costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.costs import CostKey, CostModel, load_cost_model
from offload.errors import CostModelError
from offload.plan import SlotKind
from offload.plan.topology import Machine
from offload.run.executable import Executable
from offload.run.predicted_timeline import predicted_pass, with_prediction
from offload.timeline import ExecutionTimeline, Scheduling, Timeline


def cost_key(machine: Machine) -> CostKey:
    """Return the key of the kept costs of a device on a machine."""
    return CostKey(machine.name, machine.device, (("torch", torch.__version__),))


def forecast(run: Executable, measured: Sequence[ExecutionTimeline] = ()) -> Timeline:
    """Predict an execution whose inputs and results all have new addresses.

    The header comes from the costs that `offload.calibrate` has kept. Launches missing there take
    the durations of the plan of streamed weights, or measured ones. Where no costs were kept and
    weights are streamed, the timeline has only launches and copies.

    Args:
        run: the executable.
        measured: executions of it.

    Returns:
        A timeline of one execution, which has predicted spans and no measured ones.

    Raises:
        CostModelError: there is nothing to predict from: no costs were kept, or a launch of the
            program is missing there; or the kept file is damaged.
    """
    machine = run.machine
    one = _execution(run)
    costs = load_cost_model(cost_key(machine))
    streaming = run.plan.streaming
    is_streamed = streaming is not None and not streaming.is_resident
    if costs is not None:
        known = costs.learned(run.program, measured)
        one = _by_costs(run, one, known.keeping(costs.launch_ns))
    elif streaming is not None and is_streamed and run.scheduling is Scheduling.OFFLOAD:
        one = predicted_pass(one, run.program, streaming, run.device)
    else:
        raise CostModelError(
            "no costs of this machine were kept: measure them once with offload.calibrate()"
        )
    timeline = Timeline(machine.device, machine.name, {"torch": torch.__version__})
    timeline.executions = (one,)
    return timeline


def _by_costs(run: Executable, one: ExecutionTimeline, costs: CostModel) -> ExecutionTimeline:
    streaming = run.plan.streaming
    if streaming is not None and streaming.launch_ns:
        costs = costs.timed(run.program, streaming.launch_ns).keeping(costs.launch_ns)
    shape = run.header_shape(one.outputs_allocated, one.slots_changed, one.words_patched)
    return with_prediction(
        one,
        run.program,
        shape,
        costs,
        run.device,
        streaming=streaming,
        launch_lanes=run.plan.launch_lanes or (),
        collectives=None if run.overlap is None else run.overlap.times,
    )


def _execution(run: Executable) -> ExecutionTimeline:
    """Return a hypothetical execution: inputs and outputs are new, each a word or its nodes."""
    moved = [*run.plan.of_kind(SlotKind.INPUT), *run.plan.of_kind(SlotKind.OUTPUT)]
    nodes = [run.n_set_nodes(slot.index) for slot in moved]
    return ExecutionTimeline(
        number=1,
        scheduling=run.scheduling,
        spans=(),
        predicted=(),
        policy="io",
        slots_changed=len(moved),
        words_patched=sum(1 if one is None else one for one in nodes),
        bytes_copied=0,
        outputs_allocated=sum(1 for _ in run.plan.of_kind(SlotKind.OUTPUT)),
    )
