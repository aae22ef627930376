"""Common parts of the Ascend probes: runtime, memory, models, a blocked stream."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence

from acl_calls import AclCalls
from probing import NotAnswered, ProbeFailed

LIBRARIES = (
    "libascendcl.so",
    "libacl_rt.so",
    "libacl_mdl.so",
    "libnnopbase.so",
    "libopapi_math.so",
    "libopapi_nn.so",
    "libopapi.so",
    "libaclnn_math.so",
    "libaclnn_nn.so",
)

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
HOST_TO_BUFFER_TO_DEVICE, INNER_DEVICE_TO_DEVICE = 5, 6
PERSISTENT = 0x4
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
HEAD = 0
AT_LEAST = 0  # comparison mode of aclrtValueWait

COUNT = 64
"""Count of numbers in a probe's tensor."""
TENSOR_BYTES = 4 * COUNT

# Blocks a stream where no task waits for a value: about 20 ms of copies.
_BUSY_COPIES, _BUSY_BYTES = 200, 64 << 20


class _Libraries:
    """Functions of several libraries, each taken from the first that has it."""

    def __init__(self, handles: Sequence[ctypes.CDLL]) -> None:
        self._handles = handles

    def __getattr__(self, name: str) -> object:
        for handle in self._handles:
            with contextlib.suppress(AttributeError):
                return getattr(handle, name)
        raise AttributeError(name)


class Device(AclCalls):
    """Device 0 with torch_npu's context, on the thread that made it."""

    def __init__(self) -> None:
        import torch
        import torch_npu  # noqa: F401  registers the device

        torch.npu.set_device(0)
        torch.npu.set_compile_mode(jit_compile=False)
        torch.ones(1, device="npu").cpu()
        handles = []
        for name in LIBRARIES:
            with contextlib.suppress(OSError):
                handles.append(ctypes.CDLL(name))
        super().__init__(_Libraries(handles))

    def code(self, function: str, *arguments: object) -> int:
        """As AclCalls.code. NotAnswered where the runtime lacks the function."""
        if not self.has(function):
            raise NotAnswered(f"this runtime has no {function}")
        return super().code(function, *arguments)

    def malloc(self, n_bytes: int) -> int:
        """Allocate device memory, for the process's life."""
        return self.make("aclrtMalloc", n_bytes, 0)

    def upload(self, address: int, content: bytes) -> None:
        """Write, and wait."""
        self.call("aclrtMemcpy", address, len(content), content, len(content), HOST_TO_DEVICE)

    def download(self, address: int, n_bytes: int) -> bytes:
        """Read the current content, without waiting."""
        content = ctypes.create_string_buffer(n_bytes)
        self.call("aclrtMemcpy", content, n_bytes, address, n_bytes, DEVICE_TO_HOST)
        return content.raw

    def memory(self, content: bytes) -> int:
        """Allocate device memory that holds this."""
        address = self.malloc(len(content))
        self.upload(address, content)
        return address

    def stage(self, address: int, content: object, n_bytes: int, stream: int) -> None:
        """Enqueue a copy of kind 5, whose source the host may change at once."""
        kind = HOST_TO_BUFFER_TO_DEVICE
        self.call("aclrtMemcpyAsync", address, n_bytes, content, n_bytes, kind, stream)

    def stream(self, flags: int = 0) -> int:
        """Make a stream of the probe."""
        return self.make("aclrtCreateStreamWithConfig", 0, flags)

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self.call("aclrtSynchronizeStream", stream)

    def execute(self, model: int, stream: int) -> None:
        """Enqueue an execution."""
        self.call("aclmdlRIExecuteAsync", model, stream)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """Capture the stream; afterwards the list holds the model."""
        models: list[int] = []
        model = ctypes.c_uint64()
        self.call("aclmdlRICaptureBegin", stream, THREAD_LOCAL)
        try:
            yield models
        except BaseException:
            if self.code("aclmdlRICaptureEnd", stream, ctypes.byref(model)) == 0:
                self.call("aclmdlRIDestroy", model.value)
            raise
        self.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
        models.append(model.value)

    @contextlib.contextmanager
    def build(self) -> Iterator[tuple[int, list[int]]]:
        """A stream whose tasks become a model: its only stream, bound as its head."""
        models: list[int] = []
        model, stream = self.make("aclmdlRIBuildBegin", 0), self.stream(PERSISTENT)
        self.call("aclmdlRIBindStream", model, stream, HEAD)
        yield stream, models
        self.call("aclmdlRIEndTask", model, stream)
        self.call("aclmdlRIBuildEnd", model, 0)
        models.append(model)

    @contextlib.contextmanager
    def held_back(self, stream: int) -> Iterator[None]:
        """Nothing that the block enqueues on the stream runs before the block's end."""
        if not self.has("aclrtValueWait"):
            source, target = (self.malloc(_BUSY_BYTES) for _ in range(2))
            copy = (target, _BUSY_BYTES, source, _BUSY_BYTES, DEVICE_TO_DEVICE, stream)
            for _ in range(_BUSY_COPIES):
                self.call("aclrtMemcpyAsync", *copy)
            yield
            return
        gate, other = self.memory(bytes(64)), self.stream()
        self.call("aclrtValueWait", gate, 1, AT_LEAST, stream)
        try:
            yield
        finally:
            self.call("aclrtValueWrite", gate, 1, 0, other)
            self.synchronize(other)


@functools.cache
def device() -> Device:
    """Return the device of this process."""
    return Device()


def words(*values: int) -> bytes:
    """Return words of eight bytes."""
    return struct.pack(f"<{len(values)}Q", *values)


def floats(first: float) -> bytes:
    """Return a tensor's bytes: first, first + 1, and so on."""
    return array.array("f", (first + index for index in range(COUNT))).tobytes()


def require_equal(found: bytes, expected: bytes, what: str) -> None:
    """Raise ProbeFailed unless they are equal: a precondition of the question."""
    if found != expected:
        raise ProbeFailed(f"{what}: the result is wrong")
