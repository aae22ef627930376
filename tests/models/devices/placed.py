"""Programs cut into random slices, and slices that are executed one after the other."""

from __future__ import annotations

import random

import torch

from offload.plan.program_tasks import program_tasks
from offload.plan.task_graph import Processor
from offload.plan.task_placement import place_tasks
from offload.plan.topology import Link
from offload.program.slice import slice_program

QUICK = Link(bytes_per_second=1e12, overhead_ns=1)


def placed_at_random(program, seed, n_processors=2):
    """A placement for random costs, and the Program's tasks."""
    draw = random.Random(seed)
    costs = [[draw.randint(1, 1000) for _ in range(n_processors)] for _ in program.launches]
    processors = [Processor(f"device {one}") for one in range(n_processors)]
    links = {
        (one, other): QUICK
        for one in range(n_processors)
        for other in range(n_processors)
        if one != other
    }
    tasks = program_tasks(program, costs, processors, links, home=0)
    return place_tasks(tasks.graph, max_evaluations=200, seed=seed), tasks


def slices_at_random(bound, seed, n_processors=2):
    """Slices of a placement for random costs, in a valid order of execution."""
    placement, tasks = placed_at_random(bound.program, seed, n_processors)
    found = []
    for segment in placement.segments():
        launches = sorted(launch for task in segment.tasks for launch in tasks.launches[task])
        found.append(slice_program(bound, launches))
    return found


def execute_slices(captured_of, slices, tensors):
    """Execute the slices in order; return the content of each Value by its index."""
    for one in slices:
        run = captured_of(one.bound).load()
        results = run(*(tensors[value] for value in one.inputs))
        tensors.update(zip(one.outputs, results, strict=True))
        run.close()
    return tensors


def viewed(program, result, tensors):
    """A tensor of the model's result, viewed in the content of its Value."""
    view = result.view
    base = tensors[view.value]
    dtype = getattr(torch, view.dtype)
    offset = base.storage_offset() * base.itemsize + view.offset_bytes
    made = torch.empty(0, dtype=dtype)
    return made.set_(base.untyped_storage(), offset // dtype.itemsize, view.shape, view.strides)
