"""Torch's operators on tensors of the stand-in: each is a kernel on the current stream.

Shapes and strides of results are those of the operator on the CPU, on zeros. The kernel runs the
operator on the CPU, on the content at the addresses in its argument block at execution.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from aten_capturer import launch_kernel
from aten_kernel import AtenKernel
from opaque_capturing import _is_same, _view, _writes

from offload.backends.cuda.graph import call, driver_bindings
from offload.interpreter.eager_run import flat
from offload.program import BoundProgram, Launch, Operator, Program, Role, Value
from offload.program.structure import Structure
from offload.record.operators import argument_data, operator_of

_EMPTY = Structure("tuple")
_COPIES = {"aten::copy_", "aten::_copy_from"}
_REDUCTIONS = ("aten::sum", "aten::mean", "aten::_softmax")
_WITH_SCRATCH = ("aten::flip",)
_SCRATCH_BYTES = 8192
# Operators that launch another one's kernels.
_KERNELS_OF = {"aten::_native_batch_norm_legit": "aten::native_batch_norm"}
_PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm")


class Operators:
    """Runs operators. Thread: any, one at a time.

    Attributes:
        workspace: memory for a product on a stream, of torch's allocator.
    """

    def __init__(self, simulator: Any, workspace: Callable[[], int]) -> None:
        self._simulator = simulator
        self._kernels: dict[str, tuple[AtenKernel, int]] = {}
        self._workspace = workspace

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch one operator; the fallback of the dispatch key CUDA."""
        operator = operator_of(func)
        if operator.name in _COPIES and self._copied(args):
            return args[0]
        arguments = operator.in_order(args, kwargs)
        if operator.name == "aten::_local_scalar_dense":
            return self._to_host(args[0]).item()
        if operator.name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(args[0])
        if operator.name == "aten::equal":
            return torch.equal(*map(self._to_host, args))
        found = [one for one in flat(arguments) if isinstance(one, torch.Tensor)]
        copies = _zeros(found)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        outcome = func(*_on_host(copies, args, pairs), **_on_host(copies, kwargs, pairs))
        assert not isinstance(outcome, bool), f"{operator.name} reads tensors"
        for tensor, there in pairs:
            if tensor.shape != there.shape:  # a result buffer of another size
                storage = memory_of(there.untyped_storage().nbytes())
                copies[storage._cdata] = there.untyped_storage()
                tensor.set_(storage, 0, there.shape, there.stride())
        originals = {
            copies[one.untyped_storage()._cdata]._cdata: one.untyped_storage() for one in found
        }
        made: list[torch.Tensor] = []

        def place(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            storage = originals.get(one.untyped_storage()._cdata)
            if storage is None:
                storage = memory_of(one.untyped_storage().nbytes())
                originals[one.untyped_storage()._cdata] = storage
                made.append(_at(storage, one))
                return made[-1]
            same = (known for known in found if _is_same(known, storage, one))
            return next(same, None) if _writes(operator) else _at(storage, one)

        if operator.name in _WITH_SCRATCH:
            scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
            call("cuMemsetD8Async", scratch.data_ptr(), 0, _SCRATCH_BYTES, _stream())
            del scratch  # where its first result will lie
        results = _in_lists(place, outcome)
        if (made or _writes(operator)) and not operator.reserves:
            self._launch(operator.name, arguments, made, flat(results))
        return results

    def _launch(self, name: str, arguments: Any, made: Any, results: Any) -> None:
        tensors = [one for one in flat(arguments) if isinstance(one, torch.Tensor)] + made
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
        number = {identity: index for index, identity in enumerate(storages)}
        values, addresses = [], {}
        for index, storage in enumerate(storages.values()):
            size_bytes, address = storage.nbytes(), storage.data_ptr()
            is_host = storage.device.type == "cpu"
            content = ctypes.string_at(address, size_bytes) if is_host else None
            values.append(Value(index, Role.INPUT, (), (), "uint8", size_bytes, "", content))
            addresses[index] = address

        def describe(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return _view(one, number[one.untyped_storage()._cdata])
            return argument_data(one)

        views = tuple(
            describe(one) if any(one is other for other in made) else None for one in results
        )
        operands = tuple(_in_lists(describe, one, tuple) for one in arguments)
        launch = Launch(
            0, Operator(name), operands, views, (), (), False, None, False, ""
        )  # fmt: skip
        program = Program("cpu", tuple(values), (launch,), (), (), _EMPTY, _EMPTY)
        self._as_kernel(name, program, addresses)

    def _as_kernel(self, name: str, program: Program, addresses: dict[int, int]) -> None:
        key = repr((program.launches, [value.size_bytes for value in program.values]))
        if key not in self._kernels:
            kernel = AtenKernel(BoundProgram(program), program.launches[0])
            sizes = kernel.sizes
            if name.split(".", maxsplit=1)[0] in _PRODUCTS:  # operators that are given a workspace
                sizes = (*sizes, 8)
            function = self._simulator.kernel(
                _KERNELS_OF.get(name, name).removesuffix(".out"),
                sizes,
                _without_workspace(kernel),
            )
            self._kernels[key] = kernel, function
        kernel, function = self._kernels[key]
        # Kernels take values of the host at launch, so they differ from call to call.
        kernel.program = program
        block = kernel.arguments(addresses)
        sizes = kernel.sizes
        if name.split(".", maxsplit=1)[0] in _PRODUCTS:
            sizes = (*sizes, 8)
            block += self._workspace().to_bytes(8, "little")
        if name.startswith(_REDUCTIONS):  # whose semaphores are cleared in separate memory
            semaphores = torch.empty(64, dtype=torch.uint8, device="cuda")
            call("cuMemsetD8Async", semaphores.data_ptr(), 0, 64, _stream())
        launch_kernel(_stream(), function, sizes, block)

    # ---- copies --------------------------------------------------------------------------------

    def _copied(self, args: Any) -> bool:
        """Copy between host and device, by the driver; return whether it was such a copy."""
        target, source = args[0], args[1]
        if target.device.type == source.device.type:
            return False
        n_bytes = target.numel() * target.element_size()
        if target.device.type == "cuda":
            content = source.to(target.dtype).expand_as(target).contiguous()
            assert target.is_contiguous(), "the stand-in copies to contiguous memory"
            if n_bytes:
                call("cuMemcpyHtoDAsync", target.data_ptr(), content.data_ptr(), n_bytes, _stream())
                call("cuStreamSynchronize", _stream())  # as torch does for pageable memory
            return True
        target.copy_(self._to_host(source))
        return True

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        content = torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage.nbytes():
            where = content.data_ptr(), storage.data_ptr(), storage.nbytes()
            call("cuMemcpyDtoHAsync", *where, _stream())
            call("cuStreamSynchronize", _stream())
        return _at(content.untyped_storage(), tensor).clone()


def _in_lists(change: Callable[[Any], Any], thing: Any, kind: Any = None) -> Any:
    """Apply `change` to each leaf of lists and tuples.

    No recursive closure: its cycle would keep tensors until a garbage collection, which a capture
    does not run.
    """
    if isinstance(thing, (list, tuple)):
        return (kind or type(thing))(_in_lists(change, one, kind) for one in thing)
    return change(thing)


def memory_of(n_bytes: int) -> torch.UntypedStorage:
    """Memory of torch's allocator; `torch.UntypedStorage` supports no device that torch lacks."""
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda").untyped_storage()


def _without_workspace(kernel: AtenKernel) -> Callable[[bytes], None]:
    def run(block: bytes) -> None:
        kernel.execute(block[: sum(kernel.sizes)])

    return run


def _stream() -> Any:
    handle = torch.cuda.current_stream().cuda_stream
    return driver_bindings().CUstream(init_value=handle)


def _at(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=storage.device)
    tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
    if like.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if like.is_neg() else tensor


def _zeros(tensors: list[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return by identity a host storage of zeros of the same size; a host storage unchanged."""
    found = {}
    for one in tensors:
        storage = one.untyped_storage()
        if storage.device.type == "cpu":
            found[storage._cdata] = storage
        elif storage._cdata not in found:
            content = torch.zeros(storage.nbytes(), dtype=torch.uint8)
            found[storage._cdata] = content.untyped_storage()
    return found


def _on_host(
    copies: dict[int, torch.UntypedStorage],
    thing: Any,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """Return an argument on the host; `pairs` collects each tensor with its replacement."""
    if isinstance(thing, torch.Tensor):
        pairs.append((thing, _at(copies[thing.untyped_storage()._cdata], thing)))
        return pairs[-1][1]
    if isinstance(thing, (list, tuple)):
        return [_on_host(copies, one, pairs) for one in thing]
    if isinstance(thing, dict):
        return {key: _on_host(copies, one, pairs) for key, one in thing.items()}
    if isinstance(thing, torch.device):
        return torch.device("cpu")
    return thing
