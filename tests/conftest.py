"""Fixtures for every test: one thread, and global state restored."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ascend_client
import ascend_simulator
import npu_device
import pytest
import simulator as simulators
import torch

import device_report
from offload.compile import crossover

pytest.register_assert_rewrite("checks", "families")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make test-cuda` and `make test-npu` that keep results."""
    parser.addoption("--device-report", type=Path, help="Write counts and reasons as JSON here.")
    parser.addoption("--device-report-goes-on", action="store_true", help="Run what it lacks.")
    parser.addoption("--device-part", default="0/1", help="As 2/8: each eighth test, the third on.")


def pytest_configure(config: pytest.Config) -> None:
    """Start the device report where tests are asked to run on a device."""
    if npu_device.uses_installed() and (missing := npu_device.missing_device()):
        raise pytest.UsageError(missing)
    if path := config.getoption("--device-report"):
        goes_on = config.getoption("--device-report-goes-on")
        part = config.getoption("--device-part")
        config.pluginmanager.register(device_report.make(path, goes_on=goes_on, part=part))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest, as a process that has one last is alone then."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


_N_FROZEN_MODULES = pytest.StashKey[int]()


def _freeze_imports(config: pytest.Config) -> None:
    """Exclude imported objects from garbage collection: most objects, and no garbage.

    A full collection takes a tenth of a second, and each test on a simulator runs one.
    """
    if config.stash.get(_N_FROZEN_MODULES, 0) == len(sys.modules):
        return
    gc.collect()
    gc.freeze()
    config.stash[_N_FROZEN_MODULES] = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze before the first test, and again after each test that imports something."""
    _freeze_imports(session.config)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Freeze after the test's own objects are gone."""
    yield
    _freeze_imports(item.config)


@pytest.fixture(autouse=True, scope="session")
def no_tiles() -> Iterator[None]:
    """Processors that multiply bfloat16 in tiles make the same kernels as others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "has_tiles", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep kernels and costs that tests store for this session only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    """Seed before each test; restore threads, generator, grad mode and default dtype after it."""
    threads = torch.get_num_threads()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)


@pytest.fixture
def simulator() -> Iterator[simulators.Simulator]:
    """The simulated CUDA driver, in its initial state before and after the test."""
    yield from simulators.for_a_test()


@pytest.fixture
def ascend() -> Iterator[ascend_simulator.AscendSimulator]:
    """The simulated Ascend runtime: initialised, device 0 set on this thread, nothing counted."""
    yield from ascend_simulator.for_a_test()


@pytest.fixture
def client(simulator: simulators.Simulator) -> ModuleType:
    """NVIDIA's bindings on the simulated driver: initialised, and with a current context."""
    pytest.importorskip(
        "cuda.bindings.driver", reason="needs cuda-bindings: pip install 'offload[cuda]'"
    )
    import driver_client

    driver_client.call("cuInit", 0)
    driver_client.call("cuCtxSetCurrent", driver_client.call("cuDevicePrimaryCtxRetain", 0))
    simulator.forget_calls()
    return driver_client


@pytest.fixture
def npu(ascend) -> ascend_client.Client:
    """A client of the simulated Ascend runtime, with kernels that add and note."""
    return ascend_client.Client(ascend)


@pytest.fixture(scope="session")
def session_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the kernels that tests of promotion make."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def kernels_folder(session_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests find the kernels of earlier tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_kernels))
