"""Weight streams with plans written by hand, and executables on them."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any
from unittest import mock

import torch

import offload
from offload.backends.cpu.backend import CpuBackend
from offload.native import _native
from offload.plan import place_values
from offload.program import BoundProgram, Program, Role
from offload.run import Executable
from offload.timeline import Scheduling

PAGE_BYTES = 4096
HEADER_BYTES = 1736  # as a safetensors header leaves the data: not at a multiple of a block

WIDTH = 64
WEIGHT_BYTES = WIDTH * WIDTH * 4

Piece = tuple[int, int, int, bool]


@dataclasses.dataclass(frozen=True)
class HandPlan:
    """Pieces by weight (offset, size, place in memory, streamed), and transfers in order."""

    memory_bytes: int
    pieces: tuple[tuple[Piece, ...], ...]
    transfers: tuple[tuple[int, int, int, int, int, int], ...]

    @property
    def transfer_bytes(self) -> int:
        return sum(self.pieces[one[0]][one[1]][1] for one in self.transfers)

    @property
    def resident_bytes(self) -> int:
        return sum(
            size for pieces in self.pieces for _, size, _, streamed in pieces if not streamed
        )


def plan_of(
    memory_bytes: int, pieces: tuple[tuple[Piece, ...], ...], uses: list[tuple[int, int]]
) -> HandPlan:
    """Copy streamed pieces in the order of first use, each as soon as its place is free."""
    ordered = sorted(
        (uses[weight][0], weight, index)
        for weight, some in enumerate(pieces)
        for index, (*_, streamed) in enumerate(some)
        if streamed
    )
    placed = [(pieces[weight][index], weight, index) for _, weight, index in ordered]
    transfers = []
    for number, ((_, size, place, _), weight, index) in enumerate(placed):
        afters = []
        for other, ((_, other_size, other_place, _), other_weight, _) in enumerate(placed):
            if place < other_place + other_size and other_place < place + size:
                afters.append((0 if other < number else -1, uses[other_weight][1]))
        after_pass, after_launch = max(afters)
        transfers.append((weight, index, *uses[weight], after_launch, after_pass))
    return HandPlan(memory_bytes, pieces, tuple(transfers))


def ring(sizes: list[int], uses: list[tuple[int, int]], n_slots: int) -> HandPlan:
    """Stream every weight whole through the slots, in turns."""
    slot_bytes = max(sizes)
    pieces = tuple(
        ((0, size, number % n_slots * slot_bytes, True),) for number, size in enumerate(sizes)
    )
    return plan_of(n_slots * slot_bytes, pieces, uses)


def tails(sizes: list[int], uses: list[tuple[int, int]], n_slots: int) -> HandPlan:
    """Keep the first page of every weight resident; stream the rest through the slots in turns."""
    slot_bytes = max(sizes) - PAGE_BYTES
    pieces = tuple(
        (
            (0, PAGE_BYTES, n_slots * slot_bytes + number * PAGE_BYTES, False),
            (PAGE_BYTES, size - PAGE_BYTES, number % n_slots * slot_bytes, True),
        )
        for number, size in enumerate(sizes)
    )
    return plan_of(n_slots * slot_bytes + len(sizes) * PAGE_BYTES, pieces, uses)


def weight_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor's memory."""
    return tensor.detach().clone().view(-1).view(torch.uint8)


def write_file(path: pathlib.Path, weights: list[torch.Tensor]) -> list[_native.FileRange]:
    """Write weights consecutively behind a header; return the location of each."""
    ranges, offset_bytes = [], HEADER_BYTES
    with path.open("wb") as file:
        file.write(b"\0" * HEADER_BYTES)
        for weight in weights:
            ranges.append(_native.FileRange(str(path), offset_bytes))
            offset_bytes += file.write(weight_bytes(weight).numpy().tobytes())
    return ranges


class Streamed:
    """A captured model loaded twice: with its weights resident, and with them streamed.

    Attributes:
        resident: the executable on the model's own weights.
        run: the executable that streams.
        stream: the stream of its weights.
        plan: the hand-made plan.
        weights: the model's, in the order of the stream.
    """

    def __init__(
        self,
        model: Any,
        inputs: tuple[torch.Tensor, ...],
        make_plan: Any,
        *,
        file: pathlib.Path | None = None,
        poison: bool = True,
        scheduling: Scheduling = Scheduling.OFFLOAD,
        load: bool = True,
    ) -> None:
        captured = offload.capture(model, *inputs)
        self.resident = captured.load()
        bound, program = captured.bound, captured.program
        values = program.of_role(Role.WEIGHT)
        self.weights = [bound.bindings.weights[value.index][0] for value in values]
        sizes = [value.size_bytes for value in values]
        self.plan = make_plan(sizes, [_use(program, value.index) for value in values])
        self.file = file
        sources = (
            [weight_bytes(weight) for weight in self.weights]
            if file is None
            else write_file(file, self.weights)
        )
        self.sources = sources
        self.stream = _native.WeightStream(
            memory_bytes=self.plan.memory_bytes,
            granule_bytes=PAGE_BYTES,
            weights=[
                _native.StreamedWeight(
                    name=value.name, size_bytes=value.size_bytes, pieces=pieces, source=source
                )
                for value, pieces, source in zip(values, self.plan.pieces, sources, strict=True)
            ],
            transfers=self.plan.transfers,
            n_launches=len(program.launches),
            poison=poison,
        )
        if load:
            self.stream.load()
        self.run = self.executable(bound, scheduling)

    def executable(self, bound: BoundProgram, scheduling: Scheduling) -> Executable:
        """The program on the stream's memory."""
        program, weights = bound.program, bound.bindings.weights
        held = {
            value.index: tuple(
                self.stream.tensor(number).view(tensor.dtype).as_strided(view.shape, view.strides)
                for tensor, view in zip(
                    weights[value.index], program.weight_views[value.index], strict=True
                )
            )
            for number, value in enumerate(program.of_role(Role.WEIGHT))
        }
        bindings = dataclasses.replace(bound.bindings, weights=held)
        backend = CpuBackend()
        prepared = backend.prepare(BoundProgram(program, bindings))
        plan = place_values(program, backend.machine(), prepared.operator_allocated)
        make_resident = _native.CpuResident
        with mock.patch.object(
            _native,
            "CpuResident",
            lambda slots, tensors, _: make_resident(slots, tensors, self.stream),
        ):
            return Executable(prepared, plan, backend, scheduling)

    def check(self, *inputs: torch.Tensor) -> None:
        """Execute each once; require the same bits."""
        expected = self.resident(*inputs)
        assert torch.equal(self.run(*inputs), expected)
        assert self.run.last_execution.bytes_streamed == self.plan.transfer_bytes


def _use(program: Program, value: int) -> tuple[int, int]:
    launches = [one.index for one in program.launches if value in one.reads]
    return launches[0], launches[-1]


class Chain(torch.nn.Module):
    """Layers in sequence; `tied`: the first weight is read once more at the end."""

    def __init__(self, n_layers: int, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(
            torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(n_layers)
        )
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(x @ layer) + x
        return x @ self.layers[0] if self.tied else x


def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH)


def two_slots(sizes: list[int], uses: list[tuple[int, int]]) -> HandPlan:
    return ring(sizes, uses, 2)


def three_slots(sizes: list[int], uses: list[tuple[int, int]]) -> HandPlan:
    return ring(sizes, uses, 3)


def two_tails(sizes: list[int], uses: list[tuple[int, int]]) -> HandPlan:
    return tails(sizes, uses, 2)
