"""Executables of all sizes of a Family: one resident, which changes sizes in place."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.backends import Backend, Loaded, Prepared
from offload.errors import BindingError
from offload.host.buckets import Buckets, bucket_ends
from offload.host.call_sizes import CallSizes, with_arguments
from offload.host.promoter import Promoter, new_promoter
from offload.host.promotion import Choice
from offload.host.promotion_work import NotPromoted, Promoting
from offload.host.sizes import InstanceReport, Sizes
from offload.interpreter.native_layouts import native_layout
from offload.interpreter.settled_family import SettledFamily
from offload.load.place import place
from offload.native import _native
from offload.plan import Plan
from offload.program import BoundProgram, Role, TensorView
from offload.program.expressions import Expression
from offload.program.family import MOST, Family
from offload.program.structure import Structure
from offload.program.varying_numbers import values_bytes, varying_of
from offload.run import Executable, LastExecution, MemoryReport
from offload.run.arguments import tensors_of_call
from offload.run.native_replay import SizedCalls, outputs_shown_once
from offload.timeline import Scheduling

LoadAt = Callable[[Mapping[str, int]], Executable]

_KEPT_ANSWERS = 4096
"""The number of choices of sizes for which it is kept whether they are accepted."""


class SizedExecutable(Executable):
    """An Executable of all sizes that a Family accepts; recorded, planned and loaded once.

    The numbers at one choice of sizes are an instance: computed at the first occurrence, with its
    size constants, and kept while there is room. Where an execution's sizes differ from the
    previous ones, the resident's tensors take the numbers of its instance. Made by `Captured.load`.

    Calls are those of an Executable. It raises the errors of an Executable, and:
        BindingError: the sizes of the call fit no Dim or break a guard; nothing has run.
        PlanError: these sizes have no feature map.

    Attributes:
        family: the Family.
        sizes: the memory of instances, and the buckets that place activations.
        note: the reason of its scheduling, for people; empty where that was not chosen.
        host_cores: the number of host cores for the stages of launches at new sizes.
    """

    def __init__(
        self,
        settled: SettledFamily,
        sizes: Sizes,
        backend: Backend,
        load_at: LoadAt,
        scheduling: Scheduling = Scheduling.OFFLOAD,
        *,
        verify: bool = True,
        promoting: Promoting | None = None,
        note: str = "",
        host_cores: int = 1,
    ) -> None:
        """Make a Family resident at its recorded sizes.

        Args:
            settled: the Family.
            sizes: the memory of instances, and the buckets.
            backend: of a device whose residents change sizes.
            load_at: loads the Program of one choice of sizes.
            scheduling: as one task, or launch by launch.
            verify: as `Captured.load`.
            promoting: makes executables of repeated sizes; None: no promotion.
            note: a sentence on loading, for people.
            host_cores: the number of host cores for the stages of launches at new sizes.

        Raises:
            BindingError: `sizes` has no valid number of bytes, or a bucket of an unknown Dim.
            CaptureError, PlanError, OutOfMemory, ExecutionError: it cannot be loaded.
        """
        self.family: Family = settled.family
        self.sizes = sizes
        self._load_at = load_at
        self._budget_bytes = sizes.budget_bytes
        self._bucket_ends = sizes.ends_for(self.family.dims, bucket_ends)
        self._settled = settled
        self._find = CallSizes(self.family)
        self._accepted = functools.lru_cache(_KEPT_ANSWERS)(
            functools.partial(_accepts, self.family)
        )
        self.note = note
        self.host_cores = host_cores
        assert backend.sizes is not None  # checked by the caller
        self._changer = backend.sizes.on_host_cores(host_cores)
        self._promoter = None if promoting is None else self._new_promoter(promoting)
        prepared = backend.prepare(self._settled.bound)
        super().__init__(prepared, place(prepared, backend), backend, scheduling, verify=verify)

    def _new_promoter(self, promoting: Promoting) -> Promoter:
        own = weakref.ref(self)

        def publish(sizes: Choice, run: Executable) -> _native.Replay:
            found = own()
            if found is None:
                raise NotPromoted("the executable was freed meanwhile")
            run._native.join(found._native)
            return run._native

        budget_bytes = self.sizes.promoted_bytes
        return new_promoter(self, promoting, self.family.names, budget_bytes, publish)

    def _instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        loaded = self._changer.instantiate(self._settled, prepared, plan)
        self._buckets = Buckets(self.family, prepared.program, plan)
        return loaded

    def _sized_calls(self) -> SizedCalls:
        family = self.family
        self._instances = _native_instances(
            self._settled,
            self._loaded,
            self._changer.constants(self._settled),
            bucket_ends=self._bucket_ends,
            budget_bytes=self._budget_bytes,
            place=self._buckets.place,
        )
        return SizedCalls(
            instances=self._instances,
            axes=[(one.dim, one.leaf, one.axis) for one in family.places if one.leaf >= 0],
            constants={one.constant: one.dim for one in family.places if one.constant >= 0},
            find=functools.partial(_sizes_of, family, self._find),
            match=functools.partial(_matched, self._settled.bound, family, self._find),
            results=functools.partial(_results_at, self._settled.bound.result_structure, family),
            promotions=None if self._promoter is None else self._promoter.accounts,
        )

    def at(self, sizes: Mapping[str, int]) -> Executable:
        """Return an Executable of only one choice of sizes: for timelines, or where it repeats.

        Raises:
            BindingError: the Family does not accept them.
            CaptureError, PlanError, OutOfMemory, ExecutionError: it cannot be loaded.
        """
        return self._load_at(sizes)

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """Whether the Family accepts these sizes: a call with them would not be refused."""
        return self._accepted(tuple(sizes.items()))

    def feature_map_bytes_at(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes that a `feature_map=` tensor must have for these sizes.

        Raises:
            BindingError: the Family does not accept them.
            PlanError: these sizes have no feature map.
        """
        return self._instances.feature_map_bytes(list(self.family.checked(sizes)))

    @property
    def instances(self) -> InstanceReport:
        """Report the instances so far."""
        counts, promoter = self._instances.counts, self._promoter
        last, own_sizes = self._latest()
        found = last.sizes if own_sizes is None else own_sizes
        return InstanceReport(
            hits=counts.n_hits,
            misses=counts.n_misses,
            evicted=counts.n_evicted,
            kept=counts.n_kept,
            kept_bytes=counts.kept_bytes,
            buckets=counts.n_places,
            sizes=tuple(zip(self.family.names, found, strict=False)),
            was_hit=bool(last.sizes_were_ready) or own_sizes is not None,
            prepare_ns=last.prepare_sizes_ns,
            promotion=None if promoter is None else promoter.report(),
        )

    def _latest(self) -> tuple[_native.LastExecution, Choice | None]:
        """Return the latest execution, and its sizes where a promoted executable ran it."""
        found: tuple[_native.LastExecution, Choice | None] = self._native.last_execution, None
        for sizes, run in () if self._promoter is None else self._promoter.executables():
            last = run._native.last_execution
            if last.n_executions > 1 and last.end_ns > found[0].end_ns:  # the first was its proof
                found = last, sizes
        return found

    @property
    def last_execution(self) -> LastExecution:
        """The latest finished execution, of promoted sizes as well."""
        if self._promoter is None:
            return super().last_execution
        last, own_sizes = self._latest()
        n_executions = self._native.last_execution.n_executions + self._promoter.n_executions()
        return dataclasses.replace(
            LastExecution.of(last, self._native.substages),
            n_executions=n_executions,
            was_promoted=own_sizes is not None,
        )

    def rebind_weights(self) -> None:
        """As of an Executable; promoted executables do likewise, or are dropped if they cannot."""
        super().rebind_weights()
        if self._promoter is not None:
            self._promoter.rebind_weights()

    def memory_report(self) -> MemoryReport:
        """Return the memory by kind; the feature map is that of the largest bucket so far.

        Its lower bound, and the bytes without sharing, are those at the recorded sizes.
        """
        report = super().memory_report()
        met_bytes = self._buckets.feature_map_bytes or report.feature_map_bytes
        return dataclasses.replace(report, feature_map_bytes=met_bytes)

    def explain(self) -> str:
        """Describe what varies, what is kept, and what an Executable describes."""
        instances = self.instances
        promotion = () if instances.promotion is None else instances.promotion.explain()
        lines = [str(self.family), str(instances), self.note, *promotion, super().explain()]
        return "\n".join(filter(None, lines))

    def forget_sizes(self) -> None:
        """Drop all instances: each is prepared again at its next occurrence."""
        self._instances.clear()

    def close(self) -> None:
        """Close as an Executable, with instances and promoted executables.

        A running preparation is finished, and dropped.
        """
        super().close()
        if self._promoter is not None:
            self._promoter.close()
        self._instances.clear()


