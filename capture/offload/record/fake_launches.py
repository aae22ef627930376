"""Launches under fake tensors: the arguments of an operator; nothing is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.fake_weights import FakeWeights
from offload.record.guards import HostReadGuards
from offload.record.host_constants import may_be_host_constant
from offload.record.operators import Overload, tensors_in
from offload.record.storages import StorageTable, TrackedStorage


class Tracker(Protocol):
    """The owner of the storages that launches use.

    Attributes:
        guards: of host reads.
    """

    guards: HostReadGuards

    def track(self, tensor: torch.Tensor, name: str) -> TrackedStorage:
        """The storage of a tensor that the operator `name` uses."""


class FakeLaunches:
    """Gives operators fake tensors; only host constants are computed, as their values are needed.

    Owner: one LaunchRecorder.
    """

    def __init__(self, fakes: FakeWeights, table: StorageTable, tracker: Tracker) -> None:
        self._fakes = fakes
        self._table = table
        self._tracker = tracker

    def launch(
        self, operator: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], contextlib.AbstractContextManager[Any]]:
        """The arguments to call an operator with, and the context to call it in.

        Raises:
            CaptureError: as `track`; or a tensor lies on another device.
        """
        if self._is_on_host(args, kwargs):
            return args, kwargs, contextlib.nullcontext()
        fake = self._all_fake(operator.name, args)
        named = self._all_fake(operator.name, kwargs)
        return fake, named, self._computing_nothing(operator)

    def rule(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The callable that says what an operator returns."""
        return self._fakes.rule(func)

    def _is_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all arguments, or results made of numbers alone, can be host constants."""
        if self._table.device.type == "cpu":
            return False
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if not tensors:
            return torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return not any(isinstance(one, FakeTensor) for one in tensors) and all(
            map(may_be_host_constant, tensors)
        )

    @contextlib.contextmanager
    def _computing_nothing(self, operator: Overload) -> Iterator[None]:
        try:
            with self._fakes.mode:
                yield
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._tracker.guards.require(operator.name, "it reads a tensor's value on the host")
        except Exception as error:  # eager would raise an aten operator's error too
            unsupported = (UnsupportedOperatorException, UnsupportedFakeTensorException)
            if operator.is_aten and not isinstance(error, unsupported):
                raise
            raise CaptureError(
                f"{user_location()}: torch cannot determine the result of {operator.name} without "
                "computing it: register a fake implementation (torch.library.register_fake), or "
                f"capture without weights= ({error})"
            ) from error

    def _all_fake(self, name: str, given: Any) -> Any:
        """The arguments of an operator, with a fake twin for each tensor in memory."""
        if isinstance(given, (list, tuple)):
            return type(given)(self._all_fake(name, one) for one in given)
        if isinstance(given, torch.SymBool):  # a Program holds its answer
            return bool(given)
        if isinstance(given, dict):
            return {key: self._all_fake(name, one) for key, one in given.items()}
        if not isinstance(given, torch.Tensor) or isinstance(given, FakeTensor):
            return given
        own = self._fakes.of_model(given)
        if own is not None:
            return own
        tracked = self._tracker.track(given, name)
        fake = self._fakes.of(given, f"a tensor of shape {list(given.shape)} that {name} uses")
        self._table.let_stand_for(fake, tracked)
        return fake
