"""Random numbers in a model of torch_npu: where its kernels read a generator's seed and offset.

Under capture torch_npu allocates two numbers of eight bytes for each generator, at its first draw,
on the device's default stream; random kernels read them at each run (NPUGeneratorState in
torch_npu's NPUGeneratorImpl.h). An execution of offload writes them before the model, as a replay
by torch does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.backends.ascend.failed_captures import abandon
from offload.backends.captured.random_draws import DrawLog, RandomState
from offload.errors import CaptureError, ExecutionError
from offload.interpreter.device_failures import first_line
from offload.interpreter.memory_pools import MemoryPool, live_blocks, region, segments_of
from offload.native import _native
from offload.program import Launch

Cell = tuple[int, int]
"""The addresses of a seed and an offset."""

_NUMBER_BYTES = 8
# Distinct states for the trial capture, unlikely to equal each other or earlier memory content.
_TRIAL_SEEDS = (0x5EED_0001, 0x5EED_0002)
_TRIAL_OFFSETS = (1200, 3600)

_seed_first: dict[int, bool] = {}
_trial = threading.Lock()


class CellFinder:
    """Finds the memory of seeds and offsets that a capture makes.

    The first launch that draws from a generator allocates all its memory from a separate pool,
    where its stream identifies the capture's additional allocations.

    Owner: one capture, on whose thread it is called, with states of generators that no other
    capture has: cells are made at a state's first draw. It keeps the pools, which must outlive the
    captured graph and the states.

    Attributes:
        pools: the pools with cells, and with memory of the launches that made them.
    """

    def __init__(self, device: torch.device, draws: DrawLog) -> None:
        """Learn, before the capture begins, what it will draw.

        Raises:
            CaptureError: torch_npu keeps seeds and offsets in an unknown way.
            ExecutionError: the device failed.
        """
        npu: Any = torch.npu  # type: ignore[attr-defined]
        self.pools: list[MemoryPool] = []
        self._device = device
        self._draws = draws
        self._cells: dict[int, Cell] = {}
        self._default_stream = 0
        self._is_seed_first = True
        if draws.generator_of:
            self._default_stream = npu.default_stream(device).npu_stream
            self._is_seed_first = seed_is_first(device)

    @contextlib.contextmanager
    def launching(self, launch: Launch) -> Iterator[None]:
        """Find the cells of a launch while it is captured.

        Raises:
            CaptureError: it draws, and makes no cells.
        """
        position = self._draws.generator_of.get(launch.index)
        if position is None or position in self._cells:
            yield
            return
        pool = MemoryPool(self._device)
        self.pools.append(pool)
        with pool.use():
            yield
        numbers = numbers_in(pool, self._device, self._default_stream)
        if len(numbers) != 2:
            raise CaptureError(
                f"{launch.source}: {launch.name} draws random numbers, and under capture makes "
                f"{len(numbers)} numbers on the device's default stream: expected a seed and an "
                "offset there, else each execution would draw the same numbers"
            )
        first, second = numbers
        self._cells[position] = (first, second) if self._is_seed_first else (second, first)

    def check_captured(self, launches: Sequence[Launch]) -> None:
        """Check as `DrawLog.check_captured`."""
        self._draws.check_captured(launches)

    def states(self) -> tuple[RandomState, ...]:
        """Return the generators that are drawn from."""
        return tuple(self._draws.states().values())

    def segments_of_launches(self) -> list[dict[str, Any]]:
        """Return the launches' own allocations in the pools, as described by torch's snapshots."""
        return [
            segment
            for pool in self.pools
            for segment in segments_of(pool, self._device)
            if segment["stream"] != self._default_stream
        ]

    def cells(self) -> list[Cell]:
        """Return the cell of each of these generators."""
        return [self._cells[position] for position in sorted(self._cells)]


def numbers_in(pool: Any, device: torch.device, stream: int) -> list[int]:
    """Return the addresses of eight-byte numbers that a pool has made on a stream, in order."""
    segments = (one for one in segments_of(pool, device) if one["stream"] == stream)
    return sorted(
        block["address"]
        for block in live_blocks(segments)
        if block["requested_size"] == _NUMBER_BYTES
    )


def seed_is_first(device: torch.device) -> bool:
    """Whether torch_npu makes the seed before the offset: tried once per process and device.

    A draw from a separate generator is captured on the current stream, which is not the default
    stream, and replayed by torch from another state.

    Raises:
        CaptureError: the replay draws other numbers than eager, or leaves other values than seed
            and offset in the memory that the capture made.
        ExecutionError: the device failed.
    """
    with _trial:
        if device.index not in _seed_first:
            try:
                with contextlib.closing(_Trial(device)) as trial:
                    _seed_first[device.index] = trial.seed_is_first()
            except RuntimeError as error:
                raise ExecutionError(
                    f"a trial capture of random numbers failed: {first_line(error)}"
                ) from error
        return _seed_first[device.index]


def _number_at(device: int, address: int) -> int:
    return int.from_bytes(_native.ascend_read_memory(device, address, _NUMBER_BYTES), "little")


class _Trial:
    """A captured draw from a separate generator, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        self._npu = npu
        self._device = device
        self._generator = torch.Generator(device=device)
        self._drawn = torch.empty(64, device=device)
        self._pools = [MemoryPool(device), MemoryPool(device)]
        self._graph = npu.NPUGraph()
        self._stream = npu.current_stream(device)

    def seed_is_first(self) -> bool:
        """Capture from one state, replay from another, and compare the memory."""
        self._set(0)
        self._draw()
        self._set(0)
        self._capture()
        self._set(1)
        self._draw()
        expected, end = self._drawn.tolist(), self._generator.get_offset()
        self._set(1)
        self._graph.replay()
        self._stream.synchronize()
        replayed = self._drawn.tolist()
        default_stream = self._npu.default_stream(self._device).npu_stream
        numbers = numbers_in(self._pools[1], self._device, default_stream)
        held = [_number_at(self._device.index, address) for address in numbers]
        state = [_TRIAL_SEEDS[1], _TRIAL_OFFSETS[1]]
        is_same = replayed == expected and self._generator.get_offset() == end
        if not is_same or sorted(held) != sorted(state):
            raise CaptureError(
                "torch_npu keeps the state of random generators in an unknown way: a replay from "
                f"seed and offset {state} leaves {held} in the memory that its capture made, and "
                f"draws {'the numbers that' if is_same else 'other numbers than'} eager does"
            )
        return held == state

    def close(self) -> None:
        """Release everything: users of the pools' memory before the pools."""
        with contextlib.suppress(RuntimeError):  # of a failed device
            self._graph.reset()
        del self._graph, self._generator, self._drawn
        self._pools.clear()

    def _set(self, which: int) -> None:
        self._generator.manual_seed(_TRIAL_SEEDS[which])
        self._generator.set_offset(_TRIAL_OFFSETS[which])

    def _draw(self) -> None:
        self._drawn.uniform_(generator=self._generator)

    def _capture(self) -> None:
        stream: int = self._stream.npu_stream
        with region():
            try:
                self._graph.capture_begin(pool=self._pools[0].id, capture_error_mode="thread_local")
                with self._pools[1].use():
                    self._draw()
                    self._stream.npu_stream  # noqa: B018 - until it is launched
                self._graph.capture_end()
            except BaseException:
                abandon(self._graph, self._pools[0], stream, self._device.index)
                raise
