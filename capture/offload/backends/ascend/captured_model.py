"""A model captured by torch_npu, the Values of a Program that it copies, and its memory.

A model keeps the addresses with which its kernels were launched. Inputs and outputs that move are
therefore copied to and from memory of the capture (see `_native.AscendMovingCopies`), unless
addresses in the kernels' arguments can be found and patched: see `torch_relocation`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.backends.ascend.random_cells import Cell, CellFinder
from offload.backends.captured.copied_values import (
    CopiedValue,
    copied_value,
    why_uncopiable,
)
from offload.backends.captured.random_draws import RandomState
from offload.errors import CaptureError
from offload.interpreter.memory_pools import MemoryPool, segments_of
from offload.native import _native
from offload.program import Program, Role


def moving_values(program: Program) -> list[CopiedValue]:
    """Return the inputs that launches use, and the outputs.

    Raises:
        CaptureError: copies cannot replace them: inputs that share memory are written, or an input
            with gaps is.
    """
    used = {index for one in program.launches for index in (*one.reads, *one.writes)}
    moving = []
    for value in (
        *(program.values[view.value] for view in program.inputs),
        *program.of_role(Role.OUTPUT),
    ):
        is_moving = value.role is Role.OUTPUT or (value.index in used and not value.on_host)
        if not value.size_bytes or not is_moving:
            continue
        if why := why_uncopiable(program, value.index):
            raise CaptureError(why)
        moving.append(copied_value(program, value.index))
    return moving


@dataclasses.dataclass(slots=True)
class CaptureLog:
    """The record of a capture of launches.

    Attributes:
        places: by Value the address of each input's memory, and of each result of launches.
        pool: (address, bytes) of each piece of the pool, in the order of their allocation by torch.
        n_tasks: for each moment, before and after launches, the number of the model's tasks on each
            stream.
        begins: for each moment the launch that begins there; else None.
        why_unreported: why the runtime does not report tasks; else empty.
    """

    places: dict[int, int] = dataclasses.field(default_factory=dict)
    pool: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    n_tasks: list[list[int]] = dataclasses.field(default_factory=list)
    begins: list[int | None] = dataclasses.field(default_factory=list)
    why_unreported: str = ""


class CapturedModel:
    """A captured model, and the memory that its kernels address.

    Owner: one load; closed at the latest when it is dropped. Thread: any, one call at a time.

    Attributes:
        handle: the runtime's handle of the model.
        moving: in the order of `copies`.
        copies: copies them to the addresses of the kernels, and back; None once closed.
        pool_bytes: the bytes that torch has allocated on the device for the capture, memory for
            inputs included.
        log: the record of the capture.
        steps: the steps that copy weights on its streams; None without such copies.
        random_states: the generators that it draws from.
        random_cells: where its kernels read seeds and offsets.
        table: the table from which kernels read their arguments; None: each reads its block of the
            runtime.
    """

    def __init__(
        self,
        graph: Any,
        pools: list[MemoryPool],
        tensors: list[Any],
        moving: Sequence[CopiedValue],
        copies: _native.AscendMovingCopies,
        *,
        steps: _native.AscendStreamedSteps | None,
    ) -> None:
        self.handle = 0
        self.moving = tuple(moving)
        self.copies: _native.AscendMovingCopies | None = copies
        self.steps = steps
        self.pool_bytes = 0
        self.log = CaptureLog()
        self.random_states: tuple[RandomState, ...] = ()
        self.random_cells: list[Cell] = []
        self.table: _native.AscendCapturedTable | None = None
        self._graph = graph
        self._pools = pools
        self._tensors = tensors

    def take_cells(self, cells: CellFinder, device: torch.device) -> None:
        """Take over the memory of seeds and offsets; no allocation may follow."""
        self._pools += cells.pools
        segments = [one for pool in self._pools for one in segments_of(pool, device)]
        self.pool_bytes = sum(one["total_size"] for one in segments)
        self.random_states = cells.states()
        self.random_cells = cells.cells()

    def end(self) -> None:
        """Free the model and its streams; keep its memory, so that it is not reused."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # of a failed device
                graph.reset()
        del graph  # holds the states of generators
        self.steps = None  # with its events

    def close(self) -> None:
        """Free the model, its memory and its table; it must have no execution in flight."""
        self.end()
        self.copies = None
        self.table = None  # no task reads it any more
        self._tensors.clear()  # before the pools, which must outlive all users of their memory
        self._pools.clear()

    def __del__(self) -> None:
        self.close()


Capture = Callable[[Sequence[CopiedValue]], CapturedModel]
"""Captures a Program again, and copies only these Values."""

Improve = Callable[[CapturedModel, Capture], CapturedModel]
"""Makes another model from a captured model by further captures."""
