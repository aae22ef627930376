"""Segments whose values cross memories, and their execution with planned transfers, computed."""

import itertools

from offload.plan.placed_transfers import INPUTS, PlacedSegmentValues, placed_transfers
from offload.plan.topology import Link
from offload.run.device_choice import Crossings, SegmentCosts

US = 1e3
HAND_OVER_NS = 10 * US
LINK = Link(bytes_per_second=10e9, overhead_ns=15 * US)


def crossings_of(sizes, returned, n_memories=2, link=LINK):
    pairs = itertools.permutations(range(n_memories), 2)
    memories = tuple(range(n_memories))
    return Crossings(memories, 0, dict.fromkeys(pairs, link), sizes, frozenset(returned))


def at_random(draw, n, ccr, n_devices=2):
    """Segments that read the input or earlier results, and bytes that take `ccr` times as long."""
    costs = [
        tuple(draw.uniform(50, 400) * US * draw.uniform(0.5, 1.5) for _ in range(n_devices))
        for _ in range(n)
    ]
    after = [
        sorted({draw.randrange(at) for _ in range(draw.randint(1, 2))} if at else ())
        for at in range(n)
    ]
    unread = set(range(n)) - {one for before in after for one in before}
    segments = [
        SegmentCosts(row, tuple(before), 0, tuple(one + 1 for one in before) or (0,), (at + 1,))
        for at, (row, before) in enumerate(zip(costs, after, strict=True))
    ]
    mean_bytes = ccr * 225 * US * LINK.bytes_per_second / 1e9
    sizes = {value: int(mean_bytes * draw.uniform(0.1, 1.9)) for value in range(n + 1)}
    return segments, crossings_of(sizes, {one + 1 for one in unread}, n_devices)


def execution_ns(segments, crossings, devices, paces):
    """Execute segments and transfers when they are ready, in that order on each device and link."""
    memory_of = crossings.memory_of
    values = [
        PlacedSegmentValues(memory_of[device], one.reads, one.makes)
        for one, device in zip(segments, devices, strict=True)
    ]
    transfers = placed_transfers(values, crossings.home, crossings.returned)
    resources, took_ns, waits = [], [], []
    for at, (one, device) in enumerate(zip(segments, devices, strict=True)):
        resources.append(device)
        took_ns.append(one.costs_ns[device] * paces[device])
        arrivals = [
            (len(segments) + index, 0.0)
            for index, each in enumerate(transfers)
            if at in each.consumers
        ]
        others = [
            (before, HAND_OVER_NS if devices[before] != device else 0.0) for before in one.after
        ]
        waits.append(arrivals + others)
    for each in transfers:
        link = crossings.links[each.origin, each.target]
        size_bytes = sum(crossings.size_bytes[value] for value in each.values)
        resources.append((each.origin, each.target))
        took_ns.append(link.overhead_ns + size_bytes * 1e9 / link.bytes_per_second)
        waits.append([] if each.producer == INPUTS else [(each.producer, 0.0)])
    ends, free = {}, {}
    while len(ends) < len(resources):
        ready = {
            at: max((ends[one] + delay for one, delay in before), default=0.0)
            for at, before in enumerate(waits)
            if at not in ends and all(one in ends for one, _ in before)
        }
        at = min(ready, key=lambda one: (ready[one], one))
        begin = max(ready[at], free.get(resources[at], 0.0))
        ends[at] = free[resources[at]] = begin + took_ns[at]
    return max(ends.values(), default=0.0)


def best_of_all(segments, crossings, paces):
    n_devices = len(paces)
    return min(
        itertools.product(range(n_devices), repeat=len(segments)),
        key=lambda one: execution_ns(segments, crossings, one, paces),
    )


def executed(choice, segments, paces, n_executions):
    for _ in range(n_executions):
        devices = choice.choose()
        took_ns = [one.costs_ns[at] * paces[at] for one, at in zip(segments, devices, strict=True)]
        choice.ended(devices, took_ns)
    devices = choice.choose()
    choice.failed()
    return devices


def planned_at(segments, devices):
    return [
        SegmentCosts(one.costs_ns, one.after, device, one.reads, one.makes)
        for one, device in zip(segments, devices, strict=True)
    ]