def _native_instances(
    settled: SettledFamily,
    loaded: Loaded,
    constants: _native.SizeConstants | None,
    *,
    bucket_ends: Sequence[Sequence[int]],
    budget_bytes: int,
    place: Callable[..., tuple[list[int], list[int], int, bool]],
) -> _native.Instances:
    family, program = settled.family, settled.program
    recorded = [one.recorded for one in family.dims]
    alone = outputs_shown_once(program)
    return _native.Instances(
        dims=[
            (one.minimum, MOST if one.maximum is None else one.maximum, list(ends))
            for one, ends in zip(family.dims, bucket_ends, strict=True)
        ],
        numbers=_codes(family.expressions),
        reals=[isinstance(one, float) for one in family.numbers_at(recorded)],
        conditions=_codes([one.condition for one in family.guards]),
        compared=family.compared,
        values=values_bytes(program),
        inputs=[_varying_view(view) for view in program.inputs],
        outputs=[value.index for value in program.of_role(Role.OUTPUT)],
        results=[
            (_varying_view(one.view), one.view.value if one.view.value in alone else None)
            for one in program.results
        ],
        constants=constants,
        resident=loaded.resident,
        budget_bytes=budget_bytes,
        refuse=functools.partial(_refuse, family),
        place=place,
    )


