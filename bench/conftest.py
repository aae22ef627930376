"""One thread, and one way to compare: peers take turns, so that noise meets all of them."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def medians_ns(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 60, calls: int = 20
) -> dict[str, float]:
    """Median time of one call of each contender, in ns, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for function in contenders.values():
        for _ in range(calls):
            function()
    for _ in range(rounds):
        for name, function in contenders.items():
            begin = time.perf_counter_ns()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter_ns() - begin) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


@pytest.fixture
def compare(benchmark: Any) -> Callable[..., dict[str, float]]:
    """Time contenders in turns; the first is ours, and its own run is pytest-benchmark's."""

    def run(contenders: Mapping[str, Callable[[], Any]], **options: int) -> dict[str, float]:
        medians = medians_ns(contenders, **options)
        ours = next(iter(contenders))
        benchmark.extra_info["median_ns"] = medians
        benchmark.extra_info["times_as_fast_as"] = {
            name: value / medians[ours] for name, value in medians.items() if name != ours
        }
        benchmark.pedantic(contenders[ours], rounds=20, iterations=10, warmup_rounds=2)
        return medians

    return run


def pytest_itemcollected(item: pytest.Item) -> None:
    """Peers may warn: torch.compile imports deprecated parts of torch."""
    item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info["torch"] = torch.__version__
    machine_info["cores"] = os.cpu_count()
    machine_info["platform"] = platform.platform()
    machine_info.pop("node", None)


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: Any) -> None:
    """Leave single times out of reports, and where they were taken but for the machine's kind."""
    output_json.pop("commit_info", None)
    for one in output_json["benchmarks"]:
        one["stats"].pop("data", None)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    for one in getattr(session, "benchmarks", []):
        for name, value in one.extra_info.items():
            terminalreporter.write_line(f"{one.name}: {name}: {value}")
