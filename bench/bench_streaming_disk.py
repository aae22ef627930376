"""Claim: weights streamed from a disk keep a pass within 90 % of the roofline, measured.

The roofline of a round is max(compute, copy). Compute is the replay with all weights resident; copy
is reading, through the same reader into existing memory, as many bytes as weights exceed the
budget: the first of the streamed bytes of a pass, which are more, by the ring. Of two models with
as many weights one is compute-bound, the other, of few tokens, disk-bound. Contenders take turns; a
turn is one untimed pass and then several in sequence, so that a streamed pass begins with the ring
of the preceding one. Also shown: compute and copy at once, unordered, a lower bound of any
streaming where they contend; and blocks read just before they run, nothing ahead, with as many
leading blocks resident as fit the budget. Files are as safetensors writes them, and aligned.

Memory is the peak of processes that take turns, by proportional set size. From the least budget to
half of the weights it may grow by 1.01 times the growth of the budget; and beyond the imports it is
at most 1.01 times the budget and the streamed bytes together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
import process_memory
import streaming_process
from measurements import Case, Figure, counted_figure, figure_of, ratio_of
from offload.api.captured import Captured
from offload.files import find_stored_tensors
from offload.native import _native
from offload.program import StoredTensor
from offload.run import Executable
from streaming_process import Stack
from turns import take_turns

PROCESS = Path(streaming_process.__file__)
COMPUTING = streaming_process.STACK
READING = streaming_process.Stack(n_blocks=32, width=512, heads=8, tokens=4)
CASES = [
    (stack, percent, kind)
    for stack, percents in ((COMPUTING, (25, 50, 75)), (READING, (25, 50)))
    for kind in ("ordinary", "aligned")
    for percent in percents
]
ROUNDS, ROUND_NS = 16, 300_000_000
MEMORY_ROUNDS = 9
MIB = 2**20
BLOCK_BYTES = 4096  # alignment of unbuffered reads from a disk

Range = tuple[StoredTensor, int, int]
"""Bytes of a stored tensor: the tensor, their offset in it, their number."""


class Reader:
    """Separate memory for ranges of files, into which all are read repeatedly."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        places, at = [], 0
        for _, _, size_bytes in ranges:
            places.append(at)
            at += -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._stream = _native.WeightStream(
            memory_bytes=at,
            granule_bytes=BLOCK_BYTES,
            weights=[
                _native.StreamedWeight(
                    name=stored.name,
                    size_bytes=size_bytes,
                    pieces=[(0, size_bytes, place, False)],
                    source=_native.FileRange(stored.path, stored.offset_bytes + offset_bytes),
                )
                for (stored, offset_bytes, size_bytes), place in zip(ranges, places, strict=True)
            ],
            transfers=[],
            n_launches=1,
        )

    def read(self) -> None:
        """Read all ranges."""
        self._stream.load()

    def tensors(self) -> list[torch.Tensor]:
        """The bytes of each range, uint8."""
        return [self._stream.tensor(index) for index in range(len(self.modes))]

    @property
    def modes(self) -> list[str]:
        """How each range is read."""
        return self._stream.read_modes


def streamed_ranges(run: Executable) -> list[Range]:
    """The ranges that a pass streams, in the order of its transfers."""
    assert run.streaming is not None
    plan = run.streaming.plan
    pieces = [plan.pieces[one.piece] for one in plan.transfers]
    return [
        (run.bound.bindings.stored[one.value], one.offset_bytes, one.size_bytes) for one in pieces
    ]


def first_of(ranges: Iterable[Range], n_bytes: int) -> list[Range]:
    """The first bytes of ranges, this many together."""
    found: list[Range] = []
    for stored, offset_bytes, size_bytes in ranges:
        if taken := min(size_bytes, n_bytes):
            found.append((stored, offset_bytes, taken))
            n_bytes -= taken
    assert n_bytes == 0
    return found


