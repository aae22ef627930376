"""Probes of the driver's functions, and of the costs of launches, updates and copies."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from cuda.bindings import driver

from driver_calls import check_code, driver_call
from probe_capture import capture_in_pool, capture_state, torch_allocator
from probe_graph import Execution
from probe_library import find_nvcc, load_library
from probe_models import mlp
from probing import ProbeFailed, conclude, tell

_ABI = Path(__file__).parents[2] / "native" / "cuda" / "driver_abi.hpp"
_ENTRY = re.compile(r'X\((\w+),\s*"(\w+)",\s*(\d+),')


def what_is_there() -> None:
    """P0: the driver's functions, torch's pools, the device runtime."""
    torch.cuda.init()
    missing = []
    for _, symbol, version in _ENTRY.findall(_ABI.read_text(encoding="utf-8")):
        code, address, status = driver.cuGetProcAddress(symbol.encode(), int(version), 0)
        if int(code) or not int(address or 0):
            missing.append(f"{symbol} of {version}: {status!s}")
    tell("driver functions missing", missing)
    device_runtime = _device_runtime()
    tell("libcudadevrt.a", device_runtime)
    with capture_state():
        load_library().probe_pool_begin(1)
        model, inputs = mlp(2, 64)
        with torch.no_grad():
            model(*inputs)
        torch.cuda.synchronize()
        captured = capture_in_pool(model, inputs, torch_allocator())
        tell("allocations in a private pool of our own", len(captured.allocations))
        inside = captured.place(captured.result.data_ptr()) is not None
        tell("results under capture lie there", inside)
        exec_handle = Execution(captured.graph.raw_cuda_graph())
        tell("raw graph instantiates", exec_handle is not None)
    with_exec = torch.cuda.CUDAGraph(keep_graph=True)
    with capture_state():
        x = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        with_exec.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        with_exec.capture_end()
        with_exec.instantiate()
        tell("torch's raw exec", with_exec.raw_cuda_graph_exec() != 0)
    conclude(not missing and inside and bool(device_runtime), "; ".join(missing)[:500])


def _device_runtime() -> bool:
    """Whether the toolkit, or torch's packages, have libcudadevrt.a."""
    folders = [Path(find_nvcc()).resolve().parents[1]]
    if (found := importlib.util.find_spec("nvidia")) is not None:
        folders += [Path(one) for one in found.submodule_search_locations or ()]
    return any(True for one in folders for _ in one.rglob("libcudadevrt.a"))


# ---- launches and updates ------------------------------------------------------------------------

_NODES = (1, 10, 100, 1000, 3000)
_PATCHED = (0, 1, 10, 100)
_ROUNDS = 100


def launch_costs(argument_bytes: str) -> None:
    """P1: the host cost of a launch and of each update."""
    library, slopes, bare = load_library(), [], []
    for n_nodes in _NODES:
        for forked in (0, 1) if n_nodes >= 10 else (0,):
            cases = [one for one in _PATCHED if one <= n_nodes]
            figures = (ctypes.c_double * (3 * len(cases)))()
            code = library.probe_launch_costs(
                n_nodes, forked, int(argument_bytes), (ctypes.c_int * len(cases))(*cases),
                len(cases), _ROUNDS, figures,
            )  # fmt: skip
            check_code(code, f"{n_nodes} nodes")
            shape = f"{'forked' if forked else 'chain'} of {n_nodes}"
            for case, n_patched in enumerate(cases):
                keys = ("set us", "launch us", "until done us")
                values = [round(one, 3) for one in figures[3 * case : 3 * case + 3]]
                tell(f"{shape}, {n_patched} patched", dict(zip(keys, values, strict=True)))
            if not forked and n_nodes <= 1000:
                bare.append(figures[1])
            if cases[-1] >= 10:
                slopes.append(figures[3 * (len(cases) - 1)] / cases[-1])
    low, high = min(bare), max(bare)
    tell("bare launch us, chains to 1000 nodes", [round(low, 3), round(high, 3)])
    tell("us for an update", [round(min(slopes), 3), round(max(slopes), 3)])
    conclude(high <= 3.5 and max(slopes) <= 1.1, f"launch to {high:.2f} us, {max(slopes):.2f} us")


_KINDS = ("plain", "cluster", "programmatic", "cooperative")


def device_updates(kind: str) -> None:
    """P6: whether a kernel may write the arguments of this kind of node, and how fast."""
    library = load_library()
    if not hasattr(library, "probe_device_updates"):
        raise ProbeFailed("the probes were built without libcudadevrt.a")
    if kind == "triton":
        _update_triton(library)
        return
    costs = {}
    for n_words in (104, 1000, 3000):
        update_us = ctypes.c_double()
        code = library.probe_device_updates(_KINDS.index(kind), n_words, ctypes.byref(update_us))
        check_code(code, f"{kind}, {n_words} words")
        costs[n_words] = update_us.value
        tell(f"{n_words} words, us", round(update_us.value, 3))
    per_word_ns = 1e3 * (costs[3000] - costs[1000]) / 2000
    tell("ns per word", round(per_word_ns, 2))
    conclude(per_word_ns <= 25, f"{per_word_ns:.1f} ns per word")


