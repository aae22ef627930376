"""Executions of dispatched segments on a virtual clock, with devices whose speed changes."""

import heapq
import itertools
import math

from offload.plan.placed_transfers import INPUTS, PlacedSegmentValues, placed_transfers

BEGIN, COPY, END = range(3)  # DispatchCommand::Kind


class Speeds:
    """How fast devices are over time: (device, from when, factor of durations), ascending."""

    def __init__(self, n, changes=()):
        self._changes = {device: [(0.0, 1.0)] for device in range(n)}
        for device, begin_ns, factor in changes:
            self._changes[device].append((begin_ns, factor))

    def end_ns(self, device, begin_ns, work_ns):
        """When work that begins now ends."""
        changes = [*self._changes[device], (math.inf, 1.0)]
        now_ns = begin_ns
        for (_, factor), (until_ns, _) in itertools.pairwise(changes):
            if until_ns <= now_ns:
                continue
            if now_ns + work_ns * factor <= until_ns:
                return now_ns + work_ns * factor
            work_ns -= (until_ns - now_ns) / factor
            now_ns = until_ns
        raise AssertionError("the last factor lasts for ever")


class Run:
    """Carries out what a dispatch says; every segment begins a hand-over after its command.

    Attributes:
        begun: (time, execution, segment, device), in order.
        ends_ns: of executions, by number.
        n_wakes: how often the dispatch was asked although nothing had ended.
    """

    def __init__(self, segments, crossings, choice, speeds, hand_over_ns):
        self.segments, self.crossings, self.choice = segments, crossings, choice
        self.speeds, self.hand_over_ns = speeds, hand_over_ns
        self.dispatch, self.shared = choice.dispatch(), choice.shared
        self.begun, self.ends_ns, self.n_wakes, self.now_ns = [], {}, 0, 0.0
        self._events, self._n_events, self._link_free_ns = [], 0, {}

    def add(self):
        return self.dispatch.add(self.choice.choose())

    def at(self, ns, function, *args):
        """Call a function at a time."""
        self._n_events += 1
        heapq.heappush(self._events, (ns, self._n_events, function, args))

    def execute(self, until_ns=math.inf):
        """Run until nothing is left, or a time is reached."""
        self._carry_out()
        while True:
            wake_at_ns = self.dispatch.wake_at_ns
            event_at_ns = self._events[0][0] if self._events else math.inf
            if min(wake_at_ns, event_at_ns, until_ns) == until_ns:
                return
            if event_at_ns <= wake_at_ns:
                self.now_ns, _, function, args = heapq.heappop(self._events)
                function(*args)
            else:
                self.now_ns = wake_at_ns
                self.n_wakes += 1
            self._carry_out()

    def _carry_out(self):
        for command in self.dispatch.next(self.choice.paces, self.now_ns):
            kind, execution, what, to, values = command
            if kind == BEGIN:
                self._begin(execution, what, to)
            elif kind == COPY:
                self._copy(execution, what, to, values)
            else:
                self.ends_ns[execution] = self.now_ns
                paces, begun = self.choice.native_paces, self.begun
                on = {device for _, number, _, device in begun if number == execution}
                paces.forget([device in on for device in range(len(self.choice.paces))])
                paces.end_execution()

    def _begin(self, execution, segment, device):
        work_ns, begin_ns = self.segments[segment].costs_ns[device], self.now_ns + self.hand_over_ns
        end_ns = self.speeds.end_ns(device, begin_ns, work_ns)
        self.begun.append((self.now_ns, execution, segment, device))
        self.at(end_ns, self._ended, execution, segment, device, work_ns, end_ns - begin_ns)

    def _ended(self, execution, segment, device, expected_ns, took_ns):
        self.dispatch.segment_ended(execution, segment)
        self.choice.native_paces.observe_at_once(device, expected_ns, took_ns)

    def _copy(self, execution, producer, to, values):
        size_bytes = sum(self.shared[one].size_bytes for one in values)
        plan, memory_of = self.dispatch.devices(execution), self.crossings.memory_of
        origin = self.crossings.home if producer == INPUTS else memory_of[plan[producer]]
        link = self.crossings.links[origin, to]
        begin_ns = max(self.now_ns, self._link_free_ns.get((origin, to), 0.0))
        end_ns = begin_ns + link.overhead_ns + size_bytes * 1e9 / link.bytes_per_second
        self._link_free_ns[origin, to] = end_ns
        self.at(end_ns, self.dispatch.copy_ended, execution, to, values)


def fixed_ns(segments, crossings, devices, speeds, hand_over_ns):
    """The duration of an execution whose segments stay on these devices."""
    memory_of = crossings.memory_of
    values = [
        PlacedSegmentValues(memory_of[device], one.reads, one.makes)
        for one, device in zip(segments, devices, strict=True)
    ]
    transfers = placed_transfers(values, crossings.home, crossings.returned)
    n, ends, free = len(segments), {}, {}
    waits = []
    for at, one in enumerate(segments):
        waits.append([(n + k, 0.0) for k, each in enumerate(transfers) if at in each.consumers])
        waits[at] += [(b, hand_over_ns * (devices[b] != devices[at])) for b in one.after]
    waits += [[] if one.producer == INPUTS else [(one.producer, 0.0)] for one in transfers]
    while len(ends) < len(waits):
        ready = {
            at: max((ends[one] + delay for one, delay in before), default=0.0)
            for at, before in enumerate(waits)
            if at not in ends and all(one in ends for one, _ in before)
        }
        at = min(ready, key=lambda one: (ready[one], one))
        if at < n:
            resource = devices[at]
            begin_ns = max(ready[at], free.get(resource, 0.0))
            ends[at] = speeds.end_ns(resource, begin_ns, segments[at].costs_ns[resource])
        else:
            one = transfers[at - n]
            resource = one.origin, one.target
            link = crossings.links[resource]
            size_bytes = sum(crossings.size_bytes[value] for value in one.values)
            begin_ns = max(ready[at], free.get(resource, 0.0))
            ends[at] = begin_ns + link.overhead_ns + size_bytes * 1e9 / link.bytes_per_second
        free[resource] = ends[at]
    return max(ends.values(), default=0.0)


def best_ns(segments, crossings, speeds, hand_over_ns, begun=()):
    """The least duration of all choices of devices; `begun`: segments that stay, with devices."""
    fixed = dict(begun)
    able = [
        [fixed[at]] if at in fixed else range(len(one.costs_ns)) for at, one in enumerate(segments)
    ]
    return min(
        fixed_ns(segments, crossings, one, speeds, hand_over_ns) for one in itertools.product(*able)
    )
