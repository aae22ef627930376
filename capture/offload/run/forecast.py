"""The timeline of an execution that has not happened, from costs that were kept."""

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
    """What the costs of a device on a machine are kept under."""
    return CostKey(machine.name, machine.device, (("torch", torch.__version__),))


def forecast(run: Executable, measured: Sequence[ExecutionTimeline] = ()) -> Timeline:
    """What one execution is predicted to take whose inputs and results all lie elsewhere.

    The header is that of the costs that `offload.calibrate` has kept. Launches that these do not
    know take what the plan of streamed weights counts on, or what they were measured to take.
    Where no costs were kept and weights are streamed, it is the launches and copies alone.

    Args:
        run: the executable.
        measured: executions of it.

    Returns:
        A timeline of one execution, which has predicted spans and no measured ones.

    Raises:
        CostModelError: nothing is known to predict from: no costs were kept, or they do not know
            a launch of the program; or what was kept is damaged.
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
    """One that nobody has made: inputs and outputs are new, and each is a word or its nodes."""
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
