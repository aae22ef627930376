"""Further recordings of a call: over symbolic sizes, and at other sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from offload.errors import BindingError, CaptureError, OffloadError
from offload.program import TritonKernel
from offload.program.family import BoundFamily, Dim, Family, with_constants
from offload.program.structure import unflatten
from offload.record.call_arguments import CallArguments
from offload.record.callables import parameters_of
from offload.record.dynamic_shapes import VaryingSizes
from offload.record.fake_weights import device_of_call
from offload.record.family import check_family, difference_of, family_of, without_unused
from offload.record.recorder import Recorder
from offload.record.sized_functions import SizedFunctions
from offload.record.symbolic_sizes import SymbolicSizes, VariedSizes
from offload.record.whole_layers import WholeLayers
from offload.record.whole_program import WholeProgram

# Size beyond the recorded one where a Dim has no maximum: odd, and no power.
_FACTOR, _BEYOND = 4, 3

_TRACE = "\nException raised from "  # C++ frames follow (c10/util/Exception.cpp)


class SecondRecordings:
    """Records one call again, computing nothing. Owner: the block that recorded it."""

    def __init__(
        self,
        function: Callable[..., Any],
        called: tuple[tuple[Any, ...], dict[str, Any]],
        varying: VaryingSizes,
        avoided_read: str,
    ) -> None:
        """Prepare for a recorded call.

        Args:
            function: the called function.
            called: its arguments.
            varying: the sizes of these arguments that may vary.
            avoided_read: the host read that the call makes unless `is_compiling()` is true; empty:
                the call was recorded with false.
        """
        self._function = function
        self._called = called
        self._varying = varying
        self._avoided_read = avoided_read
        self._device = device_of_call(*called)

    def family(self, real: WholeProgram) -> BoundFamily:
        """The Family of the call, compared with recordings at some other sizes.

        Args:
            real: the real recording.

        Raises:
            CaptureError: the call launches a Triton kernel, or differs at other sizes in a way that
                no guard distinguishes; see `family_of`.
        """
        for launch in real.program.launches:
            if isinstance(launch.callee, TritonKernel):  # nor can it be launched on fake tensors
                raise CaptureError(
                    f"{launch.source}: sizes cannot vary where the call launches a Triton kernel "
                    f"({launch.name}), whose grid and numbers are those of the recorded call: "
                    "capture once for each size, or leave out dynamic_shapes"
                )
        varying = self._varying
        sizes = SymbolicSizes(varying.dims, varying.axes, self._device)
        family = family_of(real, self._seen(sizes, "over sizes that vary"), sizes, varying.places)
        plain = VariedSizes(varying.axes, self._device)
        for chosen in _compared(family):
            at = ", ".join(f"{n} = {size}" for n, size in zip(family.names, chosen, strict=True))
            check_family(family, chosen, self._seen(plain.at(chosen), f"at {at}"))
        family = self._with_one(family, plain)
        return without_unused(BoundFamily(family, real.bindings))

    def _with_one(self, family: Family, plain: VariedSizes) -> Family:
        """The Family, also usable at size 1 if a recording there equals it.

        Guards would refuse size 1, as torch asks for it before taking special paths.
        """
        if len(family.dims) > 1 or family.dims[0].minimum > 1:
            return family
        with contextlib.suppress(BindingError):
            family.checked({family.names[0]: 1})
            return family
        with contextlib.suppress(OffloadError), _quiet():
            seen = self._seen(plain.at((1,)), "at 1")
            if not difference_of(family, seen, family.whole_at((1,))):
                return dataclasses.replace(family, compared=((1,),))
        return family

    def _seen(self, sizes: VariedSizes, how: str) -> WholeProgram:
        """The recording of the call at these sizes.

        Raises:
            CaptureError: the call raises an error, or cannot be recorded at these sizes.
        """
        recorder = Recorder(
            host_reads="avoid",
            function=self._function,
            parameters=parameters_of(self._function),
            fakes=sizes,
            avoided_read=self._avoided_read,
            sized=SizedFunctions(WholeLayers(sizes.layer_by_steps)),
        )
        try:
            result = recorder.call_again(*self._arguments(sizes.sizes))
        except Exception as error:
            raise CaptureError(
                f"the call was recorded, but cannot be recorded {how}: "
                f"{type(error).__qualname__}: {str(error).partition(_TRACE)[0]}; declare a "
                "smaller Dim, or leave out dynamic_shapes"
            ) from error
        try:
            return recorder.finish_seen(result)
        except OffloadError as error:
            raise CaptureError(
                f"the call was recorded, but cannot be recorded {how}: {error}"
            ) from error

    def _arguments(self, sizes: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other integers where these vary."""
        numbers = {
            place.constant: sizes[place.dim]
            for place in self._varying.places
            if place.constant >= 0
        }
        if not numbers:
            return self._called
        given = CallArguments(*self._called)
        args, kwargs = unflatten(with_constants(given.live, numbers), given.tensors)
        return args, kwargs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging errors of fake tensors, which are handled here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _compared(family: Family) -> Iterator[tuple[int, ...]]:
    """Yield sizes to compare a Family at, which its guards accept: range ends, and between.

    All Dims together, and where there are several, each alone at its ends.
    """
    recorded = family.recorded_sizes
    choices = [{one.name: choose(one) for one in family.dims} for choose in _CHOICES]
    if len(family.dims) > 1:
        choices += [
            {**recorded, one.name: end}
            for one in family.dims
            for end in (_greatest(one), _least(one))
        ]
    found = {tuple(recorded.values())}
    for sizes in choices:
        try:
            chosen = family.checked(sizes)
        except BindingError:
            continue
        if chosen not in found:
            found.add(chosen)
            yield chosen


def _greatest(dim: Dim) -> int:
    return _FACTOR * dim.recorded + _BEYOND if dim.maximum is None else dim.maximum


def _least(dim: Dim) -> int:
    return dim.minimum


def _between(dim: Dim) -> int:
    beyond = dim.recorded + _BEYOND
    if dim.maximum is None or beyond <= dim.maximum:
        return beyond
    return (dim.minimum + dim.recorded) // 2


_CHOICES = (_greatest, _least, _between)
