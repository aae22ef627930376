"""Runs a Program launch by launch by torch calls: for the check, the diagnosis and captures."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import CaptureError
from offload.interpreter.device_formats import own_format, plain_alias
from offload.interpreter.torch_names import (
    dtype_name,
    find_dtype,
    find_overload,
    positional_and_named,
    symbol_object,
)
from offload.program import (
    Argument,
    Bindings,
    BoundProgram,
    DeviceFunction,
    Kernel,
    Launch,
    Opaque,
    Program,
    Symbol,
    TensorView,
    TritonCode,
    TritonKernel,
    same_strides,
)

Enqueue = Callable[[DeviceFunction, Sequence[int]], None]
"""Launches compiled kernels on the current stream; takes the address of each Value of the launch.
"""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a uint8 tensor on the same memory, whatever its format.

    A tensor on a storage in a device format counts as being in it, and is converted when copied.
    """
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return plain_alias(content) if own_format(content) else content


def content_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the content of a CPU tensor, row by row. Needs no NumPy."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def host_storage(content: bytes) -> torch.UntypedStorage:
    """New CPU memory with the bytes of a host constant."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().untyped_storage()


def tensor_at(storage: torch.UntypedStorage, base_bytes: int, view: TensorView) -> torch.Tensor:
    """A view of a Value that begins at byte `base_bytes` of a storage, as a tensor on it."""
    tensor = torch.empty(0, dtype=find_dtype(view.dtype), device=storage.device)
    offset = (base_bytes + view.offset_bytes) // tensor.element_size()
    tensor.set_(storage, offset, view.shape, view.strides)
    if view.conjugate:
        tensor = torch._conj(tensor)
    if view.negative:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_() if view.requires_grad else tensor


def flat(outcome: Any) -> list[Any]:
    """The arguments or results of an operator, with lists flattened."""
    if isinstance(outcome, (list, tuple)):
        return [leaf for item in outcome for leaf in flat(item)]
    return [outcome]


class EagerRun:
    """One execution of a Program by plain torch calls, on storages that the caller chooses.

    Attributes:
        bases: for each Value that has memory, its storage and the byte at which it begins there.
    """

    def __init__(
        self,
        bound: BoundProgram,
        bases: dict[int, tuple[torch.UntypedStorage, int]],
        fill: int | None,
        enqueue: Enqueue | None = None,
    ) -> None:
        """Begin before the first launch.

        Args:
            bound: the Program to run.
            bases: the memory of inputs and weights; launches write there.
            fill: the byte that fills Values without initial content; None leaves them unset.
            enqueue: launches compiled kernels; None: the Program has none.
        """
        self._enqueue = enqueue
        self.bases = bases
        self._program = bound.program
        self._bindings = bound.bindings
        self._fill = fill

    def operands(self, launch: Launch) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword-only arguments of a launch, on the present memory."""
        arguments = [self._argument(one) for one in launch.arguments]
        return positional_and_named(find_overload(launch.name), arguments)

    def call(self, launch: Launch) -> functools.partial[Any]:
        """The launch as a function without arguments, which may be called repeatedly.

        For an opaque launch it returns the tensors of its results, and writes weights in place.

        Raises:
            CaptureError: a host constant that an opaque callee holds, and would read, differs from
                the recorded value. The function raises it for a Triton kernel that cannot be
                launched here.
        """
        if isinstance(launch.callee, Opaque):
            _check_host_constants(self._program, self._bindings)
            function = self._bindings.callables[launch.callee.index]
            return functools.partial(function, [self.tensor(one) for one in launch.views()])
        if isinstance(launch.callee, Kernel):
            return functools.partial(self._run_kernels, launch, launch.callee)
        if isinstance(launch.callee, TritonKernel):
            return functools.partial(self._run_triton, launch, launch.callee)
        positional, named = self.operands(launch)
        return functools.partial(find_overload(launch.name), *positional, **named)

    def _run_kernels(self, launch: Launch, callee: Kernel) -> list[torch.Tensor]:
        """Let a device run compiled kernels; return what they make, scratch memory included."""
        function = self._bindings.kernels[callee.index]
        assert isinstance(function, DeviceFunction)
        assert self._enqueue is not None
        given = [self.tensor(view) for view in launch.views()]
        made = [
            torch.empty_strided(
                view.shape, view.strides, dtype=find_dtype(view.dtype), device=self._program.device
            )
            for view in launch.made()
        ]
        self._enqueue(function, [one.data_ptr() for one in (*given, *made)])
        return made

    def _run_triton(self, launch: Launch, kernel: TritonKernel) -> None:
        """Launch a Triton kernel: its compiled code where a device runs that, else by Triton."""
        code = self._bindings.triton.get(kernel, TritonCode())
        arguments = [self._argument(one) for one in launch.arguments]
        if self._enqueue is not None and code.compiled is not None:
            addresses = [one.data_ptr() for one in arguments if isinstance(one, torch.Tensor)]
            self._enqueue(DeviceFunction((kernel.call(launch, code.compiled),)), addresses)
        elif code.launch is not None:
            code.launch(arguments)
        else:
            raise CaptureError(
                f"{launch.source}: {launch.name} is a Triton kernel, which only a GPU runs: load "
                'with device="cuda"'
            )

    def keep(self, launch: Launch, outcome: Any) -> None:
        """Place the Values that a launch makes where its outcome is.

        Raises:
            CaptureError: a result has another shape or dtype than recorded, other strides of
                dimensions with several elements, or for an opaque launch is in other memory.
        """
        if isinstance(launch.callee, Opaque):
            self._keep_opaque(launch, outcome)
            return
        if isinstance(launch.callee, TritonKernel):  # it makes nothing
            return
        results = zip(launch.results, flat(outcome), strict=bool(launch.results))
        for number, (result, tensor) in enumerate(results):
            if result is not None:
                shape, strides = tuple(tensor.shape), tensor.stride()
                if (shape, dtype_name(tensor.dtype)) != (
                    result.shape,
                    result.dtype,
                ) or not same_strides(shape, strides, result.strides):
                    self._refuse_result(launch, number, result, tensor)
                self.bases[result.value] = (tensor.untyped_storage(), 0)

    def _refuse_result(
        self, launch: Launch, number: int, recorded: TensorView, found: torch.Tensor
    ) -> NoReturn:
        advice = (
            "with weights= nothing was computed, and torch's fake tensors have another result "
            f"than {self._program.device}: capture without weights=, or use another operator"
            if self._bindings.stored
            else (
                "the same call must give results of the same layout each time: find what else "
                "it depends on, and capture again"
            )
        )
        raise CaptureError(
            f"{launch.source}: {launch.name}, result {number}: got {dtype_name(found.dtype)} "
            f"{list(found.shape)} with strides {list(found.stride())}, where {recorded.dtype} "
            f"{list(recorded.shape)} with strides {list(recorded.strides)} was recorded: {advice}"
        )

    def _keep_opaque(self, launch: Launch, outcome: Any) -> None:
        """The same as `keep`; a result may be in an input, in a weight or beside another result."""
        known = {storage._cdata for storage, _ in self.bases.values()}
        for number, (result, made, tensor) in enumerate(
            zip(self._program.results, launch.results, outcome, strict=True)
        ):
            view, storage = result.view, tensor.untyped_storage()
            if made is not None and storage._cdata not in known:
                self.bases[view.value] = (storage, 0)
            base, base_bytes = self.bases.get(view.value, (None, 0))
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size() - base_bytes
            is_there = base is not None and storage._cdata == base._cdata
            is_whole = made is None or storage.nbytes() == self._size_bytes(view)
            if view != _described(view.value, tensor, offset_bytes) or not (is_there and is_whole):
                raise CaptureError(
                    f"{launch.source}: result {number} differed when the callable ran again on "
                    f"the same inputs: expected {view} of {self._size_bytes(view)} bytes, got "
                    f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} "
                    f"{'in' if is_there else 'in other memory than'} the recorded place"
                )

    def _size_bytes(self, view: TensorView) -> int:
        return self._program.values[view.value].size_bytes

    def tensor(self, view: TensorView) -> torch.Tensor:
        """A view of a Value, which gets memory (filled) if it has none."""
        if view.value not in self.bases:
            size_bytes = self._program.values[view.value].size_bytes
            content = torch.empty(size_bytes, dtype=torch.uint8, device=self._program.device)
            storage = content.untyped_storage()
            if self._fill is not None:
                bytes_of(storage).fill_(self._fill)
            self.bases[view.value] = (storage, 0)
        return tensor_at(*self.bases[view.value], view)

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, TensorView):
            return self.tensor(argument)
        if isinstance(argument, tuple):
            return [self._argument(item) for item in argument]
        if isinstance(argument, Symbol):
            return symbol_object(argument, self._bindings)
        return argument


