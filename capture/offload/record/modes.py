"""The two modes that watch a call, and the state of torch that a recording needs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.console.user_code import user_location
from offload.errors import CaptureError, OffloadError
from offload.interpreter.torch_names import has_own_kernel
from offload.native import _native
from offload.record import host_reads
from offload.record.literal_lengths import with_tensors
from offload.record.operators import is_wrapper
from offload.record.sized_functions import SizedFunctions
from offload.record.step_numbers import StepNumbers
from offload.record.triton_operators import plain_attention, triton_body, triton_launch


class Watcher(Protocol):
    """The receiver of what the modes see.

    Attributes:
        refusal: the first refusal, kept in case the call swallows it.
        running: the torch function that is being called; empty outside.
    """

    refusal: OffloadError | None
    running: str

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""

    @property
    def device(self) -> torch.device:
        """The device of the recording."""

    @property
    def sees_triton(self) -> bool:
        """Whether Triton's launches are recorded."""

    @property
    def runs_originals(self) -> bool:
        """Whether what torch.compile has wrapped runs as its original code."""

    def launch_directly(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = ...
    ) -> Any:
        """Record an operator without calling the torch function that would call it."""

    def guard_content(self, tensor: torch.Tensor, what: str) -> None:
        """Record a read of a tensor's values on the host, or refuse it."""

    def note_range(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note that a profiler range begins or ends."""

    def refuse_read(self, what: str, refusal: CaptureError) -> None:
        """Refuse to go on recording after a read on the host that cannot become a guard."""

    def hand_out(self, tensor: torch.Tensor, refusal: CaptureError) -> None:
        """Note that a tensor's memory is passed to code that cannot be followed, or refuse it."""


@contextlib.contextmanager
def refusals_kept(watcher: Watcher) -> Iterator[None]:
    """Tell the watcher of the first refusal, which its caller may swallow."""
    try:
        yield
    except OffloadError as error:
        watcher.refusal = watcher.refusal or error
        raise


@functools.cache
def _is_composite(func: torch._ops.OpOverload[..., Any]) -> bool:
    return func._can_decompose()


@functools.cache
def _has_kernel(func: torch._ops.OpOverload[..., Any], device_type: str) -> bool:
    """Whether a device has its own kernel for a decomposable operator, such as `silu_backward`.

    Eager execution runs that kernel. A batch norm is one kernel either way, and its decomposition
    says whether it trains and what it writes.
    """
    if func is torch.ops.aten.native_batch_norm.default:
        return False
    return has_own_kernel(func.name(), device_type)


def _device_type(args: tuple[Any, ...]) -> str:
    tensors = (one for one in tree_leaves(args) if isinstance(one, torch.Tensor))
    return next((one.device.type for one in tensors), "cpu")


def _views_followed() -> contextlib.AbstractContextManager[None]:
    """Let views of weights know that these require gradients, as in eager.

    Composites choose kernels by that (`should_fold` of aten/src/ATen/native/LinearAlgebra.cpp). In
    inference mode they come here as they are, where views are not followed any more.
    """
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    followed = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, followed)


@contextlib.contextmanager
def _running(watcher: Watcher, name: str) -> Iterator[None]:
    """Let a torch function count as being called, which the function mode has not seen."""
    outside, watcher.running = watcher.running, name
    try:
        yield
    finally:
        watcher.running = outside


class DispatchMode(TorchDispatchMode):
    """Sees every operator below autograd; composite ones are decomposed first."""

    supports_higher_order_operators = True  # they come here and are refused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to keep torch's compiler out; torch imports it for that, which takes 2 s."""
        return False

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def reports_to(self, watcher: Watcher) -> bool:
        """Whether this watcher receives what the mode sees."""
        return self._watcher is watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):  # it unwraps itself, and its calls come here
            return NotImplemented
        with torch._C.DisableTorchFunction(), refusals_kept(self._watcher):
            if not isinstance(func, torch._ops.OpOverload):
                return self._higher_order(func, args, kwargs)
            if func.namespace in ("prim", "profiler"):
                if func.namespace == "profiler":  # a range of record_function
                    self._watcher.note_range(func, args)
                return func(*args, **kwargs)  # it computes nothing; prim: a fake tensor's device
            if func is torch.ops.aten.size.default:  # C++ asks a fake tensor for plain numbers
                return [int(one) for one in args[0].shape]
            outcome = self._decomposed(func, args, kwargs)
            if outcome is not NotImplemented:
                return outcome
            return self._watcher.dispatch(func, args, kwargs)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator as the operators that it computes.

        Raises:
            CaptureError: it is not known as such.
        """
        launch = triton_launch(func) if self._watcher.sees_triton else None
        if launch is not None:
            with self, _views_followed():
                return launch(*args, **kwargs)
        attention = plain_attention(func) if self._watcher.runs_originals else None
        if attention is None:
            raise CaptureError(f"{user_location()}: {func} is a higher-order operator: refused")
        with self, _views_followed(), _running(self._watcher, "flex_attention"):
            return attention(*args, **kwargs)

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that consists of others; NotImplemented for one that does not."""
        body = triton_body(func, args) if self._watcher.sees_triton else None
        if body is not None:
            with self, _views_followed():
                return body(*args, **kwargs)
        if _is_composite(func) and not _has_kernel(func, _device_type(args)):
            with self, _views_followed():
                return func.decompose(*args, **kwargs)
        return NotImplemented