def _update_triton(library: ctypes.CDLL) -> None:
    from probe_graph import read_graph
    from probe_triton import add_one

    x, y, moved = torch.ones(256, device="cuda"), *torch.zeros(2, 256, device="cuda")
    add_one(x, y)
    torch.cuda.synchronize()
    with capture_state() as stream:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        add_one(x, y)
        graph.capture_end()
        (node,) = read_graph(graph.raw_cuda_graph())
        (offset,) = (offset for offset, word in node.words() if word == y.data_ptr())
        handle = ctypes.c_void_p()
        raw_node = ctypes.c_void_p(int(node.handle))
        check_code(library.probe_make_updatable(raw_node, ctypes.byref(handle)), "attribute")
        execution = Execution(graph.raw_cuda_graph())
        execution.launch(stream.cuda_stream)
        torch.cuda.synchronize()
        y.zero_()
        torch.cuda.synchronize()
        code = library.probe_update_word(
            handle, ctypes.c_size_t(offset), ctypes.c_void_p(moved.data_ptr())
        )
        check_code(code, "update")
        execution.launch(stream.cuda_stream)
        torch.cuda.synchronize()
    arrived = bool((moved == 2).all()) and bool((y == 0).all())
    tell("a Triton kernel writes where it was moved to", arrived)
    conclude(arrived)


# ---- copies --------------------------------------------------------------------------------------


def operand_nodes(kind: str) -> None:
    """P8: whether copy and memset nodes accept new addresses, and when they need new updates."""
    library, codes = load_library(), (ctypes.c_int * 7)(*([-9] * 7))
    function = library.probe_copy_node if kind == "copy" else library.probe_memset_node
    code = function(codes)
    names = (
        "plain allocation, launched",
        "set to mapped memory",
        "launched there",
        "mapped anew at its address, set and launched",
        "instantiated at mapped memory, set to a plain allocation",
        "launched there",
        "mapped anew, launched without setting",
    )
    tell("codes, -1 for wrong content, -9 not reached", list(zip(names, codes, strict=True)))
    check_code(code, kind)
    conclude(not any(codes[:6]), "" if not any(codes[:6]) else "a node that was set again fails")


_MIB = (8, 32, 128, 256)


def captured_copies() -> None:
    """P10: host-to-device copies as nodes: bandwidth beside a product, cost of a node and fork."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)
    torch.mm(left, left, out=product)
    torch.cuda.synchronize()

    def copies(n_bytes: int, n_nodes: int) -> None:
        for part in range(n_nodes):
            begin = part * n_bytes % host.numel()
            device[begin : begin + n_bytes].copy_(host[begin : begin + n_bytes], non_blocking=True)

    rates = {}
    for mib in _MIB:
        alone_ms = _graph_ms(lambda mib=mib: copies(mib << 20, 1))
        beside_ms = _graph_ms(
            lambda mib=mib: copies(mib << 20, 1),
            lambda: [torch.mm(left, left, out=product) for _ in range(32)],
        )
        product_ms = _graph_ms(lambda: [torch.mm(left, left, out=product) for _ in range(32)])
        rates[mib] = (mib << 20) / alone_ms / 1e6
        tell(
            f"{mib} MiB",
            {"GB/s": round(rates[mib], 2), "beside products ms": round(beside_ms, 4),
             "products ms": round(product_ms, 4), "copy ms": round(alone_ms, 4)},
        )  # fmt: skip
    one_ms, many_ms = _graph_ms(lambda: copies(32 << 20, 1)), _graph_ms(lambda: copies(1 << 20, 32))
    overhead_us = 1e3 * (many_ms - one_ms) / 31
    tell("us for each further copy node", round(overhead_us, 3))
    chain_us, forked_us = _launch_us(copies, forked=False), _launch_us(copies, forked=True)
    tell("host us of a launch", {"chain": round(chain_us, 3), "forked": round(forked_us, 3)})
    conclude(
        rates[256] >= 40 and overhead_us <= 12,
        f"{rates[256]:.1f} GB/s, {overhead_us:.1f} us for each copy node",
    )


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph) -> Iterator[torch.cuda.Stream]:
    with capture_state() as stream:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield stream
        finally:
            graph.capture_end()


def _forked_graph(
    work: Callable[[], object], beside: Callable[[], object] | None
) -> torch.cuda.CUDAGraph:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with _captured(graph) as stream:
        if beside is not None:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                beside()
        work()
        if beside is not None:
            stream.wait_stream(side)
    return graph


def _graph_ms(work: Callable[[], object], beside: Callable[[], object] | None = None) -> float:
    """Return the median time on the device of a graph of this work."""
    graph = _forked_graph(work, beside)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def _launch_us(copies: Callable[[int, int], None], *, forked: bool) -> float:
    """Return the host's time in the driver's launch of two copies, in sequence or in parallel."""
    graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    with _captured(graph) as stream:
        if forked:
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                copies(4096, 1)
            copies(4096, 1)
            stream.wait_stream(side)
        else:
            copies(4096, 2)
    execution, times = Execution(graph.raw_cuda_graph()), []
    raw_stream = torch.cuda.current_stream().cuda_stream
    for _ in range(200):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        execution.launch(raw_stream)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def driver_version() -> int:
    """Return the driver's version as a number, such as 13000."""
    found: int = driver_call(driver.cuDriverGetVersion)
    return found
