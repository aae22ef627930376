"""Errors of the CUDA driver: what was being done, the call, and the driver's text."""

from __future__ import annotations

from typing import Any

from offload.errors import ExecutionError, OutOfMemory
from offload.interpreter.device_failures import AFTER_A_FAULT
from offload.native import _native

_OUT_OF_MEMORY = 2  # of CUresult

# By the driver's function.
_DOING = {
    "cuCtxGetCurrent": "querying the current context",
    "cuCtxSetCurrent": "making the device's context current",
    "cuDeviceGet": "finding the device",
    "cuDevicePrimaryCtxRetain": "retaining the device's primary context",
    "cuEventCreate": "creating an event to time executions",
    "cuEventDestroy": "destroying an event that timed executions",
    "cuEventElapsedTime": "timing executions",
    "cuEventRecord": "recording an event between timed executions",
    "cuEventSynchronize": "waiting for timed executions",
    "cuFuncGetName": "reading a kernel's name",
    "cuFuncGetParamInfo": "reading a kernel's parameters",
    "cuFuncSetAttribute": "asking for the shared memory of a kernel",
    "cuGetProcAddress": "looking up a function of the driver",
    "cuGraphAddDependencies": "ordering copies in the captured graph",
    "cuGraphAddMemcpyNode": "adding a copy to the captured graph",
    "cuGraphClone": "copying the captured graph, to run its launches concurrently",
    "cuGraphGetEdges": "reading the edges of the captured graph",
    "cuGraphGetNodes": "reading the nodes of the captured graph",
    "cuGraphKernelNodeGetParams": "reading a kernel of the captured graph",
    "cuGraphMemcpyNodeGetParams": "reading a copy of the captured graph",
    "cuGraphMemsetNodeGetParams": "reading a memset of the captured graph",
    "cuGraphKernelNodeGetAttribute": "reading how a kernel of the captured graph is launched",
    "cuGraphNodeGetDependencies": "reading what a node of the captured graph waits for",
    "cuGraphNodeGetType": "reading a node of the captured graph",
    "cuGraphRemoveDependencies": "removing dependencies of nodes from the captured graph",
    "cuKernelGetName": "reading a kernel's name",
    "cuKernelGetParamInfo": "reading a kernel's parameters",
    "cuMemAlloc": "allocating memory of the device",
    "cuMemFree": "freeing memory of the device",
    "cuMemGetInfo": "querying how much memory is free",
    "cuMemcpyDtoDAsync": "copying on the device",
    "cuMemcpyDtoH": "copying from the device",
    "cuMemcpyHtoD": "copying to the device",
    "cuMemsetD8Async": "clearing memory of the device",
    "cuModuleGetFunction": "finding a compiled kernel in its module",
    "cuModuleLoadData": "loading a compiled kernel",
    "cuPointerGetAttribute": "querying to whose memory an address belongs",
    "cuStreamCreate": "creating the stream of captures",
    "cuStreamGetCaptureInfo": "querying the graph that is being captured",
    "cuStreamSynchronize": "waiting for the device",
}


def driver_error(driver: Any, name: str, code: Any) -> ExecutionError:
    """The error to raise if a driver function returned a code other than 0.

    Args:
        driver: NVIDIA's bindings.
        name: of the function.
        code: its result, a CUresult.

    Returns:
        An OutOfMemory if the device has no memory left.
    """
    kind = OutOfMemory if int(code) == _OUT_OF_MEMORY else ExecutionError
    doing = f"{_DOING[name]}: " if name in _DOING else ""
    advice = f"; {AFTER_A_FAULT}" if _native.cuda_is_fault(int(code)) else ""
    return kind(f"{doing}{name}: {_described(driver, code)}{advice}")


def _described(driver: Any, code: Any) -> str:
    """The driver's name and text of a code."""
    name = getattr(code, "name", f"CUDA error {int(code)}")
    failed, text = driver.cuGetErrorString(code)
    return name if int(failed) or not text else f"{name} ({text.decode()})"
