"""Captures a Program's launches with torch, for discovery: see `Capturer`.

Everything happens on the capture thread and its stream (see `capture_thread`): cuBLAS's handles
belong to a thread, their workspaces to a stream. Captures run there one at a time, since they
borrow what the process has once: the pool that serves torch's allocator, its record of requests,
and the states of generators.

A warm-up runs each launch once outside a capture, so that libraries choose their algorithms and
load their kernels there. Under capture nothing executes, so inputs and weights are stand-ins in the
pool's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.backends.captured.capture_thread import refuse_capturing, run_on_capture_thread
from offload.backends.captured.random_draws import (
    DrawLog,
    RandomState,
    generators_of,
    own_random_states,
)
from offload.backends.captured.relocation.captures import RANDOM_OWNER, GraphCapture, OwnedRange
from offload.backends.captured.relocation.fixed_weights import weight_ranges
from offload.backends.captured.torch_warm_up import (
    Bases,
    captured_bases,
    collector_off,
    copied,
    failures_of,
    warm_up,
)
from offload.backends.cuda.capture import device_of
from offload.backends.cuda.capture_stream import capture_stream, end_capture
from offload.backends.cuda.generator_cells import begin_capture
from offload.backends.cuda.graph import read_graph
from offload.backends.cuda.kernel_launcher import launcher_of
from offload.backends.cuda.node_log import NodeLog
from offload.backends.cuda.torch_pool import PoolMemory
from offload.errors import CaptureError, ExecutionError, OffloadError
from offload.interpreter.device_failures import first_line
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.memory_pools import MemoryPool, live_blocks, region
from offload.native import _native
from offload.program import BoundProgram, Launch, Role, Value

_MAXIMUM_TRIES = 3

_PAINTED_BYTES = 2**17
"""Of the stack before each captured launch: more than torch's operators use."""

_paints = itertools.cycle(range(0x11, 0x100, 0x11))
"""The byte with which a capture paints the stack: different for each capture of a Program."""

# Graphs whose captures could not be ended: torch's allocator of pinned memory continues to query
# them by address (`captures_underway_` in ATen/core/CachingHostAllocator.h), so they must not be
# destroyed.
_never_ended: list[torch.cuda.CUDAGraph] = []


class TorchCapturer:
    """Captures with torch.cuda; a Program is warmed up once.

    Owner: one preparation of a Program. Thread: any, one call at a time; captures of several
    capturers wait for one another.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Begin without a warm-up.

        Args:
            inputs: a call's tensors in the Program's order, which the warm-up reads; None: those of
                `made_up_inputs`.
        """
        self._inputs = inputs
        self._warm: BoundProgram | None = None
        self._copied: set[int] = set()
        self._random: RandomState | None = None

    def capture(self, bound: BoundProgram, pool: _native.DiscoveryPool) -> GraphCapture:
        """Run every launch once under stream capture; see `Capturer.capture`.

        Leaves generators, inputs, weights and torch's settings unchanged, also on failure.

        Raises:
            CaptureError: a launch cannot be captured (the message names it), the caller is
                capturing, or torch's memory history is being recorded.
            ExecutionError: the device or the pool failed, or has no memory.
        """
        program = bound.program
        refuse_capturing("cuda")
        device = device_of(program)
        ready = torch.cuda.current_stream(device).record_event()
        work = functools.partial(self._on_thread, bound, pool, device, ready)
        return run_on_capture_thread(work, "cuda")

    def _on_thread(
        self, bound: BoundProgram, pool: _native.DiscoveryPool, device: int, ready: torch.cuda.Event
    ) -> GraphCapture:
        with torch.cuda.device(device), torch.no_grad():
            stream = capture_stream(device)
            cuda = torch.device("cuda", device)
            own_states = own_random_states(generators_of(bound, cuda), cuda)
            with torch.cuda.stream(stream), own_states:
                stream.wait_event(ready)
                if self._warm is not bound:
                    self._random = _warm_up_drawing(bound, device, self._inputs)
                    self._warm, self._copied = bound, set()
                return self._until_unshared(bound, pool, device, stream)

    def _until_unshared(
        self,
        bound: BoundProgram,
        pool: _native.DiscoveryPool,
        device: int,
        stream: torch.cuda.Stream,
    ) -> GraphCapture:
        """Capture, and repeat if results were in memory that had another use before."""
        program = bound.program
        for _ in range(_MAXIMUM_TRIES):
            one = _OneCapture(bound, pool, device, stream, self._copied)
            found, recycled = one.run()
            if not recycled:
                return dataclasses.replace(found, random=self._random)
            self._copied |= recycled
            del one, found
            pool.rewind()
        names = sorted(program.values[index].name for index in self._copied)
        raise CaptureError(
            f"{', '.join(names)}: torch allocated these results in reused memory in each of "
            f"{_MAXIMUM_TRIES} captures, so their words cannot be distinguished: leave the "
            "operators that make them out of the captured model"
        )


