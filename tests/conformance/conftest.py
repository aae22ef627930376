"""The backends that the suite runs on, and the loading of a program on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import backends
from offload.backends import Backend, CpuBackend, backend_names, find_backend
from offload.backends.dispatched import DispatchBackend
from offload.timeline import Scheduling

# A test that a backend cannot pass, with the reason. An unlisted failure is a failure.
SIMULATED = "cuda-simulated"
SIMULATED_ASCEND = "npu-simulated"
DISPATCHED = "cpu-dispatched"  # torch's operators, launched by the host as on devices
NPU = "npu"  # by torch_npu, on the simulated runtime or an installed one
CUDA = "cuda"
_EXIT = "simulated kernels are written in Python, which does not run while the interpreter exits"
_ON_CPU = "its threads and scripts make tensors on the CPU: tests/npu has it for the NPU"
_FAULT = "its process has no device after it: tests/cuda has it in a process of its own"
_NOTHING_PLACED = "its operators allocate what they make"
UNSUPPORTED: dict[tuple[str, str], str] = {
    (DISPATCHED, "test_rebinds_every_slot_with_old_memory_poisoned"): _NOTHING_PLACED,
    (DISPATCHED, "test_moved_feature_map_is_one_slot"): _NOTHING_PLACED,
    (DISPATCHED, "test_two_executables_share_one_feature_map"): _NOTHING_PLACED,
    (DISPATCHED, "test_too_small_feature_map"): _NOTHING_PLACED,
    (DISPATCHED, "test_timelines_of_two_executables_on_one_axis"): "the host delivers all launches",
    (CUDA, "test_failing_launch_surfaces_at_the_wait"): _FAULT,
    (CUDA, "test_fork_with_work_in_flight"): "a CUDA driver does not work after a fork",
    (CUDA, "test_fork_with_what_waits"): "a CUDA driver does not work after a fork",
    (CUDA, "test_a_failed_launch_fails_what_is_queued_behind_it"): _FAULT,
    (SIMULATED, "test_interpreter_exit_with_work_in_flight"): _EXIT,
    (SIMULATED, "test_interpreter_exit_from_a_thread_that_never_ends"): _EXIT,
    (SIMULATED, "test_interpreter_exit_from_threads_in_calls"): _EXIT,
    (SIMULATED, "test_fork_with_work_in_flight"): "a CUDA driver does not work after a fork",
    (SIMULATED, "test_fork_with_what_waits"): "a CUDA driver does not work after a fork",
    (SIMULATED_ASCEND, "test_interpreter_exit_with_work_in_flight"): _EXIT,
    (SIMULATED_ASCEND, "test_interpreter_exit_from_a_thread_that_never_ends"): _EXIT,
    (SIMULATED_ASCEND, "test_interpreter_exit_from_threads_in_calls"): _EXIT,
    (SIMULATED_ASCEND, "test_fork_with_work_in_flight"): "a device does not work after a fork",
    (SIMULATED_ASCEND, "test_fork_with_what_waits"): "a device does not work after a fork",
    (NPU, "test_random_numbers_are_those_that_eager_draws"): (
        "what stands for a generator's kernels comes with tests/npu/test_npu_random.py"
    ),
    (NPU, "test_many_threads_call_one_executable"): _ON_CPU,
    (NPU, "test_interpreter_exit_with_work_in_flight"): _ON_CPU,
    (NPU, "test_interpreter_exit_from_a_thread_that_never_ends"): _ON_CPU,
    (NPU, "test_interpreter_exit_from_threads_in_calls"): _ON_CPU,
    (NPU, "test_timelines_of_two_executables_on_one_axis"): "it executes a model as a whole",
    (NPU, "test_failing_launch_surfaces_at_the_wait"): "torch_npu ends a process whose NPU failed",
    (NPU, "test_fork_with_work_in_flight"): "a device does not work after a fork",
    (NPU, "test_fork_with_what_waits"): "a device does not work after a fork",
    (NPU, "test_a_failed_launch_fails_what_is_queued_behind_it"): (
        "torch_npu ends a process whose NPU failed"
    ),
}

Load = Callable[..., offload.Executable]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On an installed NPU run only its own tests, whatever their names are."""
    import npu_device

    if not npu_device.uses_installed():
        return
    here = Path(__file__).parent

    def is_other(item: pytest.Item) -> bool:
        parameters = getattr(item, "callspec", None)
        backend = None if parameters is None else parameters.params.get("backend")
        return item.path.is_relative_to(here) and backend != NPU

    config.hook.pytest_deselected(items=[item for item in items if is_other(item)])
    items[:] = [item for item in items if not is_other(item)]


@pytest.fixture(params=[*backend_names(), SIMULATED, SIMULATED_ASCEND, DISPATCHED])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A backend; tensors that a test makes are on the device on which its Programs are recorded."""
    reason = UNSUPPORTED.get((request.param, request.node.originalname))
    if reason is not None:
        pytest.skip(reason)
    if request.param == SIMULATED:
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
        from simulated_backend import install

        found = install(request.getfixturevalue("simulator"), monkeypatch)
    elif request.param == SIMULATED_ASCEND:
        import simulated_ascend

        found = simulated_ascend.install(request.getfixturevalue("ascend"), monkeypatch)
    elif request.param == DISPATCHED:
        found = DispatchBackend(DISPATCHED, CpuBackend().machine, "cpu")
        monkeypatch.setattr(
            backends, "_BACKENDS", {**backends._BACKENDS, DISPATCHED: lambda: found}
        )
    else:
        if request.param == NPU:
            _load_torch_npu()
        found = find_backend(request.param)
    try:
        found.machine()
    except offload.BackendUnavailable as error:
        pytest.skip(str(error))
    on_cpu = found.records() == "cpu"
    with contextlib.nullcontext() if on_cpu else torch.device(found.records()):
        yield found


def _load_torch_npu() -> None:
    import npu_device
    from simulator_build import SimulatorUnavailable

    try:
        npu_device.load_torch_npu()
    except SimulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=list(Scheduling))
def scheduling(request: pytest.FixtureRequest, backend: Backend) -> Scheduling:
    if request.param is Scheduling.OFFLOAD:
        if backend.dispatch is backend:
            pytest.skip("the host launches the operators")
        return request.param
    if not backend.capabilities.schedules_launches:
        if backend.dispatch is None:
            pytest.skip("the device executes a model as a whole")
        reason = UNSUPPORTED.get((DISPATCHED, request.node.originalname))
        if reason is not None:
            pytest.skip(reason)
    return request.param


@pytest.fixture
def load(backend: Backend, scheduling: Scheduling) -> Load:
    """Capture a function on its arguments and load it on the backend."""

    def load_function(function: Callable[..., Any], *args: Any) -> offload.Executable:
        with offload.capture(function) as captured:
            captured(*args)
        return captured.load(device=backend.name, scheduling=scheduling)

    return load_function
