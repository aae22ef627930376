"""Records launches: what each operator is given, makes and writes, as observed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload import _native
from offload.errors import CaptureError
from offload.program import Argument, Launch, Role, Symbol, TensorView
from offload.record.operators import (
    RESERVE_OPERATORS,
    argument_data,
    arguments_in_order,
    check_plain,
    flat,
    operator_name,
    tensors_in,
    user_location,
)
from offload.record.storages import StorageTable, TrackedStorage


class LaunchRecorder:
    """Turns dispatched operators into Launches over the Values of a StorageTable.

    Owner: one Recorder, on whose thread it is called.

    Attributes:
        table: the storages met so far.
        launches: the launches so far.
        host_reads: notes on reads that became guards.
        generators: those that random operators drew from, with their state before the call.
        allocations: tells tensors made during the call from those made before.
    """

    def __init__(self, table: StorageTable, *, guards_reads: bool) -> None:
        self.table = table
        self.launches: list[Launch] = []
        self.host_reads: list[str] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.allocations = _native.AllocationObserver()
        self._guards_reads = guards_reads
        self._changed_state_at = ""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator below the modes and record it."""
        name = operator_name(func)
        self._check_operator(func, name)
        arguments = arguments_in_order(func, args, kwargs)
        touched = self._before_launch(func, name, arguments)
        outcome = func(*args, **kwargs)
        self._after_launch(func, name, arguments, touched, outcome)
        return outcome

    def _check_operator(self, func: Any, name: str) -> None:
        if torch.Tag.dynamic_output_shape in func.tags and name != "aten::index.Tensor":
            self._require_guard(name, "its result's shape depends on the data")

    def _require_guard(self, what: str, reason: str) -> None:
        place = user_location()
        if not self._guards_reads:
            raise CaptureError(
                f"{place}: {what}: {reason}, which a replay cannot repeat. Compute it with "
                'tensors, pass it as an argument, or capture with host_reads="guard" to have each '
                "execution check that it is as recorded"
            )
        if self._changed_state_at:
            raise CaptureError(
                f"{place}: {what} is guarded, but the call has already changed state at "
                f"{self._changed_state_at}, so a failing guard would come too late: read before "
                "the first change of an input, buffer, parameter or random generator"
            )

    def _before_launch(
        self, func: Any, name: str, arguments: list[Any]
    ) -> list[tuple[torch.Tensor, TrackedStorage, bool]]:
        """Find the storages that the operator is given; keep what it is going to write."""
        touched = []
        for schema, argument in zip(func._schema.arguments, arguments, strict=True):
            is_write = schema.alias_info is not None and schema.alias_info.is_write
            for tensor in tensors_in(argument):
                check_plain(tensor, name)
                tracked = self.track(tensor, name)
                if is_write:
                    tracked.keep_before()
                touched.append((tensor, tracked, is_write))
        if name == "aten::index.Tensor" and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(arguments[1])
        ):
            self._require_guard("indexing with a mask", "its result's shape depends on the data")
        return touched

    def track(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """The storage of a tensor that `name` uses; one not met before is a weight.

        Raises:
            CaptureError: it was made during the call, by work that the recorder cannot see.
        """
        tracked = self.table.find(tensor)
        if tracked is not None:
            return tracked
        identity = tensor.untyped_storage()._cdata
        unseen = (
            tensor.numel() > 0
            and not self.table.knows(identity)
            and name != "aten::lift_fresh"
            and self.allocations.contains(tensor.untyped_storage().data_ptr())
        )
        if unseen:
            raise CaptureError(
                f"{user_location()}: {name} uses a tensor of shape {list(tensor.shape)} that was "
                "made during the call by work that the recorder cannot see (another thread, or an "
                "extension that bypasses torch's dispatcher): move that work to the calling "
                "thread, or before the capture"
            )
        return self.table.add_weight(tensor)

    def _after_launch(
        self,
        func: Any,
        name: str,
        arguments: list[Any],
        touched: list[tuple[torch.Tensor, TrackedStorage, bool]],
        outcome: Any,
    ) -> None:
        if torch.Tag.inplace_view in func.tags:
            self._follow_metadata(touched)
            return
        writes = self._observed_writes(touched)
        outcomes = list(flat(outcome)) if func._schema.returns else []
        made, results = self._track_results(name, outcomes)
        returns_tensor = any(isinstance(one, torch.Tensor) for one in outcomes)
        reads_host = torch.Tag.data_dependent_output in func.tags and not returns_tensor
        if reads_host:
            self._note_host_read(name)
        elif name in RESERVE_OPERATORS or (func._schema.returns and not (made or writes)):
            return  # it reserves memory, makes views, or answers from shapes alone
        random = torch.Tag.nondeterministic_seeded in func.tags
        if (random or any(one.is_state for one in writes)) and not self._changed_state_at:
            self._changed_state_at = user_location()
        self.launches.append(
            Launch(
                index=len(self.launches),
                operator=name,
                arguments=tuple(self._argument(argument) for argument in arguments),
                results=tuple(results),
                reads=_indices(tracked for _, tracked, _ in touched),
                writes=tuple(sorted({*_indices(writes), *made})),
                random=random,
                guard=outcomes[0] if reads_host else None,
                guards_shape=torch.Tag.dynamic_output_shape in func.tags and self._guards_reads,
                source=user_location(),
            )
        )

    def _follow_metadata(self, touched: list[tuple[torch.Tensor, TrackedStorage, bool]]) -> None:
        """After resize_, set_, transpose_ and the like: the tensor may lie elsewhere now."""
        for tensor, tracked, _ in touched:
            current = self.table.find(tensor)
            if current is None:
                self.table.add_made(tensor, "storage", unwritten=True)
            elif (
                current is tracked and tensor.untyped_storage().nbytes() != tracked.nbytes_at_birth
            ):
                self._grown(tensor, tracked)

    def _observed_writes(
        self, touched: list[tuple[torch.Tensor, TrackedStorage, bool]]
    ) -> list[TrackedStorage]:
        writes = []
        for tensor, tracked, is_write in touched:
            current = tracked
            if tensor.untyped_storage().nbytes() != tracked.nbytes_at_birth:
                current = self._grown(tensor, tracked)
            changed = current.changed_since_latest()
            if is_write or changed:
                current.written = True
                writes.append(current)
        return writes

    def _grown(self, tensor: torch.Tensor, tracked: TrackedStorage) -> TrackedStorage:
        if tracked.value.role is not Role.ACTIVATION or tracked.value.size_bytes:
            raise CaptureError(
                f"{user_location()}: {tracked.value.name} was resized in place from "
                f"{tracked.value.size_bytes} to {tensor.untyped_storage().nbytes()} bytes: "
                "allocate it at its final size"
            )
        return self.table.replace_grown(tracked, tensor)

    def _track_results(
        self, name: str, outcomes: list[Any]
    ) -> tuple[set[int], list[TensorView | None]]:
        made: set[int] = set()
        results: list[TensorView | None] = []
        for outcome in outcomes:
            if not isinstance(outcome, torch.Tensor):
                results.append(None)
                continue
            check_plain(outcome, name)
            tracked = self.table.find(outcome)
            if tracked is None:
                label = f"{name.removeprefix('aten::').partition('.')[0]}_{len(self.launches)}"
                tracked = self.table.add_made(outcome, label, unwritten=name in RESERVE_OPERATORS)
                made.add(tracked.value.index)
                results.append(self.table.view(outcome, tracked))
            else:
                results.append(None)
        return made, results

    def _note_host_read(self, name: str) -> None:
        self._require_guard(name, "it reads a tensor's value on the host")
        self.host_reads.append(f"guarded: {name} at {user_location()}")

    def guard_content(self, tensor: torch.Tensor, what: str) -> None:
        """Record that every execution must find these bytes in `tensor` (guard mode only)."""
        self._require_guard(what, "it reads a tensor's values on the host")
        with _disable_current_modes():
            tracked = self.track(tensor, what)
            expected = self.table.add_weight(tensor.detach().clone())
        self.host_reads.append(f"guarded: {what} at {user_location()}")
        view = self.table.view(tensor, tracked)
        other = TensorView(expected.value.index, 0, view.shape, expected.value.strides, view.dtype)
        self.launches.append(
            Launch(
                index=len(self.launches),
                operator="aten::equal",
                arguments=(view, other),
                results=(None,),
                reads=_indices((tracked, expected)),
                writes=(),
                random=False,
                guard=True,
                guards_shape=False,
                source=user_location(),
            )
        )

    def note_generator(self, generator: torch.Generator) -> int:
        """The position of a generator among those used, its state kept at first sight."""
        for position, (known, _) in enumerate(self.generators):
            if known is generator:
                return position
        self.generators.append((generator, generator.get_state()))
        return len(self.generators) - 1

    def _argument(self, argument: Any) -> Argument:
        if isinstance(argument, torch.Tensor):
            tracked = self.table.find(argument)
            assert tracked is not None
            return self.table.view(argument, tracked)
        if isinstance(argument, (list, tuple)):
            return tuple(self._argument(item) for item in argument)
        if isinstance(argument, torch.Generator):
            return Symbol("generator", str(self.note_generator(argument)))
        return argument_data(argument)


def _indices(tracked: Iterable[TrackedStorage]) -> tuple[int, ...]:
    return tuple(sorted({one.value.index for one in tracked}))