class BlockByBlock:
    """Reads the weights of each block just before it runs, except those of the leading blocks."""

    def __init__(self, stack: Stack, folder: Path, budget_bytes: int) -> None:
        stored = find_stored_tensors(folder)
        self._model = stack.without_memory()
        self._readers = []
        for index, block in enumerate(self._model):
            names = [name for name, _ in block.named_parameters()]
            found = [stored[f"{index}.{name}"] for name in names]
            reader = Reader([(one, 0, size_bytes(one)) for one in found])
            for name, one, content in zip(names, found, reader.tensors(), strict=True):
                weight = content.view(torch.float32).view(one.shape)
                parent, _, last = name.rpartition(".")
                setattr(block.get_submodule(parent), last, nn.Parameter(weight))
            reader.read()
            self._readers.append(reader)
        per_block = sum(map(size_bytes, stored.values())) // len(self._readers)
        self._n_resident = max(0, budget_bytes // per_block - 1)  # one leaves space for the others

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Read and run each block."""
        for index, (block, reader) in enumerate(zip(self._model, self._readers, strict=True)):
            if index >= self._n_resident:
                reader.read()
            x = block(x)
        return x


def size_bytes(stored: StoredTensor) -> int:
    return torch.Size(stored.shape).numel() * torch.float32.itemsize


def save(stack: Stack, path: Path, *, aligned: bool) -> None:
    """Write the stack's weights; if `aligned`, the content begins at a multiple of a disk block.

    A header may end in spaces (safetensors, format).
    """
    content = safetensors.torch.save(stack.model().state_dict())
    n_header = int.from_bytes(content[:8], "little")
    n_spaces = -(8 + n_header) % BLOCK_BYTES if aligned else 0
    with path.open("wb") as file:
        file.write((n_header + n_spaces).to_bytes(8, "little"))
        file.write(content[8 : 8 + n_header] + b" " * n_spaces)
        file.write(content[8 + n_header :])
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Stack, str], Path]:
    """The weights of each stack as safetensors writes them, and aligned."""
    made = {}
    for stack, _, kind in CASES:
        if (stack, kind) not in made:
            made[stack, kind] = folder = tmp_path_factory.mktemp(kind)
            save(stack, folder / "model.safetensors", aligned=kind == "aligned")
    return made


def capture_from(stack: Stack, folder: Path) -> Captured:
    return offload.capture(stack.without_memory(), stack.inputs(), weights=folder)


def weights_bytes(captured: Captured) -> int:
    return sum(map(size_bytes, captured.bindings.stored.values()))


def in_milliseconds(times_ns: Sequence[float]) -> Figure:
    return figure_of([ns / 1e6 for ns in times_ns], "ms")


def mib(values: Iterable[float]) -> list[float]:
    return [one / MIB for one in values]


@pytest.mark.parametrize("case", CASES)
def test_roofline(
    benchmark: Any,
    record: Callable[[Case], None],
    folders: dict[tuple[Stack, str], Path],
    case: tuple[Stack, int, str],
) -> None:
    stack, percent, kind = case
    captured = capture_from(stack, folders[stack, kind])
    whole_bytes = weights_bytes(captured)
    budget_bytes = whole_bytes * percent // 100
    x = stack.inputs()
    with (
        ThreadPoolExecutor(1) as beside,
        captured.load() as resident,
        captured.load(weights_budget=budget_bytes) as streamed,
    ):
        assert streamed.streaming is not None
        plan = streamed.streaming.plan
        exceeding_bytes = whole_bytes - budget_bytes
        copy = Reader(first_of(streamed_ranges(streamed), exceeding_bytes))
        if set(copy.modes) != {"direct"}:
            pytest.skip("this filesystem takes no direct reads: a copy in memory would be measured")
        plain = BlockByBlock(stack, folders[stack, kind], budget_bytes)

        def at_once() -> None:
            reading = beside.submit(copy.read)
            resident(x)
            reading.result()

        expected = resident(x)
        assert torch.equal(streamed(x), expected)
        assert streamed.last_execution.bytes_streamed == plan.transfer_bytes
        torch.testing.assert_close(plain(x), expected)
        times = take_turns(
            {
                "resident": lambda: resident(x),
                "streamed": lambda: streamed(x),
                "copy": copy.read,
                "at once": at_once,
                "block by block": lambda: plain(x),
            },
            rounds=ROUNDS,
            round_ns=ROUND_NS,
        )
        roofline = [max(both) for both in zip(times["resident"], times["copy"], strict=True)]
        bounds = {"roofline": roofline, "block by block": times["block by block"]}
        record(
            Case(
                f"{stack.title}, budget {percent} % of {whole_bytes // MIB} MiB"
                + (", aligned file" if kind == "aligned" else ""),
                ratios={
                    name: ratio_of(
                        bound, times["streamed"], at_least=0.9 if name == "roofline" else 1
                    )
                    for name, bound in bounds.items()
                },
                figures={
                    **{name: in_milliseconds(of) for name, of in times.items()},
                    "streamed, predicted": counted_figure(plan.period_ns / 1e6, "ms"),
                    "copied in a pass": counted_figure(plan.transfer_bytes / MIB, "MiB"),
                    "weights less the budget": counted_figure(exceeding_bytes / MIB, "MiB"),
                    "copy, rate": figure_of([exceeding_bytes / ns for ns in times["copy"]], "GB/s"),
                },
            )
        )
        benchmark.pedantic(streamed, args=(x,), rounds=3)


def test_memory(
    benchmark: Any, record: Callable[[Case], None], folders: dict[tuple[Stack, str], Path]
) -> None:
    folder = folders[COMPUTING, "ordinary"]
    captured = capture_from(COMPUTING, folder)
    whole_bytes = weights_bytes(captured)
    with captured.load(weights_budget=whole_bytes // 2) as run:
        assert run.streaming is not None
        budgets = {"floor": run.streaming.plan.floor.required_bytes, "half": whole_bytes // 2}
        x = COMPUTING.inputs()
        checksum = float(run(x).double().abs().sum())
        benchmark.pedantic(run, args=(x,), rounds=3)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in budgets}
    for _ in range(MEMORY_ROUNDS):
        for name, several in found.items():
            several.append(process_memory.measure(PROCESS, folder, budgets[name]))
    for several in found.values():
        assert all(one["checksum"] == checksum for one in several)
    peak = {name: [one["peak_bytes"] for one in several] for name, several in found.items()}
    beyond = process_memory.beyond_imports(found["half"])
    growth = [half - floor for half, floor in zip(peak["half"], peak["floor"], strict=True)]
    allowed = [1.01 * (budgets["half"] - budgets["floor"])] * MEMORY_ROUNDS
    record(
        Case(
            f"memory: {COMPUTING.title}, budget 50 % of {whole_bytes // MIB} MiB",
            ratios={
                "1.01 of the budget's growth from the least one": ratio_of(
                    allowed, growth, of="bytes", at_least=1
                ),
                "1.01 of the budget and what is streamed": process_memory.against_streamed(
                    found["half"], budgets["half"]
                ),
            },
            figures={
                **{f"peak, {name}": figure_of(mib(of), "MiB") for name, of in peak.items()},
                "beyond the imports": figure_of(mib(beyond), "MiB"),
            },
        )
    )
