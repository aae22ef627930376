"""What launches take on an Ascend device: medians of rounds, by an event before and behind each.

Nothing is captured meanwhile, as events of a capture tell no times. A launch's time is that of the
device between two events, their own and that of its delivery to a core included. Copies hold the
stream back while launches are enqueued, so that it does not wait for the host between them; where
that did not do, it is said.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from offload.backends.base import TimedLaunches
from offload.native import _native

N_ROUNDS = 4
"""How often launches are timed; the first round, which loads and compiles, does not count."""


def timed_launches(rounds: Sequence[Sequence[_native.AscendLaunchTime]]) -> TimedLaunches:
    """The median of each launch: of rounds in which the host was ahead, of all where it never was.

    Args:
        rounds: by round what each launch took; the first one is left out.
    """
    times_ns, n_gaps = [], 0
    for launch in zip(*rounds[1:], strict=True):
        ahead = [one.time_ns for one in launch if one.host_was_ahead]
        n_gaps += not ahead
        times_ns.append(statistics.median(ahead or [one.time_ns for one in launch]))
    how = f"medians of {len(rounds) - 1} rounds, by events around each launch, which count too"
    if n_gaps:
        how += (
            f"; {n_gaps} of {len(times_ns)} launches include what the device waited for the host, "
            "which was slower"
        )
    return TimedLaunches(tuple(times_ns), how)
