"""Collectives of a recorded call: a launch starts each of them, and another waits for it.

They are recorded as operators of torch's namespace `_c10d_functional`, which identify a group by
its name. Functional collectives and DTensor's arrive there. Those that write their arguments, such
as `torch.distributed.all_reduce`, are operators of `c10d` over process groups and are performed by
functional collectives (`in_place_collectives`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.user_code import user_location
from offload.distributed import Rendezvous
from offload.distributed.groups import group_here, rank_in, send
from offload.errors import CaptureError, ExecutionError
from offload.program import Argument, Group, Launch
from offload.program.collectives import (
    RECEIVES,
    SENDS,
    SENT_AS_GIVEN,
    STARTS,
    WAIT,
    group_name,
    meeting_of,
)
from offload.record.in_place_collectives import in_place
from offload.record.storages import StorageTable, TrackedStorage

NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"})


class Log(Protocol):
    """The recorder of launches.

    Attributes:
        table: the storages met so far.
        launches: the launches so far.
    """

    table: StorageTable
    launches: list[Launch]

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `dispatch`, for an operator that is recorded as it is."""

    def described(self, argument: Any) -> Argument:
        """An argument with tracked tensors, as a Program holds it."""


@dataclasses.dataclass(slots=True)
class _UnderWay:
    """A collective that was started and not waited for.

    Attributes:
        held: the Values that belong to it until it ends.
        met: waits until the peers of the exchange have arrived.
        sending: the Work of a sent message; None for others, which torch finds.
        name: of its operator.
    """

    held: frozenset[int]
    met: Callable[[], None]
    sending: Any
    name: str


