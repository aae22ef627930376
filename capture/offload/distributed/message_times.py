"""Times of messages between two ranks of a group, by round trips of two sizes."""

from __future__ import annotations

import time
from typing import Any

from offload.distributed.groups import distributed, rank_in
from offload.errors import ExecutionError
from offload.program import Group

_N_ROUND_TRIPS = 8
_SIZES_BYTES = (8, 1 << 20)


def round_trips_ns(group: Group) -> tuple[tuple[int, float], ...]:
    """Time messages between the first two ranks of a group; all ranks call it together.

    Args:
        group: of at least two ranks.

    Returns:
        Sizes in bytes, and for each the least time of one way, in ns; 0 on ranks beyond the first
        two.

    Raises:
        ExecutionError: a rank ended, or did not arrive within the group's timeout.
    """
    import torch  # noqa: PLC0415  (the module of groups is there, so that torch is)

    number = rank_in(group)
    found = distributed()._resolve_process_group(group.name)
    times = []
    try:
        for size_bytes in _SIZES_BYTES:
            message = torch.zeros(size_bytes, dtype=torch.uint8)
            ways = [_round_trip_ns(found, message, number) for _ in range(_N_ROUND_TRIPS)]
            times.append((size_bytes, min(ways) / 2))
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            "messages between ranks were timed: the process group failed, as when a rank ends or "
            f"is too late: {error}"
        ) from error
    return tuple(times)


def _round_trip_ns(group: Any, message: Any, number: int) -> float:
    """The time of a round trip; the second rank waits for the first."""
    if number > 1:
        return 0.0
    begin_ns = time.perf_counter_ns()
    for is_sender in (number == 0, number == 1):
        step = group.send if is_sender else group.recv
        step([message], 1 - number, 0).wait()
    return float(time.perf_counter_ns() - begin_ns)
