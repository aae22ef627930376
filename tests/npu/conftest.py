"""torch_npu on the simulated NPU (`make test-npu-sim`) or on an installed one (`make test-npu`).

Elsewhere modules are skipped with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import FORMS
from simulator_build import SimulatorUnavailable

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend

pytest.register_assert_rewrite("on_npu", "npu_draws")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Allow warnings of torch_npu at import and in use."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def npu_runtime() -> AscendSimulator | None:
    """Import torch_npu; return the simulated runtime that it runs on, None for an installed one."""
    try:
        return npu_device.load_torch_npu()
    except SimulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def simulated_npu(npu_runtime: AscendSimulator | None) -> AscendSimulator:
    """The simulated runtime, for tests that control or inspect it."""
    if npu_runtime is None:
        pytest.skip("controls the simulated runtime, or looks into it")
    return npu_runtime


@pytest.fixture(autouse=True)
def npu(npu_runtime: AscendSimulator | None) -> Iterator[torch.device]:
    """The device, for inference. A failure on it fails the test that caused it."""
    device = torch.device("npu", 0)
    with torch.no_grad():
        torch.npu.manual_seed_all(0)
        if npu_runtime is not None:
            npu_runtime.forget_calls()
        yield device
        torch.npu.synchronize()
        # A failing operator stops the thread that launches, and later operators are lost silently.
        refused = npu_runtime.refusals if npu_runtime is not None else ()
        lines = ["torch_npu launches nothing any more; calls that failed:", *refused]
        assert (torch.ones(1, device=device) + 1).item() == 2, "\n".join(lines)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form in which inputs and outputs are copied, if they are."""
    make = functools.partial(TorchAscendBackend, **FORMS[request.param])
    try:
        make().machine()
    except offload.BackendUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    return request.param
