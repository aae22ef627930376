"""Our declarations of the driver against the toolkit's, and the simulator under a sanitizer."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from simulator_build import BUILD, ROOT, SOURCES, SimulatorUnavailable, configure

from offload.backends.cuda import driver as driver_calls
from offload.backends.cuda import graph

DECLARATIONS = ROOT / "native" / "cuda" / "driver_abi.hpp"
NODE_KINDS = (
    *((number, kind.name) for number, kind in graph._KINDS.items()),
    (3, "HOST"),
    (4, "GRAPH"),
    (6, "WAIT_EVENT"),
    (7, "EVENT_RECORD"),
    (8, "EXT_SEMAS_SIGNAL"),
    (9, "EXT_SEMAS_WAIT"),
    (10, "MEM_ALLOC"),
    (11, "MEM_FREE"),
    (12, "BATCH_MEM_OP"),
    (13, "CONDITIONAL"),
)
FUNCTION = re.compile(r'X\((\w+), "(\w+)", (\d+)')


def toolkit_headers():
    """The folder of cuda.h: the toolkit's, or that of the packages that torch needs; or None."""
    compiler = shutil.which("nvcc")
    candidates = [Path(compiler).resolve().parents[1] / "include"] if compiler else []
    candidates += sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        candidates += sorted(Path(folder).glob("c*/include"), reverse=True)
    return next((path for path in candidates if (path / "cudaTypedefs.h").exists()), None)


def compile_check(folder, rows, attributes=()):
    """The compiler's errors about abi_check.cpp with these functions; empty if all agree.

    Args:
        folder: for the lines that are included.
        rows: (name here, symbol, version) of each function.
        attributes: (number, bytes) of each launch attribute.
    """
    include = toolkit_headers()
    if include is None:
        pytest.skip("no CUDA toolkit with cuda.h and cudaTypedefs.h is installed")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    lines = [f"ABI_FUNCTION({name}, PFN_{symbol}_v{version})" for name, symbol, version in rows]
    lines += [f"ABI_ATTRIBUTE({number}, {n_bytes})" for number, n_bytes in attributes]
    (folder / "abi_functions.inc").write_text("\n".join(lines) + "\n")
    native = ROOT / "native"
    search = [f"-I{path}" for path in (native, folder)] + ["-isystem", str(include)]
    source = str(SOURCES / "cuda" / "abi_check.cpp")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Werror", *search, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def declared():
    """Every function of the table: name here, symbol, version."""
    rows = FUNCTION.findall(DECLARATIONS.read_text())
    assert len(rows) == len(set(rows)) > 80
    return rows


def test_every_declaration_agrees_with_the_toolkit(tmp_path):
    attributes = graph._ATTRIBUTE_BYTES.items()
    assert compile_check(tmp_path, declared(), attributes) == ""


@pytest.mark.parametrize("attribute", [(4, 4), (8, 8), (9, 4), (1, 4)])
def test_the_check_finds_another_size_of_an_attribute(tmp_path, attribute):
    assert "static assertion failed" in compile_check(tmp_path, [], [attribute])


def test_what_graphs_are_asked_for_has_the_numbers_of_the_bindings():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert {
        name: int(getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"))
        for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_START_ADDR", "RANGE_SIZE")
    } == {
        "MEMORY_TYPE": driver_calls._MEMORY_TYPE_ATTRIBUTE,
        "DEVICE_ORDINAL": driver_calls._ORDINAL,
        "RANGE_START_ADDR": driver_calls._RANGE_START,
        "RANGE_SIZE": driver_calls._RANGE_BYTES,
    }
    kinds = driver.CUmemorytype
    assert (driver_calls.HOST, driver_calls.DEVICE, driver_calls.UNIFIED) == (
        kinds.CU_MEMORYTYPE_HOST,
        kinds.CU_MEMORYTYPE_DEVICE,
        kinds.CU_MEMORYTYPE_UNIFIED,
    )
    window = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    assert window == graph._ACCESS_POLICY_WINDOW
    for number, name in NODE_KINDS:
        assert number == getattr(driver.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{name}")
    assert {*graph._KINDS, *graph._REFUSED} == {number for number, _ in NODE_KINDS}


@pytest.mark.parametrize(
    "row",
    [
        ("stream_get_capture_info", "cuStreamGetCaptureInfo", 12030),  # with edge data
        ("graph_get_edges", "cuGraphGetEdges", 10000),  # without
        ("memory_map", "cuMemCreate", 10020),
        ("memory_release", "cuMemFreeHost", 2000),  # a number, not a pointer
    ],
)
def test_the_check_finds_another_version(tmp_path, row):
    assert "static assertion failed" in compile_check(tmp_path, [row])


def test_the_simulator_answers_for_every_declared_function(simulator):
    kinds = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_void_p)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
    resolve = prototype(("cuGetProcAddress_v2", simulator.library))
    addresses = set()
    for _, symbol, version in declared():
        address = ctypes.c_void_p()
        found = resolve(symbol.encode(), ctypes.addressof(address), int(version), 0, None)
        assert (symbol, found) == (symbol, 0)
        addresses.add(address.value)
    assert len(addresses) == len(declared())


@pytest.mark.slow
def test_the_simulators_are_clean_under_sanitizers():
    directory = BUILD.with_name("simulators-sanitized")
    options = ["-DSIMULATORS_TESTS=ON", "-DSIMULATORS_SANITIZER=address,undefined"]
    try:
        configure(directory, "-DCMAKE_BUILD_TYPE=Debug", *options)
    except SimulatorUnavailable as reason:
        pytest.skip(str(reason))
    for program in ("simulator_test", "ascend_simulator_test"):
        done = subprocess.run([directory / program], capture_output=True, text=True, check=False)
        assert (program, done.returncode, done.stderr) == (program, 0, "")