class _Kept:
    """What a capture's graph needs, released in an order that torch's allocator accepts.

    A pool must be the last user of its memory: tensors first, then the graph, then the pool. The
    cells of seed and offset belong to generators' states until the graph is destroyed: in torch
    2.11 `~CUDAGraph` unregisters it there, and `reset` does not (ATen/cuda/CUDAGraph.cpp).
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, tensors: list[Any], pools: list[MemoryPool]
    ) -> None:
        self.bases: Bases = {}
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._tensors = tensors
        self._pools = pools

    def close(self) -> None:
        """Release it; there must be no other reference to the graph."""
        self.bases.clear()
        self._tensors.clear()
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # from a device that has failed
                graph.reset()
        del graph
        while self._pools:
            self._pools.pop().close()

    def __del__(self) -> None:
        self.close()


class _OneCapture:
    """One capture of a Program in one layout."""

    def __init__(
        self,
        bound: BoundProgram,
        pool: _native.DiscoveryPool,
        device: int,
        stream: torch.cuda.Stream,
        copied: set[int],
    ) -> None:
        self._bound = bound
        self._program = bound.program
        self._pool = pool
        self._device = device
        self._copied = copied
        self._stream = stream.cuda_stream
        self._launcher = launcher_of(device)
        self._paint = next(_paints)
        self._nodes = NodeLog(self._stream)
        self._memory = PoolMemory(pool, device)
        self._cells = MemoryPool(torch.device("cuda", device))
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._tensors: list[Any] = self._memory.kept
        pools = [self._cells, self._memory.torch_pool]
        self._kept = _Kept(self._graph, self._tensors, pools)

    def run(self) -> tuple[GraphCapture, set[int]]:
        """Capture; Values whose memory was used before make the capture unusable.

        A failed capture leaves nothing behind, though its error is held.
        """
        try:
            return self._captured()
        except BaseException:
            del self._graph
            self._kept.close()
            raise

    def _captured(self) -> tuple[GraphCapture, set[int]]:
        with region(), self._memory.current(), collector_off(), _workspaces_cleared():
            run = EagerRun(self._bound, self._stand_ins(), None, self._launcher.enqueue)
            self._kept.bases = run.bases
            try:
                self._begin()
                for launch in self._program.launches:
                    self._launch(run, launch)
            except BaseException:
                self._abandon()
                raise
            self._end()
            values = {
                storage.data_ptr(): index
                for index, (storage, _) in run.bases.items()
                if storage.device.type == "cuda" and storage.nbytes()
            }
            sizes_bytes = {one.index: one.size_bytes for one in self._program.values}
            allocations, recycled = self._memory.allocations(values, sizes_bytes)
        handle = self._graph.raw_cuda_graph()
        nodes, edges = read_graph(handle, self._nodes.known)
        nodes = self._launcher.declared(nodes)
        launches = [self._nodes.launches.get(node.handle, -1) for node in nodes]
        added = {index for index, node in enumerate(nodes) if node.handle in self._nodes.added}
        owned = [*self._random_cells(), *weight_ranges(self._bound)]
        kept = self._kept
        found = GraphCapture(handle, nodes, edges, launches, allocations, owned, kept)
        n_bytes = _workspace_bytes(self._device)
        return dataclasses.replace(found, workspace_bytes=n_bytes, added=added), recycled

    def _stand_ins(self) -> Bases:
        """Memory for inputs and weights; host constants as recorded.

        The weights of an opaque Program stay in place, as it reads its own.
        """
        weights_stay = self._program.opaque is not None

        def given(value: Value) -> torch.UntypedStorage | None:
            if value.role is Role.WEIGHT and weights_stay:
                return None
            return self._memory.stand_in(value.size_bytes)

        return captured_bases(self._bound, given)

    def _begin(self) -> None:
        pool: Any = self._memory.torch_pool.id
        cuda = torch.device("cuda", self._device)
        try:
            begin_capture(self._graph, pool, self._cells, generators_of(self._bound, cuda))
        except RuntimeError as error:
            raise ExecutionError(f"a capture cannot begin: {first_line(error)}") from error

    def _launch(self, run: EagerRun, launch: Launch) -> None:
        # Unwritten bytes of a kernel's arguments hold this byte, and another in each capture.
        _native.paint_stack(_PAINTED_BYTES, self._paint)
        with failures_of(launch, "the capture", functools.partial(self._failure, launch)):
            outcome = run.call(launch)()
        self._tensors.append(outcome)
        run.keep(launch, outcome)
        try:
            self._settle(run, launch)
        except torch.OutOfMemoryError as error:
            raise self._failure(launch, error) from error

    def _settle(self, run: EagerRun, launch: Launch) -> None:
        """Copy the results that need it, and take free memory before and after that."""
        made = [view.value for view in launch.made()]
        # Memory that the launch freed is taken first: a copy must not receive it.
        self._memory.settle({run.bases[value][0].data_ptr() for value in made})
        self._nodes.note(launch)
        if self._copied.isdisjoint(made):
            return
        for value in made:
            if value in self._copied:
                run.bases[value] = (copied(run.bases[value][0]), 0)
        self._nodes.note(launch, are_added=True)
        self._memory.settle({run.bases[value][0].data_ptr() for value in made})

    def _failure(self, launch: Launch, error: Exception) -> OffloadError:
        # Out of memory, torch tries to free some, which fails in a capture.
        reason = self._pool.error or first_line(error)
        if self._pool.error is not None or isinstance(error, torch.OutOfMemoryError):
            return ExecutionError(f"{launch.source}: no addresses for {launch.name}: {reason}")
        return CaptureError(
            f"{launch.source}: {launch.name} cannot be captured in a CUDA graph, and has to be "
            f"left out of the captured model: {reason}"
        )

    def _end(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                self._graph.capture_end()
        except RuntimeError as error:
            self._abandon()
            raise CaptureError(
                "the capture of the program's launches failed, so that one of them has to be left "
                f"out of the captured model: {first_line(error)}"
            ) from error

    def _abandon(self) -> None:
        """End a failed capture; an error says that it had already ended."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            _never_ended.append(self._graph)
            pool = self._memory.torch_pool.id
            with contextlib.suppress(RuntimeError):  # from a capture that has not begun
                torch._C._cuda_endAllocateToPool(self._device, pool)
                torch._C._cuda_releasePool(self._device, pool)
            end_capture(self._stream)

    def _random_cells(self) -> list[OwnedRange]:
        """The cells of seed and offset for this graph's random kernels: memory of this capture."""
        return sorted(
            (
                OwnedRange(block["address"], block["requested_size"], RANDOM_OWNER)
                for block in live_blocks(self._cells.snapshot(include_traces=False))
            ),
            key=lambda one: one.address,
        )


