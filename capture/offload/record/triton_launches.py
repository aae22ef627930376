"""Records the kernels that a call launches through Triton, each as a launch of a `TritonKernel`.

Triton's launches do not pass torch's dispatcher. During a recording the methods by which Triton
runs kernels (`JITFunction.run`, `InterpretedFunction.run`; triton/runtime/jit.py and
interpreter.py, 3.7) are replaced. Only launches that the recorder's mode would see are recorded:
those inside an operator belong to it, except in the body of a `torch.library.triton_op`, whose
launches and operators are recorded one by one. Triton's own functions say how it would compile a
kernel for its arguments (`create_function_from_signature`, `JITFunction._pack_args`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._library.triton import set_wrap_triton_enabled
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.torch_names import dtype_name
from offload.program import DeviceKernel, Symbol, TritonCode, TritonKernel
from offload.program.triton_kernels import CONSTANT, SCALAR_BYTES, Constant
from offload.record.launches import LaunchRecorder
from offload.record.operators import tensors_in
from offload.record.replaced import is_watched_by, replaced
from offload.record.triton_sources import (
    UnknownSource,
    defined_name,
    is_function,
    jit_function,
    source_of,
)

CompileTriton = Callable[[TritonKernel, torch.device], tuple[DeviceKernel, frozenset[str]]]
"""Compiles a kernel for a device; returns its code, and the parameters through which it writes.

