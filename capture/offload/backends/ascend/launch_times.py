"""What launches take on an Ascend device: medians of rounds, by an event before and behind each.

Nothing is captured meanwhile, as events of a capture tell no times. A launch's time is that of the
device between two events, their own and that of its delivery to a core included. Copies hold the
stream back while launches are enqueued, so that it does not wait for the host between them; where
that did not do, it is said.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from offload.backends.ascend.kernel_table import table_words
from offload.backends.ascend.kernels import KernelCapture
from offload.backends.ascend.relocated_model import ProofMemory
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.base import Prepared, TimedLaunches
from offload.backends.captured.relocation.proof import timed_rounds
from offload.backends.captured.relocation.proof_bases import Placed
from offload.native import _native
from offload.plan import Plan
from offload.program import Program

N_ROUNDS = 4
"""How often launches are timed; the first round, which loads and compiles, does not count."""


class TwinTimer:
    """Times kernels of a twin, launched one by one, outside of its model; see `LaunchTimer`."""

    def __init__(
        self,
        device_of: Callable[[Program], int],
        make_twin: Callable[..., _native.AscendResident],
        proof_memory: Callable[[int], ProofMemory],
    ) -> None:
        """A timer of one backend.

        Args:
            device_of: the index of a Program's device.
            make_twin: `kernel_table.make_resident`, as the backend makes residents.
            proof_memory: memory of the device of an index, for executions that nobody asked for.
        """
        self._device_of = device_of
        self._make_twin = make_twin
        self._proof_memory = proof_memory

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Medians of rounds; see `timed_launches`.

        Raises:
            BackendUnavailable: the runtime makes no events that tell times.
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
