"""The two modes that watch a call, and the state of torch that a recording needs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from offload import _native
from offload.errors import CaptureError, OffloadError
from offload.record import host_reads
from offload.record.operators import user_location


def refuse_fake_mode() -> None:
    """Refuse a caller's FakeTensorMode, under which nothing is computed or can be compared.

    Raises:
        CaptureError: one is active on this thread.
    """
    if any(isinstance(one, FakeTensorMode) for one in _get_current_dispatch_mode_stack()):
        raise CaptureError(
            "a FakeTensorMode is active, under which nothing can be recorded: capture outside of "
            "it; with weights= in files nothing is computed or held in memory"
        )


class Watcher(Protocol):
    """Who is told of what the modes see.

    Attributes:
        refusal: the first refusal, kept in case the call swallows it.
        running: the torch function that is being called; empty outside.
    """

    refusal: OffloadError | None
    running: str

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""

    def guard_content(self, tensor: torch.Tensor, what: str) -> None:
        """Record a read of a tensor's values on the host, or refuse it."""

    def hand_out(self, tensor: torch.Tensor, refusal: CaptureError) -> None:
        """Note that a tensor's memory is given to code that cannot be followed, or refuse it."""


@contextlib.contextmanager
def _refusals_kept(watcher: Watcher) -> Iterator[None]:
    try:
        yield
    except OffloadError as error:
        watcher.refusal = watcher.refusal or error
        raise


@functools.cache
def _is_composite(func: torch._ops.OpOverload[..., Any]) -> bool:
    return func._can_decompose()


class DispatchMode(TorchDispatchMode):
    """Sees every operator below autograd; composite ones are decomposed first."""

    supports_higher_order_operators = True  # so that they come here, and are refused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler is kept out, for which torch imports it: that takes 2 s."""
        return False

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction(), _refusals_kept(self._watcher):
            if not isinstance(func, torch._ops.OpOverload):
                raise CaptureError(f"{user_location()}: {func} is a higher-order operator: refused")
            if func.namespace == "prim":  # where a fake tensor lies
                return func(*args, **kwargs)
            if func.namespace == "profiler":  # a range of record_function: it computes nothing
                return func(*args, **kwargs)
            if _is_composite(func):
                with self:
                    outcome = func.decompose(*args, **kwargs)
                if outcome is not NotImplemented:
                    return outcome
            return self._watcher.dispatch(func, args, kwargs)


class _UncompiledDispatchMode(DispatchMode):
    """Inside a function that torch compiles, the mode itself must not be compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = DispatchMode.__torch_dispatch__


def dispatch_mode(watcher: Watcher) -> DispatchMode:
    """The mode for one recording: only who has loaded torch's compiler pays for keeping it out."""
    is_loaded = "torch._dynamo" in sys.modules
    return _UncompiledDispatchMode(watcher) if is_loaded else DispatchMode(watcher)


_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _refuse_without_history(name: str, first: Any = (), *_: Any, **options: Any) -> None:
    """Say better than torch why there are no gradients of what was computed without them.

    Raises:
        CaptureError: one of the tensors to differentiate, given first or by its name, has none.
    """
    tensors = tree_leaves((first, options.get("outputs"), options.get("tensors")))
    if torch.is_grad_enabled() or all(
        one.requires_grad for one in tensors if isinstance(one, torch.Tensor)
    ):
        return
    raise CaptureError(
        f"{user_location()}: {name} differentiates what was computed without gradients, since a "
        "call is recorded so: compute it under torch.enable_grad() in the forward; steps that "
        "train are for eager"
    )


class FunctionMode(TorchFunctionMode):
    """Sees what never reaches the dispatcher: reads by `tolist`, `numpy` and their like."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            name = func._schema.name.rpartition("::")[2]
        else:
            name = getattr(func, "__name__", "")
        with _refusals_kept(self._watcher):
            if func in _DIFFERENTIATING:
                _refuse_without_history(name, *args, **kwargs)
            if name in host_reads.REFUSED:
                refusal = CaptureError(f"{user_location()}: {name}: {host_reads.REFUSED[name]}")
                if name not in host_reads.ADDRESSES:
                    raise refusal
                self._watcher.hand_out(args[0], refusal)
            for tensor in host_reads.tensors_read(name, args, kwargs):
                self._watcher.guard_content(tensor, f"torch.{name}")
        outside, self._watcher.running = self._watcher.running, name
        try:
            outcome = func(*args, **kwargs)
        finally:
            self._watcher.running = outside
        return host_reads.without_write_access(name, outcome)


@contextlib.contextmanager
def reads_avoided(avoid: bool) -> Iterator[None]:
    """Tell model code that it is being compiled, so that it keeps its values on the device.

    torch's compiler sets the same flag, for all threads, and puts back what it found, so none may
    compile meanwhile.
    """
    with _no_compilation():
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = avoid or before
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def _no_compilation() -> contextlib.AbstractContextManager[Any]:
    """Keep other threads from compiling; nothing to do before torch's compiler is loaded."""
    module: Any = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if module is None else module.compile_lock


