"""One thread, and one way to record measurements."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from measurements import Case, as_json

_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "openvino", "transformers")
_CPU_FACTS = ("arch", "brand_raw", "hz_advertised_friendly", "l2_cache_size", "l3_cache_size")
_CPU_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, no gradients, and the same numbers in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def record(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[Case], None]:
    """Store a case in the report, with the claim: the first line of the file's docstring."""
    first, _, _ = (request.module.__doc__ or "").partition("\n")
    marker, _, claim = first.partition("Claim: ")
    if marker or not claim:
        raise pytest.UsageError(f"{request.path.name}: its docstring must begin with 'Claim: '")
    name = request.path.stem.removeprefix("bench_")

    def store(case: Case) -> None:
        benchmark.extra_info["measurements"] = as_json(name, claim, case)

    return store


def pytest_itemcollected(item: pytest.Item) -> None:
    """Peers may warn: torch.compile imports deprecated parts of torch."""
    item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Record what the times depend on, and nothing that identifies the machine's owner."""
    cpu = machine_info.get("cpu", {})
    facts = {name: cpu[name] for name in _CPU_FACTS if name in cpu}
    facts["features"] = [name for name in _CPU_FEATURES if name in cpu.get("flags", ())]
    machine_info.clear()
    machine_info.update(
        system=platform.system(),
        python_version=platform.python_version(),
        cores=os.cpu_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpu=facts,
        packages={name: found for name in _PACKAGES if (found := _version(name))},
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: Any) -> None:
    """Leave single times out of reports, and their machine except for its kind."""
    output_json.pop("commit_info", None)
    for one in output_json["benchmarks"]:
        one["stats"].pop("data", None)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Show the ratios, and the absent peers with reasons."""
    session = getattr(config, "_benchmarksession", None)
    for one in getattr(session, "benchmarks", []):
        case = one.extra_info.get("measurements", {}).get("case", {})
        for name, ratio in case.get("ratios", {}).items():
            interval = f"({ratio['low']:.3g} to {ratio['high']:.3g})"
            terminalreporter.write_line(f"{one.name}: {name}: {ratio['value']:.3g} {interval}")
        for name, why in case.get("absent", {}).items():
            terminalreporter.write_line(f"{one.name}: {name}: absent: {why}")
