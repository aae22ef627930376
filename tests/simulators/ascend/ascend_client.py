"""A concise client of the Ascend runtime's C ABI, shared by tests of the raw ABI."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator

from ascend_simulator import AscendSimulator

# Error codes, named as in the documentation without ACL_ERROR_RT_.
ACL_INVALID_PARAM = 100000
PARAM_INVALID, INVALID_DEVICE = 107000, 107001
CONTEXT_NULL, STREAM_CONTEXT = 107002, 107003
STREAM_MODEL, CAPTURE_DEPENDENCY, STREAM_UNJOINED = 107005, 107024, 107025
MODEL_CAPTURED, STREAM_CAPTURED, EVENT_CAPTURED = 107026, 107027, 107028
STREAM_NOT_CAPTURED, CAPTURE_MODE_NOT_SUPPORT = 107029, 107030
STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_CONFLICT = 107031, 107032
STREAM_TASK_GROUP_STATUS, STREAM_TASK_GROUP_INTR = 107033, 107034
STREAM_CAPTURE_UNMATCHED, MODEL_RUNNING, STREAM_CAPTURE_WRONG_THREAD = 107036, 107037, 107038
INSUFFICIENT_INPUT_ARRAY, MODEL_UPDATE_FAILED, CAPTURE_MODE_BLOCK_ASYNC = 107039, 107040, 107041
SUB_ACLGRAPH_IS_CAPTURING = 107045
FEATURE_NOT_SUPPORT, MEMORY_ALLOCATION = 207000, 207001
RESOURCE_ALLOC_FAIL, NO_EVENT_RESOURCE, NO_STREAM_RESOURCE = 207005, 207007, 207008
STREAM_TASK_FULL = 507002
INTERNAL_ERROR, TASK_TYPE_NOT_SUPPORT, MODEL_EXECUTE, SYS_DMA = 507000, 507009, 507011, 507013
AICORE_EXCEPTION, STREAM_SYNC_TIMEOUT, STREAM_CAPTURE_INVALIDATED = 507015, 507046, 507903

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 0, 1, 2, 3
DEFAULT, HOST_TO_BUFFER_TO_DEVICE, INNER_DEVICE_TO_DEVICE = 4, 5, 6
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
EVENT_SYNC, EVENT_TIME_LINE, EVENT_EXTERNAL = 0x1, 0x8, 0x20
PERSISTENT = 0x4


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def peek(address: int, count: int = 1) -> tuple[int, ...]:
    """Return the current words of memory, without waiting for any work."""
    return struct.unpack(f"<{count}Q", ctypes.string_at(address, 8 * count))


class Client:
    """Calls in the current thread's context."""

    def __init__(self, ascend: AscendSimulator):
        self.ascend = ascend
        self.order: list[str] = []  # the kernels that ran
        functions = ascend.functions({"add": (24, self._add), "note": (8, self._note)})
        self.add_function, self.note_function = functions["add"], functions["note"]

    def _add(self, block: bytes, _n_blocks: int) -> None:
        source, destination, added = struct.unpack_from("<3Q", block)
        self.order.append(f"add {added}")
        ctypes.c_uint64.from_address(destination).value = peek(source)[0] + added

    def _note(self, block: bytes, n_blocks: int) -> None:
        (word,) = struct.unpack_from("<Q", block)
        self.order.append(f"note {word} of {n_blocks}")

    def malloc(self, n_bytes: int = 64) -> int:
        return self.ascend.make("aclrtMalloc", n_bytes, 0)

    def words(self, *values: int) -> int:
        """Allocate device memory that holds these words."""
        address = self.malloc(8 * len(values))
        self.upload(address, u64(*values))
        return address

    def pinned(self, content: bytes) -> int:
        address = self.ascend.make("aclrtMallocHost", len(content))
        ctypes.memmove(address, content, len(content))
        return address

    def upload(self, address: int, content: bytes) -> None:
        self.ascend.call(
            "aclrtMemcpy", address, len(content), content, len(content), HOST_TO_DEVICE
        )

    def stream(self, flags: int = 0) -> int:
        return self.ascend.make("aclrtCreateStreamWithConfig", 0, flags)

    def event(self, flags: int = EVENT_SYNC) -> int:
        return self.ascend.make("aclrtCreateEventExWithFlag", flags)

    def external_event(self) -> int:
        """An event that crosses the border of models."""
        return self.ascend.make("aclrtCreateEventWithFlag", EVENT_EXTERNAL)

    def synchronize(self, stream: int) -> None:
        self.ascend.call("aclrtSynchronizeStream", stream)

    def launch(self, stream: int, function: int, arguments: int, n_bytes: int) -> None:
        """Launch a kernel whose arguments lie in our device memory."""
        self.ascend.call("aclrtLaunchKernel", function, 1, arguments, n_bytes, stream)

    def launch_host(self, stream: int, function: int, *words: int) -> int:
        """Launch a kernel with arguments of the host; return the error code."""
        content = u64(*words)
        return self.ascend.code(
            "aclrtLaunchKernelWithHostArgs", function, 1, stream, 0, content, len(content), 0, 0
        )

    def add(self, stream: int, source: int, destination: int, added: int) -> None:
        """destination[0] = source[0] + added"""
        assert self.launch_host(stream, self.add_function, source, destination, added) == 0

    def note(self, stream: int, word: int) -> None:
        assert self.launch_host(stream, self.note_function, word) == 0

    def record(self, event: int, stream: int) -> None:
        self.ascend.call("aclrtRecordEvent", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.ascend.call("aclrtStreamWaitEvent", stream, event)

    def begin(self, stream: int, mode: int = THREAD_LOCAL) -> None:
        self.ascend.call("aclmdlRICaptureBegin", stream, mode)

    def end(self, stream: int) -> int:
        model = ctypes.c_uint64()
        self.ascend.call("aclmdlRICaptureEnd", stream, ctypes.byref(model))
        return model.value

    def end_code(self, stream: int) -> int:
        model = ctypes.c_uint64()
        return self.ascend.code("aclmdlRICaptureEnd", stream, ctypes.byref(model))

    def info(self, stream: int) -> tuple[int, int]:
        """Return the status of the stream's capture, and the model."""
        status, model = ctypes.c_int(-1), ctypes.c_uint64()
        self.ascend.call(
            "aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(model)
        )
        return status.value, model.value

    @contextlib.contextmanager
    def capture(self, stream: int, mode: int = THREAD_LOCAL) -> Iterator[list[int]]:
        """Capture the stream; afterwards the list holds the model."""
        result: list[int] = []
        self.begin(stream, mode)
        yield result
        result.append(self.end(stream))

    def execute(self, model: int, stream: int) -> None:
        self.ascend.call("aclmdlRIExecuteAsync", model, stream)

    def run(self, model: int, stream: int) -> None:
        self.execute(model, stream)
        self.synchronize(stream)

    @contextlib.contextmanager
    def exchanged(self, mode: int) -> Iterator[None]:
        """Exchange this thread's capture mode, and restore it afterwards."""
        value = ctypes.c_int(mode)
        self.ascend.call("aclmdlRICaptureThreadExchangeMode", ctypes.byref(value))
        yield
        self.ascend.call("aclmdlRICaptureThreadExchangeMode", ctypes.byref(value))
        assert value.value == mode