@contextlib.contextmanager
def eager_paths_taken() -> Iterator[None]:
    """Let torch's own layers choose the path that they take when nobody watches.

    nn.TransformerEncoder, its layers and nn.MultiheadAttention leave their fast path, which gives
    other values at padded places, where a function mode is active or the compiling flag is set.
    They look both up at each call; torch's functions, by which the function mode is told, do not.
    """
    has_torch_function, is_compiling = (
        torch.overrides.has_torch_function,
        torch.compiler.is_compiling,
    )
    thread = threading.get_ident()

    def has_other_torch_function(args: Iterable[Any]) -> bool:
        if threading.get_ident() != thread:
            return bool(has_torch_function(args))
        modes = torch.overrides._get_current_function_mode_stack()
        is_own = all(isinstance(mode, FunctionMode) for mode in modes)
        return not is_own or any(map(_has_own_torch_function, args))

    def is_compiling_elsewhere() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__")
        return caller != torch.nn.modules.transformer.__name__ and is_compiling()

    torch.overrides.has_torch_function = has_other_torch_function
    torch.compiler.is_compiling = is_compiling_elsewhere
    try:
        yield
    finally:
        torch.overrides.has_torch_function = has_torch_function
        torch.compiler.is_compiling = is_compiling


def _has_own_torch_function(thing: Any) -> bool:
    none = torch._C._disabled_torch_function_impl
    return type(thing) is not torch.Tensor and (
        getattr(type(thing), "__torch_function__", none) is not none
    )


class _UnseededGenerator:
    """Stands for torch's default generator where torch's seeding functions look it up."""

    def __init__(self, generator: torch.Generator, watcher: Watcher) -> None:
        self._generator = generator
        self._watcher = watcher
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self._thread:
            with _refusals_kept(self._watcher):
                raise CaptureError(
                    f"{user_location()}: the call seeds or restores torch's random generator "
                    "(torch.manual_seed, torch.seed, torch.set_rng_state, torch.random.fork_rng), "
                    "which a replay would not do again: do it before the call, or draw from a "
                    "torch.Generator that is passed as an argument"
                )
        return getattr(self._generator, name)


@contextlib.contextmanager
def seeding_refused(watcher: Watcher) -> Iterator[None]:
    """Refuse what sets the state of the default generator, on this thread.

    By comparing states before and after it would go unseen where the seed happens to be the one
    that was set before the call.
    """
    functions: Any = torch.random
    generator = functions.default_generator
    functions.default_generator = _UnseededGenerator(generator, watcher)
    try:
        yield
    finally:
        functions.default_generator = generator


@contextlib.contextmanager
def seeding_noticed(generators: Iterable[torch.Generator], watcher: Watcher) -> Iterator[None]:
    """Refuse what sets the state of these generators, where no operator draws from them.

    Each is moved on by a draw for that time, so that a seed which sets it as it was is seen too.
    """
    before = [(one, one.get_state()) for one in generators]
    for generator, _ in before:
        torch.rand(1, generator=generator, device=generator.device)
    moved = [one.get_state() for one, _ in before]
    try:
        yield
    finally:
        for (generator, state), expected in zip(before, moved, strict=True):
            if not torch.equal(generator.get_state(), expected):
                watcher.refusal = watcher.refusal or CaptureError(
                    "the call seeds or restores a torch.Generator, which a replay would not do "
                    "again: do it before the call"
                )
            generator.set_state(state)


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Casts cached by autocast outside the call would be taken for constants."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def executions_refused() -> Iterator[None]:
    """Refuse executions of captured programs on this thread: their launches cannot be seen."""
    _native.set_recording(True)
    try:
        yield
    finally:
        _native.set_recording(False)
