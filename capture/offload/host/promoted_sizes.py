"""Executables of repeated sizes: loaded with kernels, and proved by a copied call."""

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
    """How Programs of a Family are loaded with kernels in place of launches.

    Attributes:
        bound: the Family.
        fuse: every region that can be fused, or what is faster (`auto`).
        load: makes a Program resident, and regularly calls a function that may abort the load.
    """

    bound: BoundFamily
    fuse: bool | Literal["auto"]
    load: Callable[[BoundProgram, Progress], Executable]


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedCall:
    """A call with its own tensors, and the state of its thread that operators see."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Mapping[str, Any]


class FusedSizes:
    """Makes executables of one choice of sizes with kernels in place of launches.

    It does so on a thread, while calls continue: making kernels takes seconds, and needs nothing of
    the calls' device. Owner: a Promoter. Thread: any; it is immutable.
    """

    expected = KERNELS
    in_turn = False

    def __init__(self, fused: FusedLoad, publish: Publish) -> None:
        """Begin without executables.

        Args:
            fused: loads them.
            publish: makes an executable share the turns of the one of all sizes, and returns what
                calls use.
        """
        self._bound = fused.bound
        self._load = fused.load
        self._publish = publish

    def kept(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CopiedCall:
        """Copy a call of these sizes, whose tensors the caller may soon write."""
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
        """Return an executable of these sizes, whose kernels a copied call has proved.

        Raises:
            NotPromoted: no launches became a kernel, or it is no longer wanted.
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
            assert fusion is not None  # loaded with fusion
            if not fusion.n_kernels:
                raise NotPromoted(f"no kernel: {'; '.join(fusion.explain())}")
        except BaseException:
            run.close()
            raise
        return run, loaded_bytes(self._bound, run)

    def publish(self, sizes: Choice, run: Executable) -> object:
        """Make it share the turns of the executable of all sizes; return what calls use."""
        return self._publish(sizes, run)