# ---- small things --------------------------------------------------------------------------------


def _warm_up_drawing(
    bound: BoundProgram, device: int, inputs: Sequence[torch.Tensor] | None
) -> RandomState | None:
    """Warm up; return the generator that the Program draws from, and the advance of its offset.

    Raises:
        CaptureError, Disproved: it draws from several generators; or as `warm_up`.
        ExecutionError: as `warm_up`.
    """
    cuda = torch.device("cuda", device)
    draws = DrawLog(generators_of(bound, cuda))
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    enqueue = launcher_of(device).enqueue
    warm_up(bound, cuda, inputs, free_workspaces=clear, launched=draws.note, enqueue=enqueue)
    drawn = draws.states()
    if len(drawn) > 1:
        raise CaptureError(
            "the program draws from several random generators, and a graph supports one: draw "
            "from torch's default one, or from one that is passed"
        )
    return next(iter(drawn.values()), None)


def _workspace_bytes(device: int) -> int:
    """The size of torch's workspace for cuBLAS for each handle and stream.

    After `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp: pairs of a size in KiB and a
    count in CUBLAS_WORKSPACE_CONFIG; else 32 MiB from sm_90, and `:4096:2:16:8` before. If the size
    differs, the launches that use a workspace keep their order.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not pairs:
        is_hopper = torch.cuda.get_device_capability(device) >= (9, 0)
        pairs = [("4096", "8")] if is_hopper else [("4096", "2"), ("16", "8")]
    return sum(int(size) * int(count) * 1024 for size, count in pairs)


@contextlib.contextmanager
def _workspaces_cleared() -> Iterator[None]:
    """Let cuBLAS create its workspaces in the capture, and keep none of them after it."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
