"""Benchmarks on a GPU: collected only if this folder is named, and skipped without a device."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_FOLDER = Path(__file__).parent
_PACKAGES = ("cuda-bindings", "triton", "timm")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make bench` measures this machine's processor, and collects nothing here."""
    named = (Path(config.invocation_params.dir, one.partition("::")[0]) for one in config.args)
    return None if any(_FOLDER in (path, *path.parents) for path in named) else True


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Set up inference on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    with torch.no_grad():
        torch.cuda.manual_seed_all(0)
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Add the GPU, its driver and the versions."""
    if not torch.cuda.is_available():
        return
    from probes_cuda import _driver_release

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    machine_info["gpu"] = {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "driver": _driver_release(),
        "cuda": torch.version.cuda,
    }
    packages = machine_info.setdefault("packages", {})
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
