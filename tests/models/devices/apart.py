"""Executables on the CPU whose devices have separate memories: tensors that cross are copied."""

from __future__ import annotations

import itertools
import random

import torch

from offload.api.captured import Captured
from offload.backends import CpuBackend
from offload.load.placed_devices import PlacedDevices
from offload.load.placed_segments import copies_used, grouped, load_segments
from offload.plan.program_tasks import program_tasks, staying_launches, task_launches
from offload.plan.task_graph import Processor
from offload.plan.task_placement import place_tasks
from offload.plan.topology import Link
from offload.run.device_choice import Crossings, DeviceChoice, Placement
from offload.run.placed_executable import PlacedExecutable
from offload.run.transfers import Memory
from offload.run.weight_copies import WeightCopies

LINK = Link(bytes_per_second=1e9, overhead_ns=1_000)


def apart_devices(n=2, backends=None):
    """Devices of one thread, each with a memory that the others do not read; the first is home."""
    names = tuple(f"device {at}" for at in range(n))
    backends = backends or tuple(CpuBackend(threads=1) for _ in range(n))
    return PlacedDevices(names, backends, tuple(Memory(torch.device("cpu")) for _ in range(n)), 0)


def movable_tasks(program):
    """Indices of the tasks that may leave home."""
    stays = staying_launches(program)
    return [at for at, one in enumerate(task_launches(program)) if stays.isdisjoint(one)]


def apart(bound, where, n=2, kind=Placement.STATIC, devices=None, costs_ns=None, has_room=None):
    """Return a PlacedExecutable with each task on its given device.

    `where`: device by task; tasks left out are at home. If placements may change, all segments are
    loaded on all devices that can run them, and for which `has_room` (group, device) is true;
    `costs_ns` then holds the durations of launches.
    """
    devices = devices or apart_devices(n)
    program, home = bound.program, devices.home
    stays = staying_launches(program)
    wanted = {
        launch: where.get(at, home)
        for at, one in enumerate(task_launches(program))
        for launch in one
    }
    costs = [
        [
            None
            if (at != home and launch in stays) or (costs_ns is None and at != wanted[launch])
            else 1_000.0
            if costs_ns is None
            else costs_ns[at]
            for at in range(n)
        ]
        for launch in range(len(program.launches))
    ]
    links = dict.fromkeys(itertools.permutations(range(n), 2), LINK)
    processors = [Processor(name) for name in devices.names]
    tasks = program_tasks(program, costs, processors, links, home=home, has_ends=True)
    placement = place_tasks(tasks.graph, max_evaluations=0)
    copies = WeightCopies(bound, devices.memories[home])
    groups = grouped(bound, devices, tasks, placement, kind=kind, hand_over_ns=1_000.0)
    segments = load_segments(
        groups,
        devices,
        tasks,
        kind=kind,
        copies=copies,
        load=lambda part, backend: Captured(part).load(backend),
        has_room=has_room or (lambda *_: True),
    )
    returned = {result.view.value for result in program.results}
    crossings = Crossings.between(devices.memories, home, links, program.values, returned)
    choice = DeviceChoice([one.costs for one in segments], kind, 1_000.0, crossings=crossings)
    return PlacedExecutable(
        bound,
        placement,
        segments,
        choice,
        memories=devices.memories,
        copies=copies.part(copies_used(segments, devices)),
    )


def all_ways(program, n=2):
    """Every placement of the movable tasks on devices."""
    tasks = movable_tasks(program)
    for where in itertools.product(range(n), repeat=len(tasks)):
        yield dict(zip(tasks, where, strict=True))


def drawn_way(program, seed, n=2):
    """A random placement."""
    draw = random.Random(seed)
    return {task: draw.randrange(n) for task in movable_tasks(program)}
