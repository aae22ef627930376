"""torch.cuda on the simulated driver, for a torch built without CUDA.

The C++ half provides tensors, streams and generators of the device type (backend.cpp); this module
provides the caching allocator, graphs, pools and streams of `torch.cuda`, as far as captures use
them. Needs a separate process: it cannot be uninstalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import build_backend
import simulator as simulators
import torch
from caching_allocator import CachingAllocator
from operators import Operators, memory_of

from offload.backends.cuda.graph import call, driver_bindings
from offload.errors import ExecutionError

WORKSPACE_BYTES = 32 << 20  # of cuBLAS on sm_90: see `_workspace_bytes` in torch_capture.py
CELL_BYTES = 8


class TorchCuda:
    """The stand-in, installed.

    Attributes:
        simulator: the driver.
        allocator: torch's.
        graphs: captured graphs, in order.
    """

    def __init__(self) -> None:
        self.simulator = simulators.load()
        self.library = ctypes.CDLL(str(build_backend.build()), mode=ctypes.RTLD_GLOBAL)
        self.library.stand_in_stream.restype = ctypes.c_int64
        self.library.stand_in_set_stream.argtypes = [ctypes.c_int64]
        call("cuInit", 0)
        self.context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))
        self.allocator = CachingAllocator(self._take, self._give, self.current_handle)
        self.graphs: list[Graph] = []
        self._workspaces: dict[int, torch.UntypedStorage] = {}
        allocate_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
        free_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._callbacks = allocate_type(self._allocate), free_type(self._free)
        self.library.stand_in_set_allocator(*self._callbacks)
        self.operators = Operators(self.simulator, self._workspace)
        self._fallback = torch.library.Library("_", "IMPL")
        self._fallback.fallback(self._operator, "CUDA")
        # Registered for all devices, in a table of kernels that has none for this one.
        self._copies = torch.library.Library("aten", "IMPL")
        copy = functools.partial(self._operator, torch.ops.aten.copy_.default)
        self._copies.impl("copy_", copy, "CUDA")
        _install(self)

    # ---- memory --------------------------------------------------------------------------------

    def current(self) -> None:
        """Make the context current on this thread, as the runtime does at each call."""
        call("cuCtxSetCurrent", self.context)

    def current_handle(self) -> int:
        """The handle of the thread's current stream."""
        return int(self.library.stand_in_stream())

    def _take(self, n_bytes: int, stream: int) -> int:
        self.current()
        with _relaxed():
            return int(call("cuMemAlloc", n_bytes))

    def _give(self, address: int) -> None:
        self.current()
        call("cuMemFree", address)

    def _allocate(self, n_bytes: int) -> int:
        try:
            return self.allocator.allocate(n_bytes)
        except BaseException as error:  # C++ cannot handle it
            self.allocator.error = error
            return 0

    def _free(self, address: int) -> None:
        try:
            self.allocator.free(address)
        except BaseException as error:
            self.allocator.error = error

    def _workspace(self) -> int:
        """As getCurrentCUDABlasHandle of ATen/cuda/CublasHandlePool.cpp: one for each stream."""
        stream = self.current_handle()
        if stream not in self._workspaces:
            self._workspaces[stream] = memory_of(WORKSPACE_BYTES)
        return self._workspaces[stream].data_ptr()

    def clear_workspaces(self) -> None:
        """As torch._C._cuda_clearCublasWorkspaces: of all streams."""
        self._workspaces.clear()

    def empty_cache(self) -> None:
        """As torch.cuda.empty_cache: of ended pools, too."""
        self.current()
        self.allocator.empty_cache()

    def _operator(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator; the driver's failure is torch's error (`C10_CUDA_CHECK`)."""
        self.current()
        try:
            return self.operators.run(func, *args, **kwargs)
        except ExecutionError as error:
            raise torch.AcceleratorError(f"CUDA error: {error}") from error


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """As `CUDAStreamCaptureModeGuard` around what the allocator asks of the driver."""
    modes = driver_bindings().CUstreamCaptureMode
    before = call("cuThreadExchangeStreamCaptureMode", modes(2))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        installed().current()
        self._event = _checked("cuEventCreate", 0 if enable_timing else 2)

    def record(self, stream: Stream | None = None) -> None:
        _checked("cuEventRecord", self._event, (stream or current_stream()).driver)

    def __del__(self) -> None:
        driver_bindings().cuEventDestroy(self._event)


class Stream:
    """torch.cuda.Stream and ExternalStream, of a handle of the driver's."""

    def __init__(self, stream_ptr: int = 0, device: Any = None, **_: Any) -> None:
        self.cuda_stream = int(stream_ptr)
        self.device = torch.device("cuda", 0)

    @property
    def driver(self) -> Any:
        installed().current()
        return driver_bindings().CUstream(init_value=self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _checked("cuStreamWaitEvent", self.driver, event._event, 0)

    def synchronize(self) -> None:
        _checked("cuStreamSynchronize", self.driver)

    def query(self) -> bool:
        code, *_ = driver_bindings().cuStreamQuery(self.driver)
        if int(code) not in (0, 600):
            raise torch.AcceleratorError(f"CUDA error: {int(code)}")
        return int(code) == 0


def current_stream(device: Any = None) -> Stream:
    """The thread's current stream."""
    return Stream(installed().current_handle())


@contextlib.contextmanager
def stream_context(stream: Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    before = installed().current_handle()
    installed().library.stand_in_set_stream(stream.cuda_stream)
    try:
        yield
    finally:
        installed().library.stand_in_set_stream(before)


@contextlib.contextmanager
def device_context(device: Any) -> Iterator[None]:
    """torch.cuda.device, for the only device."""
    installed().current()
    yield


def is_capturing() -> bool:
    status = _checked("cuStreamIsCapturing", current_stream().driver)
    return int(status) != 0


def _checked(name: str, *arguments: Any) -> Any:
    """Make a driver call; its failure is torch's error (`C10_CUDA_CHECK`)."""
    code, *results = getattr(driver_bindings(), name)(*arguments)
    if int(code):
        name = driver_bindings().CUresult(int(code)).name
        raise torch.AcceleratorError(f"CUDA error: {name}")
    return results[0] if len(results) == 1 else tuple(results)


class MemPool:
    """torch.cuda.MemPool."""

    def __init__(self, allocator: Any = None, *, no_split: bool = False, **_: Any) -> None:
        functions = allocator or (None, None)
        self._pool = installed().allocator.make_pool(*functions, no_split=no_split)
        self.id = self._pool.id

    def use_count(self) -> int:
        return 1 + self._pool.n_users

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        return self._pool.snapshot()

    def __del__(self) -> None:
        installed().allocator.end_pool(self._pool)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Serve this thread's requests on streams that are not captured from the pool."""
    thread = threading.get_ident()
    allocator = installed().allocator
    token = allocator.begin(pool.id, lambda _: threading.get_ident() == thread)
    try:
        yield
    finally:
        allocator.end(token)
        allocator.release(pool.id)


class PluggableAllocator:
    """torch.cuda.memory.CUDAPluggableAllocator: two functions of a library."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self._allocate, self._free = getattr(library, allocate), getattr(library, free)
        self._allocate.restype = ctypes.c_void_p
        self._allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._sizes: dict[int, int] = {}

    def allocator(self) -> Any:
        def allocate(n_bytes: int, stream: int) -> int:
            address = int(self._allocate(n_bytes, 0, stream) or 0)
            self._sizes[address] = n_bytes
            return address

        def free(address: int) -> None:
            self._free(address, self._sizes.pop(address), 0, 0)

        return allocate, free


class Graph:
    """torch.cuda.CUDAGraph(keep_graph=True): after ATen/cuda/CUDAGraph.cpp of torch 2.13.

    `capture_begin` makes the cells of seed and offset on the default stream when the captured
    stream is captured already (`CUDAGeneratorState::init_capture_state`).
    """

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph, "the stand-in instantiates nothing"
        self._graph: Any = None
        self._token: object | None = None
        self._pool: Any = None
        self._cells: list[torch.Tensor] = []
        self._stream: Stream | None = None

    def register_generator_state(self, generator: torch.Generator) -> None:
        raise AssertionError("the stand-in captures the default generator alone")

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        here = installed()
        stream = current_stream()
        modes = {"global": 0, "thread_local": 1, "relaxed": 2}
        mode = driver_bindings().CUstreamCaptureMode(modes[capture_error_mode])
        if pool is None:
            pool = here.allocator.make_pool(None, None, no_split=False).id
        self._pool, self._stream = pool, stream
        handle = stream.cuda_stream
        self._token = here.allocator.begin(pool, lambda asked: asked == handle)
        _checked("cuStreamBeginCapture", stream.driver, mode)
        with stream_context(Stream(0)):
            self._cells = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]

    def capture_end(self) -> None:
        """After a failure the allocator still serves the capture, as in torch."""
        if self._stream is None:
            raise RuntimeError("no capture is under way")
        self._graph = _checked("cuStreamEndCapture", self._stream.driver)
        installed().allocator.end(self._token)
        self._stream = self._token = None

    def pool(self) -> Any:
        return self._pool

    def raw_cuda_graph(self) -> int:
        return int(self._graph)

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            _checked("cuGraphDestroy", graph)
        if self._pool is not None:
            installed().allocator.release(self._pool)
            self._pool = None
        self._cells.clear()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.reset()


def record_history(enabled: str | None = "all", *_: Any, **options: Any) -> None:
    """torch.cuda.memory._record_memory_history."""
    allocator = installed().allocator
    if enabled is None:
        allocator.trace = None
    elif allocator.trace is None or options.get("clear_history"):
        allocator.trace = []


def snapshot() -> dict[str, Any]:
    """torch.cuda.memory._snapshot."""
    return {"device_traces": [installed().allocator.trace or []]}


_installed: list[TorchCuda] = []


def installed() -> TorchCuda:
    """The stand-in of the process."""
    return _installed[0]


def _install(found: TorchCuda) -> None:
    _installed.append(found)
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda._initialized = True
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.current_stream, cuda.stream, cuda.device = current_stream, stream_context, device_context
    cuda.default_stream = lambda device=None: Stream(0)
    cuda.is_current_stream_capturing = is_capturing
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event, cuda.CUDAGraph, cuda.MemPool = Event, Graph, MemPool
    cuda.use_mem_pool = use_mem_pool
    cuda.empty_cache = found.empty_cache
    cuda.memory_reserved = lambda device=None: found.allocator.reserved_bytes
    cuda.memory_allocated = lambda device=None: found.allocator.allocated_bytes
    cuda.memory.CUDAPluggableAllocator = PluggableAllocator
    cuda.memory._record_memory_history, cuda.memory._snapshot = record_history, snapshot
    cuda.default_generators = (torch.Generator(device="cuda"),)
    _let_storages_lie_there()
    library: Any = torch._C
    library._cuda_clearCublasWorkspaces = found.clear_workspaces
    library._cuda_endAllocateToPool = lambda _, pool: found.allocator.end_all(pool)
    library._cuda_releasePool = lambda _, pool: found.allocator.release(pool)
    library._cuda_isHistoryEnabled = lambda: found.allocator.trace is not None


def _let_storages_lie_there() -> None:
    """Let `torch.UntypedStorage` of a number of bytes take a device that this torch lacks."""
    make: Any = torch.UntypedStorage.__new__

    def new(cls: Any, *sizes: Any, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            return memory_of(*sizes)
        return make(cls, *sizes, device=device, **options)

    storage: Any = torch.UntypedStorage
    storage.__new__ = new


def install() -> TorchCuda:
    """Install it once in a process."""
    return _installed[0] if _installed else TorchCuda()
