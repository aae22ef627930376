"""Executables: a Program resident on a device, executed at new addresses."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
from typing import Any

import torch

from offload import _native
from offload.arguments import plain_places, tensors_of_call
from offload.backends import Backend, LaunchReport, Loaded, native_layout
from offload.errors import BindingError, CaptureError
from offload.plan import Plan, SlotKind
from offload.program import ITEM_BYTES, Program, Role
from offload.structure import Structure, unflatten

atexit.register(_native.close_all_lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class LastExecution:
    """What one execution did.

    Attributes:
        convert_ns: arguments checked, outputs allocated, addresses bound.
        policy_ns: deciding what changed.
        patch_ns: writing the words that depend on it.
        submit_ns: until the first launch began.
        device_ns: the launches.
        policy: `none`, `io` (inputs or outputs moved) or `all` (feature map or weights too).
        slots_changed, words_patched: how much of the header changed.
        bytes_copied: because a tensor could not be used where it lay.
        n_executions: of this executable, this one included.
    """

    convert_ns: int
    policy_ns: int
    patch_ns: int
    submit_ns: int
    device_ns: int
    policy: str
    slots_changed: int
    words_patched: int
    bytes_copied: int
    n_executions: int

    @property
    def m_l_t_ns(self) -> int:
        """The header's duration: convert, policy, patch and submit."""
        return self.convert_ns + self.policy_ns + self.patch_ns + self.submit_ns

    def __str__(self) -> str:
        return (
            f"m_l_t {self.m_l_t_ns / 1e3:.2f} us = convert {self.convert_ns / 1e3:.2f} + policy "
            f"{self.policy_ns / 1e3:.2f} + patch {self.patch_ns / 1e3:.2f} + submit "
            f"{self.submit_ns / 1e3:.2f}; device {self.device_ns / 1e3:.2f} us; policy "
            f"{self.policy}: {self.slots_changed} slots changed, {self.words_patched} words "
            f"patched, {self.bytes_copied} bytes copied"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of an executable, in bytes.

    Attributes:
        feature_map_bytes: the arena.
        lower_bound_bytes: no arena for these activations can be smaller.
        unshared_bytes: what they would take without sharing.
        outside_bytes: allocated by operators at each execution, outside the arena, results
            included; None before the first execution counted it.
        weight_bytes: the weights, held by reference.
    """

    feature_map_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    outside_bytes: int | None
    weight_bytes: int


class Ticket:
    """An execution that was submitted. Dropping it does not stop the execution."""

    def __init__(self, native: _native.Ticket) -> None:
        self._native = native

    def done(self) -> bool:
        """Whether the execution has ended, well or not."""
        return self._native.done()

    def wait(self) -> None:
        """Block until the execution has ended.

        Raises:
            ExecutionError: a launch failed.
            BindingError: a guard found another value than the recorded one.
        """
        self._native.wait()

    def result(self) -> Any:
        """Wait, and return what the model returns; the same objects at each call.

        Raises:
            ExecutionError, BindingError: as `wait`.
        """
        return self._native.result()


class Executable:
    """A Program resident on a device: loaded, executed, closed.

    Owner of the arena. Calls from several threads are safe and run one at a time; tickets run in
    the order of submission. Made by `Captured.load`.
    """

    def __init__(self, program: Program, plan: Plan, backend: Backend) -> None:
        self.program = program
        self.plan = plan
        self._backend = backend
        self._loaded = backend.instantiate(program, plan)
        self._native = _native_replay(program, plan, self._loaded)

    def __call__(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Execute the program and return what the model returns.

        Args:
            *args: what the model takes; **kwargs likewise.
            out: buffers for the results, nested like them; None entries are allocated.
            feature_map: uint8 memory of at least `feature_map_bytes` for the activations.
            **kwargs: see *args.

        Raises:
            BindingError: an argument does not fit; nothing has run. Or a guard found another
                value than the recorded one; no input, weight or generator has changed.
            ExecutionError: a launch failed, or the executable is closed.
        """
        if out is None and feature_map is None:
            return self._native(*args, **kwargs)
        _check_feature_map(feature_map)
        return self._native.execute(args, kwargs, self._buffers(out), feature_map)

    def submit(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Queue an execution and return at once; arguments as in a call.

        Inputs and buffers must not be written until the ticket is done; they are kept alive.

        Raises:
            BindingError: an argument does not fit.
            ExecutionError: the executable is closed.
        """
        _check_feature_map(feature_map)
        return Ticket(self._native.submit(args, kwargs, self._buffers(out), feature_map))

    def _buffers(self, out: Any) -> list[torch.Tensor | None] | None:
        if out is None:
            return None
        buffers: list[torch.Tensor | None] = [None] * len(self.program.results)
        _take_buffers(self.program.result_structure, out, "out", buffers)
        return buffers

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, after `param.data = ...`.

        Raises:
            BindingError: a new storage is laid out otherwise than the recorded one.
        """
        self._native.rebind_weights()

    def close(self) -> None:
        """Wait for what is in flight and give the arena back. Closing twice is fine."""
        self._native.close()

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._native.closed

    @property
    def device(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def feature_map_bytes(self) -> int:
        """The bytes that a `feature_map=` tensor must have."""
        return self.plan.feature_map_bytes

    @property
    def last_execution(self) -> LastExecution:
        """What the latest finished execution did; all zero before the first."""
        last = self._native.last_execution
        return LastExecution(
            **{field.name: getattr(last, field.name) for field in dataclasses.fields(LastExecution)}
        )

    def launch_reports(self) -> tuple[LaunchReport, ...]:
        """How each launch is carried out, in program order."""
        return self._loaded.launch_reports()

    def memory_report(self) -> MemoryReport:
        """The executable's memory by kind."""
        counted = self.last_execution.n_executions > 0
        outside = sum(report.outside_bytes for report in self.launch_reports())
        return MemoryReport(
            feature_map_bytes=self.plan.feature_map_bytes,
            lower_bound_bytes=self.plan.lower_bound_bytes,
            unshared_bytes=self.plan.unshared_bytes,
            outside_bytes=outside if counted else None,
            weight_bytes=sum(slot.size_bytes for slot in self.plan.of_kind(SlotKind.WEIGHT)),
        )


def _check_feature_map(feature_map: object) -> None:
    if feature_map is not None and not isinstance(feature_map, torch.Tensor):
        raise BindingError(
            f"feature_map: expected a uint8 tensor, got a {type(feature_map).__qualname__}"
        )


def _take_buffers(
    structure: Structure, out: Any, where: str, buffers: list[torch.Tensor | None]
) -> None:
    """Fill `buffers`, by leaf, from an `out=` that is nested like the result.

    Raises:
        BindingError: it is nested otherwise, or holds something else than tensors and None.
    """
    if out is None:
        return
    if structure.kind == "tensor":
        if not isinstance(out, torch.Tensor):
            raise BindingError(
                f"{where}: expected a tensor or None, got a {type(out).__qualname__}"
            )
        if buffers[structure.leaf] is not None and buffers[structure.leaf] is not out:
            raise BindingError(f"{where}: two buffers for one tensor of the result")
        buffers[structure.leaf] = out
        return
    items: list[Any]
    if hasattr(out, "keys") and structure.keys:
        if set(out.keys()) - set(structure.keys):
            raise BindingError(
                f"{where}: expected keys among {list(structure.keys)}, got {list(out.keys())}"
            )
        items = [out.get(key) for key in structure.keys]
    elif isinstance(out, (list, tuple)) and len(out) == len(structure.children):
        items = list(out)
    else:
        raise BindingError(
            f"{where}: expected buffers nested like the result, {len(structure.children)} items, "
            f"got a {type(out).__qualname__}"
        )
    for position, (child, item) in enumerate(zip(structure.children, items, strict=True)):
        _take_buffers(child, item, f"{where}[{position}]", buffers)


# ---- the native side of a Program ---------------------------------------------------------------

_TRIGGERS = {
    SlotKind.INPUT: _native.Trigger.IO,
    SlotKind.OUTPUT: _native.Trigger.IO,
    SlotKind.WEIGHT: _native.Trigger.WEIGHT,
    SlotKind.FEATURE_MAP: _native.Trigger.FEATURE_MAP,
    SlotKind.OPERATOR: _native.Trigger.INTERNAL,
}


def _native_replay(program: Program, plan: Plan, loaded: Loaded) -> _native.Replay:
    positional, keyword = plain_places(program)
    structure = program.result_structure
    return _native.Replay(
        spec=_call_spec(program, plan, loaded.operator_allocated),
        triggers=[_TRIGGERS[slot.kind] for slot in plan.slots],
        resident=loaded.resident,
        positional=positional,
        keyword=keyword,
        match=functools.partial(tensors_of_call, program),
        result_form=_result_form(structure, len(program.results)),
        build_result=lambda tensors: unflatten(structure, tensors),
    )


def _result_form(structure: Structure, n_results: int) -> str:
    """`tensor`, `list` or `tuple` where the native side can build the result, else `other`."""
    if structure.kind == "tensor":
        return "tensor"
    leaves = [child.leaf for child in structure.children]
    plain = structure.kind in ("list", "tuple") and leaves == list(range(n_results))
    if plain and structure.container in (list, tuple, None):
        return structure.kind
    return "other"


def _call_spec(
    program: Program, plan: Plan, operator_allocated: frozenset[int]
) -> _native.CallSpec:
    written = {index for launch in program.launches for index in launch.writes}
    aliased = {result.view.value for result in program.results if result.input_leaf < 0}

    def slot_of(value: int) -> int:
        place = plan.places[value]
        if place is None:
            raise CaptureError(f"%{value} has no slot")
        return place.slot

    outputs = program.of_role(Role.OUTPUT)
    weights = program.of_role(Role.WEIGHT)
    return _native.CallSpec(
        device="cpu" if program.device == "cpu" else program.device,
        inputs=[
            _native.InputSpec(
                name=program.values[view.value].name,
                layout=native_layout(view),
                slot=slot_of(view.value),
                written=view.value in written,
                returned_as_view=view.value in aliased,
            )
            for view in program.inputs
        ],
        outputs=[
            _native.OutputSpec(
                name=value.name,
                slot=slot_of(value.index),
                size_bytes=value.size_bytes,
                operator_allocated=value.index in operator_allocated,
            )
            for value in outputs
        ],
        results=_result_specs(program),
        weights=[
            _native.WeightSpec(
                name=value.name,
                slot=slot_of(value.index),
                size_bytes=value.size_bytes,
                written=value.index in written,
                holders=list(program.weights[value.index]),
                layouts=[native_layout(view) for view in program.weight_views[value.index]],
                offsets=[
                    view.offset_bytes // ITEM_BYTES[view.dtype]
                    for view in program.weight_views[value.index]
                ],
            )
            for value in weights
        ],
        overlaps=[
            _native.OverlapSpec(
                first=one.first, second=one.second, distance_bytes=one.distance_bytes
            )
            for one in program.overlaps
        ],
        feature_map_slot=plan.feature_map.index,
        feature_map_bytes=plan.feature_map_bytes,
        alignment_bytes=plan.alignment_bytes,
    )


def _result_specs(program: Program) -> list[_native.ResultSpec]:
    sources = {
        Role.INPUT: (_native.ResultSource.INPUT, [view.value for view in program.inputs]),
        Role.WEIGHT: (_native.ResultSource.WEIGHT, _indices(program, Role.WEIGHT)),
        Role.OUTPUT: (_native.ResultSource.OUTPUT, _indices(program, Role.OUTPUT)),
    }
    n_of_value: dict[int, int] = {}
    for result in program.results:
        n_of_value[result.view.value] = n_of_value.get(result.view.value, 0) + 1
    specs = []
    for result in program.results:
        value = program.values[result.view.value]
        source, indices = sources[value.role]
        n_bytes = math.prod(result.view.shape) * ITEM_BYTES[result.view.dtype]
        covers = result.view.offset_bytes == 0 and n_bytes == value.size_bytes
        specs.append(
            _native.ResultSpec(
                source=source,
                index=indices.index(value.index),
                offset_bytes=result.view.offset_bytes,
                layout=native_layout(result.view),
                is_argument=result.input_leaf >= 0,
                covers_output=covers and n_of_value[value.index] == 1,
            )
        )
    return specs


def _indices(program: Program, role: Role) -> list[int]:
    return [value.index for value in program.of_role(role)]
