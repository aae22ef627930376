"""Each call of the Ascend runtime that a load, an execution and a close make fails once.

The calls are those of a trace. Each failure is a typed error or no error; nothing is left behind,
and the next execution is right.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
from typing import Any, Protocol

import pytest
import torch
from ascend_client import INTERNAL_ERROR
from ascend_residents import COUNT, REFRESHES, Chain, live, plus, read
from ascend_simulator import AscendSimulator
from device_streaming import AscendDevice, floor_on
from offline_models import WEIGHTS, on_device, write_model
from stored import save_weights, without_memory

import offload
from offload.errors import OffloadError
from offload.native import _native

pytestmark = [pytest.mark.slow, pytest.mark.long]

MOST_TRIES = 3
# Objects left by a failed release, which nothing else can release.
LEFT_BY = {
    "aclrtFree": {"bytes"},
    "aclrtDestroyEvent": {"event"},
    "aclrtBinaryUnLoad": {"binary"},
    "aclrtFreeHost": {"host memory", "host bytes"},
    "aclmdlRIDestroy": {"model"},
    "aclmdlUnload": {"offline model", "arguments"},
    "aclmdlDestroyDesc": {"description"},
    "aclmdlDestroyDataset": {"dataset"},
    "aclDestroyDataBuffer": {"data buffer"},
}
# Their results are numbers that cannot report a failure: those of a model that was read whole,
# where a runtime cannot fail to report.
GIVE_NUMBERS = {
    "aclmdlGetNumInputs",
    "aclmdlGetNumOutputs",
    "aclmdlGetInputSizeByIndex",
    "aclmdlGetOutputSizeByIndex",
    "aclmdlGetInputDataType",
    "aclmdlGetOutputDataType",
    "aclmdlGetInputFormat",
    "aclmdlGetOutputFormat",
}
# A function that returns only a handle gives no reason for a missing one.
GIVE_NO_CODE = {"aclmdlCreateDesc", "aclmdlCreateDataset", "aclCreateDataBuffer"}
KINDS = ("binary", "host memory", "offline model", "data buffer", "dataset", "description")


class Scenario(Protocol):
    """An object that is loaded, executed and closed.

    Attributes:
        unrelated: kinds of objects that other code may make and release meanwhile.
    """

    unrelated: frozenset[str]

    def load(self) -> Any:
        """Load."""

    def run(self, loaded: Any) -> None:
        """Execute once, and assert the result."""

    def close(self, loaded: Any) -> None:
        """Close."""


class OwnKernels:
    """Own kernels behind a table."""

    def __init__(self, ascend: AscendSimulator, form: str, refresh: str) -> None:
        self.ascend, self.how = ascend, {"form": form, "refresh": refresh}
        # Binaries of the operator library are released at each of its resets.
        self.unrelated = frozenset({"binary"} if refresh == "operators" else ())
        chain = Chain(ascend)
        self.places = {"input": chain.allocate(plus(0)), "output": chain.allocate()}
        self.places["feature_map"] = chain.allocate([0] * COUNT * 8)
        chain.resident.close()

    def load(self) -> Chain:
        chain = Chain(self.ascend, **self.how)
        chain.bind(**self.places)
        return chain

    def run(self, loaded: Chain) -> None:
        ctypes.memset(self.places["output"], 0xFF, 8 * COUNT)
        loaded.run()
        assert read(self.places["output"]) == plus(3)

    def close(self, loaded: Chain) -> None:
        loaded.resident.close()


class OfflineModel:
    """A model from a file of the runtime."""

    unrelated: frozenset[str] = frozenset()

    def __init__(self, ascend: AscendSimulator, path) -> None:
        self.path = write_model(ascend, path)
        self.x, self.y, self.out = (on_device(ascend, torch.ones(2, 2)) for _ in range(3))

    def load(self) -> offload.Executable:
        return offload.open(self.path).load("npu-simulated")

    def run(self, loaded: offload.Executable) -> None:
        self.out.fill_(-1)
        loaded.submit(self.x, self.y, out=(self.out,)).wait()
        assert torch.equal(self.out, WEIGHTS + 2)

    def close(self, loaded: offload.Executable) -> None:
        loaded.close()


class Streamed:
    """Weights that the model copies itself while it runs."""

    unrelated: frozenset[str] = frozenset()

    def __init__(self, npu: AscendDevice, folder, *, in_timeline: bool) -> None:
        self.in_timeline = in_timeline

        def layers() -> torch.nn.Module:
            return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))

        model = layers().eval()
        save_weights(model, folder)
        self.given, self.out = torch.randn(2, 64), torch.empty(2, 64)
        self.captured = offload.capture(without_memory(layers), self.given, weights=folder)
        self.name, self.budget = npu.backend.name, floor_on(self.captured, npu.backend)
        with torch.no_grad():
            self.wanted = model(self.given)

    def load(self) -> offload.Executable:
        return self.captured.load(self.name, weights_budget=self.budget, verify=False)

    def run(self, loaded: offload.Executable) -> None:
        self.out.fill_(-1)
        with loaded.timeline() if self.in_timeline else contextlib.nullcontext():
            loaded.submit(self.given, out=self.out).wait()
        assert torch.equal(self.out, self.wanted)

    def close(self, loaded: offload.Executable) -> None:
        loaded.close()


def held(ascend: AscendSimulator) -> dict[str, int]:
    gc.collect()  # failures may be in cycles with their frames
    return (
        live(ascend)
        | {kind: ascend.live(kind) for kind in KINDS}
        | {"host bytes": ascend.host_bytes}
    )


def attempt(scenario: Scenario, what: str = "") -> list[str]:
    """Load, execute twice and close, each retried where it fails; return the errors."""
    errors: list[str] = []
    loaded: Any = None
    n_executed = 0
    for _ in range(MOST_TRIES):
        try:
            loaded = loaded or scenario.load()
            while n_executed < 2:
                scenario.run(loaded)
                n_executed += 1
            break
        except OffloadError as error:
            errors.append(str(error))
    assert n_executed == 2, (what, errors)
    scenario.close(loaded)
    return errors


def calls_of(ascend: AscendSimulator, scenario: Scenario) -> dict[str, int]:
    """Calls of each function of the runtime, in the order of first calls."""
    ascend.forget_calls()
    ascend.start_trace()
    assert attempt(scenario) == []
    calls = collections.Counter(one.split()[0] for one in ascend.trace)
    ascend.forget_calls()
    return calls


def fail_every_call(ascend: AscendSimulator, scenario: Scenario) -> set[str]:
    """Fail each call once; return the functions whose failure was an error."""
    assert attempt(scenario) == []  # per-process objects now exist
    calls = calls_of(ascend, scenario)
    before = held(ascend)
    raised, wrong = set(), []
    for function, n_calls in calls.items():
        if function in GIVE_NUMBERS:
            continue
        for nth in range(1, n_calls + 1):
            ascend.forget_calls()
            ascend.fail(function, INTERNAL_ERROR, nth)
            errors = attempt(scenario, f"call {nth} of {function} failed")
            assert ascend.calls(function) >= nth, function
            ascend.forget_calls()
            assert len(errors) <= 1, (function, nth, errors)
            if errors:
                named = str(INTERNAL_ERROR) in errors[0] or function in errors[0]
                assert named or function in GIVE_NO_CODE, errors
                raised.add(function)
            after = held(ascend)
            left = {kind for kind in before if after[kind] != before[kind]} - scenario.unrelated
            if not left <= LEFT_BY.get(function, set()):
                wrong.append((function, nth, left, errors))
            before = after
    assert not wrong
    assert attempt(scenario) == []
    assert all(
        n == before[kind] for kind, n in held(ascend).items() if kind not in scenario.unrelated
    )
    return raised


@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("form", ["build", "capture"])
def test_of_own_kernels(ascend, form, refresh):
    if form == "build" and not _native.ascend_capabilities()["explicit_build"]:
        pytest.skip("the simulated runtime has no explicit build")
    raised = fail_every_call(ascend, OwnKernels(ascend, form, refresh))
    assert {"aclrtBinaryLoadFromData", "aclrtBinaryGetFunction", "aclrtMalloc"} <= raised
    assert {"aclmdlRIExecuteAsync", "aclrtSynchronizeEvent", "aclrtRecordEvent"} <= raised


def test_of_an_offline_model(ascend, monkeypatch, tmp_path):
    AscendDevice(ascend, monkeypatch)
    raised = fail_every_call(ascend, OfflineModel(ascend, tmp_path / "model.om"))
    assert {"aclmdlQuerySize", "aclmdlLoadFromFileWithMem", "aclmdlExecuteAsync"} <= raised
    assert {"aclrtRecordEvent", "aclrtSynchronizeEvent"} <= raised


@pytest.mark.parametrize("in_timeline", [False, True])
def test_of_streamed_weights(ascend, monkeypatch, tmp_path, in_timeline):
    device = AscendDevice(ascend, monkeypatch)
    raised = fail_every_call(ascend, Streamed(device, tmp_path, in_timeline=in_timeline))
    assert {"aclrtMallocHost", "aclmdlRICaptureBegin", "aclrtStreamWaitEvent"} <= raised
    assert ("aclrtEventElapsedTime" in raised) == in_timeline
