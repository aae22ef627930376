"""Durations of launches on an Ascend device: medians of rounds, by events around each launch.

Nothing is captured meanwhile, as events of a capture give no times. A launch's time is the device's
time between two events, including that of the events and of the delivery to a core. Copies delay
the stream while launches are enqueued, so that it does not wait for the host between them; where
this did not suffice, the result says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from offload.backends.ascend.kernel_table import table_words
from offload.backends.ascend.kernels import KernelCapture
from offload.backends.ascend.relocated_model import ProofMemory
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.captured.relocation.proof import timed_rounds
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.loaded import Prepared, TimedLaunches
from offload.native import _native
from offload.plan import Plan
from offload.program import Program

N_ROUNDS = 4
"""The number of rounds; the first, which loads and compiles, does not count."""


class TwinTimer:
    """Times kernels of a twin, launched one by one, outside its model; see `LaunchTimer`."""

    def __init__(
        self,
        device_of: Callable[[Program], int],
        make_twin: Callable[..., _native.AscendResident],
        proof_memory: Callable[[int], ProofMemory],
    ) -> None:
        """Time kernels of one backend.

        Args:
            device_of: the index of a Program's device.
            make_twin: `kernel_table.make_resident`, as the backend makes residents.
            proof_memory: returns memory of a device, by index, for executions of proofs.
        """
        self._device_of = device_of
        self._make_twin = make_twin
        self._proof_memory = proof_memory

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Return medians of rounds; see `timed_launches`.

        Raises:
            BackendUnavailable: the runtime has no timing events.
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """
        captured: KernelCapture = prepared.state
        program = prepared.program
        device = self._device_of(program)
        timer = _native.AscendLaunchTimer(device)
        twin = self._make_twin(
            captured,
            program,
            plan,
            device=device,
            arena_bytes=0,
            gather=None,
            streamed=StreamedWeights(),
        )
        try:
            _, relocations = table_words(captured, program, plan)
            placed = Placed(plan, twin, relocations)
            memory = self._proof_memory(device)
            return timed_launches(
                timed_rounds(
                    prepared.bound, placed, memory, lambda: twin.time_launches(timer), N_ROUNDS
                )
            )
        finally:
            twin.close()


def timed_launches(rounds: Sequence[Sequence[_native.AscendLaunchTime]]) -> TimedLaunches:
    """Return the median of each launch: of rounds with the host ahead, or of all if it never was.

    Args:
        rounds: the duration of each launch by round; the first round is ignored.
    """
    times_ns, n_gaps = [], 0
    for launch in zip(*rounds[1:], strict=True):
        ahead = [one.time_ns for one in launch if one.host_was_ahead]
        n_gaps += not ahead
        times_ns.append(statistics.median(ahead or [one.time_ns for one in launch]))
    how = (
        f"medians of {len(rounds) - 1} rounds, by events around each launch, whose time is included"
    )
    if n_gaps:
        how += (
            f"; {n_gaps} of {len(times_ns)} launches include waits of the device for the host, "
            "which was slower"
        )
    return TimedLaunches(tuple(times_ns), how)