Raises CaptureError: it cannot be compiled, or launched by its code alone.
"""

_ALIGNMENT_BYTES = 16  # which Triton asks of addresses, and for which it compiles other code
_ARCHITECTURE = 80  # of the target whose specialisation is asked: it is the same for all


class _Unrecordable(Exception):
    """A kernel's launch is not data; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Address:
    """Stands for a tensor where Triton looks at its type and the alignment of its address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address, counted from where its Value begins."""
        return self.address


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A launch: the kernel, and the arguments that are not compiled in."""

    kernel: TritonKernel
    arguments: tuple[Any, ...]
    written: frozenset[int]


class TritonLaunches:
    """Notices Triton's launches during a recording.

    Owner: one recording. Thread: those on which the recorder's mode is active.
    """

    def __init__(self, log: LaunchRecorder, compile_triton: CompileTriton) -> None:
        """Begin without noticing any.

        Args:
            log: receives the launches.
            compile_triton: compiles them for the device of the recording.
        """
        self._log = log
        self._compile = compile_triton

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice launches, if Triton is loaded: without it there are no kernels."""
        if "triton.runtime.jit" not in sys.modules:
            yield
            return
        from triton.runtime.autotuner import Autotuner  # noqa: PLC0415
        from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415
        from triton.runtime.jit import JITFunction  # noqa: PLC0415

        with contextlib.ExitStack() as stack:
            for kind in (JITFunction, InterpretedFunction):
                stack.enter_context(replaced(kind, "run", self._run))
            stack.enter_context(replaced(Autotuner, "run", self._tune))
            stack.enter_context(replaced(Autotuner, "_bench", self._bench))
            stack.enter_context(set_wrap_triton_enabled(False))  # else it is an operator of torch's
            yield

    # ---- Triton's methods ----------------------------------------------------------------------

    def _run(
        self, run: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        """In place of `run` of a kernel."""
        again = functools.partial(run, kernel, warmup=warmup)
        if warmup or not is_watched_by(self._log):
            return again(*args, grid=grid, **kwargs)
        name = getattr(kernel, "__name__", "kernel")
        try:
            call = self._call(kernel, args, kwargs, grid)
        except (_Unrecordable, UnknownSource, CaptureError) as why:
            self._refuse(name, str(why), [*args, *kwargs.values()])
            with _unwatched():
                return again(*args, grid=grid, **kwargs)
        if call is not None:
            self._log.launch_kernel(
                call.kernel, call.arguments, call.written, lambda: again(*args, grid=grid, **kwargs)
            )
        return None

    def _tune(self, run: Any, tuner: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of `run` of an autotuner: resets for its measurements are not launches."""
        if not is_watched_by(self._log):
            return run(tuner, *args, **kwargs)
        reset = tuner.pre_hook
        tuner.pre_hook = lambda given, reset_only=False: None if reset_only else reset(given)
        try:
            return run(tuner, *args, **kwargs)
        finally:
            tuner.pre_hook = reset

    def _bench(self, bench: Any, tuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        """In place of `_bench` of an autotuner, which times one configuration: on copies."""
        if not is_watched_by(self._log):
            return bench(tuner, *args, config=config, **kwargs)
        named = tuner.nargs
        with _unwatched():
            args = tuple(map(_copied, args))
            kwargs = {name: _copied(one) for name, one in kwargs.items()}
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            try:
                return bench(tuner, *args, config=config, **kwargs)
            finally:
                tuner.nargs = named

    # ---- launches ------------------------------------------------------------------------------

    def _refuse(self, name: str, why: str, given: Sequence[Any]) -> None:
        """Note that a kernel works unseen on tensors.

        Raises:
            CaptureError: the device runs no opaque launches.
        """
        refusal = CaptureError(
            f"{user_location()}: the Triton kernel {name} cannot be recorded: {why}: launch it in "
            "an operator made by torch.library.custom_op, which is recorded as a whole"
        )
        hidden = [getattr(one, "base", None) for one in given]  # by `triton.reinterpret`
        for tensor in tensors_in([*given, *hidden]):
            self._log.hand_out(tensor, refusal)
        self._log.note_unseen(refusal)

    def _call(self, kernel: Any, args: Any, kwargs: Any, grid: Any) -> _Call | None:
        """Describe a launch as data; None if its grid is empty, as Triton then launches nothing.

        Raises:
            _Unrecordable, UnknownSource: it is not data.
            CaptureError: its kernel cannot be compiled.
        """
        jit = jit_function(kernel)
        if not is_function(jit) or kernel.pre_run_hooks:
            raise _Unrecordable("it has hooks, or is not a function of Triton")
        with torch._C.DisableTorchFunction():
            bound, signature, constants, divisible, options = self._specialised(jit, args, kwargs)
        sizes = _sizes(grid(bound) if callable(grid) else grid)
        if 0 in sizes:
            return None
        found = TritonKernel(
            defined_name(jit.src),
            source_of(jit),
            tuple(signature.items()),
            tuple((name, _constant(name, one)) for name, one in constants.items()),
            divisible,
            tuple((name, _constant(name, one)) for name, one in sorted(options.items())),
            sizes,
        )
        names = [name for name, _ in found.parameters()]
        code, written = self._compile(found, self._log.device)
        live = functools.partial(_launch, kernel, found, dict(options))
        self._log.triton.setdefault(found, TritonCode(code, live))
        at = frozenset(index for index, name in enumerate(names) if name in written)
        return _Call(found, tuple(bound[name] for name in names), at)

    def _specialised(self, jit: Any, args: Any, kwargs: Any) -> Any:
        """What Triton compiles for these arguments.

        Returns:
            All arguments by name, the signature, the constants, the parameters that are multiples
            of 16, and the options of the compiler that were given.
        """
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415
        from triton.compiler import make_backend  # noqa: PLC0415
        from triton.runtime.jit import create_function_from_signature  # noqa: PLC0415

        stands = {id(one): self._stand_in(one) for one in [*args, *kwargs.values()]}
        backend = make_backend(GPUTarget("cuda", _ARCHITECTURE, 32))
        bind = create_function_from_signature(jit.signature, jit.params, backend)
        given = [stands[id(one)] for one in args], {k: stands[id(v)] for k, v in kwargs.items()}
        debug = {"debug": True} if kwargs.get("debug") or jit.debug else {}
        positional, named = given
        values, specialised, more = bind(*positional, **{**named, **debug})
        parsed, signature, constants, _ = jit._pack_args(backend, named, values, specialised, more)
        for name, kind in signature.items():
            known = str(kind).startswith("*") or kind in (*SCALAR_BYTES, CONSTANT)
            if not isinstance(kind, str) or not known:
                raise _Unrecordable(f"its parameter {name} has the type {kind}")
        names = list(signature)
        if any(len(path) != 1 for path in constants):
            raise _Unrecordable("it takes tuples")
        divisible = []
        for name, (kind, attribute) in zip(names, specialised, strict=True):
            if kind != CONSTANT and attribute:
                if attribute != "D":
                    raise _Unrecordable(f"its parameter {name} has the property {attribute}")
                divisible.append(name)
        originals = {id(stands[id(one)]): one for one in [*args, *kwargs.values()]}
        bound = {name: originals.get(id(one), one) for name, one in values.items()}
        options = {name: one for name, one in {**named, **debug}.items() if name in parsed.__dict__}
        named_constants = {names[path[0]]: values[names[path[0]]] for path in constants}
        return bound, signature, named_constants, tuple(divisible), options

    def _stand_in(self, argument: Any) -> Any:
        """What Triton looks at in place of an argument.

        An address counts from its Value's beginning, which is aligned wherever it lies.
        """
        if not isinstance(argument, torch.Tensor):
            numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
            if isinstance(argument, numbers):
                raise _Unrecordable("it takes a number that varies with sizes")
            if hasattr(argument, "data_ptr"):  # which Triton asks of any object
                raise _Unrecordable(f"a {type(argument).__qualname__} hides a tensor from torch")
            return argument
        if any(isinstance(one, torch.SymInt) for one in argument.shape):
            raise _Unrecordable("it takes a tensor whose sizes vary")
        tracked = self._log.track(argument, "a Triton kernel")
        view = self._log.table.view(argument, tracked)
        return _Address(argument.dtype, view.offset_bytes % _ALIGNMENT_BYTES)


def _launch(
    kernel: Any, found: TritonKernel, options: dict[str, Any], arguments: Sequence[Any]
) -> None:
    """Let Triton launch a recorded kernel with other arguments."""
    names = [name for name, _ in found.parameters()]
    given = {**dict(zip(names, arguments, strict=True)), **options}
    given |= {name: _live_constant(one) for name, one in found.constants}
    kernel.run(grid=found.grid, warmup=False, **given)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Let Triton's work run unseen by the recorder."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _copied(argument: Any) -> Any:
    """An argument; of a tensor one of the same layout on a copy of its memory."""
    if not isinstance(argument, torch.Tensor):
        return argument
    storage = argument.untyped_storage().clone()
    copy = torch.empty(0, dtype=argument.dtype, device=argument.device)
    return copy.set_(storage, argument.storage_offset(), argument.size(), argument.stride())


def _sizes(grid: Any) -> tuple[int, int, int]:
    sizes = [*grid] if isinstance(grid, (tuple, list)) else [grid]
    if len(sizes) > 3 or any(isinstance(one, torch.SymInt) for one in sizes):
        raise _Unrecordable("its grid is not three fixed sizes")
    first, second, third = [*map(int, sizes), 1, 1, 1][:3]
    return first, second, third


def _constant(name: str, value: Any) -> Constant:
    """A constant as a Program holds it."""
    from triton.language.core import constexpr, dtype  # noqa: PLC0415

    if isinstance(value, constexpr):
        value = value.value
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]
    if type(value) is tuple:
        return tuple(_constant(name, one) for one in value)
    if isinstance(value, dtype):
        found = next((one for one in _TORCH_TYPES if _TORCH_TYPES[one] == value.name), None)
        if found is not None:
            return Symbol("dtype", dtype_name(found))
    raise _Unrecordable(f"its constant {name} is a {type(value).__qualname__}")


_TORCH_TYPES = {
    torch.bool: "int1", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16",
    torch.int32: "int32", torch.int64: "int64", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float32: "fp32", torch.float64: "fp64", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}  # fmt: skip
"""Triton's types, by torch's (`dtype` in triton/language/core.py)."""


def _live_constant(value: Constant) -> Any:
    from triton.language.core import dtype  # noqa: PLC0415

    if isinstance(value, Symbol):
        return dtype(_TORCH_TYPES[getattr(torch, value.name)])
    return tuple(map(_live_constant, value)) if isinstance(value, tuple) else value
