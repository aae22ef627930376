"""Probes of undocumented driver behaviour: mappings, events in graphs, loading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from cuda.bindings import driver

from driver_calls import driver_call
from probe_capture import capture_state
from probe_graph import read_graph
from probing import ProbeFailed, conclude, tell

_AREA_BYTES = 64 << 30
_N_AREAS = 4
_WANTED_ADDRESS = 0x2D50 << 32  # the hint of offload's address ranges (native/cuda/memory.cpp)
_N_CHUNKS = 512
_READ_AND_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def aliased_addresses() -> None:
    """P11: the cost of addresses over one chunk, thousands of which each capture takes."""
    torch.zeros(1, device="cuda")  # makes the device's context current
    properties = _on_device()
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    chunk_bytes = driver_call(driver.cuMemGetAllocationGranularity, properties, minimum)
    tell("granule bytes", chunk_bytes)
    begin = time.perf_counter()
    areas = [driver_call(driver.cuMemAddressReserve, _AREA_BYTES, 0, 0, 0) for _ in range(_N_AREAS)]
    tell(f"ms for {_N_AREAS} areas of 64 GiB", _ms_since(begin))
    tell("where the driver puts them", [hex(int(one)) for one in areas])
    begin = time.perf_counter()
    code, hinted = driver.cuMemAddressReserve(_AREA_BYTES, 0, _WANTED_ADDRESS, 0)
    tell("ms for one that is asked for at an address", _ms_since(begin))
    where = f"refused: {code!s}" if int(code) else hex(int(hinted))
    tell("where it lies", where)
    if not int(code):
        areas.append(hinted)
    chunk = driver_call(driver.cuMemCreate, chunk_bytes, properties, 0)
    begin = time.perf_counter()
    first = int(areas[-1])
    addresses = [first + index * chunk_bytes for index in range(_N_CHUNKS)]
    for address in addresses:
        driver_call(driver.cuMemMap, address, chunk_bytes, 0, chunk, 0)
    map_us = 1e3 * _ms_since(begin) / _N_CHUNKS
    access = driver.CUmemAccessDesc()
    access.location, access.flags = properties.location, _READ_AND_WRITE
    begin = time.perf_counter()
    driver_call(driver.cuMemSetAccess, first, _N_CHUNKS * chunk_bytes, [access], 1)
    access_us = 1e3 * _ms_since(begin) / _N_CHUNKS
    begin = time.perf_counter()
    for address in addresses:
        driver_call(driver.cuMemUnmap, address, chunk_bytes)
    unmap_us = 1e3 * _ms_since(begin) / _N_CHUNKS
    found = {"map": map_us, "give access": access_us, "unmap": unmap_us}
    tell("us for each chunk", {name: round(one, 3) for name, one in found.items()})
    driver_call(driver.cuMemRelease, chunk)
    for area in areas:
        driver_call(driver.cuMemAddressFree, area, _AREA_BYTES)
    whole_us = sum(found.values())
    is_there = where == hex(_WANTED_ADDRESS)
    conclude(whole_us <= 100 and is_there, f"{whole_us:.1f} us for a chunk, asked for at {where}")


def _on_device() -> driver.CUmemAllocationProp:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = torch.cuda.current_device()
    return properties


def _ms_since(begin: float) -> float:
    return round(1e3 * (time.perf_counter() - begin), 3)


# ---- events in graphs ----------------------------------------------------------------------------

_N_PRODUCTS, _N_TURNS = 16, 20


def event_in_graph() -> None:
    """P12: whether a stream waits for an event that an earlier launched graph records."""
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x, y, z = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    long = torch.empty_like(left)
    torch.mm(left, left, out=long)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capture_state():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(_N_PRODUCTS):
                torch.mm(left, left, out=long)
            torch.add(x, 1, out=y)
            for _ in range(_N_PRODUCTS):
                torch.mm(left, left, out=long)
        finally:
            graph.capture_end()
    raw = driver.CUgraph(init_value=graph.raw_cuda_graph())
    writer = _writer_of(graph, y)
    event = driver_call(driver.cuEventCreate, _WITHOUT_TIMES)
    driver_call(driver.cuGraphAddEventRecordNode, raw, [writer], 1, event)
    execution = driver_call(driver.cuGraphInstantiate, raw, 0)
    lane, caller = torch.cuda.Stream(), torch.cuda.Stream()
    right, early = [], []
    for turn in range(_N_TURNS):
        x.fill_(turn)
        torch.cuda.synchronize()
        driver_call(driver.cuGraphLaunch, execution, _raw(lane))
        driver_call(driver.cuStreamWaitEvent, _raw(caller), event, 0)
        with torch.cuda.stream(caller):
            z.copy_(y)
        caller.synchronize()
        early.append(not lane.query())  # the graph continues after the event
        right.append(bool((z == turn + 1).all()))
        torch.cuda.synchronize()
    tell("turns that read what the graph wrote", sum(right))
    tell("turns in which the graph was still under way", sum(early))
    conclude(all(right) and any(early), "" if all(right) else "a stream did not wait")


_WITHOUT_TIMES = 2  # CU_EVENT_DISABLE_TIMING


def _writer_of(graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> driver.CUgraphNode:
    for node in read_graph(graph.raw_cuda_graph()):
        if any(word == result.data_ptr() for _, word in node.words()):
            return node.handle
    raise ProbeFailed("no node has the result's address")


def _raw(stream: torch.cuda.Stream) -> driver.CUstream:
    return driver.CUstream(init_value=stream.cuda_stream)


# ---- first uses under capture --------------------------------------------------------------------


def first_launch(kind: str) -> None:
    """P13: whether a kernel or a library may be used for the first time under capture."""
    x = torch.rand(64, 64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capture_state(), _told_errors() as problems:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            _FIRST[kind](x)
        finally:
            graph.capture_end()
    problem = "; ".join(problems)
    tell("captured without having run", problem or "yes")
    conclude(not problem, problem)


_FIRST = {
    "kernel": torch.erfinv,
    "cublas": lambda x: x @ x,
    "cudnn": lambda x: torch.nn.functional.conv2d(
        x.view(1, 1, 64, 64), x[:3, :3].reshape(1, 1, 3, 3)
    ),
}


@contextmanager
def _told_errors() -> Iterator[list[str]]:
    problems: list[str] = []
    try:
        yield problems
    except RuntimeError as error:
        problems.append(str(error).splitlines()[0])
