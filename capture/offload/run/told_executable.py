"""An executable that reports what each execution moved, patched and took: OFFLOAD_DEBUG=3."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import torch

from offload.console.switches import DebugLevel, say
from offload.errors import BindingError
from offload.interpreter.outside_graphs import outside_graphs
from offload.plan import SlotKind
from offload.program import Role
from offload.program.structure import OpaqueStructure, flatten
from offload.run.arguments import tensors_of_call
from offload.run.executable import Executable
from offload.run.reports import LastExecution
from offload.run.ticket import Ticket


class ToldExecutable(Executable):
    """An Executable whose calls pass through Python, unlike those of an Executable."""

    _told: _Told

    @outside_graphs
    def __call__(
        self, /, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Execute, and report the execution; arguments and errors are an Executable's."""
        result = super().__call__(*args, out=out, feature_map=feature_map, **kwargs)
        last = self.last_execution
        bases = None
        if not last.was_promoted:  # whose slots belong to another program
            bases = _bases_of(self, args, kwargs, feature_map, result)
        self._told.ended(last, bases)
        return result

    @outside_graphs
    def submit(
        self, /, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Queue an execution; the wait for its ticket reports it."""
        return super().submit(*args, out=out, feature_map=feature_map, **kwargs)

    def _new_ticket(self) -> Ticket:
        return _ToldTicket(self)

    def tell_submitted(self) -> None:
        """Report the latest execution, unless reported."""
        self._told.ended(self.last_execution, None)


class _ToldTicket(Ticket):
    """A ticket whose wait reports its execution, unless a later one has ended meanwhile."""

    def __init__(self, run: ToldExecutable) -> None:
        super().__init__()
        self._run = run

    def wait(self, timeout: float | None = None) -> None:
        """As a Ticket's."""
        super().wait(timeout)
        self._run.tell_submitted()

    def result(self, timeout: float | None = None) -> Any:
        """As a Ticket's."""
        result = super().result(timeout)
        self._run.tell_submitted()
        return result


def tell_executions(run: Executable) -> None:
    """Let an executable report its executions, from the next one for its lifetime.

    It becomes a ToldExecutable, so that the calls of others stay native.
    """
    kind = type(run)
    run.__class__ = (
        ToldExecutable if kind is Executable else type(kind.__name__, (ToldExecutable, kind), {})
    )
    cast(ToldExecutable, run)._told = _Told(run)


class _Told:
    """The reported executions of one executable. Thread: any."""

    def __init__(self, run: Executable) -> None:
        self._slots = run.plan.slots
        self._lock = threading.Lock()
        self._n_executions = run.last_execution.n_executions
        self._bases: Mapping[int, int] | None = None

    def ended(self, last: LastExecution, bases: Mapping[int, int] | None) -> None:
        """Report an execution, and the number of earlier ones that were not reported.

        Args:
            last: the latest execution.
            bases: the addresses of its caller's tensors by slot; None if unknown.
        """
        with self._lock:
            n_unsaid = last.n_executions - self._n_executions - 1
            if n_unsaid < 0:
                return  # another thread has reported it
            before = self._bases if n_unsaid == 0 else None
            self._n_executions, self._bases = last.n_executions, bases
        text = f"execution {last.n_executions}: {last}"
        if moved := self._moved(last, before, bases):
            text += f"; moved: {moved}"
        if n_unsaid:
            first = last.n_executions - n_unsaid
            text = f"executions {first} to {last.n_executions - 1} ended without a report\n{text}"
        say(text, DebugLevel.EXECUTIONS)

    def _moved(
        self,
        last: LastExecution,
        before: Mapping[int, int] | None,
        now: Mapping[int, int] | None,
    ) -> str:
        """List the slots that moved, by name as far as addresses tell."""
        if not last.slots_changed:
            return ""
        if last.n_executions == 1:
            return "every slot that is bound, for the first time"
        if before is None or now is None:
            return ""
        names = [
            f"{self._slots[slot].kind} {self._slots[slot].name}"
            for slot, base in now.items()
            if before.get(slot) != base
        ]
        rest = last.slots_changed - len(names)
        if rest > 0:
            names.append(f"{rest} more (weights that were bound again, or copies of arguments)")
        text = ", ".join(names)
        return text if rest >= 0 else f"{text}, of which {last.slots_changed} are patched"


def _bases_of(
    run: Executable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    feature_map: torch.Tensor | None,
    result: Any,
) -> dict[int, int] | None:
    """Return the addresses of an execution's inputs, results and feature map, by slot.

    None where the result cannot be flattened, or has another number of tensors than recorded.
    """
    program, plan = run.program, run.plan
    copied = {choice.slot for choice in run.copy_choices if choice.is_copied}
    try:
        given = tensors_of_call(run.bound, args, kwargs)
        made, _ = flatten(result, _is_tensor, share_same=True)
    except (BindingError, OpaqueStructure):
        return None
    if len(made) != len(program.results):
        return None
    bases: dict[int, int] = {}
    for view, tensor in zip(program.inputs, given, strict=True):
        if not program.values[view.value].on_host:
            bases[plan.slot_of(view.value)] = tensor.data_ptr() - view.offset_bytes
    for one, tensor in zip(program.results, made, strict=True):
        if program.values[one.view.value].role is Role.OUTPUT:
            bases[plan.slot_of(one.view.value)] = tensor.data_ptr() - one.view.offset_bytes
    slot = next(plan.of_kind(SlotKind.FEATURE_MAP)).index
    bases[slot] = 0 if feature_map is None else feature_map.data_ptr()
    return {slot: base for slot, base in bases.items() if slot not in copied}


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
