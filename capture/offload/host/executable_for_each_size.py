"""Executables of a Family on devices that load each choice of sizes separately."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import CopyError, ExecutionError
from offload.host.call_sizes import CallSizes
from offload.host.loaded_bytes import loaded_bytes
from offload.host.sizes import InstanceReport, Sizes
from offload.interpreter.outside_graphs import outside_graphs
from offload.interpreter.size_constants import program_at
from offload.program import BoundProgram
from offload.program.family import BoundFamily, Family
from offload.run import Executable, LastExecution, Ticket
from offload.run.submitting import (
    Args,
    Kwargs,
    Submitting,
    with_results,
)

Load = Callable[[BoundProgram], Executable]


@dataclasses.dataclass(frozen=True, slots=True)
class _Latest:
    """The sizes of the latest turn, and the duration of making them ready; 0 if they were."""

    sizes: tuple[int, ...]
    run: Executable
    prepare_ns: int


class ExecutableForEachSize(Submitting):
    """A loaded Family: recorded once, called with any sizes that it accepts.

    Each choice of sizes has an instance, made at its first occurrence: its Program is evaluated,
    placed and loaded, and its size constants are computed. Instances share the model's weights.
    Made by `Captured.load` where sizes may vary.

    Owner of its instances. Calls from several threads are safe. Calls of one choice of sizes run
    one at a time; where the Program writes inputs or weights, draws random numbers or may have
    further effects, all calls do, in order of arrival.

    Calling it, as `run(x)` or `run(x, out=y)`, executes the Program of the call's sizes; arguments
    and results are those of an Executable. It raises the errors of an Executable, and:
        BindingError: the sizes of the call fit no Dim or break a guard; nothing has run.
        CaptureError, PlanError, OutOfMemory: their Program cannot be loaded.

    Attributes:
        family: the Family.
        program: at the recorded sizes.
        sizes: the memory of instances.
    """

    def __init__(
        self,
        bound: BoundFamily,
        sizes: Sizes,
        load: Load,
        note: str = "",
        *,
        shares_arena: bool = False,
    ) -> None:
        """Begin without instances.

        Args:
            bound: the Family.
            sizes: the memory of instances.
            load: makes a Program resident.
            note: a sentence on loading, for people.
            shares_arena: whether feature maps of all instances share memory, which then counts for
                none of them.

        Raises:
            BindingError: `sizes` has no valid number of bytes.
        """
        self.sizes = sizes
        self._budget_bytes = sizes.budget_bytes
        self._bound = bound
        self._load = load
        self._note = note
        self._shares_arena = shares_arena
        self._find = CallSizes(bound.family)
        self._kept: OrderedDict[tuple[int, ...], Executable] = OrderedDict()
        self._n_hits = self._n_misses = self._n_evicted = 0
        self._latest: _Latest | None = None
        self._closed = False
        self._making = threading.Lock()  # acquired before the other lock
        self._lock = threading.Lock()
        self.program = bound.family.program
        self._keeps_order = self.program.leaves_something
        self._turn = threading.Lock()
        self._latest_ticket: tuple[Executable, Ticket] | None = None  # guarded by the turn

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its device's memory, and cannot be copied or pickled: load the "
            "captured program once more"
        )

    @property
    def family(self) -> Family:
        """The Family."""
        return self._bound.family

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute with new tensors, of any sizes that the Family accepts."""
        run = self._instance(self._find.of(args, kwargs))
        with self._in_turn(run):
            return run(*args, **kwargs)

    @outside_graphs
    def submit(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Queue an execution and return at once; as `Executable.submit`.

        Where order matters it first waits for tickets of other sizes, and for tickets among the
        arguments, whose results give sizes.
        """
        return self._submitted(args, {**kwargs, "out": out, "feature_map": feature_map}, ())

    @outside_graphs
    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        args, kwargs = with_results(args, kwargs, Ticket.result)
        buffers = {name: kwargs.pop(name, None) for name in ("out", "feature_map")}
        run = self._instance(self._find.of(args, kwargs))
        with self._in_turn(run):
            ticket = run.after(*after).submit(*args, **kwargs, **buffers)
            if self._keeps_order:
                self._latest_ticket = (run, ticket)
            return ticket

    @contextlib.contextmanager
    def _in_turn(self, run: Executable) -> Iterator[None]:
        """Execute after all submissions of other sizes, where order matters."""
        if not self._keeps_order:
            yield
            return
        with self._turn:
            if self._latest_ticket is not None and self._latest_ticket[0] is not run:
                self._latest_ticket[1]._outcome()  # its owner gets the error
                self._latest_ticket = None
            yield

    def at(self, sizes: Mapping[str, int]) -> Executable:
        """Return the instance of some sizes, made if absent: to explain it, or for timelines.

        Raises:
            BindingError: the Family does not accept them.
            CaptureError, PlanError, OutOfMemory, ExecutionError: it cannot be loaded.
        """
        return self._instance(self.family.checked(sizes))

    def _instance(self, sizes: tuple[int, ...]) -> Executable:
        """Return the instance of sizes; the key is the sizes themselves, not a digest.

        Kept instances were accepted when they were made. Others are made one at a time, while calls
        of kept instances continue.
        """
        found = self._ready(sizes)
        if found is None:
            with self._making:
                found = self._ready(sizes) or self._add(sizes)
        return found

    def _ready(self, sizes: tuple[int, ...]) -> Executable | None:
        with self._lock:
            if self._closed:
                raise ExecutionError("the executable is closed: load the captured program again")
            found = self._kept.get(sizes)
            if found is None:
                return None
            self._kept.move_to_end(sizes)
            self._n_hits += 1
            self._latest = _Latest(sizes, found, prepare_ns=0)
            return found

    def _add(self, sizes: tuple[int, ...]) -> Executable:
        begin_ns = time.perf_counter_ns()
        named = dict(zip(self.family.names, sizes, strict=True))
        run = self._load(program_at(self._bound, self.family.checked(named)))
        prepare_ns = time.perf_counter_ns() - begin_ns
        with self._lock:
            if self._closed:
                run.close()
                raise ExecutionError("the executable was closed meanwhile: load it again")
            self._kept[sizes] = run
            self._n_misses += 1
            self._latest = _Latest(sizes, run, prepare_ns)
        self._make_room()
        return run

    def _instance_bytes(self, run: Executable) -> int:
        """The memory of an instance; a graph takes it at its first execution."""
        arena_bytes = 0 if self._shares_arena else run.feature_map_bytes
        return arena_bytes + loaded_bytes(self._bound, run)

    def _sizes_bytes(self) -> dict[tuple[int, ...], int]:
        """The memory of each instance, without the lock: an execution may delay its report."""
        with self._lock:
            kept = dict(self._kept)
        return {sizes: self._instance_bytes(run) for sizes, run in kept.items()}

    def _make_room(self) -> None:
        """Evict the least recently used until the rest fits; their executions continue."""
        sizes_bytes = self._sizes_bytes()
        kept_bytes = sum(sizes_bytes.values())
        evicted = []  # outlives the lock: its destruction waits for executions
        with self._lock:
            while kept_bytes > self._budget_bytes and len(self._kept) > 1:
                sizes, run = self._kept.popitem(last=False)
                kept_bytes -= sizes_bytes[sizes]
                evicted.append(run)
            self._n_evicted += len(evicted)

    @property
    def instances(self) -> InstanceReport:
        """Report the instances so far."""
        kept_bytes = sum(self._sizes_bytes().values())
        with self._lock:
            latest = self._latest
            sizes = () if latest is None else zip(self.family.names, latest.sizes, strict=True)
            return InstanceReport(
                self._n_hits,
                self._n_misses,
                self._n_evicted,
                len(self._kept),
                kept_bytes,
                sizes=tuple(sizes),
                was_hit=latest is not None and not latest.prepare_ns,
                prepare_ns=0 if latest is None else latest.prepare_ns,
            )

    @property
    def last_execution(self) -> LastExecution | None:
        """The latest execution of the latest sizes; None before the first."""
        latest = self._latest
        return None if latest is None else latest.run.last_execution

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, as `Executable.rebind_weights`.

        Raises:
            BindingError: a new storage has another layout than the recorded one.
        """
        with self._lock:
            for one in self._kept.values():
                one.rebind_weights()

    @outside_graphs
    def explain(self) -> str:
        """Describe what varies, and which instances are kept."""
        return "\n".join(filter(None, [str(self.family), str(self.instances), self._note]))

    def close(self) -> None:
        """Wait for executions in flight and free the memory; idempotent."""
        with self._lock:
            self._closed = True
            kept = list(self._kept.values())
            self._kept.clear()
            self._latest = None
        for one in kept:
            one.close()

    @outside_graphs
    def __enter__(self) -> ExecutableForEachSize:
        return self

    @outside_graphs
    def __exit__(self, *_: object) -> None:
        self.close()
