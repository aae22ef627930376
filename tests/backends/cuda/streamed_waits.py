"""Expected arrival times of streamed weights and waits of launches, by hand."""

from __future__ import annotations

import dataclasses

from offload.plan.streaming import Streaming

KERNEL_NS, COPY_NS, LONG_NS = 1000, 700, 50_000


def n_early(plan: Streaming) -> int:
    """Transfers that the preceding pass makes."""
    return sum(one.after_pass < 0 for one in plan.transfers)


def early_bytes(plan: Streaming) -> int:
    return sum(plan.pieces[one.piece].size_bytes for one in plan.transfers if one.after_pass < 0)


@dataclasses.dataclass
class Expected:
    """One pass in ns from its beginning, when the preceding pass's last copies have ended."""

    waits: dict[int, int]
    transfers: list[tuple[int, int]]
    outputs_ready: int
    last_copy_ended: int


def by_hand(plan: Streaming, copies_ns: list[int]) -> Expected:
    """Launches of one kernel each, in sequence, beside one chain of copies."""
    n_launches, early = len(plan.launch_ns), n_early(plan)
    begins = {one.first_launch: [] for one in plan.transfers}
    for index, one in enumerate(plan.transfers[early:], early):
        begins[one.first_launch].append(index)
    ends = [0] * n_launches
    times: list[tuple[int, int]] = [(0, 0)] * len(plan.transfers)
    waits, copied_ns, now_ns, n_copied = {}, 0, 0, early
    for launch in range(n_launches):
        for index in begins.get(launch, ()):
            while n_copied <= index:
                free_ns = ends[plan.transfers[n_copied].after_launch]
                begin_ns = max(copied_ns, free_ns)
                copied_ns = begin_ns + copies_ns[n_copied]
                times[n_copied] = (begin_ns, copied_ns)
                n_copied += 1
            if times[index][1] > now_ns:
                waits[launch] = waits.get(launch, 0) + times[index][1] - now_ns
                now_ns = times[index][1]
        now_ns += KERNEL_NS
        ends[launch] = now_ns
    assert n_copied == len(plan.transfers)
    for index in range(early):
        begin_ns = max(copied_ns, ends[plan.transfers[index].after_launch])
        copied_ns = begin_ns + copies_ns[index]
        times[index] = (begin_ns, copied_ns)
    return Expected(waits, times, now_ns, copied_ns)


def with_first(expected: Expected) -> dict[int, int]:
    """The waits of a pass after another, whose last copies it waits for at first."""
    waits = dict(expected.waits)
    if expected.last_copy_ended > expected.outputs_ready:
        late_ns = expected.last_copy_ended - expected.outputs_ready
        waits[0] = waits.get(0, 0) + late_ns
    return waits
