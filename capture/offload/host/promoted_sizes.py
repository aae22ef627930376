"""Executables of sizes that repeat: loaded with kernels, and proved by a call that was copied."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from offload.console.progress import Progress
from offload.host.call_sizes import with_arguments
from offload.host.loaded_bytes import loaded_bytes
from offload.host.promotion import KERNELS, Choice
from offload.host.promotion_work import NotPromoted, Publish
from offload.interpreter.size_constants import program_at
from offload.program import BoundProgram
from offload.program.family import BoundFamily
from offload.program.structure import unflatten
from offload.run import Executable
from offload.run.arguments import tensors_of_call


@dataclasses.dataclass(frozen=True, slots=True)
class FusedLoad:
    """How Programs of a Family are loaded with kernels in the place of launches.

    Attributes:
        bound: the Family.
        fuse: all that can be, or what is quicker (`auto`).
        load: makes a Program resident, and calls a function now and then, which may end it.
    """

    bound: BoundFamily
    fuse: bool | Literal["auto"]
    load: Callable[[BoundProgram, Progress], Executable]


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedCall:
    """A call with tensors of its own, and what of its thread's state operators see."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Mapping[str, Any]


class FusedSizes:
    """Makes executables of one choice of sizes with kernels in the place of launches.

    In a thread, while calls go on: kernels are made for seconds, and need nothing of the device
    that calls have. Owner: a Promoter. Thread: any; it does not change.
    """

    expected = KERNELS
    in_turn = False

    def __init__(self, fused: FusedLoad, publish: Publish) -> None:
        """Make none yet.

        Args:
            fused: loads them.
            publish: lets one take turns with the executable of all sizes, and says what calls are
                given for it.
        """
        self._bound = fused.bound
        self._load = fused.load
        self._publish = publish

    def kept(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CopiedCall:
        """A copy of a call of these sizes, whose tensors the caller may write soon."""
        family = self._bound.family
        recorded = BoundProgram(family.program, self._bound.bindings)
        bound = with_arguments(recorded, family, family.numbers_at(sizes))
        with torch.no_grad():
            copies = [one.detach().clone() for one in tensors_of_call(bound, args, kwargs)]
        copied_args, copied_kwargs = unflatten(bound.arguments_structure, copies)
        autocast = {
            "enabled": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_autocast_dtype("cpu"),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        return CopiedCall(copied_args, copied_kwargs, autocast)

    def made(
        self, sizes: Choice, call: CopiedCall, is_wanted: Callable[[], bool]
    ) -> tuple[Executable, int]:
        """An executable of some sizes, whose kernels a copied call has proved.

        Raises:
            NotPromoted: nothing became a kernel, or it is not wanted any more.
            OffloadError: it cannot be loaded, or the call fails.
        """

        def go_on(*_: object) -> None:
            if not (is_wanted() and threading.main_thread().is_alive()):
                raise NotPromoted("it was closed meanwhile, or the interpreter is exiting")

        go_on()
        run = self._load(program_at(self._bound, sizes), go_on)
        try:
            go_on()
            with torch.no_grad(), torch.autocast("cpu", **call.autocast):
                run(*call.args, **call.kwargs)
            fusion = run.fusion
            assert fusion is not None  # as it was loaded
            if not fusion.n_kernels:
                raise NotPromoted(f"no kernel: {'; '.join(fusion.explain())}")
        except BaseException:
            run.close()
            raise
        return run, loaded_bytes(self._bound, run)

    def publish(self, sizes: Choice, run: Executable) -> object:
        """Let it take turns with the executable of all sizes; what its calls are given for it."""
        return self._publish(sizes, run)
