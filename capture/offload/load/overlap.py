"""`load(lanes=...)` with collectives: exchanged while launches run, where that is quicker.

All ranks measure at once: launches and exchanges in recorded order, and then calls in turns. The
slowest rank's times, which are the same on all ranks, decide, so that the decision is too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from offload.backends import Backend
from offload.compile import Fusion
from offload.console.progress import stage
from offload.interpreter.own_generators import drawing_alone
from offload.load.options import AUTO, Options
from offload.load.place import place
from offload.load.ranks import LoadedTogether
from offload.load.trial import (
    calls_in_turns_ns,
    estimated_ns,
    execute_made_up,
    launch_times_ns,
    weights_kept,
)
from offload.plan import Plan
from offload.plan.check_reordering import check_reordering
from offload.plan.collective_lanes import CollectiveTimes, exchanged_spans, started_collectives
from offload.plan.overlap_collectives import (
    CollectiveOrder,
    in_order,
    lower_bound_ns,
    overlap_collectives,
)
from offload.program import BoundProgram, Effect, EffectKind, Program
from offload.run import Executable
from offload.run.overlap_choice import OverlapChoice
from offload.timeline import SpanKind

_N_TIMED = 7
_N_WARM_UP = 2

# An order is chosen if it takes less than this fraction of the recorded order: medians of equal
# calls differ by more than a percent.
_QUICKER = 0.97

# An order's feature map may be this many times as large as that of the recorded order.
_MOST_BYTES = 2.0

# For an exchange that could not be timed: assumptions of the order of gloo's on one machine, never
# measurements.
_EXCHANGE_NS = 200_000.0
_EXCHANGE_BYTES_PER_NS = 1.0


def load_overlapped(
    bound: BoundProgram,
    backend: Backend,
    options: Options,
    fusion: Fusion | None,
    ranks: LoadedTogether,
) -> Executable:
    """Load a Program whose collectives may be exchanged while launches run.

    Raises:
        PlanError, CaptureError, OutOfMemory, ExecutionError: as `Captured.load`.
    """
    return _OverlapLoad(bound, backend, options, fusion, ranks).loaded()


class _OverlapLoad:
    """One load of a Program with collectives on all its ranks. Owner: one call."""

    def __init__(
        self,
        bound: BoundProgram,
        backend: Backend,
        options: Options,
        fusion: Fusion | None,
        ranks: LoadedTogether,
    ) -> None:
        self._bound = bound
        self._backend = backend
        self._options = options
        self._fusion = fusion
        self._ranks = ranks
        self._alone = drawing_alone(bound)
        self._trials = self._alone.bound.unguarded()
        self._recorded_bytes = self._plan(bound).feature_map_bytes

    def loaded(self) -> Executable:
        """The executable, in the chosen order."""
        estimated = self._untimed()
        times = self._estimates() if estimated else self._measured()
        orders = overlap_collectives(self._bound.program, times)
        order, order_bytes = self._within_memory(orders)
        predicted_ns, recorded_ns = self._ranks.largest(
            [order.predicted_ns, orders[-1].predicted_ns]
        )
        choice = OverlapChoice(
            self._options.lanes,
            times=times,
            estimated=estimated,
            predicted_ns=predicted_ns,
            recorded_ns=recorded_ns,
            lower_bound_ns=lower_bound_ns(self._bound.program, times),
            method=order.method,
            n_moved=sum(at != launch for at, launch in enumerate(order.order)),
            feature_map_bytes=order_bytes,
            recorded_feature_map_bytes=self._recorded_bytes,
        )
        if self._options.lanes != AUTO:
            return self._made(order, choice)
        if estimated or predicted_ns > _QUICKER * recorded_ns:
            return self._made(orders[-1], choice)
        recorded, moved = self._calls_ns(orders[-1], order)
        measured_ns = {"recorded order": recorded, "collectives beside launches": moved}
        choice = dataclasses.replace(choice, measured_ns=measured_ns)
        return self._made(order if moved < _QUICKER * recorded else orders[-1], choice)

    def _untimed(self) -> str:
        """Why executions on made-up inputs show nothing, or could end on one rank alone.

        Empty on all ranks or on no rank.
        """
        why = self._alone.refusal or _may_end(self._bound.program)
        (is_refused,) = self._ranks.largest([float(bool(why))])
        return why or ("another rank could not time its launches" if is_refused else "")

    def _measured(self) -> CollectiveTimes:
        """The times of launches and exchanges, from executions in recorded order on all ranks."""
        program = self._bound.program
        run = self._trial(self._trials)
        try:
            with weights_kept(self._bound), stage("timing collectives", _N_WARM_UP + _N_TIMED):
                execute_made_up(run, _N_WARM_UP)
                with run.timeline() as timeline:
                    execute_made_up(run, _N_TIMED)
        finally:
            run.close()
        durations = launch_times_ns(timeline)
        launch_ns = [float(statistics.median(durations[at])) for at in range(len(durations))]
        transfers: dict[int, list[int]] = {one.start: [] for one in started_collectives(program)}
        for execution in timeline.executions:
            spans = sorted(execution.of_kind(SpanKind.LAUNCH), key=lambda span: span.launch)
            exchanged = exchanged_spans(
                program, [one.begin_ns for one in spans], [one.end_ns for one in spans]
            )
            for start, (begin_ns, end_ns) in exchanged.items():
                transfers[start].append(end_ns - begin_ns)
        return _times(
            program, launch_ns, {at: statistics.median(of) for at, of in transfers.items()}
        )

    def _estimates(self) -> CollectiveTimes:
        program = self._bound.program
        costs = self._backend.machine(program.device_index).costs
        sizes = {
            one.start: sum(
                program.values[at].size_bytes for at in program.launches[one.start].writes
            )
            for one in started_collectives(program)
        }
        return _times(
            program,
            estimated_ns(program, costs.memory_bytes_per_ns),
            {at: _EXCHANGE_NS + size / _EXCHANGE_BYTES_PER_NS for at, size in sizes.items()},
        )

    def _within_memory(self, orders: Sequence[CollectiveOrder]) -> tuple[CollectiveOrder, int]:
        """The quickest order whose feature map is not much larger, and that map's bytes."""
        for order in orders[:-1]:
            plan = self._plan(self._in_order(self._bound, order))
            if plan.feature_map_bytes <= _MOST_BYTES * self._recorded_bytes:
                return order, plan.feature_map_bytes
        return orders[-1], self._recorded_bytes

    def _calls_ns(self, recorded: CollectiveOrder, moved: CollectiveOrder) -> list[float]:
        """The times of calls in both orders on the slowest rank."""
        runs: list[Executable] = []
        with weights_kept(self._bound):
            try:
                for order in (recorded, moved):
                    runs.append(self._trial(self._in_order(self._trials, order)))
                    execute_made_up(runs[-1], _N_WARM_UP)
                return calls_in_turns_ns(
                    runs, "timing orders of collectives", agree=self._ranks.largest
                )
            finally:
                for run in runs:
                    run.close()

    def _in_order(self, bound: BoundProgram, order: CollectiveOrder) -> BoundProgram:
        check_reordering(bound.program, order.order)
        found = in_order(bound.program, order.order)
        return BoundProgram(found.program, bound.bindings.moved(found.positions))

    def _plan(self, bound: BoundProgram) -> Plan:
        return place(self._backend.prepare(bound), self._backend)

    def _trial(self, bound: BoundProgram) -> Executable:
        """An executable for trial executions, which draw from separate generators."""
        prepared = self._backend.prepare(bound)
        plan = place(prepared, self._backend)
        return Executable(prepared, plan, self._backend, fusion=self._fusion)

    def _made(self, order: CollectiveOrder, choice: OverlapChoice) -> Executable:
        prepared = self._backend.prepare(self._in_order(self._bound, order))
        run = Executable(
            prepared,
            place(prepared, self._backend),
            self._backend,
            self._options.scheduling,
            verify=self._options.verify,
            fusion=self._fusion,
        )
        run.overlap = choice.chosen(order)
        return run


def _times(
    program: Program, launch_ns: Sequence[float], transfer_ns: dict[int, float]
) -> CollectiveTimes:
    """The times of a Program; a wait has no time itself: it ends with the exchange."""
    return CollectiveTimes(
        tuple(
            0.0 if launch.waits else ns
            for launch, ns in zip(program.launches, launch_ns, strict=True)
        ),
        tuple(transfer_ns.get(at, 0.0) for at in range(len(program.launches))),
    )


def _may_end(program: Program) -> str:
    """Why an execution may end on one rank, while others wait for it; empty if it does not."""
    guard = Effect(EffectKind.GUARD)
    for launch in program.launches:
        if guard in launch.effects:
            return (
                f"{launch.source}: {launch.name}: an execution on made-up inputs may end there, "
                "and the other ranks would wait for this one"
            )
    return ""
