"""Captures a callable's own work: each operator becomes a simulated kernel, and nothing executes.

A dispatch mode sees torch's operators. Code that bypasses torch, such as a raw kernel, asks
`current_capture` for the captured stream, and launches there itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from offload.backends.captured.relocation.captures import Allocation
from offload.errors import CaptureError
from offload.interpreter.eager_run import flat
from offload.interpreter.torch_names import dtype_name
from offload.program import Launch, Operator, Program, Role, TensorView, Value, span_bytes
from offload.program.structure import Structure
from offload.record.operators import argument_data, operator_of

_EMPTY = Structure("tuple")


class Capture:
    """One capture of a callable.

    Attributes:
        stream: the captured stream.
        allocations: in the order in which they were made.
        on_host: the addresses of host constants, whose content kernels take at launch.
    """

    def __init__(self, stream: Any, pool: Any, launch: Callable[[Program, dict[int, int]], None]):
        self.stream = stream
        self.on_host: set[int] = set()
        self.allocations: list[Allocation] = []
        self.tensors: list[torch.Tensor] = []  # kept alive: storages stay unique
        self._pool = pool
        self._launch = launch

    def memory(self, size_bytes: int, value: int | None = None) -> torch.UntypedStorage:
        """Memory of the pool, as a storage that torch treats as the host's."""
        address = self._pool.allocate(max(1, size_bytes))
        self.allocations.append(Allocation(address, max(1, size_bytes), value))
        memory = (ctypes.c_char * max(1, size_bytes)).from_address(address)
        content = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
        self.tensors.append(content)
        return content.untyped_storage()

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch an operator as a kernel; its results are new memory, or views of existing."""
        operator = operator_of(func)
        arguments = operator.in_order(args, kwargs)
        if operator.reads_host:
            raise CaptureError(f"{operator.name} cannot be captured: it waits for the device")
        found = [one for one in flat(arguments) if isinstance(one, torch.Tensor)]
        copies = _zeros_like_storages(found)
        outcome = func(*_on(copies, args), **_on(copies, kwargs))
        values = {one.untyped_storage()._cdata: None for one in found}
        originals = {copies[one._cdata]._cdata: one for one in map(_storage, found)}
        made: list[torch.Tensor] = []

        def placed(one: Any) -> Any:
            if isinstance(one, (list, tuple)):
                return type(one)(map(placed, one))
            if not isinstance(one, torch.Tensor):
                return one
            storage = originals.get(one.untyped_storage()._cdata)
            if storage is None:
                storage = self.memory(one.untyped_storage().nbytes())
                originals[one.untyped_storage()._cdata] = storage
                made.append(_tensor(storage, one))
                return made[-1]
            same = (known for known in found if _is_same(known, storage, one))
            return (
                next(same, None)
                if operator.returns and _writes(operator)
                else _tensor(storage, one)
            )

        results = placed(outcome)
        self.tensors += made
        is_launch = (made or _writes(operator)) and not operator.reserves
        if is_launch:
            storages = [*dict.fromkeys(values), *(_storage(one)._cdata for one in made)]
            self._as_kernel(operator.name, arguments, made, storages, flat(results))
        return results

    def _as_kernel(self, name, arguments, made, storages, results) -> None:
        number = {identity: index for index, identity in enumerate(storages)}
        tensors = [one for one in flat(arguments) if isinstance(one, torch.Tensor)] + made
        values, addresses = [], {}
        for identity, index in number.items():
            storage = next(map(_storage, (t for t in tensors if _storage(t)._cdata == identity)))
            size_bytes, address = storage.nbytes(), storage.data_ptr()
            content = ctypes.string_at(address, size_bytes) if address in self.on_host else None
            values.append(Value(index, Role.INPUT, (), (), "uint8", size_bytes, "", content))
            addresses[index] = address

        def described(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return _view(one, number[_storage(one)._cdata])
            if isinstance(one, (list, tuple)):
                return tuple(map(described, one))
            return argument_data(one)

        views = tuple(
            described(one) if any(one is other for other in made) else None for one in results
        )
        launch = Launch(
            0,
            Operator(name),
            tuple(map(described, arguments)),
            views,
            (),
            (),
            False,
            None,
            False,
            "",
        )
        program = Program("cpu", tuple(values), (launch,), (), (), _EMPTY, _EMPTY)
        self._launch(program, addresses)


_current = threading.local()  # as a library's current stream: where the recorder does not look


def current_capture() -> Capture | None:
    """Return the capture in progress, from which torch gives kernel launchers their stream."""
    found: Capture | None = getattr(_current, "capture", None)
    return found


@contextlib.contextmanager
def capturing(capture: Capture, *, sees_operators: bool) -> Iterator[None]:
    """Let called code launch into a capture: operators too, or only a compiler's own."""
    _current.capture = capture
    try:
        with CapturingMode(capture) if sees_operators else contextlib.nullcontext():
            yield
    finally:
        del _current.capture


class CapturingMode(TorchDispatchMode):
    """Turns operators into kernels of a capture."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._can_decompose():
            with self:
                outcome = func.decompose(*args, **(kwargs or {}))
            if outcome is not NotImplemented:
                return outcome
        with _disable_current_modes():
            return self._capture.operator(func, args, kwargs or {})


def compiler(graph_module: Any, example_inputs: Any) -> Callable[..., Any]:
    """A torch.compile backend whose code launches by itself, below the level that modes see.

    torch runs compiled code under no other mode, so it enters the capture's mode.
    """

    def run(*args: Any) -> Any:
        capture = current_capture()
        with contextlib.nullcontext() if capture is None else CapturingMode(capture):
            return graph_module(*args)

    return run


def _writes(operator: Any) -> bool:
    return any(operator.declares_write)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _zeros_like_storages(tensors: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return by identity a storage of zeros of the same size, valid indices anywhere."""
    copies = {}
    for one in tensors:
        storage = one.untyped_storage()
        if storage._cdata not in copies:
            content = torch.zeros(storage.nbytes(), dtype=torch.uint8)
            copies[storage._cdata] = content.untyped_storage()
    return copies


def _on(copies: dict[int, torch.UntypedStorage], thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return _tensor(copies[thing.untyped_storage()._cdata], thing)
    if isinstance(thing, (list, tuple)):
        return [_on(copies, one) for one in thing]
    if isinstance(thing, dict):
        return {key: _on(copies, one) for key, one in thing.items()}
    return thing


def _tensor(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype)
    tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
    if like.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if like.is_neg() else tensor


def _is_same(known: torch.Tensor, storage: torch.UntypedStorage, one: torch.Tensor) -> bool:
    return known.untyped_storage()._cdata == storage._cdata and (
        (known.storage_offset(), known.shape, known.stride(), known.dtype)
        == (one.storage_offset(), one.shape, one.stride(), one.dtype)
    )


def _view(tensor: torch.Tensor, value: int) -> TensorView:
    dtype, shape, strides = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()
    offset_bytes = tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0
    assert span_bytes(shape, strides, dtype) + offset_bytes <= tensor.untyped_storage().nbytes()
    bits = tensor.is_conj(), tensor.is_neg()
    return TensorView(value, offset_bytes, shape, strides, dtype, *bits)