class _UncompiledDispatchMode(DispatchMode):
    """The mode inside a function that torch compiles: it must not be compiled itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = DispatchMode.__torch_dispatch__


def dispatch_mode(watcher: Watcher) -> DispatchMode:
    """The mode for one recording: keeping torch's compiler out costs only where it is loaded."""
    is_loaded = "torch._dynamo" in sys.modules
    return _UncompiledDispatchMode(watcher) if is_loaded else DispatchMode(watcher)


_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _refuse_without_history(name: str, first: Any = (), *_: Any, **options: Any) -> None:
    """Explain better than torch why results computed without history have no gradients.

    Raises:
        CaptureError: one of the tensors to differentiate, given first or by its name, has no
            history.
    """
    tensors = tree_leaves((first, options.get("outputs"), options.get("tensors")))
    if torch.is_grad_enabled() or all(
        one.requires_grad for one in tensors if isinstance(one, torch.Tensor)
    ):
        return
    raise CaptureError(
        f"{user_location()}: {name} differentiates what was computed without gradients, since "
        "calls are recorded without them: compute it under torch.enable_grad() in the forward; to "
        "record a training step, capture it with training=True"
    )


# For these torch chooses how to compute the gradient by values that it reads on the host, and
# otherwise under a dispatch mode (`isTensorSubclassLike` in autograd/FunctionsManual.cpp).
_GRADIENTS_BY_VALUE = frozenset({"prod"})


def _refuse_gradient_by_value(name: str, args: tuple[Any, ...]) -> None:
    """Refuse a function whose gradient differs between eager execution and a recording.

    Raises:
        CaptureError: the call is recorded for gradients.
    """
    if name not in _GRADIENTS_BY_VALUE or not torch.is_grad_enabled():
        return
    if any(one.requires_grad for one in args if isinstance(one, torch.Tensor)):
        raise CaptureError(
            f"{user_location()}: torch reads on the host which elements are zero to compute the "
            f"gradient of torch.{name}, which a replay cannot repeat: compute it in another way, "
            "such as (x.abs().log().sum(dim).exp()), or by multiplications"
        )


def _refusal(name: str) -> CaptureError:
    """A new error each time; no frame holds it, as its traceback would form a reference cycle."""
    return CaptureError(f"{user_location()}: {name}: {host_reads.REFUSED[name]}")


class FunctionMode(TorchFunctionMode):
    """Sees calls that never reach the dispatcher: reads by `tolist`, `numpy` and the like."""

    def __init__(
        self,
        watcher: Watcher,
        numbers: StepNumbers | None = None,
        sized: SizedFunctions | None = None,
    ) -> None:
        super().__init__()
        self._watcher = watcher
        self._numbers = numbers
        self._sized = sized

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            name = func._schema.name.rpartition("::")[2]
        else:
            name = getattr(func, "__name__", "")
        with refusals_kept(self._watcher):
            if self._numbers is not None:
                outcome = self._numbers.call(name, args, kwargs)
                if outcome is not NotImplemented:
                    return outcome
            _refuse_gradient_by_value(name, args)
            if func in _DIFFERENTIATING:
                _refuse_without_history(name, *args, **kwargs)
            if name in host_reads.REFUSED:
                if name in host_reads.ADDRESSES:
                    self._watcher.hand_out(args[0], _refusal(name))
                else:
                    self._watcher.refuse_read(f"torch.{name}", _refusal(name))
            for tensor in host_reads.tensors_read(name, args, kwargs):
                self._watcher.guard_content(tensor, f"torch.{name}")
        outside, self._watcher.running = self._watcher.running, name
        try:
            outcome = NotImplemented
            if self._sized is not None:
                with refusals_kept(self._watcher):
                    outcome = self._sized.call(func, name, args, kwargs, self._watcher)
            if outcome is NotImplemented:
                args, kwargs = with_tensors(name, args, kwargs)
                outcome = func(*args, **kwargs)
        finally:
            self._watcher.running = outside
        return host_reads.without_write_access(name, outcome)


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Disable autocast's cache: casts cached outside the call would be taken for constants."""
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