class Collectives:
    """The collectives of one recorded call.

    Owner: one LaunchRecorder, on whose thread it is called. It holds no reference to its owner, so
    that a refused recording frees the device's memory at once.

    Attributes:
        under_way: collectives that have started and not ended, by the Value that awaits each.
    """

    def __init__(self, log: Log, rendezvous: Rendezvous | None) -> None:
        self._log: Log = weakref.proxy(log)
        self._rendezvous = rendezvous
        self.under_way: dict[int, _UnderWay] = {}
        self._works: list[Any] = []  # torch looks them up by address later
        self._groups: dict[str, Group] = {}
        self._met: Callable[[], None] = _nobody
        self._sending: Any = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the collectives so far, by name."""
        return tuple(self._groups[name] for name in sorted(self._groups))

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of process groups and record its effect.

        Raises:
            CaptureError: the operator cannot be recorded, or ranks differ.
            ExecutionError: a rank has ended, or is late.
        """
        name = func._schema.name
        namespace, _, base = name.partition("::")
        if namespace == "c10d":
            outcome, work = in_place(self._log.dispatch, base, args)
            self._works.append(work)
            return outcome
        if namespace == "_c10d_functional_autograd":
            same = getattr(torch.ops._c10d_functional, base).default
            return self._log.dispatch(same, args, kwargs)
        if base == "_wrap_tensor_autograd":  # torch waits for it at its first use
            self._wait(args[0])
            return torch.ops.aten.alias.default(args[0])
        if name == WAIT:
            self._wait(args[0])
            return args[0]
        if base == "batch_p2p_ops":
            return self._batch(*args)
        if name not in STARTS:
            raise CaptureError(
                f"{user_location()}: {name} is not a collective that can be recorded"
            )
        return self._start(func, args, kwargs)

    def calling(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a collective's operator, made once the other ranks have come to it."""
        if name == WAIT:
            return self._call_wait(call)

        def called(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            self._meet(name, [self._log.described(one) for one in given])
            with _failures_located(name):
                if name != SENDS or any(map(_is_fake, args)):
                    return call(*args, **kwargs)
                placeholder, self._sending = send(*args, **kwargs)
                return placeholder

        return called

    def finish(self) -> None:
        """Wait for collectives that the call left unawaited, while its modes are active."""
        for work in self._works:
            work.wait()
        for value in list(self.under_way):
            self._wait_for(value)

    def _wait_for(self, value: int) -> None:
        """Wait for the collective that is awaited by a Value, with a tensor on its memory."""
        if value not in self.under_way:  # one wait may end several
            return
        with _disable_current_modes():
            tracked = next(one for one in self._log.table if one.value.index == value)
            content = torch.empty(0, dtype=torch.uint8, device=tracked.storage.device)
            self._wait(content.set_(tracked.storage))

    def _start(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(_by_name(one) for one in args)
        kwargs = {key: _by_name(one) for key, one in kwargs.items()}
        self._settle((*args, *kwargs.values()))
        if func._schema.name in SENT_AS_GIVEN:
            args = (self._without_gaps(args[0]), *args[1:])
        self._met, self._sending = _nobody, None
        outcome = self._log.launch(func, args, kwargs)
        launch = self._log.launches[-1]
        started = _UnderWay(launch.held(), self._met, self._sending, launch.name)
        self.under_way |= dict.fromkeys(launch.writes, started)
        return outcome

    def _settle(self, given: Sequence[Any]) -> None:
        """Wait for operands that an earlier collective still holds."""
        for one in given:
            if isinstance(one, (list, tuple)):
                self._settle(one)
            elif isinstance(one, torch.Tensor) and self._is_under_way(one):
                self._wait(one)

    def settle_writes(self, name: str, touched: Sequence[tuple[Any, TrackedStorage, bool]]) -> None:
        """Wait for collectives that still use memory which an operator is about to write.

        Values are whole storages, and the operator may write another part of one than is exchanged.
        All ranks have started the collective, as they met at its start, so that it ends without
        another step of these ranks. A message does not: its receiver may be later than the write.

        Args:
            name: of the operator.
            touched: its tensors, each with its storage, and whether it writes it.

        Raises:
            CaptureError: a message uses the memory.
        """
        if name == WAIT:
            return
        values = {one.value.index: one for _, one, is_write in touched if is_write}
        for awaited, started in list(self.under_way.items()):
            for value in sorted(started.held & values.keys()):
                if started.name in (SENDS, RECEIVES):
                    raise CaptureError(
                        f"{user_location()}: {values[value].value.name} is written while a message "
                        f"({started.name}) that it, or a part of it, belongs to is under way: wait "
                        "for the message first, or exchange a tensor of its own (a .clone())"
                    )
                self._wait_for(awaited)
                break

    def _without_gaps(self, given: Any) -> Any:
        """Return tensors as process groups send them; operators copy those with gaps themselves."""
        if isinstance(given, (list, tuple)):
            return [self._without_gaps(one) for one in given]
        if given.is_contiguous():
            return given
        layout = {"memory_format": torch.contiguous_format}
        return self._log.dispatch(torch.ops.aten.clone.default, (given,), layout)

    def _is_under_way(self, tensor: torch.Tensor) -> bool:
        tracked = self._log.table.find(tensor)
        return tracked is not None and tracked.value.index in self.under_way

    def _wait(self, tensor: torch.Tensor) -> None:
        """Wait for the collective that a tensor belongs to, if any."""
        if not self._is_under_way(tensor):
            return
        started = self.under_way.pop(self._log.table.of(tensor).value.index)
        self._met, self._sending = started.met, started.sending
        self._log.launch(torch.ops._c10d_functional.wait_tensor.default, (tensor,), {})
        launch = self._log.launches[-1]
        reads = tuple(sorted(started.held.union(launch.reads)))
        self._log.launches[-1] = dataclasses.replace(launch, reads=reads)

    def _call_wait(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waited(tensor: torch.Tensor) -> torch.Tensor:
            self._met()
            if tensor.device.type != "meta" and not _is_fake(tensor):
                with _failures_located(WAIT):
                    if self._sending is None:
                        call(tensor)
                    else:
                        self._sending.wait()
            return tensor

        return waited

    def _meet(self, name: str, arguments: list[Argument]) -> None:
        """Meet the other ranks; for messages between two ranks the wait waits for the peer."""
        group = group_here(group_name(arguments))
        self._groups[group.name] = group
        if self._rendezvous is None:
            return
        meeting = meeting_of(name, arguments, rank_in(group))
        is_message = meeting.sender is not None
        arrival = self._rendezvous.come(meeting, begins_message=is_message)
        if is_message:
            self._met = arrival.wait
        else:
            arrival.wait()

    def _batch(
        self,
        kinds: Sequence[str],
        peers: Sequence[int],
        tags: Sequence[int],
        tensors: Sequence[torch.Tensor],
        group: Any,
    ) -> list[torch.Tensor]:
        operators = torch.ops._c10d_functional
        return [
            self._start(getattr(operators, kind).default, (tensor, peer, tag, group), {})
            for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True)
        ]


def _nobody() -> None:
    """Wait for no rank."""


def _by_name(argument: Any) -> Any:
    """A group by its name, where torch gives the group itself."""
    if isinstance(argument, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(argument).group_name
    return argument


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


@contextlib.contextmanager
def _failures_located(name: str) -> Iterator[None]:
    """Name the line at which a process group failed: a rank has ended, or is late."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            f"{user_location()}: {name}: the process group failed while the call was recorded, as "
            f"when a rank ends or is too late: {error}"
        ) from error
