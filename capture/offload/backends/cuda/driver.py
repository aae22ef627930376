"""The driver's API by NVIDIA's Python bindings: its functions, and what it knows of addresses."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from offload.backends.cuda.driver_errors import driver_error
from offload.errors import BackendUnavailable

INVALID_VALUE = 1  # of CUresult

# CUmemorytype in cuda.h.
HOST, DEVICE, UNIFIED = 1, 2, 4

# CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START_ADDR and _RANGE_SIZE.
_MEMORY_TYPE_ATTRIBUTE, _ORDINAL, _RANGE_START, _RANGE_BYTES = 2, 9, 11, 12


@functools.cache
def driver_bindings() -> Any:
    """NVIDIA's bindings of the driver.

    Raises:
        BackendUnavailable: they are not installed, or older than CUDA 13.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415
    except ImportError:
        raise BackendUnavailable(
            "graphs are read through NVIDIA's Python bindings, which are not installed: "
            "pip install 'offload[cuda]'"
        ) from None
    if not hasattr(driver, "cuKernelGetParamInfo"):
        raise BackendUnavailable("cuda-bindings is older than CUDA 13: pip install 'offload[cuda]'")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function and return its results.

    Raises:
        OutOfMemory: the device has no memory left.
        ExecutionError: the driver returned another error; the message says what was being done,
            with the driver's text.
    """
    driver = driver_bindings()
    code, *results = getattr(driver, name)(*arguments)
    if int(code):
        raise driver_error(driver, name, code)
    return results[0] if len(results) == 1 else tuple(results)


def is_known_address(address: int) -> bool:
    """Whether the driver knows an address, as memory of a device or pinned memory.

    Raises:
        ExecutionError: the driver cannot answer: no context is current, or the device has failed.
    """
    return memory_type(address) is not None


def describe_address(address: int) -> str:
    """An address with the driver's information about it: whose memory, and which part of it."""
    driver = driver_bindings()
    kind = memory_type(address)

    def ask(attribute: int) -> int | None:
        code, value = driver.cuPointerGetAttribute(driver.CUpointer_attribute(attribute), address)
        return None if int(code) else int(value)

    start, size_bytes, device = (ask(one) for one in (_RANGE_START, _RANGE_BYTES, _ORDINAL))
    if kind is None or start is None:
        return f"0x{address:x}"
    where = f"device {device}" if kind == DEVICE else "the host, known to the driver"
    return f"0x{address:x} (byte {address - start} of {size_bytes} allocated on {where})"


def memory_type(address: int) -> int | None:
    """The memory type of an address, a CUmemorytype; None if the driver does not know it."""
    driver = driver_bindings()
    attribute = driver.CUpointer_attribute(_MEMORY_TYPE_ATTRIBUTE)
    code, kind = driver.cuPointerGetAttribute(attribute, address)
    if int(code) not in (0, INVALID_VALUE):
        raise driver_error(driver, "cuPointerGetAttribute", code)
    return None if int(code) else int(kind)


def by_address(name: str, version: int, *kinds: Any) -> Any:
    """A driver function as of a CUDA version, by its address, with these ctypes.

    Raises:
        ExecutionError: the driver lacks it.
    """
    address, _ = call("cuGetProcAddress", name.encode(), version, 0)
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(address))