def _check_host_constants(program: Program, bindings: Bindings) -> None:
    """Check that host constants that a callable reads itself are as recorded.

    Executions are compared with the recording, which would not reveal that a capture differs.

    Raises:
        CaptureError: one of them has another value now.
    """
    for index, holders in bindings.weights.items():
        value = program.values[index]
        if value.host_content is None:
            continue
        for holder, view in zip(holders, program.weight_views[index], strict=True):
            begin = int(holder.storage_offset()) * holder.element_size()
            size_bytes = view.end_bytes - view.offset_bytes
            content = bytes_of(holder.untyped_storage())[begin : begin + size_bytes]
            is_here = holder.device.type == "cpu"
            recorded = value.host_content[view.offset_bytes : view.end_bytes]
            if not is_here or bytes(content.tolist()) != recorded:
                raise CaptureError(
                    f"{value.name}, a tensor on the CPU, has changed since it was recorded: the "
                    "program is one opaque launch, which calls the model itself, and its kernels "
                    "would use the new value; change it back, or capture again"
                )


def _described(value: int, tensor: torch.Tensor, offset_bytes: int) -> TensorView:
    return TensorView(
        value,
        0 if 0 in tensor.shape else offset_bytes,
        tuple(tensor.shape),
        tensor.stride(),
        dtype_name(tensor.dtype),
        tensor.is_conj(),
        tensor.is_neg(),
    )
