"""A recorded call that can be repeated: an opaque launch executes it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.constants import same_constant
from offload.program.structure import OpaqueStructure, Structure, constants, flatten, unflatten
from offload.program.structure_match import StructureMismatch, match
from offload.record.operators import is_tensor
from offload.record.python_state import PythonState
from offload.record.thread_lookups import CompilingAnswers, eager_paths_taken


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of torch that chooses what a call launches, apart from its arguments.

    Attributes:
        is_inference: inference mode is on.
        autocast: for each device type that has autocast, whether it is on, and its dtype.
        default_device: the device of new tensors that name no device; None for the CPU.
        avoids_reads: `is_compiling()` returned True to model code.
        runs_originals: what torch.compile has wrapped runs as its original code.
    """

    is_inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None
    avoids_reads: bool
    runs_originals: bool = False

    @classmethod
    def of_caller(cls, device: torch.device, *, avoids_reads: bool) -> Surroundings:
        """The current surroundings on this thread, for a call on a device."""
        default_device = torch.get_default_device()
        return cls(
            is_inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({"cpu", device.type})
                if torch.amp.is_autocast_available(kind)
            ),
            default_device=None if default_device.type == "cpu" else default_device,
            avoids_reads=avoids_reads,
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them for a call on this thread, without gradients, as in every recording."""
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            if self.avoids_reads:
                enter(CompilingAnswers(answer=True).given())
                enter(eager_paths_taken())
            if self.runs_originals:
                enter(torch.compiler.set_stance("force_eager"))
            if self.default_device is not None:
                enter(self.default_device)
            enter(torch.inference_mode(self.is_inference))
            enter(torch.no_grad())
            for kind, enabled, dtype in self.autocast:
                enter(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


_calls = threading.local()


def is_called_again() -> bool:
    """Whether this thread is repeating a recorded call, which watchers of calls ignore."""
    return getattr(_calls, "again", False)


@contextlib.contextmanager
def called_again() -> Iterator[None]:
    """Mark this thread as repeating a recorded call."""
    before = is_called_again()
    _calls.again = True
    try:
        yield
    finally:
        _calls.again = before


@dataclasses.dataclass(frozen=True, slots=True)
class RepeatableCall:
    """A callable with the nesting of a call's arguments and of its result.

    Thread: any, one call at a time.

    Attributes:
        state: the callable's Python state when it was recorded.
        arguments: their nesting, with the constants themselves.
        recorded: the same, with the recorded content of mutable constants.
    """

    function: Callable[..., Any]
    state: PythonState
    arguments: Structure
    recorded: Structure
    result: Structure
    surroundings: Surroundings

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call with these tensors in place of the recorded ones.

        Returns:
            The tensors of the result, in the order of its structure.

        Raises:
            CaptureError: the callable, or a mutable constant argument, has changed since the
                recording; or the result is nested otherwise than the recorded result, or a constant
                in it differs.
        """
        if change := self.state.change():
            raise CaptureError(
                f"the model has changed since it was recorded ({change}): its program is one "
                "opaque launch, which calls the model itself; change it back, or capture it again"
            )
        for was, now in zip(constants(self.recorded), constants(self.arguments), strict=True):
            if not same_constant(was, now):
                raise CaptureError(
                    f"an argument of the recorded call, a {type(now).__qualname__}, has changed "
                    "since: the program is one opaque launch, which calls the model with it; "
                    "change it back, or capture again"
                )
        args, kwargs = unflatten(self.arguments, list(tensors))
        with called_again(), self.surroundings.restored():
            outcome = self.function(*args, **kwargs)
        try:
            found, structure = flatten(outcome, is_tensor, share_same=True)
            match(self.result, outcome, is_tensor, "the result")
        except (OpaqueStructure, StructureMismatch) as error:
            raise CaptureError(
                f"the callable returned something else when it ran again on the same inputs: "
                f"{error}"
            ) from error
        if structure != self.result:
            raise CaptureError(
                "the callable returned one tensor in other places of its result when it ran again "
                "on the same inputs"
            )
        return found
