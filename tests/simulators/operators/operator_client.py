"""A client of the simulated operator library: calls both phases of an operator, as programs do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import npu_device
from ascend_client import Client

FLOAT, HALF, INT32, INT64, DOUBLE, BOOL, STRING = 0, 1, 3, 9, 11, 12, 13
ND, FRACTAL_NZ = 2, 29
PARAM_NULLPTR, PARAM_INVALID, INNER_NULLPTR, FAILURE = 161001, 161002, 561103, 500001
RUNTIME_ERROR = 361001

_FORMATS = {FLOAT: "f", HALF: "e", INT32: "i", INT64: "q", DOUBLE: "d", BOOL: "?"}


class Tensor(ctypes.c_void_p):
    """An aclTensor*, as arguments need it."""


class Operators:
    """Operators of libopapi.so on a simulated device. Descriptions are destroyed by `close`."""

    def __init__(self, npu: Client):
        self.npu = npu
        self.library = npu_device.operators()
        self.library.sim_operators_reset()
        self._descriptions: list[tuple[str, ctypes.c_void_p]] = []

    @property
    def live(self) -> tuple[int, int]:
        """The number of live descriptions and executors."""
        return npu_device.live_operator_objects()

    def upload(self, values: Sequence[float], dtype: int = FLOAT) -> int:
        """Copy these elements to device memory."""
        content = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
        address = self.npu.malloc(max(len(content), 32))
        self.npu.upload(address, content)
        return address

    def read(self, address: int, n: int, dtype: int = FLOAT) -> list[float]:
        """Return the elements in memory now, without waiting for any work."""
        layout = f"<{n}{_FORMATS[dtype]}"
        return list(struct.unpack(layout, ctypes.string_at(address, struct.calcsize(layout))))

    def tensor(
        self,
        address: int,
        *shape: int,
        dtype: int = FLOAT,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        storage: Sequence[int] = (),
    ) -> Tensor:
        """A tensor's description; strides and offset in elements.

        With the shape of a `storage`, its layout is FRACTAL_NZ.
        """
        dims = (ctypes.c_int64 * len(shape))(*shape)
        steps = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        dims_of_storage = (ctypes.c_int64 * len(storage))(*storage) if storage else dims
        create = self.library.aclCreateTensor
        create.restype = ctypes.c_void_p
        made = create(
            dims, ctypes.c_uint64(len(shape)), dtype, steps, ctypes.c_int64(offset),
            FRACTAL_NZ if storage else ND, dims_of_storage,
            ctypes.c_uint64(len(dims_of_storage)), ctypes.c_void_p(address),
        )  # fmt: skip
        tensor = Tensor(made)
        self._descriptions.append(("aclDestroyTensor", tensor))
        return tensor

    def scalar(self, value: float, dtype: int = FLOAT) -> ctypes.c_void_p:
        """A number's description."""
        content = ctypes.create_string_buffer(struct.pack(f"<{_FORMATS[dtype]}", value))
        create = self.library.aclCreateScalar
        create.restype = ctypes.c_void_p
        scalar = ctypes.c_void_p(create(content, dtype))
        self._descriptions.append(("aclDestroyScalar", scalar))
        return scalar

    def plan(self, name: str, *parameters: object) -> tuple[int, int, int]:
        """Call the first phase; return its code, the bytes of workspace, and the executor."""
        n_bytes, executor = ctypes.c_uint64(), ctypes.c_void_p()
        function = getattr(self.library, f"aclnn{name}GetWorkspaceSize")
        code = function(*parameters, ctypes.byref(n_bytes), ctypes.byref(executor))
        return code, n_bytes.value, executor.value or 0

    def launch(self, name: str, stream: int, workspace: int, n_bytes: int, executor: int) -> int:
        """Call the second phase; return its code."""
        return getattr(self.library, f"aclnn{name}")(
            ctypes.c_void_p(workspace),
            ctypes.c_uint64(n_bytes),
            ctypes.c_void_p(executor),
            ctypes.c_void_p(stream),
        )

    def call(self, name: str, stream: int, *parameters: object) -> None:
        """Call both phases, with the workspace that the first one requests."""
        code, n_bytes, executor = self.plan(name, *parameters)
        assert code == 0
        workspace = self.npu.malloc(n_bytes) if n_bytes else 0
        assert self.launch(name, stream, workspace, n_bytes, executor) == 0

    def close(self) -> None:
        """Destroy every description."""
        while self._descriptions:
            destroy, description = self._descriptions.pop()
            assert getattr(self.library, destroy)(description) == 0
