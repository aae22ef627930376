"""Nodes that graphs of offload cannot hold: each refusal names their launch, kind and remedy."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import pytest

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import driver_client
from cuda.bindings import driver
from small_graphs import current_context
from small_programs import added

from offload.backends.cuda.graph import call
from offload.backends.cuda.node_log import NodeLog

WHOSE = "^model.py:4: aten::add.Tensor: "
ADVICE = ".*leave that call out of the captured model$"
OK = driver.CUresult.CUDA_SUCCESS

# The message's name of each kind; by the bindings' names, as the numbers are the driver's.
REFUSED = {
    "HOST": "a host function",
    "GRAPH": "a child graph",
    "WAIT_EVENT": "a wait for an event of another stream",
    "EVENT_RECORD": "an event that other streams wait for",
    "EXT_SEMAS_SIGNAL": "a signal to another device or process",
    "EXT_SEMAS_WAIT": "a wait for another device or process",
    "MEM_ALLOC": "an allocation of memory",
    "MEM_FREE": "a free of memory",
    "BATCH_MEM_OP": "a batch of memory operations",
    "CONDITIONAL": "a conditional graph",
}
HELD = ("KERNEL", "MEMCPY", "MEMSET", "EMPTY")
KINDS = {one.name.removeprefix("CU_GRAPH_NODE_TYPE_"): one for one in driver.CUgraphNodeType}


@pytest.fixture
def device(simulator):
    current_context()
    return simulator


@pytest.fixture
def kernel(device) -> int:
    return device.kernel("add_kernel", [8, 8, 8], lambda arguments: None)


def refusal_of(issue) -> str:
    """The message about a launch that issues work on a captured stream."""
    stream = driver_client.stream()
    log = NodeLog(int(stream))
    with driver_client.capture(stream):
        issue(stream)
        with pytest.raises(CaptureError) as raised:
            log.note(added(4, 4))
    return str(raised.value)


def launched(kernel: int):
    """Launches the kernel with three numbers."""
    return lambda stream: driver_client.launch(kernel, stream, *((7, ctypes.c_uint64),) * 3)


def test_every_kind_of_the_driver_is_held_or_refused():
    assert {*HELD, *REFUSED} <= KINDS.keys()


@pytest.mark.parametrize("name", sorted(KINDS.keys() - set(HELD)))
def test_nodes_of_other_kinds_are_refused(kernel, monkeypatch, name):
    """The simulated driver can make few of them, so a kernel's kind is reported otherwise."""
    kind = KINDS[name]
    monkeypatch.setattr(driver, "cuGraphNodeGetType", lambda node: (OK, kind))
    what = REFUSED.get(name, f"a node of kind {int(kind)}, unknown to this version")
    said = refusal_of(launched(kernel))
    assert re.search(f"{WHOSE}the captured graph has {re.escape(what)}, {ADVICE}", said), said


def test_a_child_graph_is_refused(kernel):
    """As from a library that launches its own graph on a captured stream."""
    inner = driver_client.stream()
    graph = driver_client.instantiate(
        driver_client.captured_graph(inner, lambda: launched(kernel)(inner))
    )
    said = refusal_of(lambda stream: call("cuGraphLaunch", graph, stream))
    assert re.search(f"{WHOSE}the captured graph has a child graph, {ADVICE}", said), said


def test_an_access_policy_window_is_refused(kernel):
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    window = driver.CUaccessPolicyWindow()
    window.base_ptr, window.num_bytes, window.hitRatio = driver_client.allocate(4096), 4096, 1.0
    attribute.value.accessPolicyWindow = window
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    parameters = driver_client.arguments(*((7, ctypes.c_uint64),) * 3)

    def issue(stream):
        config.hStream = stream
        call("cuLaunchKernelEx", config, kernel, parameters, 0)

    said = refusal_of(issue)
    what = "kernel 'add_kernel' is launched with an access policy window"
    assert re.search(f"{WHOSE}{what}.*: launch it without one{ADVICE}", said), said


@pytest.mark.parametrize("side", ["src", "dst"])
def test_copies_of_cuda_arrays_are_refused(device, monkeypatch, side):
    """The simulated device has no arrays: a copy's operands are reported as arrays."""
    ask = driver.cuGraphMemcpyNodeGetParams

    def with_an_array(node):
        code, params = ask(node)
        setattr(params, f"{side}MemoryType", driver.CUmemorytype.CU_MEMORYTYPE_ARRAY)
        return code, params

    monkeypatch.setattr(driver, "cuGraphMemcpyNodeGetParams", with_an_array)
    block = driver_client.allocate(128)
    said = refusal_of(lambda stream: call("cuMemcpyDtoDAsync", block, block + 64, 64, stream))
    assert re.search(f"{WHOSE}the captured graph copies to or from a CUDA array{ADVICE}", said)


@pytest.mark.parametrize("by", ["host", "unified"])
def test_copies_to_the_host_are_refused(device, monkeypatch, by):
    """Also where only the driver knows, as for an address that torch passes as unified."""
    host = ctypes.create_string_buffer(64)
    block = driver_client.allocate(64)
    if by == "unified":
        ask = driver.cuGraphMemcpyNodeGetParams

        def unified(node):
            code, params = ask(node)
            params.dstDevice, params.dstMemoryType = (
                int(params.dstHost),
                driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED,
            )
            return code, params

        monkeypatch.setattr(driver, "cuGraphMemcpyNodeGetParams", unified)
    said = refusal_of(
        lambda stream: call("cuMemcpyDtoHAsync", ctypes.addressof(host), block, 64, stream)
    )
    advice = "return the tensor, and copy it after the execution$"
    assert re.search(f"{WHOSE}the captured graph copies to the host.*{advice}", said), said


class Buffer:
    """A launch's options as the driver keeps them, from words of (key, value) and a 0."""

    def __init__(self, n_bytes: int, *keys: int) -> None:
        self.content = ctypes.create_string_buffer(n_bytes)
        self.size = ctypes.c_size_t(n_bytes)
        values = {1: ctypes.addressof(self.content), 2: ctypes.addressof(self.size)}
        pairs = [word for key in keys for word in (key, values.get(key, 0))]
        self.words = (ctypes.c_uint64 * (len(pairs) + 1))(*pairs)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Buffer(16, 1, 2), "has 24 bytes of arguments, of which 16 can be read: launch it with"),
        (None, "has 24 bytes of arguments, of which 0 can be read: launch it with all of them"),
        (Buffer(24, 1), "is launched with options that cannot be read: give its arguments one"),
        (Buffer(24, 1, 2, 3), "is launched with options that cannot be read: give its arguments"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(kernel, monkeypatch, options, what):
    """The simulated driver itself refuses such launches, so a fake one reports them."""
    ask = driver.cuGraphKernelNodeGetParams

    def told(node):
        code, params = ask(node)
        shape = {
            name: getattr(params, name)
            for side in ("gridDim", "blockDim")
            for name in (f"{side}X", f"{side}Y", f"{side}Z")
        }
        extra = 0 if options is None else ctypes.addressof(options.words)
        return code, SimpleNamespace(
            func=params.func, kern=params.kern, kernelParams=0, extra=extra,
            sharedMemBytes=params.sharedMemBytes, **shape,
        )  # fmt: skip

    monkeypatch.setattr(driver, "cuGraphKernelNodeGetParams", told)
    said = refusal_of(launched(kernel))
    assert re.search(f"{WHOSE}kernel 'add_kernel' {what}{ADVICE}", said), said