def _codes(given: Sequence[Expression]) -> list[list[tuple[str, int | float]]]:
    return [list(one.code) for one in given]


def _varying_view(view: TensorView) -> _native.VaryingView:
    return _native.VaryingView(
        layout=native_layout(view), offset_bytes=view.offset_bytes, varying=varying_of(view)
    )


def _accepts(family: Family, sizes: tuple[tuple[str, int], ...]) -> bool:
    try:
        family.checked(dict(sizes))
    except BindingError:
        return False
    return True


def _refuse(family: Family, sizes: Sequence[int]) -> None:
    """Say why the native side refused sizes."""
    family.whole_at(family.checked(dict(zip(family.names, sizes, strict=True))))


def _sizes_of(
    family: Family, find: CallSizes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the sizes of a call, accepted by the Family.

    Raises:
        BindingError: arguments give no consistent sizes, or the Family does not accept them.
    """
    return family.checked(dict(zip(family.names, find.of(args, kwargs), strict=True)))


def _matched(
    bound: BoundProgram,
    family: Family,
    find: CallSizes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[torch.Tensor]:
    """Return the tensors of a call, whose varying integers match its sizes.

    Raises:
        BindingError: as `tensors_of_call`.
    """
    if family.arguments:
        numbers = family.numbers_at(_sizes_of(family, find, args, kwargs))
        bound = with_arguments(bound, family, numbers)
    return tensors_of_call(bound, args, kwargs)


def _results_at(structure: Structure, family: Family, sizes: Sequence[int]) -> Structure:
    """Return the result's structure, with the integers that vary."""
    return family.results_at(structure, family.numbers_at(sizes)) if family.results else structure
